"""ZeRO: parameters, gradients and optimizer states sharded over dp, on plain local tensors.

rewrite:  p [O, I]  -->  p [ceil(O/n), I] on each of n ranks; modules read all_gather(p) while a step runs

The all-gather is differentiable: its backward reduce-scatters gradients over dp. An optimizer over
`model.parameters()` therefore keeps states for this rank's rows alone. Source: arXiv:1910.02054.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.errors import MeshError
from slapo_zoo.hf.models import stays_wide
from slapo_zoo.model.dp.data_parallel import DataParallel, use_engine
from slapo_zoo.model.dp.gathered import Group, Shards
from slapo_zoo.model.dp.whole_blocks import Blocks
from slapo_zoo.parallel import gradient_buckets
from slapo_zoo.parallel.local_tensors import is_divided
from slapo_zoo.parallel.mesh import Mesh


class Sharded(DataParallel):
    """Data parallelism by ZeRO: each group of `dp_shard` dp ranks shards parameters and gradients by rows (axis 0).

    The backward reduce-scatters gradients within a group; at the end of a step ranks with the same rows, one of each
    group, all-reduce them.
    """

    def __init__(self, shards: Shards, groups: list[Group], blocks: Blocks):
        self.shards, self.groups, self.blocks = shards, groups, blocks

    def reads(
        self, model: nn.Module, dtype: torch.dtype | None, in_own_loop: bool
    ) -> Iterator[tuple[nn.Module, str, Tensor]]:
        """All-gather parameters before a forward: in ZeRO stage 3 those outside the transformer blocks (embeddings,
        head), else all; then yield (module, attribute, gathered parameter) for each.

        `dtype` is the compute dtype, None for the parameters'. With `in_own_loop` the user's loop, not `train_step`,
        runs the backward, which then averages over dp. MeshError if parameters were replaced since the load.
        """
        self.shards.averages = in_own_loop
        self.blocks.forget()  # left by a failed backward, or by one of a block called alone
        whole: dict[int, Tensor] = {}
        for group in self.groups:
            made = group.traced(group.dtype_of(dtype))
            whole.update({id(p): x for p, x in zip(group.parameters, made, strict=True)})
        held = {(module, name): p for module, name, p in _parameters_of(model)}
        read = {place: p for place, p in held.items() if id(p) in whole}
        replaced = len(set(map(id, read.values()))) < len(whole) or any(
            held.get((module, name)) is not block.groups[i].parameters[j]
            for block in self.blocks.at.values()
            for module, name, (i, j) in block.places
        )
        if replaced:
            problem = "the parameters or a block were replaced since the load; the new ones are not sharded here"  # fmt: skip
            hint = "copy values into the parameters (p.data.copy_); functional_call and assign=True replace them"
            raise MeshError("forward", "the parameters of a model with dp_shard=", problem, hint)
        yield from ((*place, whole[id(p)]) for place, p in read.items())

    def new_gradients(self, parameters: list[nn.Parameter]) -> Any:
        """Drop sums that a failed step left; return a context that sets `.grad` to None and adds the old `.grad` at exit."""
        for group in self.groups:
            group.sums = [None] * len(group.sums)
        return super().new_gradients(parameters)

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Context for forward and backward of a micro-batch; in ZeRO stage 1 the end of the last one reduces gradients."""
        with super().micro_batch(is_last):
            yield
        if is_last:
            self._sum_waiting()

    def pipeline_step(self, *args: Any) -> Tensor:
        """Run all micro-batches as `DataParallel.pipeline_step` does, with its arguments and result: this rank's share
        of the loss. In ZeRO stage 1 then reduce-scatter the gradients over dp.
        """
        loss = super().pipeline_step(*args)
        self._sum_waiting()
        return loss

    def _sum_waiting(self) -> None:
        for group in self.groups if self.shards.stage == 1 else ():
            group.sum_waiting()

    def own_backward_ended(self, parameters: list[nn.Parameter], mesh: Mesh, paused: bool) -> None:
        """Complete a backward in the user's own loop (without `train_step`).

        The gathered parameters of blocks are released, and gradients that ZeRO does not shard (of adapters) averaged
        over dp, unless `paused`: True within `model.no_sync()`.
        """
        self.blocks.forget()
        rest = [] if paused else [p for p in parameters if not is_divided(p)]
        gradient_buckets.all_reduce_gradients(
            rest, mesh.group("loss") if rest else None, 1 / mesh.size("loss")
        )

    def sum_over_dp(self, parameters: list[nn.Parameter], mesh: Mesh) -> None:
        """Sum gradients after a step: shards over the dp ranks with the same parameter rows, others over all of dp."""
        gradient_buckets.all_reduce_gradients(filter(is_divided, parameters), self.shards.copies)
        rest = [p for p in parameters if not is_divided(p)]
        gradient_buckets.all_reduce_gradients(rest, mesh.group("loss") if rest else None)

    def tensors(self, model: Any, grads: bool = False) -> dict[str, Tensor]:
        """Return {name: tensor, gathered over dp} of this rank's parameters and buffers; with `grads`, the gradients."""
        found = super().tensors(model, grads)
        named = dict(model.named_parameters(remove_duplicate=False))
        whole: dict[int, Tensor] = {}
        for name, p in named.items():
            if id(p) not in whole:
                shape = model._slapo.plan.local_shape(name) if is_divided(p) else p.shape
                whole[id(p)] = self.whole_of(found[name].detach(), p, shape)
        return {n: whole[id(named[n])] if n in named else x for n, x in found.items()}

    def whole_of(self, value: Any, p: Any, shape: tuple[int, ...]) -> Any:
        """Return `value` gathered over dp by a collective: this rank's rows of `p`, of its gradient or of an optimizer
        state. `shape` is the shape of `p` before ZeRO. A `value` that ZeRO does not shard is only cloned.
        """
        if not (is_divided(p) and isinstance(value, Tensor) and value.shape == p.shape):
            return value.clone() if isinstance(value, Tensor) else value
        (found,) = self.shards.gather([value.detach()], [shape], value.dtype)
        is_padded = found.untyped_storage().nbytes() > found.nbytes
        return found.clone() if is_padded else found  # a padded buffer would stay alive as a whole

    def sends(self, mesh: Mesh) -> bool:
        """Return True on the dp ranks 0 to dp_shard - 1: the one replica that sends its tensors in `stream_weights`."""
        return mesh.coord("loss") < self.shards.size

    def kept(self, model: Any) -> dict[str, Tensor]:
        """Return {name: tensor to write to a checkpoint}: this dp rank's rows of each parameter, and whole buffers."""
        return super().tensors(model)


def shard_over_dp(model: Any, blocks: Sequence[str], shards: Shards) -> None:
    """Apply ZeRO to a model: each parameter keeps this rank's rows (a slice of axis 0), and modules read gathered ones.

    Args:
        model: a scheduled model whose weights are filled.
        blocks: paths of the transformer blocks; the parameters of each are gathered together.
        shards: process groups of the ranks over which rows are sharded, and the ZeRO stage.
    """
    runtime = model._slapo
    computes = runtime.precision.dtype
    wide = {name for path, module in model.named_modules() if computes is not None
            for name in (f"{path}.{leaf}" for leaf in module._parameters)
            if stays_wide(model, name, module, computes)}  # fmt: skip
    units: dict[str, dict[Any, list[tuple[nn.Parameter, tuple[int, ...]]]]] = {}
    parts: dict[int, nn.Parameter] = {}
    block_of = _block_of(model, blocks)
    for name, p in list(model.named_parameters()):
        if p.ndim == 0:
            continue
        part: Any = p
        if not is_divided(p):  # else the load has filled only this rank's rows
            part = nn.Parameter(shards.part(p.detach()), p.requires_grad)
            part.__dict__.update({k: v for k, v in p.__dict__.items() if k[0] != "_"})
            shards.note(part, p.shape)
        parts[id(p)] = part
        unit = block_of.get(id(p)) or name.rpartition(".")[0]
        kind = p.dtype, p.requires_grad, name in wide
        units.setdefault(unit, {}).setdefault(kind, []).append(
            (part, runtime.plan.local_shape(name))
        )
    for module, name, p in _parameters_of(model):
        module._parameters[name] = parts.get(id(p), p)
    _refuse_calls_outside(model, blocks)
    groups = {unit: [Group(shards, held, kind[2]) for kind, held in kinds.items()]
              for unit, kinds in units.items()}  # fmt: skip
    alone = Blocks(computes, runtime.schedule.state.keeps)
    for position, path in enumerate(blocks if shards.stage == 3 else ()):
        if path in groups:
            block, held = model.get_submodule(path), groups.pop(path)
            alone.add(block, held, _places(block, held), position)
    engine = Sharded(shards, [group for held in groups.values() for group in held], alone)
    use_engine(model, engine)
    runtime.precision.reads, runtime.precision.blocks = engine.reads, alone


def _parameters_of(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Return [(module, attribute, parameter)] of a model; a tied parameter appears once for each module that holds it."""
    return [
        (m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None
    ]


def _refuse_calls_outside(model: nn.Module, blocks: Sequence[str]) -> None:
    """Hook each module that neither is nor contains a transformer block (`blocks` are paths), so that a call of the module
    outside the model's or a block's forward raises MeshError if the module's weights are shards.
    """
    gather = {path.rsplit(".", i)[0] for path in blocks for i in range(path.count(".") + 1)} | {""}
    for path, module in model.named_modules():
        if path not in gather:
            module.register_forward_pre_hook(_require_whole)


def _require_whole(module: nn.Module, _args: Any) -> None:
    """Raise MeshError if `module` is called outside the model's forward and has sharded weights; a forward pre-hook."""
    for m, name, p in _parameters_of(module):
        if is_divided(p):
            if name in m.__dict__:
                return
            problem = f"{type(module).__name__} is called outside the model's forward, and this rank holds only some rows of its weights"
            hint = "call the model or a whole block, which gather them, or load the model without dp_shard="
            raise MeshError("forward", "a module of a model with dp_shard=", problem, hint)


def _block_of(model: nn.Module, blocks: Sequence[str]) -> dict[int, str]:
    """Return {id of a parameter: path of its block, or "" outside of blocks}, without parameters that blocks share."""
    found: dict[int, set[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        block = next((b for b in blocks if name.startswith(f"{b}.")), "")
        found.setdefault(id(p), set()).add(block)
    return {key: next(iter(paths)) for key, paths in found.items() if len(paths) == 1}


def _places(block: nn.Module, groups: Sequence[Group]) -> list[tuple[nn.Module, str, Any]]:
    """Return (module, attribute, (i, j)) of each parameter of a block: it is number j of those in `groups[i]`."""
    at = {id(p): (i, j) for i, group in enumerate(groups) for j, p in enumerate(group.parameters)}
    return [(module, name, at[id(p)]) for module in block.modules()
            for name, p in module._parameters.items() if id(p) in at]  # fmt: skip


def check_dp_shard(
    mesh: Mesh, size: int, stage: int, target: Any = None, options: Any = None
) -> None:
    """Raise MeshError if `dp_shard=` is no divisor of dp or used with an engine, or `zero_stage=` without `dp_shard=`.

    `size` is `dp_shard=`, `stage` is `zero_stage=`; `target` and `options` (`target_options=`) choose an engine.
    """
    if size == 1:
        if stage != 3:  # the default
            problem = "with dp_shard=1 (the default) nothing is sharded over dp"
            hint = "also pass dp_shard=, a divisor of dp"
            raise MeshError("from_pretrained", f"zero_stage={stage}", problem, hint)
        return
    if (ranks := mesh.size("loss")) % size:
        near = min((n for n in range(1, ranks + 1) if ranks % n == 0), key=lambda n: abs(n - size))
        problem = f"found {size}, which does not divide {mesh.named('loss')}={ranks}"
        hint = f"pass a divisor; the nearest is {near}"
        raise MeshError("from_pretrained", f"dp_shard={size}", problem, hint)
    if target not in (None, "torch") or options:
        problem = "with target= or target_options= the engine shards parameters itself"
        hint = "leave out dp_shard=, or leave out target= and target_options="
        raise MeshError("from_pretrained", f"dp_shard={size}", problem, hint)
