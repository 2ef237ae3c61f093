"""The work of one rank: load its part of a checkpoint, train it, save it."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from slapo_zoo.cli.training.display import OnStep, ledger_table, progress_bar, silence
from slapo_zoo.cli.training.text import Batches
from slapo_zoo.weights.ledger import Ledger
from slapo_zoo.weights.training_state import FILE


@dataclass(frozen=True)
class TrainOptions:
    """What to train and how.

    Args:
        model: checkpoint folder or Hub id.
        tp, pp, dp: sizes of the mesh dims.
        steps: optimizer steps.
        micro_batches: per step and data-parallel rank; None leaves it to the loader.
        lr: learning rate of AdamW.
        clip: largest global gradient norm; 0 does not clip.
        seed: of dropout, of new weights, of the order of the rows and of the masks.
        output: folder for the trained checkpoint, or None.
        checkpoint: folder for all that training needs to go on; one that is there is gone on from.
        save_every: steps between two writes of `checkpoint`; it is written after the last step too.
        device: "cpu", "cuda", or None for what is there.
        task: "causal" or "masked", as the checkpoint's family was pre-trained.
        engine: torch, deepspeed or megatron.
        zero_stage: of DeepSpeed.
    """

    model: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    steps: int = 100
    micro_batches: int | None = None
    lr: float = 1e-4
    clip: float = 1.0
    seed: int = 0
    output: str | None = None
    device: str | None = None
    task: str = "causal"
    engine: str = "torch"
    zero_stage: int = 0
    checkpoint: str | None = None
    save_every: int = 100


def load(options: TrainOptions) -> Any:
    """The scheduled model on our rank, with the head of the task."""
    import transformers

    from slapo_zoo.model.auto import AutoScheduledModel

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    heads = {
        "causal": transformers.AutoModelForCausalLM,
        "masked": transformers.AutoModelForMaskedLM,
    }
    return AutoScheduledModel.from_pretrained(
        options.model, tp=options.tp, pp=options.pp, dp=options.dp, seed=options.seed,
        micro_batches=options.micro_batches, device=options.device,
        auto_class=heads[options.task],
    )  # fmt: skip


def fit(model: Any, batches: Batches, options: TrainOptions, on_step: OnStep) -> list[float]:
    """Train with AdamW and clipping; return the global mean loss of every step that was left."""
    device = next(iter(model.parameters())).device
    model.train()
    engine, losses = make_engine(model, batches.batch_size // options.dp, options), []
    done = begin(engine, options)
    for step in range(done, options.steps):
        part = batches.part(step, model.mesh.coord("dp"), model.mesh.dp)
        loss = float(engine.update({name: t.to(device) for name, t in part.items()}))
        losses.append(loss)
        on_step(step, loss, engine.grad_norm)
        if is_due(step + 1, options):
            where = position(batches)
            engine.save_checkpoint(options.checkpoint, step=step + 1, data_position=where)
    return losses


def begin(engine: Any, options: TrainOptions) -> int:
    """Steps that are done: those of the checkpoint, if there is one."""
    if options.checkpoint is None or not has_checkpoint(options.checkpoint):
        return 0
    done = engine.load_checkpoint(options.checkpoint).step
    if engine.model.mesh.rank == 0:
        Console(highlight=False).print(f"checkpoint: {done} of {options.steps} steps are done")
    return done


def has_checkpoint(folder: str) -> bool:
    """Whether a folder holds what training goes on from."""
    return (Path(folder) / FILE).exists()


def is_due(steps: int, options: TrainOptions) -> bool:
    """Whether a checkpoint is written after so many steps."""
    last = steps == options.steps
    return options.checkpoint is not None and (last or steps % options.save_every == 0)


def position(batches: Batches) -> dict[str, int]:
    """What, beside the number of steps, says which rows come next."""
    rows, tokens = batches.rows.shape
    return {"rows": rows, "seq_len": tokens, "batch_size": batches.batch_size, "seed": batches.seed}


def make_engine(model: Any, rows: int, options: TrainOptions) -> Any:
    """The engine of the options around a model; `rows` is the batch of a dp rank."""
    from slapo_zoo.model.dialects import init_target_engine

    settings: dict[str, Any] = {"clip": options.clip}
    if options.engine == "deepspeed":
        legal = [i for i in range(1, rows + 1) if rows % i == 0 and i <= 2 * options.pp]
        count = options.micro_batches or (max(legal) if options.pp > 1 else 1)
        config = {
            "train_micro_batch_size_per_gpu": rows // count,
            "gradient_accumulation_steps": count,
            "gradient_clipping": options.clip,
            "zero_optimization": {"stage": options.zero_stage},
        }
        settings = {"config": config}
    fused = options.engine == "torch"  # the others wrap the optimizer, or flatten its parameters
    make = functools.partial(torch.optim.AdamW, lr=options.lr, fused=fused)
    return init_target_engine(model, options.engine, optimizer=make, **settings)[0]


def gather_ledgers(model: Any) -> list[Ledger]:
    """The ledger of every rank, on every rank."""
    if not dist.is_initialized():
        return [model.ledger]
    ledgers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ledgers, model.ledger)
    return ledgers


def train(options: TrainOptions, batches: Batches) -> list[float]:
    """Load, show the ledgers, train, save: what every rank runs."""
    model = load(options)
    ledgers, first = gather_ledgers(model), model.mesh.rank == 0
    if first:
        Console(highlight=False).print(ledger_table(model.mesh, ledgers))
    with progress_bar("training", options.steps) if first else silence() as on_step:
        losses = fit(model, batches, options, on_step)
    if options.output is not None:
        model.save_pretrained(options.output)
    return losses
