"""`slapo-zoo train`: a person's own checkpoint and text, on any mesh."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(help="A checkpoint folder, or the id of a model on the Hub.")]
Data = Annotated[Path, typer.Option(help="A text file, or a folder of them.")]
Engine = Annotated[str, typer.Option(help="torch, deepspeed or megatron.", metavar="NAME")]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        help="Folder of all that training needs to go on; where there is one, it goes on."
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.", metavar="NAME")]


def train(
    model: Model,
    data: Data,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    dp: Annotated[int | None, typer.Option(min=1, help="Copies of the model.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 100,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per step, all copies together.")] = 8,
    micro_batches: Annotated[int | None, typer.Option(min=1, help="Per step and copy.")] = None,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens per row.")] = 128,
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate of AdamW.")] = 1e-4,
    clip: Annotated[float, typer.Option(min=0.0, help="Largest gradient norm; 0: no limit.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of dropout, order and masks.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Folder for the trained checkpoint.")] = None,
    checkpoint: Checkpoint = None,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")] = 100,
    device: Device = "auto",
    engine: Engine = "torch",
    zero_stage: Annotated[int, typer.Option(min=0, max=3, help="Of DeepSpeed's ZeRO.")] = 0,
) -> None:
    """Train a checkpoint on text: the next token, or for BERT-like models masked tokens.

    Under torchrun, srun or the deepspeed launcher the command joins their processes; otherwise it
    starts tp * pp * dp local ranks.
    Any number of them computes the same losses, and goes on from a checkpoint of any other.
    """
    from dataclasses import replace

    from slapo_zoo.cli.training import job
    from slapo_zoo.cli.training.loop import TrainOptions
    from slapo_zoo.cli.training.text import check_data

    options = TrainOptions(
        model=model, tp=tp, pp=pp, dp=job.data_parallel_size(tp, pp, dp), steps=steps,
        micro_batches=micro_batches, lr=lr, clip=clip, seed=seed,
        output=None if output is None else str(output), device=job.device_named(device),
        engine=job.check_engine(engine, zero_stage, pp), zero_stage=zero_stage,
        checkpoint=None if checkpoint is None else str(checkpoint), save_every=save_every,
    )  # fmt: skip
    job.check_batch(batch_size, options.dp, micro_batches)
    check_data(data)
    if output is not None:
        job.check_output(output)
    config = job.read_config(model)
    options = replace(options, task=job.task_of(config))
    tokenizer = job.load_tokenizer(model)
    batches = job.make_batches(tokenizer, config, data, seq_len, batch_size, options)
    if checkpoint is not None:
        job.check_checkpoint(checkpoint, batches, steps)
    job.run(options, batches, tokenizer)
