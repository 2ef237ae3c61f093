"""Read and write the folder of a peft adapter: adapter_config.json and adapter_model.safetensors."""

from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from slapo_zoo.errors import WeightsError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.weights.carry import ADAPTER_FILE
from slapo_zoo.weights.folder import CheckpointFolder
from slapo_zoo.weights.save import require_finite
from slapo_zoo.weights.staging import Staging, resolved

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def open_adapter(folder: Path) -> CheckpointFolder:
    """Open the tensors of a peft adapter folder; raise WeightsError when it has no safetensors file."""
    if not (folder / TENSORS).exists():
        problem = f"found no {TENSORS}"
        hint = "pass the folder of an adapter that peft saved; peft.PeftModel rewrites an older .bin file"
        raise WeightsError(str(folder), "adapter", problem, hint)
    return CheckpointFolder(folder, TENSORS)


def save_adapter_files(
    mesh: Mesh, target: str | Path, tensors: dict[str, Tensor], write_config: Callable[[Path], None],
    check_finite: bool = True,
) -> None:  # fmt: skip
    """Write an adapter's unsharded tensors and config on rank 0; one rename publishes the complete folder.

    Args:
        mesh: mesh whose ranks all call this function.
        target: path of a new or empty folder, or that of an older adapter, which is replaced.
        tensors: unsharded tensors by name; only those of rank 0 are used.
        write_config: writes the config into the folder that it is given, before the rename.
        check_finite: raise when NaN or infinite tensors would replace an older adapter.
    """

    def write() -> None:
        if mesh.rank != 0:
            return
        folder = resolved(target)
        if check_finite and (folder / TENSORS).exists():
            require_finite(folder, tensors)
        staging = Staging(folder, CONFIG, ADAPTER_FILE)
        try:
            staging.create()
            write_config(staging.path)
            save_file(tensors, staging.path / TENSORS, metadata={"format": "pt"})
            staging.publish()
        except (OSError, SafetensorError) as error:
            problem = f"cannot be written: {getattr(error, 'strerror', '') or error}"
            hint = "the folder is unchanged: make room, or save to another one"
            what = getattr(error, "filename", "") or ""
            raise WeightsError(str(folder), what, problem, hint) from error
        finally:
            staging.discard()

    together(mesh, "save_adapter", write)
