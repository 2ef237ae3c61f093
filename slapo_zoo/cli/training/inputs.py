"""Inputs of a run: the task of the model, its tokenizer, and the batches of training and evaluation."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slapo_zoo.cli.data import read
from slapo_zoo.cli.data.batches import Batches
from slapo_zoo.cli.data.labelled import Classify, Labelled, Pairs, Tag, Translate
from slapo_zoo.cli.data.language import Causal, Masked, Spans
from slapo_zoo.cli.data.rows import Chosen, Packed, Rows, divided
from slapo_zoo.cli.data.stream import Stream
from slapo_zoo.cli.data.tasks import Task, pad_id
from slapo_zoo.cli.data.text_files import DataError
from slapo_zoo.cli.training.config import ConfigError
from slapo_zoo.cli.training.train_options import TrainOptions
from slapo_zoo.errors import ArchitectureError

TASKS: dict[str, type[Task]] = {
    "causal": Causal, "masked": Masked, "span": Spans, "classify": Classify, "tag": Tag,
    "seq2seq": Translate, "pairs": Pairs,
}  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """Inputs of a run.

    Args:
        batches: of the training.
        held_out: what it is evaluated on.
        tokenizer: is saved beside the weights.
    """

    batches: Batches | Stream
    held_out: Batches | None = None
    tokenizer: Any = None

    def summary(self) -> str:
        """One line about it."""
        task, count = self.batches.task, len(getattr(self.batches, "rows", []))
        what = "a stream of rows" if isinstance(self.batches, Stream) else f"{count} rows"
        held = f", {len(self.held_out.rows)} to evaluate on" if self.held_out else ""
        apart = ""
        if isinstance(task, Causal):
            apart = f", documents{' ' if task.document_masks else ' not '}masked from each other"
        return f"task {type(task).__name__.lower()}: {what} of up to {task.seq_len} tokens{held}{apart}"


def task_of(config: Any, asked: str | None = None) -> str:
    """The task that was asked for, if the family has a head for it; or the one it was pre-trained on."""
    from transformers.models.auto import modeling_auto as names

    family = config.model_type
    heads = {
        "causal": names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "pairs": names.MODEL_MAPPING_NAMES,
        "masked": names.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "span": names.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "seq2seq": names.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "classify": names.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "tag": names.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    }  # fmt: skip
    if asked is not None:
        if family in heads[asked]:
            return asked
        known = [name for name, families in heads.items() if family in families]
        problem = f"transformers has no such head for {family!r}"
        raise ArchitectureError("train", f"task={asked}", problem, f"tasks: {', '.join(known)}")
    if family in heads["masked"] and not config.is_decoder and not config.is_encoder_decoder:
        return "masked"
    if family in heads["causal"]:
        return "causal"
    if family in heads["span"] and "t5" in family:
        return "span"
    problem = "found no language-modelling head that this command trains"
    hint = "name the task (--set task=classify), or call model.train_step from a script of your own"
    raise ArchitectureError("train", f"model_type={family!r}", problem, hint)


def row_length(asked: int | None, config: Any, option: str = "--seq-len") -> int:
    """Tokens of a row: what was asked for, or what fits the model."""
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and config.model_type in BEHIND_PADDING:
        longest -= config.pad_token_id + 1
    if asked is not None and longest is not None and asked > longest:
        problem = f"found {asked}, but the model has {longest} positions"
        raise DataError("train", option, problem, f"choose at most {longest}")
    return asked or min(128, longest or 128)


BEHIND_PADDING = {"roberta", "xlm-roberta", "camembert", "esm"}  # where their positions begin


def load_tokenizer(name: str) -> Any:
    """The tokenizer of the checkpoint."""
    from transformers import AutoTokenizer

    hint = "save the tokenizer beside the weights: tokenizer.save_pretrained(folder)"
    try:
        found = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as exc:
        raise DataError(name, "tokenizer", first_line(exc), hint) from exc
    if len(found) <= len(found.all_special_ids):  # what transformers makes where there are no files
        raise DataError(name, "tokenizer", f"found one of {len(found)} tokens, all special", hint)
    return found


def first_line(exc: Exception) -> str:
    """The first line of a library's message; the rest repeats it."""
    return (str(exc).strip() or type(exc).__name__).splitlines()[0]


def read_inputs(options: TrainOptions, config: Any) -> Inputs:
    """Read what is trained and evaluated on, and check that it fits the model."""
    tokenizer, name = load_tokenizer(options.model), str(options.data)
    cls = TASKS[options.task or "causal"]
    data = opened(name, options.data_split, cls, options, options.stream)
    task = make_task(cls, tokenizer, data, options, config)
    if options.stream:
        batches: Batches | Stream = make_stream(data, task, options)
        rows, held = None, None
    else:
        rows, held = training_rows(data, task, options)
        task = with_masks(task, rows, options, config)
        batches = Batches(rows, task, options.batch_size, options.seed)
        check_vocabulary(rows, tokenizer, config, options)
    if options.eval_data or options.eval_split:
        try:
            held = other_rows(task, options)
        except DataError as error:  # which says --data
            raise DataError("eval_data", error.what, error.problem, error.hint) from error
        require_held_out(held, task, options)
    held_out = None
    if held is not None:
        held_out = Batches(held, batches.task, options.batch_size, options.seed)
    return Inputs(batches, held_out, tokenizer)


def make_task(cls: type[Task], tokenizer: Any, data: Any, options: TrainOptions, config: Any) -> Task:  # fmt: skip
    """Make the task of a run; classes are numbered as in `config.id2label`, else as the data orders them."""
    more: dict[str, Any] = {}
    if issubclass(cls, Labelled):
        if options.stream:
            hint = "leave stream out: labels are counted before training"
            raise DataError("train", "stream", f"task {options.task} has labels", hint)
        columns = read.columns_of(cls, options.columns, data.column_names)
        found = read.class_names(data, columns["label" if cls is Classify else "tags"])
        own = tuple(config.id2label[number] for number in sorted(config.id2label))
        more["names"] = own if set(found) <= set(own) else found
    if cls is Translate:
        more["target_len"] = options.target_len or options.seq_len or 128
    return cls(tokenizer, options.seq_len or 128, **more)


def training_rows(data: Any, task: Task, options: TrainOptions) -> tuple[Rows, Rows | None]:
    """The rows to train on, and those that `eval_share` holds out."""
    rows = rows_of(str(options.data), data, task, options)
    if not options.eval_share:
        require_rows(rows, options.batch_size, options)
        return rows, None
    rest, held = divided(rows, options.eval_share, options.seed)
    require_rows(rest, options.batch_size, options)
    require_held_out(held, task, options)
    return rest, held


def other_rows(task: Task, options: TrainOptions) -> Rows:
    """The rows of eval_data, or of eval_split."""
    name = options.eval_data or str(options.data)
    has_one = Path(name).is_file() or read.kind_of(name) == "text"
    split = options.eval_split or ("train" if has_one else options.data_split)
    return rows_of(name, opened(name, split, type(task), options), task, options)


def opened(name: str, split: str, cls: type[Task], options: TrainOptions, stream: bool = False) -> Any:  # fmt: skip
    """A table; the task has to be able to read it."""
    is_text = read.kind_of(name) == "text"
    if is_text and not cls.packs:
        hint = "give jsonl, csv, parquet or a data set of the Hub"
        raise DataError(name, f"task={options.task}", "text has no columns", hint)
    if is_text and not stream:
        return read.open_text(name, split)
    return read.open_table(name, split, options, stream)


def rows_of(name: str, data: Any, task: Task, options: TrainOptions) -> Rows:
    """The rows of a table."""
    is_other_text = name != options.data and read.kind_of(name) == "text"
    given = {} if is_other_text else options.columns
    return read.rows_of_table(data, task, read.columns_of(type(task), given, data.column_names))


def require_rows(rows: Rows, least: int, options: TrainOptions) -> None:
    """Enough for one step."""
    if len(rows) >= least:
        return
    found = f"found {len(rows)} rows"
    if isinstance(rows, Packed):
        found = f"found {rows.tokens} tokens, which fill {len(rows)} rows of {options.seq_len}"
    hint = "give more data, or a smaller --seq-len or --batch-size"
    raise DataError("--data", "", f"{found}; expected at least {least} rows", hint)


def require_held_out(rows: Rows, task: Task, options: TrainOptions) -> None:
    """Enough for an evaluation: of pairs a whole batch, else a row."""
    least = options.batch_size if task.couples else 1
    if len(rows) < least:
        problem = f"found {len(rows)} rows to evaluate on, expected at least {least}"
        hint = "take a larger eval_share, or other eval_data"
        raise DataError("train", "eval_share" if options.eval_share else "eval_data", problem, hint)


def with_masks(task: Task, rows: Rows | None, options: TrainOptions, config: Any) -> Task:
    """The task with masks between documents, where they are wanted and the model can."""
    if not isinstance(task, Causal):
        if options.document_masks:
            problem = f"found task {options.task}, whose rows are not kept apart"
            raise ConfigError("train", "document_masks", problem, "leave it out")
        return task
    can = config.model_type in TELL_APART
    if options.document_masks and not can:
        problem = f"attention of {config.model_type} is not known to tell documents of a row apart"
        raise ConfigError("train", "document_masks", problem, "leave it out")
    packed = rows.rows if isinstance(rows, Chosen) else rows
    several = packed is None or (isinstance(packed, Packed) and len(packed.ends) > 1)
    wanted = several if options.document_masks is None else options.document_masks
    return replace(task, document_masks=can and wanted)


# families whose masks follow position_ids: each is shown to do so by tests/cli/test_documents.py
TELL_APART = {"gpt2", "gpt_neo", "gpt_neox", "llama", "mistral", "mixtral", "qwen3"}


def check_vocabulary(rows: Rows, tokenizer: Any, config: Any, options: TrainOptions) -> None:
    """No token of the rows lies beyond the model's vocabulary."""
    size = getattr(config.get_text_config(), "vocab_size", None)
    if size is None or max(tokenizer.get_vocab().values(), default=0) < size:
        return
    cls, rows = TASKS[options.task or "causal"], rows.rows if isinstance(rows, Chosen) else rows
    if isinstance(rows, Packed):
        found = max(int(chunk.max(initial=0)) for chunk in rows.chunks)
        found = max(found, tokenizer.mask_token_id if cls is Masked else 0)
    else:
        columns = (rows[[number]].items() for number in range(len(rows)))
        ids = (
            max(held[0], default=0) for row in columns for name, held in row if "input_ids" in name
        )
        found = max(pad_id(tokenizer), *ids)
    if found >= size:
        problem = f"found token {found}, but the vocabulary has {size} rows"
        raise DataError(options.model, "tokenizer", problem, "it belongs to another model")


def make_stream(data: Any, task: Task, options: TrainOptions) -> Stream:
    """The batches of data that are read while training goes on."""
    if options.eval_share:
        problem = "a stream has no known end to hold rows out of"
        raise ConfigError("train", "eval_share", problem, "name eval_data or eval_split")
    columns = read.columns_of(type(task), options.columns, read.names_in(data, options))
    source = read.Source(options, task, columns)
    return Stream(source, task, options.batch_size, options.seed, options.shuffle_rows)
