"""`slapo-zoo reshard`: a checkpoint in files of another size, or in another dtype."""

from pathlib import Path
from typing import Annotated

import typer

from slapo_zoo.cli.arguments import AsJson
from slapo_zoo.cli.readable_errors import say, stdout_for_json
from slapo_zoo.cli.waiting import waiting

Size = Annotated[str, typer.Option(help='Largest file, e.g. "5GB".')]
Dtype = Annotated[str | None, typer.Option(help="Of the model: float32, bfloat16, float16.")]


def reshard(
    source: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    target: Annotated[Path, typer.Argument(help="A new folder, or the same one.")],
    max_shard_size: Size = "5GB",
    dtype: Dtype = None,
    allow_pickle: Annotated[bool, typer.Option(help="Read a .bin checkpoint.")] = False,
    as_json: AsJson = False,
) -> None:
    """Rewrite a checkpoint, also of a stopped training; it takes the memory of one tensor."""
    with stdout_for_json(as_json):
        from slapo_zoo.weights.reshard import reshard
        from slapo_zoo.zoo.argument_values import to_dtype

        kept = to_dtype(dtype) if dtype else None
        with waiting(f"reshard {source}"):
            reshard(source, target, max_shard_size, kept, allow_pickle)
    files = {file.name: file.stat().st_size for file in sorted(target.glob("*.safetensors"))}
    told = f"{target}: {sum(files.values()) / 1e6:.1f} MB in {len(files)} files"
    say(as_json, {"target": target, "files": files}, told)
