"""sync: insert one collective at the input, the output or the gradient of a module."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from slapo_zoo.errors import ScheduleError
from slapo_zoo.language.directive import Directive, Site, primitive
from slapo_zoo.language.primitives.bias_after_sum import output_of, sum_before_bias

MODES = ("fwd_pre", "fwd_post", "bwd_post")
OLDER = {"forward": "fwd_post", "backward": "bwd_post"}  # names of the first release of Slapo
SyncOp = Callable[[Tensor, "Sync", Site], Any]
SYNC_OPS: dict[str, tuple[tuple[str, ...], SyncOp]] = {}


def sync_op(name: str, *modes: str) -> Callable[[SyncOp], SyncOp]:
    """Return a decorator that registers a function as `name`: `sync(mode, name)`, with a mode of `modes` such as
    "fwd_post", then calls it with (tensor, Sync directive, Site of the module) and uses the tensor that it returns.
    """

    def register(op: SyncOp) -> SyncOp:
        if name in SYNC_OPS:
            hint = "choose another name"
            raise ScheduleError("sync op", name, "the name is already registered", hint)
        SYNC_OPS[name] = (modes, op)
        return op

    return register


def require_divisible(x: Tensor, axis: int, sync: "Sync", site: Site) -> None:
    """Raise ScheduleError, before anything is sent, unless the length of `axis` of `x` is a multiple of the
    mesh dim's size. `sync` is the directive, which has the mesh dim and makes the error.
    """
    n = site.mesh.size(sync.mesh_dim)
    if not -x.ndim <= axis < x.ndim:
        problem = f"found axis {axis} for a tensor of shape {tuple(x.shape)}"
        raise sync.fail(site, problem, f"choose an axis from {-x.ndim} to {x.ndim - 1}")
    if x.shape[axis] % n:
        problem = f"axis {axis} of a tensor of shape {tuple(x.shape)} is not a multiple of {sync.mesh_dim}={n}"
        raise sync.fail(site, problem, f"pad the axis, or choose another {sync.mesh_dim}")


OF_COLUMNS = ("vocab_logits", "join_columns")  # need a sharded weight, for the global size
SUMS = ("all_reduce", "all_reduce_twice", "reduce_scatter")


def _first(values: list[Any]) -> int:
    """Return the index of the first floating-point tensor in `values`, else of the first tensor; -1 without tensors."""
    found = [i for i, x in enumerate(values) if isinstance(x, Tensor)]
    real = (i for i in found if values[i].dtype.is_floating_point or values[i].dtype.is_complex)
    return next(real, found[0] if found else -1)


def first_tensor(op: Callable[[Tensor], Tensor], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Apply `op` to the first floating-point tensor among the arguments, else to the first tensor; return (args, kwargs)
    with all others unchanged. Tuples, lists and dicts are searched if no argument is a tensor.
    """
    values = [*args, *kwargs.values()]
    if (i := _first(values)) < 0:
        return _in_tree(op, (args, kwargs)) or (args, kwargs)
    values[i] = op(values[i])
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))


def _in_tree(op: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return the containers `tree` with `op` applied to the first float (else first) tensor; None without a tensor."""
    leaves, spec = tree_flatten(tree)
    if (i := _first(leaves)) < 0:
        return None
    leaves[i] = op(leaves[i])
    return tree_unflatten(leaves, spec)


def tensors_alike(op: Callable[[Tensor], Tensor], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Apply `op` to the first tensor argument and to each 3-D one with the same first two sizes (a residual [B, S, D]).

    Returns (args, kwargs) with all other values unchanged.
    """
    first = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
    shape = None if first is None else first.shape[:2]

    def each(value: Any) -> Any:
        alike = isinstance(value, Tensor) and value.ndim == 3 and value.shape[:2] == shape
        return op(value) if value is first or alike else value

    return tuple(map(each, args)), {name: each(value) for name, value in kwargs.items()}


@primitive("sync")
@dataclass(frozen=True)
class Sync(Directive):
    """Insert a collective before the forward, after it, or after the backward of a module.

    rewrite:  fwd_post: y --> op(y);  fwd_pre: x --> op(x);  bwd_post: dx --> op(dx)
              A row-parallel Linear, Conv1D or convolution adds its bias once, after the collective.
              Nine reshards, e.g. "RR->RS" (the last axis, replicated, becomes sharded): see `sync_reshard`
    errors:   unknown mode or op; an op that cannot run in that mode; a sum of outputs that are no partial
              sums (they are unsharded, or have other columns on each rank); another op on partial sums
    source:   Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3

    Args:
        mode: "fwd_pre", "fwd_post" or "bwd_post". Older names are "forward" (fwd_post), "backward" (bwd_post) and
            "both", which inserts the same op in both.
        sync_op_or_fn: a registered name (None: "all_reduce"), or a function (which cannot be written as JSON) that
            becomes torch's hook: forward pre-hook, forward hook or full backward hook, by `mode`.
        axis: the tensor axis that is gathered or scattered.
        tensor_parallel_output_grad: for all_gather and reshards to RR: True if dy is a partial sum on each rank, which
            is to be summed (None: True for all_gather, False for a reshard).
        shared: True if siblings that take the same x (q, k, v) use one collective for it.
        sequence_axis: axis of the tokens, along which an all_reduce becomes an all-gather or reduce-scatter with
            sequence parallelism; None: it always stays an all-reduce.
        mesh_dim: name of the mesh dim whose ranks take part in the collective.
    """

    mode: str
    sync_op_or_fn: Any = None
    axis: int = -1
    tensor_parallel_output_grad: bool | None = None
    shared: bool = False
    sequence_axis: int | None = None
    mesh_dim: str = "tp"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mode", OLDER.get(self.mode, self.mode))
        if self.sync_op_or_fn is None:  # explicit, so that the history shows it
            object.__setattr__(self, "sync_op_or_fn", "all_reduce")

    def _halves(self) -> "list[Sync]":
        return [replace(self, mode=mode) for mode in OLDER.values()] if self.mode == "both" else []

    def check(self, site: Site) -> None:
        if self.mode == "both":
            for half in self._halves():
                half.check(site)
            return
        if self.mode not in MODES:
            problem = f"found mode {self.mode!r}, expected one of {MODES}"
            hint = "choose what the collective changes (fwd_pre: inputs, fwd_post: outputs, bwd_post: gradients)"
            raise self.fail(site, problem, hint)
        if callable(self.sync_op_or_fn):
            return
        if self.sync_op_or_fn not in SYNC_OPS:
            hint = f"choose one of the registered: {sorted(SYNC_OPS)}"
            raise self.fail(site, f"no sync op {self.sync_op_or_fn!r}", hint)
        self._check_op(site, self.sync_op_or_fn)

    def _check_op(self, site: Site, op: str) -> None:
        modes, _ = SYNC_OPS[op]
        if self.mode not in modes:
            problem = f"{op!r} cannot run in mode {self.mode!r}"
            hint = f"pass one of the modes {modes}"
            if "->" in op:  # a gradient must keep the shape of its input
                hint += f"; mode fwd_pre with {'->'.join(op.split('->')[::-1])!r} does this to the gradient"
            raise self.fail(site, problem, hint)
        if op in OF_COLUMNS and site.placed("weight") is None:
            hint = 'call shard("weight", 0, pad=True) first'
            raise self.fail(site, f"the module's weight is not sharded, as {op!r} needs", hint)
        if op in SUMS and self._sum in site.state.applied.get(site.path, ()):
            problem = f"an earlier sync() sums here already: a second sum multiplies by the size of {self.mesh_dim}"
            raise self.fail(site, problem, "remove one of the two sync() directives")
        if self.mode == "fwd_post" and self._is_first(site):
            self._check_output(site, op)

    @property
    def _sum(self) -> str:
        return f"{self.mode} {self.sync_op_or_fn} {self.mesh_dim}"

    def _is_first(self, site: Site) -> bool:
        return "fwd_post" not in site.state.applied.get(site.path, ())

    def _check_output(self, site: Site, op: str) -> None:
        """Raise ScheduleError if the collective `op` does not fit the module's output, e.g. a sum of unsharded outputs."""
        kind = output_of(site)
        if kind == "whole" and op in SUMS and site.mesh.size(self.mesh_dim) > 1:
            times = site.mesh.size(self.mesh_dim)
            problem = f"the module has no sharded parameter: the sum is {times} times its output"
            hint = 'call shard("weight", ...) along the inputs first, or leave sync() out'
            raise self.fail(site, problem, hint)
        if kind == "partial" and op not in SUMS:
            hint = f"use one of {SUMS}; a second sync() may follow with another collective"
            problem = f"each rank holds a partial sum of the output, which {op!r} would not add up"
            raise self.fail(site, problem, hint)
        if kind == "divided" and (op in SUMS or op.startswith("RR->")):
            hint = 'use all_gather, or a reshard of sharded columns (RS), e.g. "RS->RR"'
            problem = f"each rank holds different columns of the output, which do not fit {op!r}"
            raise self.fail(site, problem, hint)
        whole_bias = site.tensor("bias") is not None and site.placed("bias") is None
        is_summed = op in SUMS and site.mesh.size(self.mesh_dim) > 1
        if kind == "" and is_summed and whole_bias and site.placed("weight"):
            problem = f"the unsharded bias of this {type(site.module).__name__} would be summed over the ranks too"
            hint = "sync() this module without its bias, and add the bias in the forward of the parent module"
            raise self.fail(site, problem, hint)
        if kind == "partial" and op != "reduce_scatter" and site.placed("bias") and is_summed:
            hint = "leave the bias unsharded: it is added once, after the sum"
            raise self.fail(site, "the bias is sharded, but the output is not", hint)
        if kind == "partial" and op == "reduce_scatter" and self.axis == -1 and whole_bias:
            hint = 'call shard("bias", 0) first, or scatter along another axis'
            problem = "the bias is unsharded, but the collective shards the output"
            raise self.fail(site, problem, hint)

    def apply(self, site: Site) -> None:
        if self.mode == "both":
            for half in self._halves():
                half.apply(site)
            return
        if self.sync_op_or_fn == "divide_tokens":
            site.state.sequence_parallel = True
        if callable(self.sync_op_or_fn):
            self._hook(site.module, self.sync_op_or_fn)
        elif site.mesh.size(self.mesh_dim) > 1:
            self._insert(site, SYNC_OPS[self.sync_op_or_fn][1])
        site.state.applied.setdefault(site.path, set()).update((self.mode, self._sum))

    def _hook(self, module: nn.Module, fn: Callable) -> None:
        register = {
            "fwd_pre": module.register_forward_pre_hook,
            "fwd_post": module.register_forward_hook,
            "bwd_post": module.register_full_backward_hook,
        }
        register[self.mode](fn)

    def _insert(self, site: Site, op: SyncOp) -> None:
        def run(x: Tensor) -> Tensor:
            return op(x, self, site)

        if self.mode == "fwd_post":
            if not self._before_bias(site, run):
                site.module.register_forward_hook(lambda _m, _a, y: self._after(site, run, y))
            return
        enter = self._once_per_input(site, run) if self.shared else run
        takes = tensors_alike if self.sync_op_or_fn == "join_tokens" else first_tensor
        site.module.register_forward_pre_hook(
            lambda _m, args, kwargs: takes(enter, args, kwargs), with_kwargs=True
        )

    def _after(self, site: Site, run: Callable[[Tensor], Tensor], y: Any) -> Any:
        """Return the module's output `y` after the collective `run`, applied to the first float tensor of a tuple, list or dict."""
        if (found := _in_tree(run, y)) is None:
            problem = f"found no tensor in the module's output, a {type(y).__name__}"
            hint = "call sync() on the module inside that returns the tensor, or return a tuple or dict"
            raise self.fail(site, problem, hint)
        return found

    def _once_per_input(self, site: Site, run: Callable[[Tensor], Tensor]) -> Callable:
        """Return a function x --> `run(x)` (the collective) that sibling modules share: for the same tensor x, `run` is
        called once and its result reused. Results are dropped when the forward of the parent begins and ends.
        """
        parent = site.path.rpartition(".")[0]
        while isinstance(site.state.modules[parent], nn.ModuleList | nn.ModuleDict) and parent:
            parent = parent.rpartition(".")[0]  # a container is never called
        key = (parent, self)
        if key not in site.state.shared:
            results = site.state.shared[key] = []
            module = site.state.modules[parent]
            module.register_forward_pre_hook(lambda *_: results.clear())  # left by a failed forward
            module.register_forward_hook(lambda *_: results.clear())
        results = site.state.shared[key]

        def enter(x: Tensor) -> Tensor:
            for given, y in results:  # by identity, which compilers support
                if given is x and y.requires_grad == x.requires_grad:
                    return y
            results.append((x, y := run(x)))
            return y

        return enter

    def _before_bias(self, site: Site, run: Callable[[Tensor], Tensor]) -> bool:
        """Insert the collective `run` before a row-parallel module adds its bias, and return True; return False if
        there is no bias, an earlier sync() changes the output, or the module is no Linear, Conv1D or convolution.
        """
        partial = site.tensor("bias") is not None and output_of(site) == "partial"
        if not partial or not self._is_first(site):  # an earlier op has added the bias
            return False
        return sum_before_bias(site.module, run)
