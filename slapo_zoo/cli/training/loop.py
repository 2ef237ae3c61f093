"""The work of one rank: load its part of a checkpoint, train it, save it."""

import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from slapo_zoo.cli.data.tasks import Task
from slapo_zoo.cli.training.config import as_yaml
from slapo_zoo.cli.training.contrastive import InBatchNegatives
from slapo_zoo.cli.training.display import OnStep, ledger_table, progress_bar, silence
from slapo_zoo.cli.training.evaluation import Best, evaluate
from slapo_zoo.cli.training.inputs import Inputs
from slapo_zoo.cli.training.logs import Meter, kept
from slapo_zoo.cli.training.options import TrainOptions
from slapo_zoo.cli.training.schedules import base_lr, learning_rates, parameter_groups
from slapo_zoo.cli.training.stopping import Stop, exit_code, is_local_rank, listening
from slapo_zoo.errors import SlapoError, agreed
from slapo_zoo.weights.history import keep_newest, latest, place_of
from slapo_zoo.weights.ledger import Ledger


def load(options: TrainOptions, task: Task | None = None) -> Any:
    """The scheduled model on our rank, with the head of the task."""
    import transformers

    from slapo_zoo.load.auto import AutoScheduledModel

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    head = "AutoModelForCausalLM" if task is None else task.head
    settings = {} if task is None else task.settings()
    return AutoScheduledModel.from_pretrained(
        options.model, tp=options.tp, pp=options.pp, dp=options.dp or 1, seed=options.seed,
        micro_batches=options.micro_batches, device=options.device,
        auto_class=getattr(transformers, head), **{**settings, **options.load},
    )  # fmt: skip


class Training:
    """One rank's training between two of its steps: the engine, what is done, what was best.

    Args:
        model: of AutoScheduledModel, with the head of the task.
        inputs: what it reads.
        options: of the run.
    """

    def __init__(self, model: Any, inputs: Inputs, options: TrainOptions):
        self.options, self.inputs, self.batches = options, inputs, inputs.batches
        self.device = next(iter(model.parameters())).device
        model.train()
        self.engine = make_engine(model, self.batches.batch_size // model.mesh.dp, options)
        self.of_task: dict[str, Any] = {}
        if self.batches.task.couples:
            self.of_task = {"micro_batches": 1, "loss_fn": InBatchNegatives(model.mesh)}
        self.meter = Meter(model)
        self.best = Best(options.best_metric)
        self.done = self._begin()
        self.lr_at = learning_rates(self.options)

    @property
    def is_over(self) -> bool:
        """Return whether all steps are done, or the evaluations get no better."""
        patience = self.options.patience
        tired = patience is not None and self.best.since >= patience
        return self.done >= self.options.steps or tired

    def step(self) -> dict[str, float | None]:
        """One optimizer step: its loss, gradient norm and learning rate, and what it took."""
        mesh, engine, lr = self.engine.model.mesh, self.engine, self.lr_at(self.done)
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        self.meter.start()
        part = self.batches.part(self.done, mesh.coord("dp"), mesh.dp)
        batch = {name: t.to(self.device) for name, t in part.items()}
        loss = float(engine.update(batch, **self.of_task))
        self.done += 1
        check_finite(self.done, loss, engine.grad_norm, self.options)
        of_step = {"loss": loss, "grad_norm": engine.grad_norm, "lr": lr}
        return {**of_step, **self.meter.measured(batch)}

    def evaluate(self) -> dict[str, float]:
        """Judge the model where that is due, and keep it where it is the best so far; collective."""
        is_last = self.done == self.options.steps
        if self.inputs.held_out is None or not (
            is_last or self.done % self.options.eval_every == 0
        ):
            return {}
        found = evaluate(self.engine.model, self.inputs.held_out, self.options)
        if self.best.judge(self.done, found) and self.options.best is not None:
            save_model(self.engine.model, self.options.best, self.inputs.tokenizer, self.options)
            if self.engine.model.mesh.rank == 0:
                Console(highlight=False, soft_wrap=True).print(f"best: {self.best}")
        return {f"eval_{name}": value for name, value in found.items()}

    def save(self) -> None:
        """Write a checkpoint; a collective call."""
        folder = Path(str(self.options.checkpoint))
        place = place_of(folder, self.done, self.options.keep)
        self.engine.save_checkpoint(
            place, step=self.done, data_position=self.batches.position(self.done),
            extra={"lr": base_lr(self.options), "best": self.best.state()},
            texts={"run.yaml": as_yaml(self.options)},
        )  # fmt: skip
        if self.engine.model.mesh.rank == 0:
            keep_newest(folder, place, self.options.keep)

    def _begin(self) -> int:
        """Steps that are done: those of the checkpoint, if there is one."""
        options = self.options
        found = None if options.checkpoint is None else latest(Path(options.checkpoint))
        if found is None:
            return 0
        resumed = self.engine.load_checkpoint(found)
        say = Console(highlight=False).print
        say = say if self.engine.model.mesh.rank == 0 else lambda text: None
        say(f"checkpoint: {resumed.step} of {options.steps} steps are done")
        # the same on all dp ranks, so it means the same to any other number of them
        extra: dict[str, Any] = resumed.extras[0] or {
            "lr": float(self.engine.optimizer.param_groups[0]["lr"])
        }
        if options.lr is None:
            self.options = replace(options, lr=extra["lr"])
        elif options.lr != extra["lr"]:
            say(f"learning rate: {extra['lr']:g} in the checkpoint, {options.lr:g} from now on")
        self.best.restore(extra.get("best"))
        self.batches.resume(resumed.data_positions[0])
        return resumed.step


def fit(
    model: Any, inputs: Inputs, options: TrainOptions, on_step: OnStep, stop: Stop | None = None
) -> list[float]:
    """Train with AdamW and clipping; return the global mean loss of every step that was left."""
    training, losses = Training(model, inputs, options), []
    first = model.mesh.rank == 0
    with kept(options, on_step, training.done) if first else silence() as show:
        _steps(training, show, losses, stop)
    return losses


def _steps(training: Training, show: OnStep, losses: list[float], stop: Stop | None) -> None:
    """All steps that are left."""
    options = training.options
    while not training.is_over:
        record: dict[str, Any] = training.step()
        losses.append(record["loss"])
        record |= training.evaluate()
        show(training.done - 1, record)
        wanted = stop.agreed(training.device) if stop is not None else 0
        if options.checkpoint is not None and (wanted or is_due(training)):
            training.save()
        if wanted:
            raise StoppedError(wanted, training.done, options)


class StoppedError(SystemExit):
    """A signal asked for it: the step is finished, and saved where there is a place for it."""

    def __init__(self, number: int, step: int, options: TrainOptions):
        self.number, self.step, self.options = number, step, options
        super().__init__(exit_code(number))

    def __reduce__(self) -> Any:
        """It travels from the ranks to the process that started them."""
        return type(self), (self.number, self.step, self.options)

    def __str__(self) -> str:
        said = f"stopped after step {self.step} of {self.options.steps}; "
        if self.options.checkpoint is None:
            return said + "nothing was saved: --checkpoint FOLDER keeps what was done"
        return said + f"the same command goes on from {self.options.checkpoint}"


def check_finite(step: int, loss: float, norm: float, options: TrainOptions) -> None:
    """Stop before a model without finite weights is saved over a good one; the same on all ranks."""
    tells = options.engine == "torch"  # other engines may say nan for: unknown
    if math.isfinite(loss) and not math.isinf(norm) and not (tells and math.isnan(norm)):
        return
    hint = "lower --lr or --clip, or look at the rows of this step"
    if options.checkpoint is not None:
        hint += f"; what was saved before is in {options.checkpoint}"
    problem = f"found loss {loss} and gradient norm {norm} in step {step}, expected finite numbers"
    raise agreed(SlapoError("train", "loss", problem, hint))


def is_due(training: Training) -> bool:
    """Return whether a checkpoint is written now."""
    return training.is_over or training.done % training.options.save_every == 0


def make_engine(model: Any, rows: int, options: TrainOptions) -> Any:
    """The engine of the options around a model; `rows` is the batch of a dp rank."""
    from slapo_zoo.integrations.dialects import init_target_engine

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
    groups = functools.partial(parameter_groups, weight_decay=options.weight_decay)
    lr = base_lr(options)
    make = lambda parameters: torch.optim.AdamW(groups(parameters), lr=lr, fused=fused)  # noqa: E731
    return init_target_engine(model, options.engine, optimizer=make, **settings)[0]


def gather_ledgers(model: Any) -> list[Ledger]:
    """The ledger of every rank, on every rank."""
    if not dist.is_initialized():
        return [model.ledger]
    ledgers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ledgers, model.ledger)
    return ledgers


def save_model(model: Any, folder: str, tokenizer: Any, options: TrainOptions) -> None:
    """Write what `transformers` loads, with tokenizer and configuration; a collective call."""
    model.save_pretrained(folder)
    if model.mesh.rank == 0 and tokenizer is not None:
        tokenizer.save_pretrained(folder)
        Path(folder, "run.yaml").write_text(as_yaml(options), encoding="utf-8")


def train(options: TrainOptions, inputs: Inputs) -> list[float]:
    """Load, show the ledgers, train, save: what every rank runs."""
    model = load(options, inputs.batches.task)
    ledgers, first = gather_ledgers(model), model.mesh.rank == 0
    if first:
        Console(highlight=False, soft_wrap=True).print(ledger_table(model.mesh, ledgers))
    with (
        listening(is_local_rank()) as stop,
        progress_bar("training", options.steps, options.log_every) if first else silence() as show,
    ):
        losses = fit(model, inputs, options, show, stop)
    if options.output is not None:
        save_model(model, options.output, inputs.tokenizer, options)
    return losses
