"""Comparison of a sharded model on all ranks with the plain model: runs without dropout, then with dropout."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from slapo_zoo.errors import SlapoError
from slapo_zoo.hf.example_inputs import accepts
from slapo_zoo.hf.models import freeze_as_made, tied_names
from slapo_zoo.model.loader import Source, load_checkpoint
from slapo_zoo.model.numerics import digests
from slapo_zoo.model.step.runtime import tokens_divide
from slapo_zoo.parallel.losses.loss_means import LABELS
from slapo_zoo.parallel.ranks.emulation import emulate
from slapo_zoo.parallel.rng.layout_independent_random import drawn_from
from slapo_zoo.verify import compare
from slapo_zoo.verify.case import DROPOUT, EVALUATED, Case, Trial
from slapo_zoo.verify.compare import (
    DECAY,
    EPS,
    LEARNING_RATE,
    MAX_NORM,
    Comparison,
    FixedTolerance,
    RankResult,
    Result,
    Tolerance,
)  # fmt: skip
from slapo_zoo.verify.events import Recorder
from slapo_zoo.verify.kinks import drop_kinks
from slapo_zoo.verify.safe import agreed_collectives, counted, silence
from slapo_zoo.zoo.options import LoaderOptions

T = TypeVar("T")
TIMEOUT_S = 60.0
MORE = range(8)  # seeds of more plain runs, made if a value is further off than the first run
# tolerance of a model in the dtype of its truth: norms are float32 in any model; a wrong division is off by 1e-1
RELATIVE = {torch.float64: 1e-4, torch.float32: 1e-3}


def judge(
    trial: Trial, into: Comparison | None = None, scratch: Path | None = None
) -> Comparison:  # fmt: skip
    """Run a sharded model on a mesh and compare it with the plain model, without dropout; if all agrees, also with it.

    Args:
        trial: the test case, the schedule and the mesh.
        into: record to which findings are added, those before an exception too, and which is returned; None: a new one.
        scratch: folder for the saved weights; None compares no files.

    Raises:
        Exception: what the run of the sharded model raised.
    """
    case, into = trial.case, Comparison() if into is None else into
    near = tolerance_of(case)
    truth, saved = near.truth, scratch and scratch / "saved"
    found = on_mesh(scheduled, trial, case.dtype, saved)

    def check(into: Comparison, found: list[RankResult]) -> None:
        for result in found:
            result.rename(truth.tied)
        compare.compare(into, found, near)

    check(into, found)
    if case.dtype != case.truth_dtype:
        drop_kinks(into, check, lambda n: on_mesh(scheduled, trial, case.dtype, None, n))
    if not truth.grads:
        return into
    compare.replicas(into, found)
    if case.thorough:
        compare.collective_counts(into, found, trial.predicted_collectives())
    if saved is not None:
        files(into, saved, case.cls, case.batch, found[0])
    if not into.findings:
        compare_dropout(into, trial)
    return into


def compare_dropout(into: Comparison, trial: Trial) -> None:
    """Run a training step with dropout on the mesh; record in `into` which replicated parameters then differ between
    ranks. If the model draws random numbers, its loss and gradients are compared with those of a run on one rank too.
    """
    case = trial.case
    if not case.draws and trial.sizes[0] == 1:
        return  # no replicated tensor can differ
    found = on_mesh(dropped, trial, case.dtype)
    compare.replicas(into, found, "dropout")  # replicas with different dropout masks differ
    if into.findings or not case.draws:
        return
    alone = trial.on_one_rank(whole=case.thorough)
    truth = one_rank_run(dropped, alone, case.truth_dtype)
    if case.dtype == case.truth_dtype:
        compare.dropout(into, found, FixedTolerance(truth, RELATIVE[case.dtype]))
        return
    others = (one_rank_run(dropped, alone, case.dtype, n) for n in MORE)
    near = Tolerance(truth, [one_rank_run(dropped, alone, case.dtype)], others)
    check = partial(compare.dropout, near=near)
    check(into, found)
    drop_kinks(into, check, lambda n: on_mesh(dropped, trial, case.dtype, n))


def tolerance_of(case: Case) -> Tolerance:
    """Run the plain model; return its result and the allowed error of a scheduled model, as a Tolerance. This error is
    a fixed share of each value if both models run in one dtype. Else it is measured on plain runs in the scheduled
    model's dtype, which differ in the order of rows and in the attention code.
    """
    if case.dtype == case.truth_dtype:
        return FixedTolerance(case.truth or plain(case, case.dtype), RELATIVE[case.dtype])
    kinds = ("sdpa", "eager") if getattr(case.cls, "_supports_sdpa", False) else ("eager",)
    truth = case.truth or plain(case, case.truth_dtype, kinds[0])
    ways = [(kind, reverse) for kind in kinds for reverse in (False, True)]
    others = (plain(case, case.dtype, *way, n) for n, way in zip(MORE, cycle(ways)))
    return Tolerance(truth, [plain(case, case.dtype, *way) for way in ways], others)


def plain(
    case: Case, dtype: torch.dtype, attention: str | None = None, reverse: bool = False,
    shake: int | None = None,
) -> Result:  # fmt: skip
    """Run plain `transformers` in one process: a forward of a few rows and, with labels, a training step on all rows.

    Args:
        case: the model and its batch.
        dtype: dtype of parameters and floating-point inputs.
        attention: "sdpa" or "eager"; None leaves the choice to `transformers`.
        reverse: take the rows in the opposite order, which adds the same values in another order.
        shake: seed of noise of about one unit in the last place, added to all parameters; None adds none.
    """
    kind = {} if attention is None else {"attn_implementation": attention}
    model = case.cls.from_pretrained(case.folder, dtype=dtype, **kind, **case.changes())
    silence(freeze_as_made(shaken(model, shake)))
    whole, result = cast(case.batch, dtype), Result()
    batch = {k: v.flip(0) for k, v in whole.items()} if reverse else whole
    few = {k: v[:EVALUATED].flip(0) if reverse else v[:EVALUATED] for k, v in whole.items()}
    with torch.no_grad():
        outputs = result.outputs = result.uncached = tensors_of(model.eval()(**few))
        if accepts(case.cls, "use_cache"):
            result.uncached = tensors_of(model(**few, use_cache=False))
    if reverse:
        turn = lambda found: {name: x.flip(0) if x.ndim else x for name, x in found.items()}  # noqa: E731
        result.outputs, result.uncached = turn(result.outputs), turn(result.uncached)
    if "loss" not in outputs and case.thorough:
        return result
    first = {id(p): name for name, p in model.named_parameters()}
    for name, p in model.named_parameters(remove_duplicate=False):
        result.tied[name] = first[id(p)]
    output = model.train()(**batch)
    loss = output.loss if "loss" in outputs else mean_sine(output)
    if loss is None:
        return result
    loss.backward()
    result.loss = float(loss.detach())
    result.grads = {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for n, p in model.named_parameters()
    }
    if case.thorough:
        optimizer = optimizer_of(model)
        result.norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        result.weights = {n: p.detach() for n, p in model.named_parameters()}
    return result


def load(trial: Trial, changes: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Return this rank's shard of `trial.case`'s model, sharded by `trial.schedule`, with config fields `changes`."""
    tp, pp, dp = trial.sizes
    options = LoaderOptions(
        tp=tp, pp=pp, dp=dp, seed=trial.case.seed, auto_class=trial.case.cls, schedule=trial.schedule,
        dtype=dtype, **{"kernels": "reference", **trial.knobs},
    )  # fmt: skip
    model = load_checkpoint("verify", options, Source(str(trial.case.folder), changes=changes))
    model.input_check_interval = 0  # the report names modules, the guard would not
    return model


def scheduled(
    trial: Trial, dtype: torch.dtype, save: Path | None = None, shake: int | None = None
) -> RankResult:
    """Run the scheduled model on this rank without dropout: a forward and, with labels, a training step. All ranks of
    the mesh call this function together; each gets its own result.

    Args:
        trial: the test case, the schedule and the mesh.
        dtype: dtype of the parameters.
        save: folder for the weights after the step; None saves none.
        shake: seed of noise of about one unit in the last place, added to all parameters; None adds none.
    """
    model = shaken(load(trial, trial.case.changes(), dtype), shake)
    silence(model)
    result = RankResult.on(model.mesh)
    whole = cast(trial.case.batch, dtype)
    with agreed_collectives(model.mesh):
        with torch.no_grad():
            few = {k: v[:EVALUATED] for k, v in whole.items()}
            result.outputs = tensors_of(model.eval()(**few))
        if "loss" in result.outputs or (trial.case.truth and trial.case.truth.grads):
            _train(model, trial, whole, result, save is not None)
    if save is not None:
        model.save_pretrained(save)
    return result


def dropped(trial: Trial, dtype: torch.dtype, shake: int | None = None) -> RankResult:
    """Run a training step with dropout of `trial` (a schedule on a mesh, and its batch) in `dtype`; return a result
    with loss and gradients. All ranks call it together. `shake` is the seed of noise of about one unit in the last
    place, added to all parameters; None adds none.
    """
    model = shaken(load(trial, trial.case.changes(dropped=True), dtype), shake)
    result = RankResult.on(model.mesh)
    for module in () if trial.case.draws else model.modules():
        if isinstance(module, nn.Dropout):
            module.p = DROPOUT  # dropouts outside of the config must not split replicas either
    with agreed_collectives(model.mesh):
        _train(model, trial, cast(trial.case.batch, dtype), result)
    return result


def recorded(trial: Trial, dtype: torch.dtype, with_dropout: bool = False) -> RankResult:
    """Run a training step (without labels: a forward) of `trial`, a schedule on a mesh, in `dtype`; return a result
    with only `events`, the tensors that enter and leave this rank's modules. All ranks call it together.
    """
    model = load(trial, trial.case.changes(with_dropout), dtype)
    if not with_dropout:
        silence(model)
    result = RankResult.on(model.mesh)
    whole = cast(trial.case.batch, dtype)
    pipeline = model._slapo.pipeline
    units = () if pipeline is None else pipeline.units
    recorder = Recorder(model, model.schedule.state.random, units)
    result.events = recorder.events
    with agreed_collectives(model.mesh, recorder), recorder:
        if has_labels(whole):
            _step(model.train(), trial, whole)
        else:
            model.eval()(**whole)
    return result


def _train(
    model: Any, trial: Trial, whole: Mapping[str, Tensor], result: RankResult, twice: bool = False
) -> None:
    optimizer = optimizer_of(model.train())
    with counted(model.mesh, result.collectives):
        result.loss = _step(model, trial, whole)
    part = trial.part(whole, model.mesh.coord("dp"))
    if trial.knobs.get("sequence_parallel") and not tokens_divide(model, part):
        problem = f"tokens of this batch cannot be sharded over tp={model.mesh.tp}, so this option has no effect to verify"
        raise SlapoError("verify", "sequence_parallel", problem, "leave sequence_parallel out")
    result.grads = model.consolidated_state_dict(grads=True)
    result.grad_digests = digests(model, grads=True)
    if not trial.case.thorough:
        return
    if twice:
        kept = [(p, p.grad.clone()) for p in model.parameters() if p.grad is not None]
        _step(model, trial, whole)
        result.twice = model.consolidated_state_dict(grads=True)
        for p, grad in kept:
            p.grad = grad
    result.norm = float(model.clip_grad_norm_(MAX_NORM))
    optimizer.step()
    result.weights = model.consolidated_state_dict()
    result.digests = digests(model)
    result.untied = untied(model)


def _step(model: Any, trial: Trial, whole: Mapping[str, Tensor]) -> float:
    """Run forward and backward on this rank's rows of `whole`, the batch of all dp ranks; gradients stay in `.grad`.
    Return the mean loss of `whole`, the same on all ranks. `trial` has the schedule and number of micro-batches.
    """
    parts, truth = trial.micro_batches(model._slapo.table), trial.case.truth
    loss = mean_sine if truth is not None and "loss" not in truth.outputs else None
    pipeline = model._slapo.pipeline
    if loss and (pipeline is None or pipeline.places.admits(1)):
        parts = 1  # outputs of a class without a loss may depend on all rows
    part = trial.part(whole, model.mesh.coord("dp"))
    return float(model.train_step(part, micro_batches=parts, loss_fn=loss))


def mean_sine(output: Any, _batch: Any = None) -> Any:
    """Return the sum of mean(sin(x)) over outputs x that need gradients, a loss for classes without one; None: no x."""
    values = output.values() if hasattr(output, "values") else output
    return sum(x.sin().mean() for x in values if isinstance(x, Tensor) and x.requires_grad) or None


def on_mesh(run: Callable[..., T], trial: Trial, *arguments: Any) -> list[T]:
    """Call `run(trial, *arguments)` on every rank; return all results. A trial is a test case, a schedule and a mesh.
    The ranks are those of the process group; if there is none, threads of this process.
    """
    with _without_warnings():
        if trial.mesh.world_size == 1:
            return [run(trial, *arguments)]
        if not dist.is_initialized():
            tp, pp, ranks = trial.sizes[0], trial.sizes[1], trial.mesh.size("loss")
            return emulate(run, trial, *arguments, mesh=(tp, pp, ranks), timeout_s=TIMEOUT_S)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, run(trial, *arguments))
        return everyone


def one_rank_run(run: Callable[..., RankResult], trial: Trial, *arguments: Any) -> RankResult:
    """Return `run(trial, *arguments)` with torch's generator seeded by the test case; `trial` has a one-rank mesh."""
    with _without_warnings(), drawn_from(trial.case.seed):
        return run(trial, *arguments)


@contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def has_labels(batch: Mapping[str, Tensor]) -> bool:
    """Return whether a batch has labels, from which the model computes a loss."""
    return any(name in batch for name in LABELS)


def cast(batch: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the batch with its floating-point inputs in `dtype`; other inputs are unchanged."""
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


def tensors_of(output: Any) -> dict[str, Tensor]:
    """Return copies of the floating-point tensors of a model's output by name; caches and tuples are left out."""
    named = output.items() if hasattr(output, "items") else enumerate(output)
    return {
        str(k): v.detach().clone()
        for k, v in named
        if isinstance(v, Tensor) and v.is_floating_point()
    }


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """Make the AdamW optimizer of all runs of a verification; its large eps keeps noise in tiny gradients small."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=DECAY, eps=EPS)


def shaken(model: Any, seed: int | None) -> Any:
    """Add noise of about one unit in the last place to every parameter, in place; return the model. The results then
    differ from those without noise by as much as rounding alone can. `seed` None adds no noise.
    """
    if seed is None:
        return model
    # ranks may be threads, which share torch's own generator
    own = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        noise = torch.rand(p.shape, dtype=torch.float64, generator=own).sub_(0.5).mul_(2)
        p.data = p.data + p.data * noise.to(p.data) * torch.finfo(p.dtype).eps
    return model


def untied(model: Any) -> list[str]:
    """Return the names of this rank's parameters that should be tied to another parameter and are not."""
    here = dict(model.named_parameters(remove_duplicate=False))
    ties = tied_names(model).items()
    return [a for a, b in ties if a in here and b in here and here[a] is not here[b]]


def files(
    into: Comparison, folder: Path, cls: Any, batch: Mapping[str, Tensor], result: RankResult
) -> None:
    """Add to `into` a finding if plain `transformers` cannot load the weights in `folder` or run a forward on `batch`
    with them, if they differ from the weights in `result` by a bit, or if a file holds NaN or infinity.
    """
    saved = {}
    try:
        plain = cls.from_pretrained(folder, dtype=torch.float32)
        saved = dict(plain.named_parameters())
        with torch.no_grad():
            plain.eval()(**batch)
    except Exception as error:
        what = "forward" if saved else "from_pretrained"
        into.note("files", what, f"{type(error).__name__}: {error}")
    for name, want in result.weights.items():
        into.did("files")
        if name in saved and not torch.equal(saved[name], want):
            into.note("files", name, "the saved tensor is another one than was trained")
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            if not all(torch.isfinite(opened.get_tensor(key).float()).all() for key in opened.keys()):  # noqa: SIM118  # fmt: skip
                into.note("files", file.name, "it holds NaN or infinity")
