"""checkpoint: recompute the activations of a module, or of some graph nodes, in the backward."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
import torch.utils.checkpoint as recompute
from torch import is_grad_enabled, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from slapo_zoo.language.directive import Directive, Site, State, join, primitive
from slapo_zoo.language.graph.group import group
from slapo_zoo.language.graph.rewrite import insertion_point
from slapo_zoo.language.graph.target import resolve
from slapo_zoo.language.offload import SHARDED, kept_in_shares
from slapo_zoo.language.primitives.bias_after_sum import output_of
from slapo_zoo.parallel.rng.layout_independent_random import RandomStream
from slapo_zoo.parallel.rng.seeds import get_cuda_rng_tracker

ATEN = torch.ops.aten
OFFLOAD = "offload"
# Policy --> operators whose results are saved; all others are recomputed.
POLICIES: dict[str, set[Any]] = {
    "save_matmuls": {
        ATEN.mm.default, ATEN.bmm.default, ATEN.addmm.default, ATEN.baddbmm.default,
        ATEN._scaled_dot_product_flash_attention.default,
        ATEN._scaled_dot_product_efficient_attention.default,
        ATEN._scaled_dot_product_cudnn_attention.default,
        ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        "slapo_zoo.linear.default", "slapo_zoo.attention.default",
    },
}  # fmt: skip


@primitive("checkpoint")
@dataclass(frozen=True)
class Checkpoint(Directive):
    """Save only the inputs of a module for the backward, and recompute its activations there.

    rewrite:  y = f(x)               -->  y = checkpoint(f, x)
              t = f(a); y = g(t, b)  -->  y = checkpoint(self.Checkpoint_0, a, b)   (a subgraph)
    note:     the recomputation draws the same dropout masks. A model of AutoScheduledModel trains without a KV
              cache, which a recomputation would fill twice; for other models pass use_cache=False
    errors:   checkpointed already; an unknown policy; a subgraph that is not there
    source:   Chen et al. 2016, arXiv:1604.06174

    Args:
        subgraph: nodes of a traced module to recompute: the result of `find` or a pattern (which cannot be written as
            JSON), or a regex for paths of the submodules that its graph calls; None is the whole module.
        policy: what is saved; the rest is recomputed. "" saves the inputs; "save_matmuls" also the results of matrix
            products and fused attention; "sharded" the inputs, of the first one 1/tp on each tp rank (it is equal on
            all); "offload" everything, in host memory.
        offload: True keeps in host memory, not on the device, what policy "" or "save_matmuls" saves.
    """

    subgraph: Any = None
    policy: str = ""
    offload: bool = False

    def check(self, site: Site) -> None:
        if self.policy not in (known := ("", OFFLOAD, SHARDED, *POLICIES)):
            problem = f"found policy {self.policy!r}, expected one of {sorted(known[1:])}"
            hint = "choose one of these, or leave policy out to recompute everything"
            raise self.fail(site, problem, hint)
        if self.policy == SHARDED and self.offload:
            problem = f"found offload=True too, but policy={SHARDED!r} keeps shards on the device"
            raise self.fail(site, problem, 'leave offload out, or choose policy="offload"')
        if self.policy == SHARDED and output_of(site) == "partial":
            problem = f"the input differs between tp ranks, but policy={SHARDED!r} needs the same input on all"
            hint = "choose another policy, or checkpoint a module around this one"
            raise self.fail(site, problem, hint)
        if self.subgraph is not None:
            for subgraph in resolve(site, self, self.subgraph):
                insertion_point(subgraph)
        elif site.path in site.state.checkpointed:
            hint = "remove one of the two checkpoint() directives"
            raise self.fail(site, "this module is checkpointed already", hint)

    def apply(self, site: Site) -> None:
        if self.subgraph is None:
            self._wrap(site.module, site.path, site)
            return
        for subgraph in resolve(site, self, self.subgraph):
            name, child = group(subgraph, "Checkpoint")
            self._wrap(child, join(subgraph.path, name), site)
        site.state.index()

    def _wrap(self, module: nn.Module, path: str, site: Site) -> None:
        recompute_module(module, path, site.state, self.policy, self.offload)


def recompute_module(
    module: nn.Module, path: str, state: State, policy: str = "", offload: bool = False
) -> None:
    """Replace a module's forward by one that is recomputed in the backward.

    Args:
        module: the module, whose forward no earlier call replaced.
        path: path of the module; removing it from `state.checkpointed` switches recomputation off.
        state: state of the schedule; its lists of recomputed and of offloaded modules get `path`.
        policy: what is saved: "" (the inputs), "save_matmuls" (matrix products too), "offload" (all results, in host
            memory) or "sharded" (the inputs, 1/tp of the first one on each tp rank).
        offload: True keeps in host memory, not on the device, what policy "" or "save_matmuls" saves.
    """
    state.checkpointed.append(path)
    state.offloads.paths += [path] if offload or policy == OFFLOAD else []
    forward = module.forward

    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        trains = (module.training or state.recomputes_in_eval) and is_grad_enabled()
        if not (trains and path in state.checkpointed):
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling() and policy != OFFLOAD and path not in state.offloads.paths:
            return _in_a_graph(forward, args, kwargs, POLICIES.get(policy))
        away = nullcontext()
        if path in state.offloads.paths:
            away = state.offloads.call(path, module, state.keeps)
        if policy == OFFLOAD:
            with away:
                return forward(*args, **kwargs)
        elif policy == SHARDED and not state.forward.tokens_divided:
            x = args[0] if args else kwargs.get("hidden_states")
            away = kept_in_shares(x, state.mesh, state.keeps)
        contexts = restoring(state, POLICIES.get(policy), module)
        with away:
            given = {**kwargs, "use_reentrant": False, "context_fn": lambda: contexts}
            return recompute.checkpoint(forward, *args, **given)

    recomputed.recomputes = True  # pyright: ignore[reportAttributeAccessIssue]
    module.forward = recomputed


def _in_a_graph(
    forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any], kept: set[Any] | None
) -> Any:
    """Return `forward(*args, **kwargs)` while torch.compile traces it; the compiled backward recomputes the forward.
    `kept` are the operators whose results are saved; None recomputes all.
    """
    if kept is not None:
        operations = [op for op in kept if not isinstance(op, str)]
        kwargs = {
            **kwargs, "context_fn": partial(create_selective_checkpoint_contexts, operations)
        }  # fmt: skip
    return recompute.checkpoint(forward, *args, use_reentrant=False, **kwargs)


class _Anew(ExitStack):
    """Context that may be entered again, e.g. in a second backward: each entry enters a new context made by `make()`."""

    def __init__(self, make: Callable[[], AbstractContextManager]):
        super().__init__()
        self.make = make

    def __enter__(self) -> Any:
        return self.enter_context(self.make())


@contextmanager
def _as_in_forward(module: nn.Module, trained: list[bool]) -> Iterator[None]:
    """Context of a recomputation of `module`: its parameters require gradients where `trained` says so, as in the
    forward, and batch norms update copies of their statistics, which are then dropped.
    """
    both = zip(module.parameters(), trained, strict=False)
    changed = [p for p, flag in both if p.requires_grad is not flag]
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    before = [dict(norm._buffers) for norm in norms]
    for norm, buffers in zip(norms, before, strict=True):
        norm._buffers.update({k: b if b is None else b.clone() for k, b in buffers.items()})
    try:
        for p in changed:  # the user froze it after the forward, or trains it since
            p.requires_grad = not p.requires_grad
        yield
    finally:
        for p in changed:
            p.requires_grad = not p.requires_grad
        for norm, buffers in zip(norms, before, strict=True):
            norm._buffers.update(buffers)


def restoring(
    state: State, kept: set[Any] | None, module: nn.Module
) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return (context of a forward, context of its recomputation), as `context_fn` of torch's checkpoint must. The
    recomputation draws the same random numbers as the forward, and does not update statistics of batch norms.

    Args:
        state: state of the schedule.
        kept: operators whose results are saved and not recomputed; None saves no result.
        module: the module that is recomputed.
    """
    again, trained = as_now(state.random, state), [p.requires_grad for p in module.parameters()]
    if kept is None:
        return nullcontext(), _Anew(lambda: again(_as_in_forward(module, trained)))

    def choose(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        keep = operation in kept or str(operation) in kept
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    first, second = create_selective_checkpoint_contexts(choose)
    # the last to be entered is innermost: a gather of weights is no saved operation
    return first, _Anew(lambda: again(_as_in_forward(module, trained), second))


def as_now(
    stream: RandomStream | None, state: State | None = None
) -> Callable[..., AbstractContextManager]:
    """Remember the random states and settings (`state.forward`) of the running forward. Return a function (*contexts)
    that makes a context for a recomputation: until its exit both are restored, and `contexts` are entered.

    Args:
        stream: random stream of dropout masks, or None; generators of `get_cuda_rng_tracker` are always remembered.
        state: state of the schedule; None remembers only random states.
    """
    tracker, position = get_cuda_rng_tracker(), None
    if stream is not None and (stream.is_open or stream.again):  # else torch restores its generator
        position = stream.position()
    forked = dict(tracker.states)
    forward = state and state.forward
    reading = state.recomputing() if state is not None else nullcontext

    @contextmanager
    def again(*within: AbstractContextManager) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(tracker.at(forked))
            if stream is not None and position is not None:
                stack.enter_context(stream.at(*position))
            if state is not None and forward is not None:
                stack.enter_context(state.within(forward))
                stack.enter_context(reading())
            for context in within:
                stack.enter_context(context)
            yield

    return again


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = True,
    stream: RandomStream | None = None,
    **kwargs: Any,
) -> Any:
    """Run a function and recompute its activations in the backward, as torch.utils.checkpoint.checkpoint does.

    The recomputation draws the same numbers from forked generators (`get_cuda_rng_tracker`) and from a
    schedule's random stream.

    Args:
        function: function to recompute.
        *args: positional arguments of the function.
        use_reentrant: as in torch.
        stream: `schedule.state.random` of the schedule whose modules `function` calls, or None.
        **kwargs: arguments of torch's checkpoint and, without `use_reentrant`, of the function.
    """
    again, ran = as_now(stream), []

    def as_then(*inputs: Any, **named: Any) -> Any:
        with again() if ran else nullcontext():
            ran.append(True)
            return function(*inputs, **named)

    return recompute.checkpoint(as_then, *args, use_reentrant=use_reentrant, **kwargs)
