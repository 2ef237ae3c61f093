"""Results of a tuning search in a JSON-lines file: each is appended and fsynced at once, so a killed run loses none."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slapo_zoo.tune.space import Space


class Database(Mapping[str, Any]):
    """Store of the results of a tuning search, in a file or in memory: a mapping key --> e.g. fields of an `Outcome`.

    A key, made by `Scope.key`, names a configuration and the conditions of its measurement. The file holds one JSON
    object per line; of two lines with the same key the later one counts. A line that a kill or a full disk left
    incomplete is skipped. Several processes may append to one file.

    Args:
        db_file_name: path of the file; None keeps the results in memory.

    Attributes:
        damaged: number of lines of the file that could not be parsed.
    """

    def __init__(self, db_file_name: str | Path | None = None):
        self.db_file_name = None if db_file_name is None else Path(db_file_name)
        self.db: dict[str, Any] = {}
        self.damaged = 0

    def load(self) -> "Database":
        """Read all results from the file, if it exists; return this database."""
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
        """Store `data`, a JSON-serializable result, under `key` (see `Scope.key`); append it to the file and fsync."""
        line = json.dumps({"key": key, "data": data}).encode() + b"\n"
        self.db[key] = json.loads(line)["data"]  # as a reload would find it
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

    def __getitem__(self, key: str) -> Any:
        return self.db[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.db)

    def __len__(self) -> int:
        return len(self.db)


@dataclass(frozen=True)
class Scope:
    """Conditions of a tuning measurement; a stored result is reused only if all its conditions are equal to these.

    Args:
        device: name and number of the devices.
        model: name of the model and a hash of its config.
        schedule: name of the sharding rules; "zoo" for those that slapo_zoo has for the model family.
        versions: package --> version, of the software that was measured.
        setting: other fixed settings by name: tokens per row, dtype, memory limit.
    """

    device: str
    model: str
    schedule: str = "zoo"
    versions: Mapping[str, str] = field(default_factory=dict)
    setting: Mapping[str, Any] = field(default_factory=dict)

    def key(self, point: Mapping[str, Any], steps: int | None = None) -> str:
        """Return the database key, a text of this scope, the configuration `point` and the timed `steps` (or None)."""
        versions = ",".join(f"{name}={self.versions[name]}" for name in sorted(self.versions))
        setting = ",".join(f"{name}={self.setting[name]}" for name in sorted(self.setting))
        at = Space.cfg_dict_to_str(dict(sorted(point.items())))
        return " | ".join((self.device, self.model, self.schedule, versions, setting, at, f"steps={steps}"))  # fmt: skip
