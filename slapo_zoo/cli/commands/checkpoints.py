"""Commands `slapo-zoo check` and `slapo-zoo reshard`, for checkpoints on disk."""

from pathlib import Path
from typing import Annotated, Any

import typer

from slapo_zoo.cli.arguments import command
from slapo_zoo.cli.readable_errors import report
from slapo_zoo.cli.waiting import waiting

Size = Annotated[str, typer.Option(help='Largest file, e.g. "5GB".')]
Dtype = Annotated[str | None, typer.Option(help="Dtype of the weights: float32, bfloat16 or float16.")]  # fmt: skip


@command
def check(
    folder: Annotated[
        Path, typer.Argument(help="Folder that save_pretrained or save_checkpoint wrote.")
    ],
) -> Any:
    """Compare every tensor and file of a checkpoint with its checksums; exit code 2 if one is damaged."""
    from slapo_zoo.weights.training_folder import damages_of

    count, found = damages_of(folder)
    for error in found:
        report(error)
    damages = [{"tensor": str(error.what), "problem": error.problem} for error in found]
    data = {"folder": str(folder), "tensors": count, "damages": damages}
    return (data, "", 2) if found else (data, f"{folder}: {count} tensors are what was saved")


@command
def reshard(
    source: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    target: Annotated[Path, typer.Argument(help="New folder, or the same folder.")],
    max_shard_size: Size = "5GB",
    dtype: Dtype = None,
    allow_pickle: Annotated[bool, typer.Option(help="Read a .bin checkpoint.")] = False,
) -> Any:
    """Rewrite a checkpoint with other file sizes or another dtype, holding one tensor in memory at a time.

    A training checkpoint, which also has optimizer states, can be rewritten too.
    """
    from slapo_zoo.weights.reshard import reshard

    with waiting(f"reshard {source}"):
        reshard(source, target, max_shard_size, dtype, allow_pickle)
    files = {file.name: file.stat().st_size for file in sorted(target.glob("*.safetensors"))}
    told = f"{target}: {sum(files.values()) / 1e6:.1f} MB in {len(files)} files"
    return {"target": target, "files": files}, told
