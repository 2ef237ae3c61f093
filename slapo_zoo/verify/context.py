"""Verification of a `with` block that shards a model: after it, the model must compute what it computed before."""

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from slapo_zoo.hf.models import like, swap_tensors
from slapo_zoo.kernels.loss.vocab_logits import VocabLogits
from slapo_zoo.language.gradients import sum_over_tp
from slapo_zoo.language.planned_rows import plan_of
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.parallel import gather as consolidate
from slapo_zoo.parallel.compat import is_for_gpus
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.verify.blame import Blame
from slapo_zoo.verify.compare import Comparison, Divergence, RankResult, Tolerance, largest_of
from slapo_zoo.verify.events import Recorder
from slapo_zoo.verify.judge import shaken
from slapo_zoo.verify.report import Report
from slapo_zoo.verify.safe import NoDropout, agreed_collectives

WHERE, SEED, INPUT = "Verify", 0, "input "
SEED_ON_META = 20  # of the values that a model on meta gets while it is verified
SHAKES = range(3)  # seeds of noisy runs; one gives a false alarm now and then (docs/decisions/0003)
LEAST = -1e4  # numbers up to this hide in additive masks: -1e4, the least of a dtype, -inf


class Verify:
    """Context that compares what a model computes before and after a `with` block of directives (`shard`, ...).

    Outputs and every gradient are compared on all ranks, in the dtype of the model, with a tolerance of twice the
    rounding error that they had before the block, measured against fp64. Dropout is switched off. Afterwards the
    model has its former values, gradients, buffers and mode, and torch's generator its former state. A model on the
    meta device gets random values inside the block.

    Gradients of inputs are compared too: of the inputs that require one or, where none does, of all
    floating-point inputs except additive masks (only zeros and very negative numbers).

        with Verify(sch, [x]):
            sch["fc1"].shard("weight", 0).sync("bwd_post", "all_reduce")
            sch["fc2"].shard("weight", 1).sync("fwd_post", "all_reduce")

    Args:
        sch: Schedule of the model, on which the block calls directives.
        example_inputs: positional arguments of the model as a list or tuple, keyword arguments as
            a dict, or one tensor; the same on all ranks.
        device: device of the model while it is verified; "cuda" without a CUDA device, or with a process group
            that has no nccl (`emulate`), leaves the model on the device that it is on.
        eval_mode: False runs the model in training mode.
        enable: False turns the verification off.

    Attributes:
        report: the outcome, set at the end of the block.

    Raises:
        VerifyError: at the end of the block, with the first module that differs.
    """

    def __init__(
        self, sch: Schedule, example_inputs: Any, device: str = "cuda", eval_mode: bool = True,
        enable: bool = True,
    ):  # fmt: skip
        self.sch, self.inputs, self.device = sch, example_inputs, device
        self.eval_mode, self.enable = eval_mode, enable
        self.report: Report | None = None

    def __enter__(self) -> "Verify":
        if self.enable:
            self._begin = time.perf_counter()
            self._made_up = give_values(self.sch.model)
            self.sch.state.index()
            others = (self._run(None, seed) for seed in SHAKES)
            self._before = [self._run(torch.float64), self._run(None), *others]
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not self.enable:
            return
        before, self._before = self._before, []
        try:
            if error is None:
                together(self.sch.mesh, WHERE, lambda: None)  # all ranks got here
                self._compare(before)
        finally:
            if self._made_up:
                take_values(self.sch.model)
                self.sch.state.index()

    def _run(self, dtype: torch.dtype | None, shake: int | None = None) -> RankResult:
        sch = self.sch
        with _undisturbed(sch.model):
            device: torch.device | None = torch.device(self.device)
            if device.type == "cuda" and not (torch.cuda.is_available() and is_for_gpus()):
                device = None
            for tensor in _tensors(sch.model):
                floating = tensor.is_floating_point()
                wanted = dtype if floating else None
                tensor.data = tensor.data.to(device=device, dtype=wanted, copy=True)
            shaken(sch.model, shake)
            sch.model.train(not self.eval_mode)
            args, kwargs = _arguments(self.inputs, device, dtype)
            found = _observe(sch, args, kwargs)
            found.events = found.events if shake is None else {}  # noisy runs only show the error
            return found

    def _compare(self, before: Sequence[RankResult]) -> None:
        try:
            mine = self._run(None)
        except Exception as error:
            together(self.sch.mesh, WHERE, lambda: None)
            raise self._error(error) from error
        every = together(self.sch.mesh, WHERE, lambda: mine)
        comparison = Comparison()
        truth, *plains = before
        near = Tolerance(truth, plains)
        for rank, found in enumerate(every):
            _compare_all(comparison, near, "outputs", found.outputs, truth.outputs, rank)
        for rank, found in enumerate(every if truth.grads and self.sch.mesh.rank == 0 else ()):
            _compare_all(comparison, near, "gradients", found.grads, truth.grads, rank)
        comparison = together(self.sch.mesh, WHERE, lambda: comparison)[0]
        divergence = self._blame(every, truth, plains[0], comparison)
        self.report = self._reported(comparison, divergence, None)
        self.report.raise_if_wrong(WHERE)

    def _blame(
        self, every: Sequence[RankResult], truth: RankResult, plain: RankResult, found: Comparison
    ) -> Divergence | None:
        if not found.findings:
            return None
        wrong = [f.what for f in found.findings if f.check == "gradients"]
        names = [name for name in wrong if not name.startswith(INPUT)]
        divergence = Blame(every, truth.events, plain.events).first(names)
        if divergence is None and wrong:  # the gradient of an input: any module that took it
            first = next(iter(truth.events.values())).source
            took = (e.path for e, seen in truth.events.items() if seen.source == first)
            paths = tuple(dict.fromkeys(took))
            divergence = Divergence(paths[0], "backward", f"gradient of {wrong[0]}", 0, paths)
        return divergence

    def _error(self, error: Exception) -> Exception:
        """Return the error to raise if the model raised `error` when it ran after the block of directives (`shard`): a
        VerifyError that names the module that was running, or `error` itself if no module is known.
        """
        paths = getattr(error, "slapo_modules", ())
        if not paths:
            return error
        divergence = Divergence(paths[0], "error", "its call", self.sch.mesh.rank, paths)
        text = f"{type(error).__name__}: {error}"
        report = self._reported(Comparison(), divergence, text)
        self.report = report
        try:
            report.raise_if_wrong(WHERE)
        except AssertionError as raised:
            return raised
        return error

    def _reported(
        self, comparison: Comparison, divergence: Divergence | None, error: str | None
    ) -> Report:
        seconds = round(time.perf_counter() - self._begin, 2)
        sch = self.sch
        cls, mesh = type(sch.model), sch.mesh
        return Report.of(cls, mesh, comparison, divergence, sch, error, SEED, seconds)


def _compare_all(
    into: Comparison, near: Tolerance, check: str, found: Mapping[str, Tensor],
    want: Mapping[str, Tensor], rank: int | None = None,
) -> None:  # fmt: skip
    """Compare tensors `found` on rank `rank` with the unsharded model's, `want`, by name; `check` is "outputs" or
    "gradients". Record in `into` errors above the tolerance `near`, and for "outputs" also missing and additional ones.
    """
    largest = largest_of(want) if check == "gradients" else 0.0
    take = {"outputs": lambda r, n: r.outputs[n], "gradients": lambda r, n: r.grads[n]}[check]
    if check == "outputs" and found.keys() != want.keys():
        into.note(check, "number of outputs", f"found {len(found)}, expected {len(want)}", rank)
    for name in sorted(want.keys() & found.keys()):
        near.check(into, check, name, found[name], lambda r, n=name: take(r, n), largest, rank)


def _observe(sch: Schedule, args: Any, kwargs: Any) -> RankResult:
    """Run forward and backward of the model of `sch`; return outputs, gradients, and the tensors recorded at all modules.

    The gradients are those of a sum of all outputs with fixed random factors.
    """
    mesh, model = sch.mesh, sch.model
    result = RankResult.on(mesh)
    recorder = Recorder(model)
    with agreed_collectives(mesh, recorder), NoDropout(), recorder, _as_trained(sch):
        output = model(*args, **kwargs)
        tree = dict(output) if hasattr(output, "keys") else output
        leaves = [_whole(x) for x in tree_leaves(tree)]
        outputs = {str(i): x for i, x in enumerate(leaves) if isinstance(x, Tensor)}
        loss = _loss(outputs)
        if loss is not None:
            loss.backward()
    result.outputs = {name: x.detach() for name, x in outputs.items()}
    result.grads, result.events = _full_gradients(sch), recorder.events
    for i, x in enumerate(tree_leaves((args, kwargs))):
        if isinstance(x, Tensor) and x.grad is not None:
            result.grads[f"{INPUT}{i}"] = x.grad
    return result


@contextmanager
def _as_trained(sch: Schedule) -> Iterator[None]:
    """Context in which eval mode, like training, recomputes checkpointed modules and sums partial gradients over tp."""
    built, is_own = sch.state.sums, sch.state.plan is None
    for handle in built:
        handle.remove()
    handles = sum_over_tp(sch.model.named_parameters(), plan_of(sch.state)) if is_own else []
    sch.state.recomputes_in_eval = True
    try:
        yield
    finally:
        sch.state.recomputes_in_eval = False
        sch.state.sums = handles if built else []
        for handle in () if built else handles:
            handle.remove()


def _whole(x: Any) -> Any:
    return x.gathered() if isinstance(x, VocabLogits) else x


def _loss(outputs: Mapping[str, Tensor]) -> Tensor | None:
    """Return the sum of all output elements times fixed random factors; None if no output requires a gradient."""
    terms = []
    for i, x in enumerate(outputs.values()):
        if x.requires_grad and x.numel():
            # ranks may be threads, which restore the one generator of torch behind each other's back
            own = torch.Generator().manual_seed(SEED + i)
            factors = torch.randn(x.shape, dtype=torch.float64, generator=own)
            terms.append((x * factors.to(x)).sum() / x.numel() ** 0.5)
    return torch.stack(terms).sum() if terms else None


def _full_gradients(sch: Schedule) -> dict[str, Tensor]:
    """Return {parameter: gradient} of the model of `sch`: on rank 0 all gradients, unsharded; on other ranks only those of
    parameters that are not sharded. All ranks call this together.
    """
    mesh, named = sch.mesh, dict(sch.model.named_parameters())
    rows = [row for row in plan_of(sch.state).saved if row.name in named]
    held = {row.name: named[row.name] for row in rows}
    local = {n: torch.zeros_like(p) if p.grad is None else p.grad.detach() for n, p in held.items()}
    whole = {row.name: local[row.name] for row in rows if row.placement is None}
    return consolidate.gather(local, rows, mesh) or whole


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Return a context with `nn.Dropout` off, all `.grad` None at its begin, and the state of `model` restored at its end."""
    kept = {id(t): (t, t.data, t.grad) for t in _tensors(model)}
    for buffer in model.buffers():  # batch norm writes into them
        buffer.data = buffer.data.clone()
    modes = {module: module.training for module in model.modules()}
    rates = {m: copy.copy(m.p) for m in model.modules() if isinstance(m, nn.Dropout)}
    for tensor, *_ in kept.values():
        tensor.grad = None
    for module in rates:
        module.p = 0.0
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for tensor, data, grad in kept.values():
            tensor.grad = None
            tensor.data, tensor.grad = data, grad
        for module, mode in modes.items():
            module.training = mode
        for module, rate in rates.items():
            module.p = rate


def _is_mask(x: Tensor) -> bool:
    """Return whether a tensor is an additive mask: only zeros and very negative numbers.

    The gradient of a mask is not compared, as each rank has a partial sum of it.
    """
    return bool(((x == 0) | (x <= LEAST)).all()) and bool((x <= LEAST).any())


def _arguments(
    inputs: Any, device: torch.device | None, dtype: torch.dtype | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return copies of the example inputs: a dict as keyword arguments, a list, tuple or one tensor as positional ones.

    `device` or `dtype` None leaves that of each input; only floating-point inputs get `dtype`.
    """

    chosen = any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(inputs))

    def place(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        floating = x.is_floating_point()
        wanted = x.requires_grad if chosen else floating and not _is_mask(x)
        x = x.detach().to(device=device, dtype=dtype if floating else None, copy=True)
        return x.requires_grad_(wanted)

    if isinstance(inputs, Mapping):
        return (), tree_map(place, dict(inputs))
    listed = inputs if isinstance(inputs, list | tuple) else [inputs]
    return tuple(tree_map(place, list(listed))), {}


def give_values(model: nn.Module) -> bool:
    """Replace meta parameters and buffers by random CPU tensors, equal on all ranks; return whether there were any."""
    generator = torch.Generator().manual_seed(SEED_ON_META)
    found = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    swap_tensors(model.modules(), lambda x: _like(x, _values(x, generator)) if x.is_meta else x)
    return found


def take_values(model: nn.Module) -> None:
    """Undo `give_values`: replace all parameters and buffers of a model by meta tensors; tied parameters stay tied."""
    swap_tensors(model.modules(), lambda tensor: _like(tensor, tensor.data.to("meta")))


def _values(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    drawn = torch.randn(tensor.shape, device="cpu", generator=generator)
    if tensor.ndim < 2:  # the weight of a norm must not be near zero, a running variance not below
        return (1 + 0.1 * drawn.clamp(-3, 3)).to(tensor.dtype)
    return (drawn / tensor[0].numel() ** 0.5).to(tensor.dtype)


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    """Return a tensor with the data of `values` and the class and attributes of `tensor` (a Parameter if it is one)."""
    found = like(tensor, values)
    if isinstance(tensor, nn.Parameter):
        vars(found).update(vars(tensor))
    return found
