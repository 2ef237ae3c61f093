"""shard: keep this rank's shard of a parameter or buffer."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.errors import ScheduleError
from slapo_zoo.language.directive import Directive, Placed, Site, primitive
from slapo_zoo.parallel import collectives
from slapo_zoo.parallel.local_tensors import local_part, require_indices
from slapo_zoo.parallel.placement import Placement, Run


@dataclass(frozen=True)
class ShardRule:
    """Rule for a module class: which attributes change when one of its tensors is sharded along an axis.

    Args:
        sizes: tensor name -> {axis: name of the module's attribute that holds the size of that axis}.
        divided: called after sharding with (Site of the module, tensor name, the `shard` directive, index ranges of
            the axis that this rank holds); may replace the module's forward; None: nothing more to do.
    """

    sizes: dict[str, dict[int, str]]
    divided: Callable[[Site, str, "Shard", list[Run]], None] | None = None


def _divide_groups(site: Site, param_name: str, directive: "Shard", _runs: list[Run]) -> None:
    """Set the groups of a GroupNorm or convolution to this rank's number if `directive` shards its weight's axis 0."""
    module: Any = site.module
    applied = site.state.applied[site.path]
    name, groups = _groups(module)
    if directive.axis == 0 and param_name == "weight" and groups and name not in applied:
        whole, local = site.state.placed[site.name(param_name)].shape[0], len(module.weight)
        setattr(module, name, groups * local // whole)
        applied.add(name)
        if name == "groups" and not isinstance(module, nn.modules.conv._ConvTransposeNd):
            module.in_channels = module.groups * module.weight.shape[1]


def _groups(module: Any) -> tuple[str, int]:
    """Return (name of the attribute with the number of channel groups, that number); a convolution of one group returns 0."""
    if isinstance(module, nn.GroupNorm):
        return "num_groups", module.num_groups
    groups = module.groups if isinstance(module, nn.modules.conv._ConvNd) else 1
    return "groups", groups if groups > 1 else 0


SHARD_RULES: dict[str, ShardRule] = {
    "Linear": ShardRule({"weight": {0: "out_features", 1: "in_features"}}),
    "Conv1D": ShardRule({"weight": {0: "nx", 1: "nf"}}),
    "LayerNorm": ShardRule({"weight": {0: "normalized_shape"}}),
    "RMSNorm": ShardRule({"weight": {0: "normalized_shape"}}),
    "_NormBase": ShardRule({"weight": {0: "num_features"}}),  # of BatchNorm and InstanceNorm
    "GroupNorm": ShardRule({"weight": {0: "num_channels"}}, _divide_groups),
    "_ConvTransposeNd": ShardRule({"weight": {0: "in_channels"}}, _divide_groups),
    "_ConvNd": ShardRule({"weight": {0: "out_channels", 1: "in_channels"}}, _divide_groups),
}


def register_shard_rule(class_name: str, rule: ShardRule) -> ShardRule:
    """Register and return the rule by which `shard` adapts the attributes of modules whose class is `class_name`."""
    SHARD_RULES[class_name] = rule
    return rule


def shard_rule(
    divided: Callable[[Site, str, "Shard", list[Run]], None] | None = None, **sizes: dict[int, str]
) -> Callable[[type], type]:
    """Return a decorator that registers a shard rule for a module class: `@shard_rule(weight={0: "out_features"})`.

    Args:
        divided: called after sharding with (Site of the module, tensor name, the `shard` directive, index ranges of
            the axis that this rank holds); may replace the module's forward; None: nothing more to do.
        **sizes: tensor name = {axis: name of the module's attribute that holds the size of that axis}.
    """

    def register(cls: type) -> type:
        register_shard_rule(cls.__name__, ShardRule(sizes, divided))
        return cls

    return register


@primitive("shard")
@dataclass(frozen=True)
class Shard(Directive):
    """Shard `param_name` along `axis` over `mesh_dim`; n is the size of that mesh dim, r this rank's coordinate.

    rewrite:  w [O, I]  -->  w_r [O/n, I] = w[r*O/n : (r+1)*O/n]    (here axis=0)
    errors:   no such tensor; axis out of range; sharded before; fewer units than ranks; an
              uneven split that neither `unit`, `uneven` nor `pad` allows
    source:   Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3

    Args:
        param_name: name of a parameter or buffer of the module.
        axis: axis of that tensor along which it is sharded.
        groups: sizes of groups along the axis, each sharded by itself (q|k|v of a fused projection).
        unit: number of consecutive indices that always stay on one rank (head_dim); if > 1, ranks
            may differ by one unit.
        uneven: allow ranks to differ by one index where `unit` is 1.
        pad: give every rank the same length, zeros beyond the end (vocabularies).
        replicate: several ranks hold the same unit when there are fewer units than ranks (KV heads).
        together: number of units (query heads) that share a KV head and stay on one rank if they can.
        shared: number of outputs at the end that all ranks use (k and v of the only KV head): each rank
            computes a part; all are gathered after the forward of a Linear, and their gradient is summed.
        mesh_dim: name of the mesh dim that the tensor is sharded over.
    """

    param_name: str
    axis: int
    groups: tuple[int, ...] = ()
    unit: int = 1
    uneven: bool = False
    pad: bool = False
    replicate: bool = False
    together: int = 1
    shared: int = 0
    mesh_dim: str = "tp"

    @property
    def placement(self) -> Placement:
        """Return the tensor's Placement after this directive: the axis, and which indices of it each rank holds."""
        return Placement(
            self.axis,
            self.mesh_dim,
            self.groups,
            self.unit,
            self.pad,
            self.replicate,
            self.together,
            self.shared,
        )

    def check(self, site: Site) -> None:
        tensor = site.tensor(self.param_name)
        if tensor is None:
            has = ", ".join(site.tensor_names()) or "none"
            hint = f"choose one of: {has}"
            raise self.fail(site, f"no parameter or buffer {self.param_name!r}", hint)
        if earlier := site.placed(self.param_name):
            if self._same_through_a_tie(site, earlier):
                return
            hint = "remove one of the two directives; tied parameters are sharded together"
            raise self.fail(site, f"the tensor is sharded already, by {earlier.directive}", hint)
        if site.mesh.size(self.mesh_dim) > 1 and (what := self._reads_all(site)):
            problem = f"{what} of this {type(site.module).__name__} needs the unsharded tensor"
            hint = f"leave {self.param_name!r} unsharded, or use another module; register gradient hooks after shard()"
            raise self.fail(site, problem, hint)
        if self.unit < 1 or self.together < 1 or self.shared < 0:
            problem = f"found unit={self.unit}, together={self.together}, shared={self.shared}"
            raise self.fail(site, problem, "pass counts: unit and together from 1, shared from 0")
        if not 0 <= self.axis < tensor.ndim:
            problem = f"found axis {self.axis}, expected 0..{tensor.ndim - 1}"
            raise self.fail(site, problem, f"choose an axis of the shape {tuple(tensor.shape)}")
        self._check_size(site, tensor.shape[self.axis])
        if self.shared and (self.axis != 0 or not isinstance(site.module, nn.Linear)):
            cls = type(site.module).__name__
            problem = f"found shared={self.shared} on axis {self.axis} of a {cls}"
            hint = "leave shared= out, or shard axis 0 of a Linear: shared= counts its last outputs"
            raise self.fail(site, problem, hint)

    def _reads_all(self, site: Site) -> str:
        """Return what in the module needs `self.param_name` unsharded, e.g. "the recurrence" (LSTM); '' if nothing."""
        module: Any = site.module
        parent: Any = site.state.modules.get(site.path.rpartition(".")[0], module)
        rows = self.axis == 0
        own, tensor = type(module).forward, site.tensor(self.param_name)
        is_embedding, attention = isinstance(module, nn.Embedding), nn.MultiheadAttention.forward
        reads = {
            "max_norm=": getattr(module, "max_norm", None) is not None,
            "scale_grad_by_freq=": rows and getattr(module, "scale_grad_by_freq", False),
            "the sum of rows": rows and isinstance(module, nn.EmbeddingBag),
            "the forward, which takes more than ids,": rows and is_embedding and len(signature(own).parameters) > 2,
            "the recurrence": isinstance(module, nn.RNNBase),
            "the attention": attention in (own, type(parent).forward),  # a parent of peft's is not listed
            "a gradient hook": tensor is not None and bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks),
        }  # fmt: skip
        return next((what for what, is_so in reads.items() if is_so), "")

    def _same_through_a_tie(self, site: Site, earlier: Placed) -> bool:
        """Return True if `earlier`, made at a module with the same tied tensor, shards it as this directive would."""
        by_hand = self.param_name in site.state.applied.get(site.path, set())
        return not by_hand and earlier.placement == self.placement

    def _check_size(self, site: Site, size: int) -> None:
        n, axis = site.mesh.size(self.mesh_dim), f"axis {self.axis} of {self.param_name!r}"
        if problem := self.placement.problem(size, n):
            legal = [m for m in range(1, n) if not self.placement.problem(size, m)]
            hint = f"choose among legal sizes of {self.mesh_dim}: {legal or [1]}"
            raise self.fail(site, f"{axis}: {problem}", hint)
        name, groups = _groups(site.module)
        if groups and not self.axis and name not in site.state.applied.get(site.path, ()):
            ends = {end for r in range(n) for run in self.placement.runs(size, n, r) for end in run}
            if any(end * groups % size for end in ends):
                problem = f"{groups} groups of {size // groups} channels cannot be sharded over {self.mesh_dim}={n} in whole groups"
                hint = f"pass unit={size // groups} to each shard() here, or choose a {self.mesh_dim} that divides {groups}"
                raise self.fail(site, f"{axis}: {problem}", hint)
        units = self.placement.units(size)
        lenient = self.uneven or self.pad or self.replicate or self.unit > 1
        if not lenient and any(count % n for count in units):
            of, pad = f"size {size}", " or pad=True (zeros at the end)"
            if self.shared:
                of = f"size {size} less the shared end of {self.shared}"
            elif len(units) > 1:
                of, pad = f"one of the groups {tuple(units)}", ""  # only one group can be padded
            problem = f"{axis}: {of} is not a multiple of mesh_dim {self.mesh_dim}={n}"
            hint = f"pass uneven=True (ranks differ by one index){pad}, or another {self.mesh_dim}"
            raise self.fail(site, problem, hint)

    def apply(self, site: Site) -> None:
        site.state.applied.setdefault(site.path, set()).add(self.param_name)
        old = site.tensor(self.param_name)
        if old is None or site.placed(self.param_name):
            self._adjust(site)  # sharded through a tie: only sizes are left to adjust
            return
        n, r = site.mesh.size(self.mesh_dim), site.mesh.coord(self.mesh_dim)
        names = [site.name(self.param_name)]
        shape = tuple(old.shape)
        part = local_part(old.detach(), self.placement, n, r)
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(part, old.requires_grad) if n > 1 else old
            names = site.state.set_parameter(old, new)
        else:
            site.module._buffers[self.param_name] = part
        for name in names:
            site.state.placed[name] = Placed(self.placement, self, shape)
        self._adjust(site)
        if self.shared and self.param_name == "weight" and n > 1:
            (run,) = Placement(0).runs(self.shared, n, r)
            site.module.register_forward_hook(lambda *call: self._joined(site, call[2], run))

    def _joined(self, site: Site, y: Tensor, run: Run) -> Tensor:
        """Gather the last `self.shared` features of a Linear's output y over ranks (k and v of the only KV head).

        y [..., own + len(run)] has features of this rank alone, then the shared ones in its range `run`; the result is
        [..., own + self.shared]. The backward sums the gradient of the shared features over ranks.
        """
        mine = run.stop - run.start
        own, end = y.split([y.shape[-1] - mine, mine], -1)
        end = nn.functional.pad(end, (run.start, self.shared - run.stop))
        group = site.group(self)
        end = collectives.reduce_backward(collectives.reduce_forward(end, group), group)
        return torch.cat([own, end], -1)

    def _adjust(self, site: Site) -> None:
        """Set the sharded axis's size attribute (e.g. `out_features`) and call `divided`, by the class's ShardRule."""
        rule = next((SHARD_RULES[c.__name__] for c in type(site.module).__mro__
                     if c.__name__ in SHARD_RULES), None)  # fmt: skip
        placed, tensor = site.placed(self.param_name), site.tensor(self.param_name)
        if rule is None or placed is None or tensor is None:
            return
        attribute = rule.sizes.get(self.param_name, {}).get(self.axis)
        if attribute is not None:
            size = tensor.shape[self.axis]
            old = getattr(site.module, attribute)
            setattr(site.module, attribute, (size,) if isinstance(old, tuple) else size)
        if rule.divided is not None:
            n, r = site.mesh.size(self.mesh_dim), site.mesh.coord(self.mesh_dim)
            runs = self.placement.runs(placed.shape[self.axis], n, r)
            rule.divided(site, self.param_name, self, runs)


class VocabParallelLookup:
    """Forward of an Embedding of `size` rows, of which this rank holds start to stop - 1.

    rewrite:  y = w[ids]  -->  y_r = w_r[ids - start] where start <= ids < stop, else 0
              (partial: the sum over ranks is y)
    errors:   an id outside of the unsharded vocabulary, as in nn.Embedding
    """

    def __init__(self, site: Site, module: nn.Embedding, size: int, start: int, stop: int):
        self.module, self.start, self.stop = module, start, stop
        self.size, self.what = size, f"{site.path}: ids"
        own: Any = type(module).forward
        self.own = None if own is nn.Embedding.forward else own  # Gemma's also scales

    def __call__(self, input: Tensor) -> Tensor:
        module = self.module
        if module.max_norm is not None or module.scale_grad_by_freq:
            problem = "max_norm= or scale_grad_by_freq= was set after the load, and a rank has only some rows"
            hint = "set it on the plain model before the load, or use tp=1"
            raise ScheduleError("forward", self.what, problem, hint)
        require_indices((input >= 0) & (input < self.size), self.what, self.size)
        outside = (input < self.start) | (input >= self.stop)
        ids = (input - self.start).masked_fill(outside, 0)
        index, module.padding_idx = module.padding_idx, None  # which is no row of this rank's
        try:
            y = self.own(module, ids) if self.own else nn.functional.embedding(ids, module.weight)
        finally:
            module.padding_idx = index
        # The padding row keeps its value but must not receive a gradient, as in nn.Embedding.
        y = y.masked_fill(outside[..., None], 0.0)
        return y if index is None else torch.where((input == index)[..., None], y.detach(), y)


def _divide_embedding(site: Site, param_name: str, directive: Shard, runs: list[Run]) -> None:
    if directive.axis != 0 or site.mesh.size(directive.mesh_dim) == 1:
        return
    start, stop = (runs[0].start, runs[0].stop) if runs else (0, 0)
    assert isinstance(site.module, nn.Embedding)  # noqa: S101 - the rule is registered for it
    placed = site.placed(param_name)
    assert placed is not None  # noqa: S101 - it was sharded just now
    size = placed.shape[directive.axis]
    site.module.forward = VocabParallelLookup(site, site.module, size, start, stop)


SIZES = {"weight": {0: "num_embeddings", 1: "embedding_dim"}}
register_shard_rule("Embedding", ShardRule(SIZES, _divide_embedding))
