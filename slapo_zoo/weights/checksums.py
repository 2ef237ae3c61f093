"""`checksums.json`: the CRC-32 of every tensor and file of a save, and the id of the save.

The id is a digest of the saved tensors, so the same state has the same id on every mesh. It is stored in the
`__metadata__` of every safetensors file and in the field `save` of `training_state.json`, so that files of two
saves are never mixed.
"""

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slapo_zoo.errors import WeightsError
from slapo_zoo.parallel.digests import digest
from slapo_zoo.weights.folder import CheckpointFolder
from slapo_zoo.weights.index import read_json
from slapo_zoo.weights.safetensors_file import MAX_HEADER, SAVE_ID

FILE, FORMAT = "checksums.json", "slapo-zoo-checksums/1"
BLANK = "0" * 32
ANY = re.compile(".*")
PIECE = 1 << 24  # bytes read at once
FETCH_AGAIN = "fetch the folder again, or go on from an older checkpoint"
Sums = dict[str, int]


@dataclass(frozen=True)
class Checksums:
    """Content of the `checksums.json` of a checkpoint folder.

    Args:
        save: id of the save, a digest of the saved tensors.
        tensors: name of a weight file --> {tensor name: CRC-32 of the tensor's bytes}.
        files: name of any other file, or of a weight file's header (`model.safetensors#header`) --> CRC-32.
    """

    save: str
    tensors: dict[str, Sums] = field(default_factory=dict)
    files: Sums = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write `checksums.json` into a folder; its last field is the CRC-32 of the other fields."""
        body = {"format": FORMAT, **self._hexadecimal()}
        text = json.dumps({**body, "self": _hex(_of_body(body))}, indent=1)
        (folder / FILE).write_text(text + "\n", encoding="utf-8")

    def _hexadecimal(self) -> dict[str, Any]:
        tensors = {
            file: {n: _hex(crc) for n, crc in sums.items()} for file, sums in self.tensors.items()
        }
        return {
            "save": self.save, "tensors": tensors,
            "files": {name: _hex(crc) for name, crc in self.files.items()},
        }  # fmt: skip


def _hex(crc: int) -> str:
    return f"{crc:08x}"


def _of_body(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def save_id(sums: Mapping[str, int], stamp: str) -> str:
    """Return the id of a save: a digest of `sums` (tensor --> CRC-32) and `stamp`, the training state as JSON or ""."""
    return digest(json.dumps([sorted(sums.items()), stamp]))[:32]


def with_save_id(header: bytes, save: str) -> bytes:
    """Return a safetensors header with the placeholder BLANK replaced by the id of the save."""
    return header.replace(f'"{SAVE_ID}":"{BLANK}"'.encode(), f'"{SAVE_ID}":"{save}"'.encode(), 1)


def read_checksums(folder: Path) -> Checksums | None:
    """Return the checksums of a folder, or None if it has no `checksums.json`; a damaged file raises WeightsError."""
    path = folder / FILE
    try:
        body = read_json(path, FETCH_AGAIN)
    except FileNotFoundError:
        return None
    own = body.pop("self", None) if isinstance(body, dict) else None
    if own is None or body.get("format") != FORMAT or own != _hex(_of_body(body)):
        raise _damaged(path, "found contents that were changed after the file was written")
    try:
        tensors = {
            file: {n: int(crc, 16) for n, crc in sums.items()}
            for file, sums in body["tensors"].items()
        }
        return Checksums(body["save"], tensors, {n: int(c, 16) for n, c in body["files"].items()})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"its fields are not those of a save: {type(error).__name__}: {error}"
        raise _damaged(path, problem) from error


def _damaged(path: Path, problem: str) -> WeightsError:
    return WeightsError(str(path), "", problem, FETCH_AGAIN)


def crc_of_file(path: Path, stop: int | None = None) -> int:
    """Return the CRC-32 of a file, or of its first `stop` bytes."""
    crc, left = 0, path.stat().st_size if stop is None else stop
    with path.open("rb") as file:
        while left > 0 and (piece := file.read(min(PIECE, left))):
            crc, left = zlib.crc32(piece, crc), left - len(piece)
    return crc


def damaged_files(
    folder: Path, kept: Checksums, only: re.Pattern[str] = ANY
) -> Iterator[WeightsError]:
    """Yield an error for each safetensors header, and each file that holds no weights, whose CRC-32 is not the saved one.

    Args:
        folder: checkpoint folder.
        kept: checksums of that folder.
        only: pattern of file names to check, because a user may have edited other files.
    """
    for name, crc in kept.files.items():
        file, _, header = name.partition("#")
        if not only.fullmatch(file):
            continue
        try:
            found = crc_of_file(folder / file, _end_of_header(folder / file) if header else None)
        except OSError as error:
            yield WeightsError(
                str(folder / file), header, f"cannot be read: {error.strerror}", FETCH_AGAIN
            )
            continue
        if found != crc:
            yield _differs(folder / file, header, found, crc)


def damaged_tensors(
    folder: CheckpointFolder, kept: Checksums, part: int = 0, parts: int = 1
) -> Iterator[WeightsError]:
    """Yield an error for each tensor of an opened checkpoint whose CRC-32 differs from the saved one.

    Args:
        folder: opened files of the model, or of the optimizer.
        kept: checksums of that folder.
        part: index of the group of tensors that this caller checks, when ranks share the work.
        parts: number of groups.
    """
    keys = sorted(folder.key_to_file, key=lambda key: (-folder.nbytes(key), key))
    for key in keys[part::parts]:
        name = folder.key_to_file[key]
        crc = kept.tensors.get(name, {}).get(key)
        if crc is None:
            problem = "found a tensor that this save did not write"
            yield WeightsError(str(folder.path / name), f"tensor {key!r}", problem, FETCH_AGAIN)
            continue
        view = folder.view(key).reshape(-1).view(torch.uint8)
        found = zlib.crc32(view.numpy().data) if view.numel() else 0
        if found != crc:
            yield _differs(folder.path / name, f"tensor {key!r}", found, crc)


def _differs(path: Path, what: str, found: int, expected: int) -> WeightsError:
    problem = f"found CRC-32 {_hex(found)}, expected {_hex(expected)}: it was damaged or changed"
    return WeightsError(str(path), what, problem, FETCH_AGAIN)


def _end_of_header(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + min(int.from_bytes(file.read(8), "little"), MAX_HEADER)


def require_same_save(folders: Sequence[CheckpointFolder], kept: Checksums) -> None:
    """Raise WeightsError unless every file of `folders` has the save id `kept.save`."""
    for folder in folders:
        for name, found in folder.saves().items():
            if found != kept.save:
                problem = f"this file has the save id {found}, {FILE} has {kept.save}"
                hint = "the folder mixes files of two saves, or of another program: copy all files of one save"
                raise WeightsError(str(folder.path / name), "", problem, hint)
