"""Measurements on disk: one line each, appended and forced out, so that a killed run loses none."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slapo_zoo.tune.space import Space


class Database:
    """Outcomes of tuning by key, in a file or in memory.

    The file holds a JSON object per line; a later line of the same key counts. A line that was cut
    off by a kill or a full disk is passed over, and the next commit begins a new one. Several
    processes may commit to one file.

    Args:
        db_file_name: where results are kept; None keeps them in memory.

    Attributes:
        damaged: lines of the file that could not be read.
    """

    def __init__(self, db_file_name: str | Path | None = None):
        self.db_file_name = None if db_file_name is None else Path(db_file_name)
        self.db: dict[str, Any] = {}
        self.damaged = 0

    def load(self) -> "Database":
        """Read the file, if there is one."""
        if self.db_file_name is None or not self.db_file_name.exists():
            return self
        self.damaged = 0
        for line in self.db_file_name.read_bytes().splitlines():
            try:
                record = json.loads(line)
                self.db[record["key"]] = record["data"]
            except (ValueError, KeyError, TypeError):
                self.damaged += bool(line.strip())
        return self

    def commit(self, key: str, data: Any) -> None:
        """Keep a result; when this returns, it is on the disk."""
        line = json.dumps({"key": key, "data": data}).encode() + b"\n"
        self.db[key] = json.loads(line)["data"]  # what a reload would find
        if self.db_file_name is None:
            return
        self.db_file_name.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.db_file_name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":
                line = b"\n" + line
            while line:
                line = line[os.write(handle, line) :]
            os.fsync(handle)
        finally:
            os.close(handle)

    def __contains__(self, key: str) -> bool:
        return key in self.db

    def __getitem__(self, key: str) -> Any:
        return self.db[key]

    def get(self, key: str, default: Any = None) -> Any:
        """Return the result of a key, or the default."""
        return self.db.get(key, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self.db)

    def __len__(self) -> int:
        return len(self.db)


@dataclass(frozen=True)
class Scope:
    """Conditions of a measurement: it is used again only where all of them are the same.

    Args:
        device: name of the device and how many.
        model: name and a hash of its config.
        schedule: hash of the schedule or of the script.
        versions: of the software.
        setting: what else is fixed: tokens of a row, the dtype.
    """

    device: str
    model: str
    schedule: str = "zoo"
    versions: Mapping[str, str] = field(default_factory=dict)
    setting: Mapping[str, Any] = field(default_factory=dict)

    def key(self, point: Mapping[str, Any], steps: int | None = None) -> str:
        """The key of a point, measured over so many steps."""
        versions = ",".join(f"{name}={self.versions[name]}" for name in sorted(self.versions))
        setting = ",".join(f"{name}={self.setting[name]}" for name in sorted(self.setting))
        at = Space.cfg_dict_to_str(dict(sorted(point.items())))
        return " | ".join((self.device, self.model, self.schedule, versions, setting, at, f"steps={steps}"))  # fmt: skip
