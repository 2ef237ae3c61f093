"""Check before an optimizer step that replicas of a parameter have equal gradients, which all ranks scaled equally.

`torch.nn.utils.clip_grad_norm_` and torch's GradScaler see one rank's shards alone, so they may scale gradients by
another factor on each rank, or skip a step on one rank: ranks would diverge silently.
"""

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.optimizer import register_optimizer_step_pre_hook

from slapo_zoo.errors import MeshError, agreed
from slapo_zoo.model.gradients.batch_check import of_all
from slapo_zoo.model.gradients.of_models import parameters_of, runtime_of
from slapo_zoo.model.gradients.scaler import GradScaler
from slapo_zoo.parallel.local_tensors import is_divided
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.rank_plan import RankPlan
from slapo_zoo.parallel.ranks.emulation import called_once
from slapo_zoo.parallel.ranks.heartbeat import names_of
from slapo_zoo.parallel.ranks.killed_rank import rank_guard
from slapo_zoo.parallel.ranks.patience import meet

PROBES, ELEMENTS, ALIKE = 8, 64, 1e-4
FEWEST = 4  # elements that tell a common factor from one that clipping by value leaves behind
COPIES = 1e-6  # relative difference allowed between gradients of dp replicas
LOOSELY = 1e-3  # the same, and of weights, between tp ranks, whose kernels may add in another order
ALWAYS = 16  # all of the first steps are checked, then one in `input_check_interval`
APART = {  # dim of the mesh --> problem and hint of an error about replicas
    "loss": (
        "dp ranks have different weights: they took different steps, or had different gradients",
        "call optimizer.step() on all ranks or on none, and average gradients of torch.autograd.grad over dp",
    ),
    "tp": (
        "tp ranks have different values of a replicated weight, as after a change scaled by one rank's norm (SAM)",
        "take the norm from model.clip_grad_norm_(float('inf')), and seed torch equally on all tp ranks",
    ),
}
GRAD_SCALER = inspect.getfile(torch.amp.GradScaler)


class StepGuard:
    """Check before an optimizer step that all ranks changed (clipped, unscaled) their gradients by the same factor.

    After the backward a few elements of some gradients are copied. A check finds by which factor each gradient differs
    from its copy, and compares these factors over all ranks: one all-gather of 36 numbers, and one wait of the host.

    Attributes:
        interval: steps from one check to the next, after the first 16 steps, all checked; 0 switches checks off.
        divides: True if ranks hold different parameters or shards (tp, pp, `dp_shard=`); else steps need no check.
        needed: True if checks are made; False where an engine clips and steps by itself.
        on_ranks: None; or, with `exact=` (one process runs several virtual ranks, one thread each), function (optimizer,
            args, kwargs) called at `optimizer.step(*args, **kwargs)`, which checks and steps in each thread.
    """

    def __init__(self, mesh: Mesh):
        self.mesh, self.interval, self.steps, self.looks = mesh, ALWAYS, 0, 0
        self.backwards: Counter[str] = Counter()  # mesh dim --> backwards that compare weights
        self.device = torch.device("cpu")
        self.probes: list[tuple[nn.Parameter, Tensor]] = []
        self.marks: dict[str, Tensor] = {}  # of gradients that are replicated over tp
        self.trained: Tensor | None = None  # ranks that have something to train; None: all
        self.fresh, self.needed, self.divides = False, True, mesh.tp * mesh.pp > 1
        self.on_ranks: Callable[[Any, Any, Any], Any] | None = None

    def complete(
        self,
        named: Mapping[str, nn.Parameter],
        plan: RankPlan,
        averaged: bool,
        trained: Tensor | None = None,
    ) -> None:
        """Copy some gradient elements after a backward, for the check before the step. MeshError if norms of weights
        differ: those replicated over tp, as `plan` says, between tp ranks; if the backward `averaged` gradients, all
        between dp ranks.

        `named` has trained parameters by name. `trained`, a scalar, is the number of ranks along pp and dp that train
        any; if some train none, the check before the step is left out. None: all do.
        """
        if not self.needed:
            return
        parameters = list(named.values())
        held = [p for p in parameters if p.grad is not None and not hasattr(p.grad, "full_tensor")]
        self.divides = self.mesh.tp * self.mesh.pp > 1 or any(is_divided(p) for p in held)
        some = held[:: max(1, len(held) // PROBES)][:PROBES]
        self.probes = [(p, _sample(p)) for p in some]
        self.marks = self._marks_of(named, plan) if self._is_due(self.steps + 1) else {}
        self.trained, self.fresh = trained, True
        if averaged and self.mesh.size("loss") > 1 and not any(is_divided(p) for p in parameters):
            self._compare_replicas(named, "loss", COPIES)
        if self.mesh.tp > 1 and self.backwards["tp"] < ALWAYS:  # later roundings may have added up
            self._compare_replicas(_replicated(named, plan), "tp", LOOSELY)

    def _compare_replicas(
        self, named: Mapping[str, nn.Parameter], mesh_dim: str, alike: float
    ) -> None:
        """Raise MeshError on all ranks along `mesh_dim` if these have different values of a parameter in `named`. Of at
        most 8 of them the norms of the first 64 elements are compared; `alike` is the relative difference allowed.
        """
        self.backwards[mesh_dim] += 1
        some = dict(list(named.items())[:: max(1, len(named) // PROBES)][:PROBES])
        if not some or not self._is_due(self.backwards[mesh_dim]):
            return
        norms = [p.detach().reshape(-1)[:ELEMENTS].double().norm() for p in some.values()]
        found = of_all(torch.stack(norms), self.mesh.group(mesh_dim))
        apart = ((found - found[0]).abs() > alike * found.abs().amax(0)).any(0)
        if apart.any():
            names = [name for name, is_apart in zip(some, apart.tolist(), strict=True) if is_apart]
            raise agreed(MeshError("backward", f"replicas of {names[0]}", *APART[mesh_dim]))

    def _is_due(self, step: int) -> bool:
        return self.interval >= 1 and (step <= ALWAYS or not step % self.interval)

    def _marks_of(self, named: Mapping[str, nn.Parameter], plan: RankPlan) -> dict[str, Tensor]:
        """Return {name: [projection, norm] of the gradient's first 64 elements} of those parameters of `named` (by
        name) that are replicated over tp, as `plan` says. The projection is a weighted sum of these elements; a missing
        gradient is 0.
        """
        if self.mesh.tp == 1:
            return {}
        whole = _replicated(named, plan)
        grads = [p.new_zeros(1) if p.grad is None else p.grad.detach().reshape(-1)[:ELEMENTS]
                 for p in whole.values()]  # fmt: skip
        if not grads:
            return {}
        padded = pad_sequence([x.float() for x in grads], batch_first=True).double()
        places = torch.arange(1, padded.shape[1] + 1, device=padded.device, dtype=torch.float64)
        found = torch.stack([padded @ places.cos(), padded.norm(dim=1)], 1)
        return dict(zip(whole, found, strict=True))

    def before_step(self) -> None:
        """Compare gradients with their copies of the last backward. MeshError on all ranks if ranks scaled them
        differently, if replicated ones differ between tp ranks, or if a rank goes on without this step.
        """
        if not self.fresh:
            return
        self.fresh, self.steps = False, self.steps + 1
        if not self._is_due(self.steps):
            return
        if self.trained is not None and int(self.trained) < self.mesh.pp * self.mesh.size("loss"):
            return  # a stage without trained parameters takes no optimizer step: no collective
        mine = self._factors()
        with rank_guard("optimizer.step, which all ranks take or none"):
            if gone := meet("optimizer.step", range(self.mesh.world_size)):
                raise _alone(gone)
            rows = of_all(mine).tolist()
        alike = max(row[PROBES][0] for row in rows)
        self._require_same(rows, LOOSELY * alike / ALIKE)
        found = [[f if is_one else None for f, is_one, *_ in row[:PROBES]] for row in rows]
        if listed := self._unlike(found, alike):
            problem = f"ranks scaled their gradients by different factors: {listed} (clipped by the norm of one shard?)"
            hint = "call model.clip_grad_norm_(max_norm) instead of torch.nn.utils.clip_grad_norm_"
            raise MeshError("optimizer.step", "gradients", problem, hint)

    def _require_same(self, rows: Sequence[Sequence[Sequence[float]]], loosely: float) -> None:
        """Raise MeshError on all ranks if tp ranks have different gradients of a replicated parameter.

        `rows[rank]` is that rank's result of `_factors`, [9][4], of which columns 2 and 3 of rows 0 to 7 are compared:
        weighted sums and norms of gradients. `loosely` is the difference allowed between sums, relative to the norm.
        """
        tp = self.mesh.tp
        blocks = [rows[i : i + tp] for i in range(0, len(rows), tp)]
        if not any(
            _differ([row[i][2:] for row in block], loosely)
            for block in blocks
            for i in range(PROBES)
        ):
            return
        none = torch.zeros(0, 2, dtype=torch.float64, device=self.device)
        mine = torch.stack([*self.marks.values()]) if self.marks else none
        every = of_all(mine, self.mesh.group("tp")).transpose(0, 1).tolist()  # [parameters, tp, 2]
        named = zip(self.marks, every, strict=True)
        names = [name for name, marks in named if _differ(marks, loosely)]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        problem = "the parameter is replicated over tp, but its gradient differs between tp ranks"
        hint = "add sch[MODULE].sum_gradient(PARAMETER) to the schedule; `slapo-zoo verify` names the module"
        what = f"{names[0]}{more}" if names else "parameters of another stage"
        raise agreed(MeshError("optimizer.step", what, problem, hint))

    def check_outside(self, parameters: list[nn.Parameter]) -> None:
        """Raise MeshError on all ranks of a stage if a trained parameter outside the model (a user's head), or its gradient,
        has other values on another of these ranks. `parameters` are all parameters of the optimizer.

        The check runs in the first 16 steps only, by an all-gather over tp and one over dp.
        """
        beside = [p for p in parameters
                  if runtime_of(p) is None and p.requires_grad and not hasattr(p, "full_tensor")]  # fmt: skip
        self.looks += 1
        if not (beside and self.needed and self.interval) or self.looks > ALWAYS:
            return
        pairs = ((p, torch.zeros_like(p) if p.grad is None else p.grad) for p in beside)
        each = [x.detach().double() for pair in pairs for x in pair]
        mine = torch.stack([torch.stack([x.norm(), x.sum() / x.numel() ** 0.5]) for x in each])
        for mesh_dim in ("tp", "loss"):
            if self.mesh.size(mesh_dim) == 1:
                continue
            found = of_all(mine, self.mesh.group(mesh_dim))
            if ((found - found[0]).abs() > LOOSELY * found[..., :1].amax(0)).any():
                raise _unlike_outside(beside, self.mesh.named(mesh_dim))

    def _factors(self) -> Tensor:
        """Return this rank's tensor [9, 4] of what ranks compare before an optimizer step.

        Row i < 8 has in columns 0 and 1 the factor by which the i-th of 8 sampled gradients was scaled since the
        backward, and 1 if the factor fits all sampled elements, else 0. Its columns 2 and 3 are checksums of the
        gradients i, i + 8, i + 16, ... among those that are replicated over tp: sums of their two `marks`. Each column
        of row 8 is the relative rounding error allowed.
        """
        found = torch.zeros(PROBES + 1, 4, dtype=torch.float64, device=self.device)
        for i, mark in enumerate(self.marks.values()):
            found[i % PROBES, 2:] += mark
        alike = max([ALIKE, *(4 * torch.finfo(p.dtype).eps for p, _ in self.probes)])
        found[PROBES] = alike
        for i, (p, then) in enumerate(self.probes):
            now = then if p.grad is None else _sample(p)
            if p.grad is None or then.shape != now.shape:
                continue
            factor = (then * now).sum() / (then * then).sum()
            rest = (now - factor * then).norm()
            is_one = (rest <= alike * now.norm()) & (factor > 0) & torch.isfinite(factor)
            is_one &= (then != 0).sum() >= FEWEST
            found[i, :2] = torch.stack([torch.where(is_one, factor, 0.0), is_one.double()])
        return found

    def _unlike(self, found: list[list[float | None]], alike: float) -> str:
        """Return, as text, factors by which ranks scaled their gradients differently since the backward; "" if equally.

        `found[rank][i]` is the factor of the rank's i-th sampled gradient, None if unknown; `alike` is the relative
        difference allowed. Ranks of one stage sample the same parameters, so they are compared by each factor i; ranks
        of different stages only if each of all ranks scaled all its gradients by one factor.
        """
        stages = [self.mesh.coord("pp", rank) for rank in range(self.mesh.world_size)]
        groups = [[row[i] for row, s in zip(found, stages, strict=True) if s == stage]
                  for stage in set(stages) for i in range(PROBES)]  # fmt: skip
        for group in (*groups, [_common_factor(row, alike) for row in found]):
            factors = [factor for factor in group if factor is not None]
            if len(factors) == len(group) and max(factors) - min(factors) > alike * max(factors):
                return ", ".join(f"{factor:.4g}" for factor in factors)
        return ""


def _replicated(named: Mapping[str, nn.Parameter], plan: RankPlan) -> dict[str, nn.Parameter]:
    """Return the parameters of `named` (by name) that are sharded neither over tp, as `plan` says, nor by ZeRO."""
    rows = {name: plan.of(name) for name, p in named.items() if not is_divided(p)}
    return {name: named[name] for name, row in rows.items() if not (row and row.placement)}


def _common_factor(row: list[float | None], alike: float) -> float | None:
    """Return the factor by which all sampled gradients of a rank were scaled; None if factors differ or are unknown.

    `row` has one factor per sampled gradient, None where unknown; `alike` is the relative difference that is allowed.
    """
    known = [factor for factor in row if factor is not None]
    return known[0] if known and max(known) - min(known) <= alike * max(known) else None


def _differ(marks: Sequence[Sequence[float]], loosely: float) -> bool:
    """Return True if ranks have different gradients of a parameter; `marks` has (projection, norm) for each rank.

    The projection is a weighted sum of the gradient's elements. The gradients are different if the projections
    differ by more than `loosely` times the largest norm.
    """
    values, sizes = zip(*marks, strict=True)
    return max(values) - min(values) > loosely * max(sizes)


def _sample(p: nn.Parameter) -> Tensor:
    assert p.grad is not None  # noqa: S101 - checked by the callers
    return p.grad.detach().reshape(-1)[:ELEMENTS].double()


def _alone(gone: Sequence[int]) -> MeshError:
    problem = f"{names_of(gone)} did not take this step, so their weights differ from now on"
    hint = (
        "step on all ranks or on none: let them agree on a number, e.g. torch.distributed.all_reduce of "
        "whether the loss is finite; slapo_zoo.GradScaler does it"
    )
    return MeshError("optimizer.step", "taken by some ranks", problem, hint)


def _unlike_outside(parameters: list[nn.Parameter], mesh_dim: str) -> MeshError:
    shapes = ", ".join(str(list(p.shape)) for p in parameters[:3])
    problem = f"{mesh_dim} ranks have different values or gradients of parameters outside the model: {shapes}"
    hint = (
        "initialise them equally and use them in the loss_fn of train_step; for dp ranks alone, wrap their module: "
        "DistributedDataParallel(head, process_group=model.mesh.group('dp'))"
    )
    return MeshError("optimizer.step", "parameters outside the model", problem, hint)


@called_once
def watch_steps() -> None:
    """Register torch's hook before all optimizer steps, once per process: for parameters of a scheduled model on
    several ranks it lets the model's StepGuard raise MeshError if ranks scaled their gradients by different factors.
    """
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
    parameters = parameters_of(optimizer)
    for runtime in {id(found): found for p in parameters if (found := runtime_of(p))}.values():
        guard: StepGuard = runtime.calls.guard
        if guard.on_ranks is not None:
            _require_own_scaler()
            return guard.on_ranks(optimizer, args, kwargs)
        if runtime.schedule.mesh.world_size > 1:
            guard.check_outside(parameters)
        if guard.divides:
            _require_own_scaler()
            guard.before_step()
    return None


def _require_own_scaler() -> None:
    """Raise MeshError if torch's own GradScaler called `optimizer.step`: after an overflow it skips on one rank alone."""
    frame: Any = sys._getframe(1)
    for _ in range(12):
        if frame is None:
            return
        # f_locals is read in this frame only: elsewhere it would keep the frame's tensors alive
        is_theirs = frame.f_code.co_filename == GRAD_SCALER
        scaler = frame.f_locals.get("self") if is_theirs else None
        if isinstance(scaler, torch.amp.GradScaler):
            if not isinstance(scaler, GradScaler):
                problem = "after an overflow in the gradients of one rank's shards, that rank alone would skip the step"
                hint = "use slapo_zoo.GradScaler(model), with which all ranks skip a step together"
                raise MeshError("optimizer.step", "torch.amp.GradScaler", problem, hint)
            return
        frame = frame.f_back
