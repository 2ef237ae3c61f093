"""Reading of a training run's inputs: tokenizer, task, and batches of training and evaluation."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slapo_zoo.cli.training.options import ConfigError, TrainOptions
from slapo_zoo.data import read
from slapo_zoo.data.batches import Batches, Stream, divided
from slapo_zoo.data.tasks import (
    TASKS,
    Causal,
    Classify,
    DataError,
    Labelled,
    Masked,
    Task,
    Translate,
    pad_id,
)


@dataclass(frozen=True)
class Inputs:
    """Everything that a training run reads.

    Args:
        batches: batches to train on.
        held_out: batches to evaluate on, or None.
        tokenizer: tokenizer to save with the weights, or None.
    """

    batches: Batches | Stream
    held_out: Batches | None = None
    tokenizer: Any = None

    def summary(self) -> str:
        """Return one line of text on the task, the number of rows, and whether documents in a row attend to each other."""
        task, held = self.batches.task, self.held_out
        what = f"{len(self.batches.rows)} rows" if isinstance(self.batches, Batches) else "a stream of rows"  # fmt: skip
        what += f" of up to {task.seq_len} tokens"
        what += f", {len(held.rows)} to evaluate on" if held else ""
        if isinstance(task, Causal):
            what += f", documents{' ' if task.document_masks else ' not '}masked from each other"
        return f"task {type(task).__name__.lower()}: {what}"


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of a checkpoint folder or Hub id; raise DataError if there is none."""
    from transformers import AutoTokenizer

    hint = "save the tokenizer beside the weights: tokenizer.save_pretrained(folder); install a missing package"
    try:
        found = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as exc:
        raise DataError(name, "tokenizer", str(exc).strip().partition("\n")[0], hint) from exc
    if len(found) <= len(found.all_special_ids):  # transformers makes this without files
        problem = f"found a tokenizer of {len(found)} tokens, all of them special"
        raise DataError(name, "tokenizer", problem, hint)
    return found


def read_inputs(options: TrainOptions, config: Any) -> Inputs:
    """Read rows for training and evaluation, and the tokenizer; DataError for too few rows or too large token ids."""
    tokenizer, cls = load_tokenizer(options.model), TASKS[options.task or "causal"]
    held = None
    if options.stream:
        batches: Batches | Stream = make_stream(cls, tokenizer, options, config)
    else:
        data = opened(str(options.data), options.data_split, cls, options)
        task = make_task(cls, tokenizer, data, options, config)
        rows = rows_of(str(options.data), data, task, options)
        if options.eval_share:
            rows, held = divided(rows, options.eval_share, options.seed)
        require_rows(rows, options.batch_size, options)
        task = with_masks(task, rows, options, config)
        batches = Batches(rows, task, options.batch_size, options.seed)
        check_vocabulary(rows, tokenizer, config, options)
    if options.eval_data or options.eval_split:
        try:
            held = other_rows(batches.task, options)
        except DataError as error:  # name the data in the error
            raise DataError("eval_data", error.what, error.problem, error.hint) from error
    if held is None:
        return Inputs(batches, None, tokenizer)
    option = "eval_share" if options.eval_share else "eval_data"
    require_rows(held, options.batch_size if batches.task.couples else 1, options, option)
    held_out = Batches(held, batches.task, options.batch_size, options.seed)
    return Inputs(batches, held_out, tokenizer)


def make_task(cls: type[Task], tokenizer: Any, data: Any, options: TrainOptions, config: Any) -> Task:  # fmt: skip
    """Return a task of type `cls`, which makes model inputs and labels from `data`, a data set that is not tokenized. Class
    names come from config.id2label if the classes of the data are all in it, else from the data.
    """
    more: dict[str, Any] = {}
    if issubclass(cls, Labelled):
        columns = read.columns_of(cls, options.columns, data.column_names)
        own = tuple(config.id2label[number] for number in sorted(config.id2label))
        is_trained = any(f"AutoModel{name[name.rfind('For') :]}" == cls.head for name in config.architectures or ())  # fmt: skip
        column = columns["label" if cls is Classify else "tags"]
        found = read.class_names(data, column, own if is_trained else ())
        more["names"] = own if set(found) <= set(own) else found
    if cls is Translate:
        more["target_len"] = options.target_len or options.seq_len or 128
    return cls(tokenizer, options.seq_len or 128, **more)


def make_stream(cls: type[Task], tokenizer: Any, options: TrainOptions, config: Any) -> Stream:
    """Return the stream of batches of a data set that is read while training runs, for a task of type `cls`.
    DataError or ConfigError is raised if the data lack a column, or the task or an option needs all rows first.
    """
    if options.eval_share:
        problem = "no share of a stream can be held out, since its length is unknown"
        raise ConfigError("train", "eval_share", problem, "use eval_data or eval_split instead")
    if issubclass(cls, Labelled):
        hint = "leave stream out, so that all rows are read first"
        problem = f"task {options.task} counts its labels before training, but a stream is read during it"  # fmt: skip
        raise DataError("train", "stream", problem, hint)
    name, split = str(options.data), options.data_split
    require_columns(name, cls, options)
    task = make_task(cls, tokenizer, None, options, config)
    source = read.Source(name, split, options.data_config, task, options.columns)
    source.opened()  # a wrong name or column is reported before the model is loaded
    task = with_masks(task, None, options, config)
    return Stream(source, task, options.batch_size, options.seed, options.shuffle_rows)


def other_rows(task: Task, options: TrainOptions) -> Any:
    """Return the rows for evaluation, tokenized by `task`, from the data that the option eval_data or eval_split names."""
    name = options.eval_data or str(options.data)
    has_one = Path(name).is_file() or read.kind_of(name) == "text"
    split = options.eval_split or ("train" if has_one else options.data_split)
    return rows_of(name, opened(name, split, type(task), options), task, options)


def opened(name: str, split: str, cls: type[Task], options: TrainOptions) -> Any:
    """Return the split `split` of the data set `name`, not tokenized; DataError if a task of type `cls` cannot read it."""
    require_columns(name, cls, options)
    return read.open_table(name, split, options.data_config)


def require_columns(name: str, cls: type[Task], options: TrainOptions) -> None:
    """Raise DataError if the data set `name` is plain text but tasks of type `cls` read named columns."""
    if read.kind_of(name) == "text" and not cls.packs:
        hint = "give jsonl, csv, parquet or a data set of the Hub"
        problem = "found plain text, but this task reads named columns"
        raise DataError(name, f"task={options.task}", problem, hint)


def rows_of(name: str, data: Any, task: Task, options: TrainOptions) -> Any:
    """Return the rows of `data`, the opened data set `name`, tokenized by `task`. The option `columns` (role such as
    "text" --> column) applies unless `name` is an evaluation file of plain text.
    """
    is_other_text = name != options.data and read.kind_of(name) == "text"
    given = {} if is_other_text else options.columns
    return read.rows_of_table(data, task, read.columns_of(type(task), given, data.column_names))


def require_rows(rows: Any, least: int, options: TrainOptions, option: str = "data") -> None:
    """Raise DataError if `rows` are fewer than `least`; the error names `option`, which gave the data."""
    if len(rows) < least:
        problem = f"found {len(rows)} rows of up to {options.seq_len} tokens; expected at least {least} rows"
        hint = "give more data, or a smaller --seq-len or --batch-size"
        raise DataError(option, "", problem, hint)


def with_masks(task: Task, rows: Any, options: TrainOptions, config: Any) -> Task:
    """Return the task, which masks the documents of a row from each other if the option `document_masks` is True or,
    for None, if a row has several documents and the model supports it. ConfigError is raised for True on other models.
    """
    if not isinstance(task, Causal):
        if options.document_masks:
            problem = f"found task {options.task}, whose rows hold one document each"
            raise ConfigError("train", "document_masks", problem, "leave document_masks out")
        return task
    can = config.model_type in TELL_APART
    if options.document_masks and not can:
        problem = f"not supported for {config.model_type}: attention may mix the documents of a row"
        raise ConfigError("train", "document_masks", problem, "leave document_masks out")
    several = rows is None or most_of(rows, "lengths", "list_value_length") > 1
    wanted = several if options.document_masks is None else options.document_masks
    return replace(task, document_masks=can and wanted)


# families whose masks follow position_ids: each is shown to do so by tests/cli/test_documents.py
TELL_APART = {"gpt2", "gpt_neo", "gpt_neox", "llama", "mistral", "mixtral", "qwen3"}


def most_of(rows: Any, column: str, measure: str) -> int:
    """Return the largest value of `measure`, a function of pyarrow.compute, on a column of `rows`; 0 without rows."""
    import pyarrow.compute as pc

    found = pc.call_function(measure, [rows.data.column(column)])
    return pc.call_function("max", [found]).as_py() or 0


def check_vocabulary(rows: Any, tokenizer: Any, config: Any, options: TrainOptions) -> None:
    """Raise DataError if a row has a token id beyond the model's vocabulary, as with another model's tokenizer."""
    size = getattr(config.get_text_config(), "vocab_size", None)
    if size is None or max(tokenizer.get_vocab().values(), default=0) < size:
        return
    cls = TASKS[options.task or "causal"]
    used = (tokenizer.mask_token_id if cls is Masked else 0) if cls.packs else pad_id(tokenizer)
    names = [name for name in rows.column_names if name.endswith("input_ids")]
    found = max(used, *(most_of(rows, name, "list_flatten") for name in names))
    if found >= size:
        problem = f"found token id {found}, but the model's vocabulary has {size} tokens"
        hint = "save this model's tokenizer beside its weights: tokenizer.save_pretrained(folder)"
        raise DataError(options.model, "tokenizer", problem, hint)
