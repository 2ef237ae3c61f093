"""Arguments that several commands take: a model, its head, the layout, the output.

`tests/cli/test_layout_flags.py` holds the flags of a layout to the options of the loader.
"""

from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(help="A family (its default config), a folder, or a Hub id.")]
Head = Annotated[str | None, typer.Option("--auto-class", help="Which head, e.g. AutoModelForCausalLM.")]  # fmt: skip
Tp = Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel ranks.")]
Pp = Annotated[int, typer.Option("--pp", min=1, help="Pipeline stages.")]
PipelineRanks = Annotated[int, typer.Option("--pp", min=1, help="Pipeline ranks.")]
Dp = Annotated[int, typer.Option("--dp", min=1, help="Copies of the model.")]
DpOrAll = Annotated[int | None, typer.Option("--dp", min=1, help="Copies of the model.")]
SequenceParallel = Annotated[bool, typer.Option(help="Divide the tokens too.")]
MicroBatches = Annotated[int | None, typer.Option(min=1, help="Per step and copy.")]
Order = Annotated[str, typer.Option(help="Of the pipeline: a name, or a .csv file.")]
StagesPerRank = Annotated[int | None, typer.Option(min=1, help="Of an interleaved order.")]
DpShard = Annotated[
    int, typer.Option(min=1, help="Copies that divide weights and states among them.")
]
ZeroStage = Annotated[int, typer.Option(min=1, max=3, help="What they divide: ZeRO-1, 2 or 3.")]
CheckpointPolicy = Annotated[str, typer.Option(help="What a recomputed block keeps: nothing, or save_matmuls, offload, sharded.")]  # fmt: skip
CheckpointRatio = Annotated[float, typer.Option(help="Share of recomputed blocks.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.", metavar="NAME")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
