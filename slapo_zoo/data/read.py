"""Reading of rows from text files, table files and data sets of the Hub, and their tokenization."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slapo_zoo.data.tasks import Columns, DataError, Task
from slapo_zoo.errors import is_full
from slapo_zoo.hf.hub_errors import hub_errors
from slapo_zoo.parallel.digests import digest
from slapo_zoo.parallel.ranks.slurm import is_first

KINDS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv",
         ".parquet": "parquet"}  # fmt: skip
VERSION = 2  # of the rows that Encoder makes: rows cached under another number are not read
MOST_CLASSES = 100_000  # a column with larger numbers holds ids, not classes


def ending_of(path: Path) -> str:
    """Return the ending of the name of a file, which may be compressed, in lower case: ".csv" for DATA.CSV.GZ."""
    packed = Path(path.stem) if path.suffix.lower() in (".gz", ".bz2", ".xz", ".zst") else path
    return packed.suffix.lower()


def format_of(path: Path) -> str | None:
    """Return the name that `datasets` has for the format of a table file `path`, e.g. "json"; None for a text file."""
    return KINDS.get(ending_of(path))


def kind_of(name: str) -> str:
    """Return the kind of the data `name`: "text", "table" or "saved" (by save_to_disk) for a path, "hub" for a data
    set of the Hub; DataError for a path that does not exist.
    """
    path = Path(name)
    if not path.exists():
        if format_of(path) or name.startswith((".", "/", "~")) or name.count("/") > 1:
            hint = "name a file, a folder, or a data set of the Hub"
            raise DataError(name, "data", "found no file, folder or data set of this name", hint)
        return "hub"
    if path.is_file():
        return "table" if format_of(path) else "text"
    names = {file.name for file in path.glob("*.json")}
    if "dataset_dict.json" in names or {"state.json", "dataset_info.json"} <= names:
        return "saved"
    return _kind_of_folder(path)


def _kind_of_folder(path: Path) -> str:
    """Return "table" or "text", the kind of the files in the folder `path`; DataError for files of several kinds, as
    `datasets` would read only one kind.
    """
    files = [f for f in _visible_files(path) if f.suffix and not f.name.startswith("dataset_")]
    kinds = Counter((format_of(f), ending_of(f) == ".tsv") for f in files if format_of(f))
    others = Counter(f.suffix.lower() for f in files if not format_of(f))
    if len(kinds) > 1 or max(others.values(), default=0) > kinds.total() > 0:
        said = ", ".join(sorted({f.suffix for f in files}))
        problem = f"found files of several kinds ({said}), of which only one kind would be read"
        raise DataError(str(path), "data", problem, "name one file, or a folder of one kind")
    return "table" if kinds else "text"


def _visible_files(path: Path) -> list[Path]:
    """Return [path] for a file; for a folder all files below it in order of name, without hidden ones."""
    if path.is_file():
        return [path]
    is_hidden = lambda file: any(p.startswith(".") for p in file.relative_to(path).parts)  # noqa: E731
    return sorted(file for file in path.rglob("*") if file.is_file() and not is_hidden(file))


def text_files(path: Path) -> list[str]:
    """Return the paths of the files at `path`, a file or folder, that hold UTF-8 text; print how many are skipped."""
    files = _visible_files(path)
    texts = [str(file) for file in files if _is_text(file)]
    if not texts:
        problem = f"found no UTF-8 text in {len(files)} file{'' if len(files) == 1 else 's'}"
        raise DataError(str(path), "data", problem, "name an unpacked UTF-8 text file, or a folder of text files")  # fmt: skip
    if (short := len(files) - len(texts)) and is_first():
        sys.stderr.write(f"{short} of {len(files)} files hold no UTF-8 text; they are left out\n")
    return texts


def _is_text(file: Path) -> bool:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (UnicodeDecodeError, OSError):
        return False
    return bool(text.strip()) and "\0" not in text


def open_table(name: str, split: str, config: str | None = None, stream: bool = False) -> Any:
    """Return a data set of the library `datasets`.

    Args:
        name: a file, a folder, or a data set of the Hub.
        split: name of the split to read.
        config: name of a configuration, for a Hub data set that has several.
        stream: return an iterable data set that is read while its rows are used.
    """
    datasets, kind, path = _library(), kind_of(name), Path(name)
    where: dict[str, Any] = {"streaming": stream}
    if path.is_file() or kind == "text":
        check_split(name, split, ["train"])
    with explained(name, split):
        if kind == "saved":
            found: Any = datasets.load_from_disk(name)
            if not isinstance(found, Mapping):
                found = dict.fromkeys(["train", str(found.split or "train")], found)
            check_split(name, split, found)
            rows = found[split].with_format(None)  # as plain values, whatever was saved with them
            return rows.to_iterable_dataset() if stream else rows
        if kind == "text":
            where |= {"sample_by": "document", "encoding": "utf-8-sig"}
            return datasets.load_dataset("text", data_files=text_files(path), split="train", **where)  # fmt: skip
        if kind == "hub":
            ask_the_hub(name)
        if kind == "hub" or path.is_dir():
            return datasets.load_dataset(name, config, split=split, **where)
        where |= {"sep": "\t"} if ending_of(path) == ".tsv" else {}
        return datasets.load_dataset(format_of(path), data_files=name, split="train", **where)


def check_split(name: str, split: str, own: Iterable[str]) -> None:
    """Raise DataError if the data set `name` does not have the split `split`; `own` are the names of its splits."""
    if split not in own:
        hint = "name one of these, or other data: text files and single files have one split only"
        problem = f"found no such split, expected {' or '.join(own)}"
        raise DataError(name, f"split {split!r}", problem, hint)


def ask_the_hub(name: str) -> None:
    """Ask the Hub once for the data set `name`: DataError at once if it is not reached; `datasets` would first retry."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    if not constants.HF_HUB_OFFLINE:
        hint = "check the connection; HF_HUB_OFFLINE=1 uses what was fetched before"
        with hub_errors(lambda said, _: DataError(name, "data", said, hint)), suppress(HfHubHTTPError):  # fmt: skip
            # an answer is no error here: `datasets` has a better text
            HfApi().dataset_info(name, timeout=10)


def _library() -> Any:
    try:
        import datasets
    except ImportError:
        hint = "pip install slapo-zoo[train]"
        raise DataError("data", "", "the library `datasets` is not installed", hint) from None
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it raises what it logs
    return datasets


@contextmanager
def explained(name: str, split: str) -> Iterator[None]:
    """Context that turns errors of `datasets` about the split `split` of the data `name` into a DataError."""
    from pyarrow import ArrowException

    known = _library().exceptions.DatasetsError, ArrowException, ValueError, OSError, KeyError
    try:
        yield
    except DataError:
        raise
    except (*known, StopIteration, RuntimeError) as error:
        if isinstance(error, OSError) and (error.filename is not None or is_full(error)):
            raise
        cause = error.__cause__ or error
        if isinstance(cause, DataError):  # of our own encoder, which a stream calls
            raise cause from None
        problem = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        hint = "check that the file's format matches its ending, and that the data have this split"
        if any(word in problem for word in OF_NOTHING):
            problem, hint = "found no row in this split", "name other data or another split"
        raise DataError(name, f"split {split!r}", problem, hint) from error


OF_NOTHING = ("StopIteration", "corresponds to no data", "BatchSize must be greater than 0")


def columns_of(task: type[Task], given: Mapping[str, str], found: Sequence[str]) -> dict[str, str]:
    """Return role --> column: which column of the data holds each input of the task, such as "text".

    `given` is the user's {role: column}, `found` all columns; a required input without a column raises DataError.
    """
    chosen = {}
    if unknown := sorted(set(given) - set(task.roles)):
        hint = f"name inputs of the task: this task reads {', '.join(task.roles)}"
        raise DataError("columns", unknown[0], "the task has no such input", hint)
    for role, usual in task.roles.items():
        name = given.get(role) or next((one for one in usual if one in found), None)
        if name is None and role in task.optional:
            continue
        if name not in found:
            problem = f"found no column {name or ' or '.join(usual)!r} among {', '.join(found)}"
            hint = f'name the column of this input: columns={{"{role}": "NAME"}}'
            raise DataError("data", role, problem, hint)
        chosen[role] = name
    return chosen


# what a column holds --> whether a value is one
FITS: dict[str, Callable[[Any], bool]] = {
    "a text": lambda one: isinstance(one, str),
    "a class": lambda one: isinstance(one, str | int) or (isinstance(one, float) and one % 1 == 0),
    "a list of texts": lambda one: isinstance(one, list) and all(isinstance(w, str) for w in one),
    "a list of classes": lambda one: isinstance(one, list) and all(isinstance(w, str | int) for w in one),
}  # fmt: skip


@dataclass(frozen=True)
class Encoder:
    """Tokenization of a batch of rows, as a function for `datasets.map`.

    Args:
        task: task that makes tokens and labels.
        columns: role of an input, e.g. "text" --> name of the column that holds it.
        classes: names of the classes by id, if the data hold ids as labels and name the classes; else ().
    """

    task: Task
    columns: Mapping[str, str]
    classes: tuple[str, ...] = ()

    def __call__(self, batch: Columns) -> dict[str, Any]:
        """Return {name: values}, tokens and labels, of `batch` {column: values}; drop rows with a text of no token."""
        found = {role: list(batch[name]) for role, name in self.columns.items()}
        for role, held in found.items():
            wanted = self.task.kinds.get(role, "a text")
            if wrong := [one for one in held if not FITS[wanted](one)][:1]:
                problem = f"found {wrong[0]!r:.60}, expected {wanted}"
                column = f"column {self.columns[role]!r}"
                hint = f'correct this column, or name another one: columns={{"{role}": "NAME"}}'
                raise DataError("data", column, problem, hint)
            if "class" in wanted:
                found[role] = [_named_in(self.classes, one) for one in held]
        encoded = self.task.encode(found)
        rows = enumerate(zip(*encoded.values(), strict=True))
        kept = [i for i, row in rows if all(len(x) for x in row if isinstance(x, Sized))]
        return {name: [column[i] for i in kept] for name, column in encoded.items()}

    def fingerprint(self, data: str) -> str:
        """Return a cache key for the tokens: a hash of task, tokenizer, columns and `data`, the rows' fingerprint."""
        tokenizer = self.task.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        words = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))  # fmt: skip
        fields = sorted((k, repr(v)) for k, v in vars(self.task).items() if k != "tokenizer")
        text = repr((VERSION, data, type(self.task).__name__, words, tokenizer.special_tokens_map, fields,
                     sorted(self.columns.items()), *self.classes))  # fmt: skip
        return digest(text)[:32]


def _named_in(classes: Sequence[str], label: Any) -> Any:
    """Return the name in `classes` of class number `label`, or of each number in a list; any other label unchanged."""
    if isinstance(label, list):
        return [_named_in(classes, one) for one in label]
    is_known = not isinstance(label, str) and 0 <= label < len(classes)
    return classes[int(label)] if is_known else label


def has_all(row: Columns, names: Sequence[str]) -> bool:
    """Return whether a row has a value, not None, in each of the columns `names`."""
    return all(row[name] is not None for name in names)


def rows_of_table(data: Any, task: Task, columns: Mapping[str, str]) -> Any:
    """Return a `datasets.Dataset` of the rows of `data`, tokenized by `task` ("input_ids", ...), cached on disk and
    mapped into memory. `columns` maps each role of `task.roles`, e.g. "text", to the name of its column.
    """
    whole, names, count = data, sorted(set(columns.values())), len(data)
    if any(data.data.column(name).null_count for name in names):
        data = data.filter(has_all, fn_kwargs={"names": names})
    said = f"{count - len(data)} of {count} rows have no {' or '.join(columns.values())}"
    if not len(data):
        problem = f"found {count} rows, none of which has all of {', '.join(columns.values())}"
        raise DataError("data", "columns", problem, "name other columns by columns=, or fill in empty values")  # fmt: skip
    label = next((columns[role] for role, kind in task.kinds.items() if "class" in kind), None)
    encoder = Encoder(task, columns, () if label is None else own_names(data, label))
    key = encoder.fingerprint(data._fingerprint)
    with _one_by_one(whole, key):
        rows = data.map(encoder, batched=True, remove_columns=data.column_names, new_fingerprint=key)  # fmt: skip
    left = [said] if len(data) < count else []
    if not task.packs and len(rows) < len(data):
        left.append(f"{len(data) - len(rows)} of {count} rows have no token")
    sys.stderr.write("".join(f"{text}; they are left out\n" for text in left if is_first()))
    return rows


def _one_by_one(data: Any, key: str) -> Any:
    """Return a lock, named by the cache `key`: one process per node tokenizes the data, the others wait and then read
    its cache. If `data` is not on disk, return a context without a lock.
    """
    if not data.cache_files:
        return nullcontext()
    from filelock import FileLock

    return FileLock(Path(data.cache_files[0]["filename"]).parent / f"{key}.lock")


@dataclass(frozen=True)
class Source:
    """Stream of tokenized rows, which can be opened again for every epoch.

    Args:
        name: a file, a folder, or a data set of the Hub.
        split: name of the split to read.
        config: name of the data set's configuration, or None.
        task: task that tokenizes rows.
        columns: role of an input, e.g. "text" --> name of its column, needed where the column has an unusual name.
    """

    name: str
    split: str
    config: str | None
    task: Task
    columns: Mapping[str, str]

    def opened(self) -> Any:
        """Open the data at its beginning, and return its tokenized rows as an iterable data set."""
        data = open_table(self.name, self.split, self.config, stream=True)
        with explained(self.name, self.split):
            found = data.column_names or list(next(iter(data)))
        columns = columns_of(type(self.task), self.columns, found)
        data = data.filter(has_all, fn_kwargs={"names": sorted(columns.values())})
        return data.map(Encoder(self.task, columns), batched=True, remove_columns=found)

    def rows(self, data: Any) -> Iterator[Mapping[str, Any]]:
        """Yield the tokenized rows of `data`, an iterable data set that `opened` returned."""
        with explained(self.name, self.split):
            yield from data


def own_names(data: Any, column: str) -> tuple[str, ...]:
    """Return the names that the data set `data` itself has for the class numbers in column `column`; () if it has none."""
    feature = data.features[column]
    return tuple(getattr(getattr(feature, "feature", feature), "names", ()))


def class_names(data: Any, column: str, own: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the names of the classes in column `column` of the data set `data`, by class id: the names that the data
    set itself has; else the texts in the column, sorted; or for numbers "0", "1", .... The column holds labels, or
    lists of labels. If all are numbers below len(own), `own` is returned, the class names of the model's head from an
    earlier training. DataError is raised for a single class, and for labels of several types.
    """
    if names := own_names(data, column):
        return names
    held = [one if isinstance(one, list) else [one] for one in data[column]]
    found: set[Any] = {one for several in held for one in several} - {None}
    found = {int(x) if isinstance(x, float) and x % 1 == 0 else x for x in found}
    if len(found) == 1:
        problem = f"found one class, {found.pop()!r}, expected at least two"
        raise DataError("data", column, problem, "give rows of at least two classes")
    if all(isinstance(one, int) for one in found):
        return own if max(found, default=0) < len(own) else _names_of_numbers(found, column)
    if all(isinstance(one, str) for one in found):
        return tuple(sorted(found))
    examples = {type(one).__name__: repr(one) for one in sorted(found, key=repr, reverse=True)}
    kinds = "; ".join(f"{kind}, e.g. {one}" for kind, one in sorted(examples.items()))
    problem = f"found labels of {kinds}, expected names or numbers of classes"
    raise DataError("data", column, problem, "write all labels as texts, or all as integers from 0")


def _names_of_numbers(found: set[int], column: str) -> tuple[str, ...]:
    """Return the names "0", "1", ... of all classes up to the largest number in `found`, the labels in `column`.

    Numbers of MOST_CLASSES (100,000) or more raise DataError.
    """
    most = max(found, default=0)
    if most >= MOST_CLASSES:
        problem = f"found the label {most}, expected class numbers below {MOST_CLASSES}"
        raise DataError("data", column, problem, "number the classes from 0, or write texts")
    return tuple(str(number) for number in range(most + 1))
