"""Plain text files: a document is a file."""

import sys
from collections.abc import Iterator
from pathlib import Path

from slapo_zoo.cli.readable_errors import is_first
from slapo_zoo.errors import SlapoError


class DataError(SlapoError, ValueError):
    """There is nothing to train on, or not enough, or it does not fit the model or the task."""


def read_documents(path: Path) -> list[str]:
    """The text of a file, or of every UTF-8 file of a folder, in the order of their names."""
    files = [path] if path.is_file() else sorted(visible_files(path))
    documents = [text for file in files if (text := _text_of(file))]
    if documents and (short := len(files) - len(documents)) and is_first():
        sys.stderr.write(f"{short} of {len(files)} files hold no UTF-8 text; they are left out\n")
    if not documents:
        problem = f"found no UTF-8 text in {len(files)} file{'' if len(files) == 1 else 's'}"
        raise DataError(str(path), "--data", problem, "name UTF-8 text, unpacked, or a folder of it")  # fmt: skip
    return documents


def visible_files(folder: Path) -> Iterator[Path]:
    """The files of a folder and of those in it, without hidden ones."""
    for file in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if file.is_file() and not hidden:
            yield file


def _text_of(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (UnicodeDecodeError, OSError):
        return ""
    return "" if "\0" in text else text.strip()
