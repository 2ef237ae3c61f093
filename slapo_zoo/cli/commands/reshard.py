"""`slapo-zoo reshard`: a checkpoint in files of another size, or in another dtype."""

from pathlib import Path
from typing import Annotated

import typer

Size = Annotated[str, typer.Option(help='Largest file, e.g. "5GB".')]
Dtype = Annotated[str | None, typer.Option(help="Of the model: float32, bfloat16, float16.")]


def reshard(
    source: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    target: Annotated[Path, typer.Argument(help="A new folder, or the same one.")],
    max_shard_size: Size = "5GB",
    dtype: Dtype = None,
    allow_pickle: Annotated[bool, typer.Option(help="Read a .bin checkpoint.")] = False,
) -> None:
    """Rewrite a checkpoint, also of a stopped training; it takes the memory of one tensor."""
    from slapo_zoo.weights.reshard import reshard
    from slapo_zoo.zoo.arguments import to_dtype

    reshard(source, target, max_shard_size, to_dtype(dtype) if dtype else None, allow_pickle)
