"""Where rows come from: text files, files of tables, data sets of the Hub; tokenized once per node."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slapo_zoo.cli.data.rows import Packed, Rows
from slapo_zoo.cli.data.tasks import Columns, Task
from slapo_zoo.cli.data.text_files import DataError, read_documents, visible_files
from slapo_zoo.cli.readable_errors import is_first, is_full
from slapo_zoo.cli.training.train_options import TrainOptions
from slapo_zoo.parallel.digests import digest

KINDS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv",
         ".parquet": "parquet"}  # fmt: skip


def format_of(path: Path) -> str | None:
    """How `datasets` calls the table of a file; None for text."""
    return KINDS.get(path.suffix.lower())


def kind_of(name: str) -> str:
    """text, table or saved for what lies on the disk; hub for a name of a data set there."""
    path = Path(name)
    if not path.exists():
        if format_of(path) or name.startswith((".", "/", "~")) or name.count("/") > 1:
            hint = "name a file, a folder, or a data set of the Hub"
            raise DataError(name, "--data", "found nothing there", hint)
        return "hub"
    if path.is_file():
        return "table" if format_of(path) else "text"
    names = {file.name for file in path.glob("*.json")}
    if "dataset_dict.json" in names or {"state.json", "dataset_info.json"} <= names:
        return "saved"
    return _kind_of_folder(path)


def _kind_of_folder(path: Path) -> str:
    """`datasets` reads the files of the most frequent ending, so that is to be the one of all tables."""
    files = [f for f in visible_files(path) if f.suffix and not f.name.startswith("dataset_")]
    kinds = Counter((format_of(f), f.suffix.lower() == ".tsv") for f in files if format_of(f))
    others = Counter(f.suffix.lower() for f in files if not format_of(f))
    if len(kinds) > 1 or max(others.values(), default=0) > kinds.total() > 0:
        said = ", ".join(sorted({f.suffix for f in files}))
        problem = f"found files of several kinds ({said}), of which one would be read"
        raise DataError(str(path), "--data", problem, "name one file, or a folder of one kind")
    return "table" if kinds else "text"


def open_table(name: str, split: str, options: TrainOptions, stream: bool = False) -> Any:
    """A data set of the library `datasets`."""
    datasets, kind, path = _library(), kind_of(name), Path(name)
    where: dict[str, Any] = {"streaming": stream}
    if path.is_file() or kind == "text":
        check_split(name, split, ["train"])
    with _explained(name, split):
        if kind == "saved":
            found: Any = datasets.load_from_disk(name)
            if not isinstance(found, Mapping):
                found = dict.fromkeys(["train", str(found.split or "train")], found)
            check_split(name, split, found)
            return found[split].to_iterable_dataset() if stream else found[split]
        if kind == "text":
            files = [name] if path.is_file() else sorted(map(str, visible_files(path)))
            where |= {"data_files": files, "sample_by": "document", "encoding": "utf-8-sig"}
            return datasets.load_dataset("text", split="train", **where)
        if kind == "hub":
            ask_the_hub(name)
        if kind == "hub" or path.is_dir():
            return datasets.load_dataset(name, options.data_config, split=split, **where)
        where |= {"sep": "\t"} if path.suffix.lower() == ".tsv" else {}
        return datasets.load_dataset(format_of(path), data_files=name, split="train", **where)


def open_text(name: str, split: str) -> Any:
    """The documents of text files as a table, held in memory."""
    check_split(name, split, ["train"])
    return _library().Dataset.from_dict({"text": read_documents(Path(name))})


def check_split(name: str, split: str, own: Iterable[str]) -> None:
    """The rows of one split are not to be taken for those of another."""
    if split not in own:
        hint = "text, a single file and a saved data set have one split: name another as eval_data"
        raise DataError(name, f"split {split!r}", f"expected {' or '.join(own)}", hint)


def ask_the_hub(name: str) -> None:
    """Raise what the network says to one request; the libraries would try five times, each longer."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    if not constants.HF_HUB_OFFLINE:
        with suppress(HfHubHTTPError):  # an answer: `datasets` puts it into better words
            HfApi().dataset_info(name, timeout=10)


def _library() -> Any:
    try:
        import datasets
    except ImportError:
        hint = "pip install slapo-zoo[train]"
        raise DataError("--data", "", "the library `datasets` is not installed", hint) from None
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs, it raises too
    return datasets


@contextmanager
def _explained(name: str, split: str) -> Any:
    """Turn an error of the library about a file or a name into a SlapoError."""
    try:
        yield
    except DataError:
        raise
    except (*_errors(), ValueError, OSError, KeyError, StopIteration) as error:
        if isinstance(error, OSError) and (error.filename is not None or is_full(error)):
            raise
        cause = error.__cause__ or error
        problem = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        hint = "is the format what the file's ending says? data_split names the split"
        if any(word in problem for word in OF_NOTHING):
            problem, hint = "found no row in it", "is it the file that was meant?"
        raise DataError(name, f"split {split!r}", problem, hint) from error


def names_in(data: Any, options: TrainOptions) -> list[str]:
    """The columns of a stream, which may have to be read for them."""
    with _explained(str(options.data), options.data_split):
        return data.column_names or list(next(iter(data)))


OF_NOTHING = ("StopIteration", "corresponds to no data", "BatchSize must be greater than 0")


def _errors() -> tuple[type[Exception], ...]:
    from pyarrow import ArrowException

    return _library().exceptions.DatasetsError, ArrowException


def columns_of(task: type[Task], given: Mapping[str, str], found: Sequence[str]) -> dict[str, str]:
    """Map each field that the task reads to the column of the data that holds it."""
    chosen = {}
    if unknown := sorted(set(given) - set(task.roles)):
        hint = f"this task reads {', '.join(task.roles)}"
        raise DataError("columns", unknown[0], "the task reads no such thing", hint)
    for role, usual in task.roles.items():
        name = given.get(role) or next((one for one in usual if one in found), None)
        if name is None and role in task.optional:
            continue
        if name not in found:
            problem = f"found no column {name or ' or '.join(usual)!r} among {', '.join(found)}"
            raise DataError("--data", role, problem, f"say which: --set columns.{role}=NAME")
        chosen[role] = name
    return chosen


def by_role(batch: Columns, columns: Mapping[str, str], task: Task) -> dict[str, Any]:
    """A batch of the data, by what the task reads, where it is of the kind that it reads."""
    found = {role: list(batch[name]) for role, name in columns.items()}
    for role, held in found.items():
        wanted = task.kinds.get(role, "a text")
        if (wrong := next((one for one in held if not FITS[wanted](one)), FITS)) is not FITS:
            problem = f"found {wrong!r:.60}, expected {wanted}"
            raise DataError("--data", f"column {columns[role]!r}", problem, f"it is read as {role}")
    return found


# what a column holds --> whether a value is one
FITS: dict[str, Callable[[Any], bool]] = {
    "a text": lambda one: isinstance(one, str),
    "a class": lambda one: isinstance(one, str | int) or (isinstance(one, float) and one % 1 == 0),
    "a list of texts": lambda one: isinstance(one, list) and all(isinstance(w, str) for w in one),
    "a list of classes": lambda one: isinstance(one, list) and all(isinstance(w, str | int) for w in one),
}  # fmt: skip


def without_gaps(data: Any, columns: Mapping[str, str]) -> Any:
    """The rows that have all that the task reads."""
    names = sorted(set(columns.values()))
    if not any(data.data.column(name).null_count for name in names):
        return data
    return data.filter(has_all, fn_kwargs={"names": names})


def has_all(row: Columns, names: Sequence[str]) -> bool:
    """Return whether no column of a row is empty."""
    return all(row[name] is not None for name in names)


def with_tokens(task: Task, encoded: Columns) -> dict[str, list[Any]]:
    """The rows whose texts have a token each; where rows are cut from a stream, all."""
    held = [column for name, column in encoded.items() if name.endswith("input_ids")]
    kept = [i for i, row in enumerate(zip(*held, strict=True)) if task.packs or all(map(len, row))]
    return {name: [column[i] for i in kept] for name, column in encoded.items()}


def rows_of_table(data: Any, task: Task, columns: Mapping[str, str]) -> Rows:
    """The rows of a data set; its tokens are kept in the cache, and mapped from there."""
    count = len(data)
    data = without_gaps(data, columns)
    if not len(data):
        problem = f"found {count} rows, none of which has all of {', '.join(columns.values())}"
        raise DataError("--data", "", problem, "name other columns, or look at the file")
    if len(data) < count:
        missing = f"{count - len(data)} of {count} rows have no {' or '.join(columns.values())}"
        sys.stderr.write(f"{missing}; they are left out\n" if is_first() else "")
    key = fingerprint(data._fingerprint, task, columns)
    place = Path(data.cache_files[0]["filename"]).parent if data.cache_files else None
    with _one_by_one(place, key):
        encoded = data.map(
            lambda batch: with_tokens(task, task.encode(by_role(batch, columns, task))), batched=True,
            remove_columns=data.column_names, new_fingerprint=key,
        )  # fmt: skip
    if (short := len(data) - len(encoded)) and is_first():
        sys.stderr.write(f"{short} of {count} rows have no token; they are left out\n")
    return PackedTable(encoded, task.row_tokens) if task.packs else encoded


class PackedTable(Packed):
    """Rows cut from the tokens of a data set, which another process maps as we do.

    Args:
        encoded: the tokens of each document, in one column.
        row: tokens of a row.
    """

    def __init__(self, encoded: Any, row: int):
        self.encoded = encoded
        pieces = encoded.data.column("input_ids").chunks
        lengths = [piece.value_lengths().to_numpy(zero_copy_only=False) for piece in pieces]
        chunks = [piece.flatten().to_numpy(zero_copy_only=False) for piece in pieces]
        super().__init__(chunks, np.concatenate(lengths) if lengths else np.zeros(0), row)

    def __reduce__(self) -> Any:
        return type(self), (self.encoded, self.row)


@dataclass(frozen=True)
class Source:
    """A stream of examples, as a task reads them.

    Args:
        options: of the run; they name the data.
        task: encodes an example.
        columns: what it reads --> the column that holds it.
    """

    options: TrainOptions
    task: Task
    columns: Mapping[str, str]

    def opened(self) -> Any:
        """The data set, from its beginning."""
        return open_table(str(self.options.data), self.options.data_split, self.options, stream=True)  # fmt: skip

    def examples(self, data: Any) -> Iterator[Mapping[str, Any]]:
        """The rows of an opened data set, as they are read."""
        with _explained(str(self.options.data), self.options.data_split):
            yield from data

    def encode(self, example: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Columns of one row; none where something is missing."""
        if not has_all(example, list(self.columns.values())):
            return {}
        one = {name: [example[name]] for name in self.columns.values()}
        return with_tokens(self.task, self.task.encode(by_role(one, self.columns, self.task)))


def fingerprint(data: str, task: Task, columns: Mapping[str, str]) -> str:
    """Names the tokens: of these data, by this tokenizer, for this task."""
    tokenizer = task.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    other = sorted((k, repr(v)) for k, v in vars(task).items() if k != "tokenizer")
    length = [] if task.packs else [*other, with_tokens.__name__]  # a stream is cut later
    text = repr((data, type(task).__name__, words, tokenizer.special_tokens_map, length,
                 sorted(columns.items())))  # fmt: skip
    return digest(text)[:32]


def _one_by_one(place: Path | None, key: str) -> Any:
    """The first process of a node tokenizes; the others wait, and find its tokens."""
    if place is None:
        return nullcontext()
    from filelock import FileLock

    return FileLock(place / f"{key}.lock")


MOST_CLASSES = 100_000  # a larger number is an id, of which nobody wants all below it


def class_names(data: Any, column: str) -> tuple[str, ...]:
    """The classes of a column of labels, or of lists of labels, by number."""
    feature = data.features[column]
    feature = getattr(feature, "feature", feature)
    if hasattr(feature, "names"):
        return tuple(feature.names)
    found: set[Any] = {
        one for held in data[column] for one in (held if isinstance(held, list) else [held])
    }
    found = {int(x) if isinstance(x, float) and x % 1 == 0 else x for x in found - {None}}
    if len(found) == 1:
        problem = f"found one class, {found.pop()!r}, expected at least two"
        raise DataError("--data", column, problem, "there is nothing to tell apart")
    most = max((one for one in found if isinstance(one, int)), default=0)
    if all(isinstance(one, int) for one in found) and most < MOST_CLASSES:
        return tuple(str(number) for number in range(most + 1))
    if all(isinstance(one, str) for one in found):
        return tuple(sorted(found))
    kinds = sorted({f"{type(one).__name__}, e.g. {one!r}" for one in found})[:3]
    problem = f"found labels of {'; '.join(kinds)}, expected classes"
    raise DataError("--data", column, problem, "write texts, or integers from 0")
