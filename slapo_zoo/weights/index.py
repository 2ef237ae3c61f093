"""Read JSON files of a checkpoint, and the index of one of several files, whose paths are restricted.

An index can come from an untrusted source, so it may only name files in its own folder.
"""

import json
import os
import stat
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from slapo_zoo.errors import WeightsError

MAX_BYTES = 100_000_000  # of a JSON file


def read_index(path: Path) -> dict[str, str]:
    """Return {key: file name} from the index at `path`; every file must exist inside the folder of the index."""
    check_inside(path.parent, path)
    weight_map = _weight_map(path)
    for name in sorted(set(weight_map.values())):
        _check_name(path, name)
        if not os.path.exists(path.parent / name):
            count = sum(file == name for file in weight_map.values())
            problem = f"the index places {count} tensors in this file, but it is not there"
            raise WeightsError(str(path), name, problem, "fetch the missing file")
        check_inside(path.parent, path.parent / name)
    return weight_map


def read_json(path: Path, hint: str, **options: Any) -> Any:
    """Return the content of a JSON file of a checkpoint. WeightsError with `hint` is raised if it is too large, cannot be
    read or is no JSON, FileNotFoundError if it is missing; `options` are those of `json.loads`.
    """
    try:
        if (size := path.stat().st_size) <= MAX_BYTES:
            return json.loads(path.read_bytes().decode("utf-8"), **options)
        problem = f"found {size} bytes, expected at most {MAX_BYTES}"
    except (FileNotFoundError, WeightsError):
        raise
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        problem = f"this is not valid JSON: {error}"
    raise WeightsError(str(path), "", problem, hint)


def check_inside(folder: Path, path: Path) -> None:
    """Raise WeightsError when a path is not a regular file, or a link that leads out of the checkpoint.

    In the Hub cache, `models--org--name/snapshots/<sha>/file` links to `../../blobs/<hash>`: links to the blobs
    of the same repository are allowed.
    """
    try:
        real, mode = path.resolve(strict=True), path.stat().st_mode
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        problem = f"cannot be opened: {error}"
        raise WeightsError(str(path), "", problem, "fetch the file again") from error
    if not stat.S_ISREG(mode):
        raise WeightsError(str(path), "", "this is not a regular file", "fetch the file again")
    if not any(real.is_relative_to(root) for root in _roots(folder)):
        problem = f"found a link to {real}, expected a file of the checkpoint folder"
        raise WeightsError(str(path), "", problem, "copy the file into the folder")


def _roots(folder: Path) -> list[Path]:
    real = folder.resolve()
    for parent in real.parents:
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            return [real, parent.parent / "blobs"]
    return [real]


def _check_name(index: Path, name: str) -> None:
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    is_escape = posix.is_absolute() or windows.drive or ".." in (*posix.parts, *windows.parts)
    if is_escape or "\\" in name or "\0" in name or not name:
        problem = f"found the file name {name!r:.120}, expected a name inside the folder"
        raise WeightsError(str(index), "weight_map", problem, "the index is broken: fetch it again")


def _weight_map(path: Path) -> dict[str, str]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                problem = f"found in {found[key]!r:.60} and {value!r:.60}, expected one file"
                raise WeightsError(str(path), f"key {key!r}", problem, "fetch the index again")
            found[key] = value
        return found

    index = read_json(path, "fetch the index again", object_pairs_hook=unique)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    is_text = isinstance(weight_map, dict) and all(isinstance(v, str) for v in weight_map.values())
    if not is_text or not weight_map:
        problem = f"found {weight_map!r:.80}, expected a file name for every key"
        raise WeightsError(str(path), "weight_map", problem, "fetch the index again")
    return weight_map


def index_name(stem: str) -> str:
    """Return the file name of an index: "model" --> model.safetensors.index.json, and
    "model.fp16" --> model.safetensors.index.fp16.json.
    """
    base, _, variant = stem.partition(".")
    return f"{base}.safetensors.index.{variant + '.' if variant else ''}json"
