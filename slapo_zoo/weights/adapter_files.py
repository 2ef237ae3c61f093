"""The folder of a peft adapter: adapter_config.json beside adapter_model.safetensors."""

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from slapo_zoo.errors import WeightsError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.weights.folder import CheckpointFolder
from slapo_zoo.weights.staging import Staging

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def open_adapter(folder: Path) -> CheckpointFolder:
    """Open the tensors of an adapter; pickles are refused."""
    if not (folder / TENSORS).exists():
        problem = f"found no {TENSORS}"
        raise WeightsError(str(folder), "adapter", problem, "pass a folder that peft saved")
    return CheckpointFolder(folder, TENSORS)


def save_adapter_files(
    mesh: Mesh, folder: Path, tensors: dict[str, Tensor], write_config: Callable[[Path], None]
) -> None:
    """Rank 0 writes whole tensors and the config; the folder appears by one rename.

    Args:
        mesh: all its ranks call this together.
        folder: new, empty, or of an older adapter.
        tensors: on rank 0.
        write_config: is given the folder under construction.
    """

    def write() -> None:
        if mesh.rank != 0:
            return
        staging = Staging(folder.resolve(), CONFIG)
        try:
            staging.create()
            write_config(staging.path)
            save_file(tensors, staging.path / TENSORS, metadata={"format": "pt"})
            staging.publish()
        except OSError as error:
            problem = f"cannot be written: {error.strerror or error}"
            hint = "the folder is as it was before"
            raise WeightsError(str(folder), error.filename or "", problem, hint) from error
        finally:
            staging.discard()

    together(mesh, "save_adapter", write)
