"""Which collectives a schedule's directives cause, and how large they are, seen from a rehearsal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from slapo_zoo.directive import Directive
from slapo_zoo.primitives import ExpertParallel, Sync, SyncBatchNorm
from slapo_zoo.schedule import Schedule


class Transfer(NamedTuple):
    """One collective of one rank; `bytes` are those of the whole tensor that it makes or sums."""

    kind: str
    mesh_dim: str
    phase: str
    bytes: int


Note = Callable[[Transfer], None]
BOTH = ("forward", "backward")
# op, mode --> (kind, phase, whether of the module's input or output) of each collective
PLAIN = {
    ("all_reduce", "fwd_post"): (("all_reduce", "forward", "output"),),
    ("all_reduce", "bwd_post"): (("all_reduce", "backward", "input"),),
    ("all_reduce_twice", "fwd_post"): (("all_reduce", "forward", "output"), ("all_reduce", "backward", "output")),
    ("reduce_scatter", "fwd_post"): (("reduce_scatter", "forward", "output"), ("all_gather", "backward", "output")),
    ("all_gather", "fwd_post"): (("all_gather", "forward", "output"), ("reduce_scatter", "backward", "output")),
    ("all_gather", "fwd_pre"): (("all_gather", "forward", "input"), ("reduce_scatter", "backward", "input")),
    ("vocab_logits", "fwd_post"): (("all_reduce", "forward", "rows"),) * 2,  # maximum; sum with the target's logit
}  # fmt: skip
# the same while tokens are divided, where the op has an axis of tokens
DIVIDED = {
    ("all_reduce", "fwd_post"): (("reduce_scatter", "forward", "output"), ("all_gather", "backward", "output")),
    ("all_reduce", "bwd_post"): (("all_gather", "forward", "input"), ("reduce_scatter", "backward", "input")),
    ("divide_tokens", "fwd_pre"): (("all_gather", "backward", "input"),),
    ("divide_tokens", "fwd_post"): (("all_gather", "backward", "output"),),
    ("join_tokens", "fwd_pre"): (("all_gather", "forward", "input"),),
    ("join_tokens", "fwd_post"): (("all_gather", "forward", "output"),),
}  # fmt: skip


def _of_sync(sync: Sync, sizes: dict[str, int], divided: bool) -> Iterator[Transfer]:
    key = (sync.sync_op_or_fn, sync.mode)
    about_tokens = sync.sequence_axis is not None or str(key[0]).endswith("_tokens")
    table = DIVIDED if divided and about_tokens else PLAIN
    for kind, phase, of in table.get(key, ()):
        yield Transfer(kind, sync.mesh_dim, phase, sizes[of])


def _of(directive: Directive, sizes: dict[str, int], divided: bool) -> Iterator[Transfer]:
    """The collectives of one call of a module."""
    if isinstance(directive, Sync):
        yield from _of_sync(directive, sizes, divided)
    elif isinstance(directive, ExpertParallel):
        yield Transfer("all_reduce", directive.mesh_dim, "forward", sizes["output"])
        yield Transfer("all_reduce", directive.mesh_dim, "backward", sizes["input"])
        yield Transfer("all_reduce", directive.mesh_dim, "backward", sizes["last"])
    elif isinstance(directive, SyncBatchNorm):
        for kind, phase in zip(("all_gather", "all_reduce"), BOTH, strict=True):
            yield Transfer(kind, directive.mesh_dim, phase, sizes["channels"])


@contextmanager
def transfers(schedule: Schedule, note: Note) -> Iterator[None]:
    """Report the collectives of every call of a module while the rehearsing model runs."""
    hooks, seen = [], {}
    for pattern, directive in schedule.history:
        mesh_dim = getattr(directive, "mesh_dim", "tp")
        if schedule.mesh.size(mesh_dim) == 1:
            continue
        for path in schedule[pattern].paths:
            module: Any = schedule.state.modules[path]
            hook = _hook(schedule, path, directive, seen, note)
            hooks.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _hook(
    schedule: Schedule, path: str, directive: Directive, seen: dict, note: Note
) -> Callable[..., None]:
    parent = path.rpartition(".")[0]

    def after(module: Any, args: tuple, kwargs: dict, output: Any) -> None:
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        if not inputs or not outputs:
            return
        if isinstance(directive, Sync) and directive.shared:
            if (key := (parent, id(inputs[0]))) in seen:
                return
            seen[key] = inputs[0]  # alive, so that no other tensor gets its id
        x, y = inputs[0], outputs[0]
        sizes = {
            "input": x.nbytes, "output": y.nbytes, "last": inputs[-1].nbytes,
            "rows": 4 * (y.numel() // max(y.shape[-1], 1)) if y.ndim else 0,
            "channels": 4 * (2 * y.shape[1] + 1) if y.ndim > 1 else 0,
        }  # fmt: skip
        for transfer in _of(directive, sizes, schedule.state.tokens_divided):
            note(transfer)

    return after
