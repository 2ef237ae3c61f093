"""Training run: loads this rank's shard of a model, trains it with the Trainer of transformers, and saves it."""

import functools
import itertools
import math
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback

from slapo_zoo.cli.arguments import on_ranks
from slapo_zoo.cli.training.inputs import Inputs
from slapo_zoo.cli.training.options import TrainOptions, as_yaml
from slapo_zoo.cli.training.records import Best, OnStep, Records, progress
from slapo_zoo.cli.training.trainer_arguments import (
    arguments_of,
    base_lr,
    make_schedule,
    optimizer_of,
    parameter_groups,
)
from slapo_zoo.data.tasks import Task
from slapo_zoo.errors import SlapoError, agreed
from slapo_zoo.model.evaluation import evaluate
from slapo_zoo.model.integrations.trainer import ScheduledTrainer
from slapo_zoo.model.step_meter import StepMeter
from slapo_zoo.parallel.losses.in_batch_negatives import InBatchNegatives
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.parallel.ranks.emulation import on_each_rank
from slapo_zoo.parallel.ranks.process_group import is_distributed_launch
from slapo_zoo.parallel.ranks.stop_signals import Stop, listening
from slapo_zoo.weights.history import keep_newest, latest, place_of
from slapo_zoo.weights.ledger import Ledger, as_table

REQUEUE, INTERRUPTED = 75, 130  # exit codes: EX_TEMPFAIL of sysexits.h, and as a shell says Ctrl-C


def run(options: TrainOptions, inputs: Inputs) -> list[float]:
    """Train on the ranks of a launcher, or on local ranks started here; return each step's mean loss over its batch.
    StoppedError is raised if a signal stopped the run.
    """
    world = options.tp * options.pp * options.cp * (options.dp or 1)
    starts = world > 1 and not is_distributed_launch()  # local ranks: this process gets signals
    with listening() if starts else nullcontext() as stop:
        found = on_ranks(train, world, (options, inputs), options.device, "train")
    losses, number, step = found
    if number:
        raise StoppedError(stop.number if stop else number, step, options)
    return losses


def train(options: TrainOptions, inputs: Inputs) -> tuple[list[float], int, int]:
    """Load the model, print what each rank read, train and save; every rank calls this.

    Returns (mean loss of each step's batch, number of the signal that stopped the run or 0, steps done in all).
    """
    model = load(options, inputs.batches.task)
    with closing(model) if options.exact else nullcontext():  # an exact model has threads to end
        ledgers, first = ledgers_of(model), model.mesh.rank == 0
        if first:
            table = ledger_table(getattr(model, "virtual", model.mesh), ledgers)
            Console(highlight=False, soft_wrap=True).print(table)
        shown = progress(options.max_steps, options.logging_steps) if first else nullcontext()
        with listening() as stop, shown as show:
            done = fit(model, inputs, options, show, stop)
        if options.output is not None and not done.stopped:
            save_model(model, options.output, inputs.tokenizer, options)
    return done.losses, done.stopped, done.done


def load(options: TrainOptions, task: Task | None = None) -> Any:
    """Load the model that the options name and return this rank's shard, with the head of `task` (None: a causal LM head)."""
    import transformers

    from slapo_zoo.model.load.auto import AutoScheduledModel

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    head = "AutoModelForCausalLM" if task is None else task.head
    settings = {} if task is None else task.settings()
    return AutoScheduledModel.from_pretrained(
        options.model, tp=options.tp, pp=options.pp, dp=options.dp or 1, cp=options.cp, seed=options.seed,
        micro_batches=options.micro_batches, device=options.device, exact=options.exact or False,
        auto_class=getattr(transformers, head), **{**settings, **options.load},
    )  # fmt: skip


class Run(ScheduledTrainer):
    """Trainer of `transformers` whose steps an engine (torch, deepspeed, megatron) runs, on the same rows on any mesh.

    Trainer provides the loop, callbacks and trackers, and decides when to evaluate, save and end. This class adds
    optimizer steps of the engine, a position in the data that any mesh continues from, loss means over the labels of
    all ranks, and checkpoints that any mesh can resume.

    Args:
        model: model that AutoScheduledModel loaded, with the head of the task.
        inputs: batches and tokenizer.
        options: options of the run.
    """

    def __init__(self, model: Any, inputs: Inputs, options: TrainOptions):
        self.options, self.inputs, self.batches = options, inputs, inputs.batches
        model.train()
        self.engine = make_engine(model, self.batches.batch_size // model.mesh.dp, options)
        self.of_task: dict[str, Any] = {}
        if self.batches.task.couples:
            self.of_task = {"micro_batches": 1, "loss_fn": InBatchNegatives(model.mesh)}
        self.meter, self.best = StepMeter(model), Best(options.metric_for_best_model)
        self.record: dict[str, Any] = {}
        self.losses: list[float] = []
        self.stopped = 0  # number of the signal that ended the run
        self.done = self.begin()
        schedule = make_schedule(self.options, self.done)
        arguments = arguments_of(self.options, self.meter.device.type)
        arguments.use_cache = getattr(
            model.config, "use_cache", False
        )  # saved with the model's config
        super().__init__(
            model, arguments, eval_dataset=inputs.held_out,
            optimizers=(schedule.optimizer, schedule),
        )  # fmt: skip
        self.remove_callback(PrinterCallback)

    @property
    def is_over(self) -> bool:
        """Return whether the run is to end: all steps are done, or `patience` evaluations brought no new best."""
        patience = self.options.patience
        tired = patience is not None and self.best.since >= patience
        return self.done >= self.options.max_steps or tired

    def get_train_dataloader(self) -> Any:
        """Return an iterator over this dp rank's batches from the next step on."""
        mesh = self._mesh

        def rest() -> Iterator[dict[str, Tensor]]:
            for step in itertools.count(self.done):
                yield self.batches.part(step, mesh.coord("batch"), mesh.size("batch"))

        return rest()

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return ([batch of the next step], None) in place of Trainer's method; the time counts as part of the step."""
        self.meter.start()
        return [next(epoch_iterator)], None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run one optimizer step of the engine (torch, deepspeed, megatron) on `inputs`, all rows of this dp rank;
        record its measurements in `self.record`; return the mean loss of all dp ranks. Other arguments are unused.
        """
        lr = self._get_learning_rate()
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        batch = {name: tensor.to(self.meter.device) for name, tensor in inputs.items()}
        loss = self.engine.update(batch, **self.of_task).detach()
        self.done += 1
        norm = self.engine.grad_norm
        check_finite(self.done, float(loss), norm, self.options)
        self.record = {"loss": float(loss), "grad_norm": norm, "lr": lr}
        self.record |= self.meter.measured(batch)
        if self.options.log_digest:
            self.record["digest"] = self.engine.model.step_digest()
        self.losses.append(self.record["loss"])
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        return self.engine.grad_norm  # the engine has clipped, and stepped

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self.engine.grad_norm

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: Trainer's count would cost a collective per step, and `StepMeter` computes MFU without it."""
        return 0

    def store_flos(self) -> None:
        """Do nothing: Trainer would store a count of operations, which this class does not make."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Pass to callbacks and trackers the step's loss, gradient norm, ... if `logs` has a "loss", else `logs`."""
        measured = self.record if "loss" in logs else logs
        super().log({k: v for k, v in measured.items() if v is not None and k != "digest"})

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Return {"eval_loss": ..., "eval_accuracy": ...}, means over the rows held out from training (`eval_batches`
        batches; None: all), and pass them to trackers and callbacks. Trainer's arguments are unused.
        """
        means = evaluate(self.model, self.inputs.held_out, self.options.eval_batches)
        found = {f"eval_{name}": value for name, value in means.items()}
        self.log(found)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        return found

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a training checkpoint after the current step, with model and optimizer; all ranks call this."""
        folder = Path(str(self.options.checkpoint))
        place = place_of(folder, self.done, self.options.save_total_limit)
        self.engine.save_checkpoint(
            place, step=self.done, data_position=self.batches.position(self.done),
            extra={"lr": base_lr(self.options), "best": self.best.state()},
            texts={"run.yaml": as_yaml(self.options)},
        )  # fmt: skip
        if self._mesh.rank == 0:
            keep_newest(folder, place, self.options.save_total_limit)

    def begin(self) -> int:
        """Load the newest checkpoint of the run, if there is one; return the number of steps already done, else 0."""
        options = self.options
        found = None if options.checkpoint is None else latest(Path(options.checkpoint))
        if found is None:
            return 0
        resumed = self.engine.load_checkpoint(found)
        said = f"checkpoint: {resumed.step} of {options.max_steps} steps are done"
        # equal on all dp ranks, so it is valid for any dp
        extra: dict[str, Any] = resumed.extras[0] or {"lr": float(self.engine.optimizer.param_groups[0]["lr"])}  # fmt: skip
        if options.learning_rate is None:
            self.options = replace(options, learning_rate=extra["lr"])
        elif options.learning_rate != extra["lr"]:
            now = f"{options.learning_rate:g} from now on"
            said += f"\nlearning rate: {extra['lr']:g} in the checkpoint, {now}"
        if self.engine.model.mesh.rank == 0:
            Console(highlight=False).print(said)
        self.best.restore(extra.get("best"))
        self.batches.resume(resumed.data_positions[0])
        return resumed.step


class Ending(TrainerCallback):
    """Trainer callback that saves the model after each evaluation that is the best so far, and ends the run after a
    signal, after `max_steps` steps, or after `patience` evaluations without a new best.

    Args:
        run: Trainer that the callback belongs to.
        stop: record of SIGTERM, SIGUSR1 or Ctrl-C if this process got it; None if signals are not handled.
    """

    def __init__(self, run: Run, stop: Stop | None):
        self.run, self.stop = run, stop

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        """Save the model if this evaluation is the best so far; `metrics` are equal on all ranks, so all decide alike."""
        run, options = self.run, self.run.options
        found = {name.removeprefix("eval_"): value for name, value in metrics.items()}
        if run.best.judge(run.done, found) and options.best is not None:
            save_model(run.engine.model, options.best, run.inputs.tokenizer, options)
            if state.is_world_process_zero:
                Console(highlight=False, soft_wrap=True).print(f"best: {run.best}")
        self.on_step_end(args, state, control)  # a signal may have come in the meantime

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the run, with a checkpoint, if `Run.is_over` or any rank got a signal; all ranks call this together."""
        run = self.run
        if self.stop is not None and not run.stopped:
            run.stopped = self.stop.agreed(run.meter.device)
        if run.stopped or run.is_over:
            control.should_training_stop = True
            control.should_save = run.options.checkpoint is not None


def fit(
    model: Any, inputs: Inputs, options: TrainOptions, tell: OnStep | None, stop: Stop | None = None
) -> Run:
    """Train until done or stopped. Return the Run, a Trainer of transformers with the `losses` of this run's steps.

    Args:
        model: model that AutoScheduledModel loaded.
        inputs: batches and tokenizer.
        options: options of the run.
        tell: called with each step's index and measurements, {"loss": ..., ...}; None on ranks that report nothing.
        stop: record of SIGTERM, SIGUSR1 or Ctrl-C if this process got it; None if signals are not handled.
    """
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # forked ranks would take over its state
    run = Run(model, inputs, options)
    for callback in (Ending(run, stop), Records(run, tell)):
        run.add_callback(callback)
    if not run.is_over:
        run.train()
    return run


def check_finite(step: int, loss: float, norm: float, options: TrainOptions) -> None:
    """Raise an error on all ranks if the loss or gradient norm of `step` is not finite, before the model is saved."""
    tells = options.engine == "torch"  # other engines return NaN for an unknown norm
    if math.isfinite(loss) and not math.isinf(norm) and not (tells and math.isnan(norm)):
        return
    hint = "lower --learning-rate or --max-grad-norm, or look at the rows of this step"
    if options.checkpoint is not None:
        hint += f"; what was saved before is in {options.checkpoint}"
    problem = f"found loss {loss} and gradient norm {norm} in step {step}, expected finite numbers"
    raise agreed(SlapoError("train", "loss", problem, hint))


def make_engine(model: Any, rows: int, options: TrainOptions) -> Any:
    """Return the engine of the options (torch, deepspeed or megatron), an object that holds `model` and a new optimizer
    and runs training steps. `rows` is the number of rows of a dp rank in a step.
    """
    from slapo_zoo.model.integrations.dialects import init_target_engine

    settings: dict[str, Any] = {"clip": options.max_grad_norm}
    if options.engine == "deepspeed":
        legal = [i for i in range(1, rows + 1) if rows % i == 0 and i <= 2 * options.pp]
        count = options.micro_batches or (max(legal) if options.pp > 1 else 1)
        sizes = {"train_micro_batch_size_per_gpu": rows // count, "gradient_accumulation_steps": count}  # fmt: skip
        settings = {"config": {**sizes, "gradient_clipping": options.max_grad_norm, **options.deepspeed}}  # fmt: skip
    kind, values = optimizer_of(options, next(iter(model.parameters())).device.type)
    if options.engine != "torch":  # other engines wrap the optimizer or flatten its parameters
        values.pop("fused", None)
    groups = functools.partial(parameter_groups, weight_decay=options.weight_decay)
    make = lambda parameters: kind(groups(parameters), **values)  # noqa: E731
    return init_target_engine(model, options.engine, optimizer=make, **settings)[0]


def save_model(model: Any, folder: str, tokenizer: Any, options: TrainOptions) -> None:
    """Write weights that `transformers` loads, tokenizer and run.yaml into `folder`; all ranks call this together."""
    model.save_pretrained(folder)
    if model.mesh.rank == 0 and tokenizer is not None:
        tokenizer.save_pretrained(folder)
        Path(folder, "run.yaml").write_text(as_yaml(options), encoding="utf-8")


@on_each_rank
def ledgers_of(model: Any) -> list[Ledger]:
    """Return a record of each rank's load (bytes read, seconds, ...), in the order of ranks; all processes call this.
    With the option `exact`, which lets a process run several virtual ranks as threads, the list has the virtual ranks.
    """
    return together(model.mesh, "load", lambda: model.ledger)


def ledger_table(mesh: Mesh, ledgers: Sequence[Ledger]) -> str:
    """Return a table of what each rank read while loading (`ledgers`, by rank), with each rank's mesh coordinates."""
    rows, dims = [], ("pp", "dp", "cp", "tp") if mesh.cp > 1 else ("pp", "dp", "tp")
    for rank, ledger in enumerate(ledgers):
        place = replace(mesh, rank=rank)
        coords = [place.coord(name) for name in dims]
        sizes = [f"{size / 1e6:.1f} MB" for size in (ledger.bytes_read, ledger.shard_bytes)]
        memory = f"+{ledger.peak_anonymous / 1e6:.1f} MB"
        counts = [ledger.tensors, *sizes, ledger.files_opened, f"{ledger.seconds:.2f}", memory]
        rows.append((rank, *coords, *counts))
    names = ("rank", *dims, "tensors", "read", "its share", "files", "s", "memory")
    return as_table("what each rank read", names, rows)


class StoppedError(SystemExit):
    """SystemExit of a run that a signal stopped: the last step is finished, and saved if `checkpoint` is set."""

    def __init__(self, number: int, step: int, options: TrainOptions):
        self.number, self.step, self.options = number, step, options
        super().__init__(INTERRUPTED if number == signal.SIGINT else REQUEUE)

    def __str__(self) -> str:
        said = f"stopped after step {self.step} of {self.options.max_steps}; "
        if self.options.checkpoint is None:
            return said + "nothing was saved: --checkpoint FOLDER keeps what was done"
        return said + f"the same command resumes from {self.options.checkpoint}"
