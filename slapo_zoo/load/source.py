"""Source of a load: config and weights of one folder at one moment, the same on all ranks."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.weights.folder import CheckpointFolder, open_checkpoint
from slapo_zoo.weights.snapshot import read_by_all
from slapo_zoo.zoo.arguments import changed_config

STEP = "from_pretrained"


@contextmanager
def open_source(
    mesh: Mesh, folder: Path, allow_pickle: bool, changes: Mapping[str, Any], hub: Any
) -> Iterator[tuple[Any, CheckpointFolder]]:
    """The config of a checkpoint and its opened files, of one save on all ranks.

    Args:
        mesh: of all ranks; they call it together.
        folder: that another job may replace meanwhile.
        allow_pickle: see `open_checkpoint`.
        changes: fields of the config to change.
        hub: how the Hub is asked, and how the files are named.
    """

    def read() -> tuple[Any, CheckpointFolder]:
        config = changed_config(folder, dict(changes), hub)
        return config, open_checkpoint(folder, allow_pickle, hub.stem).open_all()

    config, checkpoint = read_by_all(
        mesh, STEP, folder, read, lambda found: found[1].digest(), lambda found: found[1].close()
    )
    with checkpoint:
        yield config, checkpoint
