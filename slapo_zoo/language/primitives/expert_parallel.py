"""expert_parallel: shard the experts of a mixture over ranks, and all-reduce their outputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.language.directive import Directive, Site, primitive
from slapo_zoo.parallel import collectives
from slapo_zoo.parallel.mesh import ShapeOnlyGroup
from slapo_zoo.parallel.placement import Placement, Run


@primitive("expert_parallel")
@dataclass(frozen=True)
class ExpertParallel(Directive):
    """Run a mixture of experts with the experts of this rank; the router still chooses among all experts.

    rewrite:  y = experts(x, index, weight)
              -->  y = sum over ranks of experts_r(x, index - start, weight), where a token's choice
              of another rank's expert is skipped and weighs 0; dx and d(weight) are summed too
    errors:   no such integer attribute; no parameter with that many experts on axis 0
    source:   Lepikhin et al. 2020, GShard, arXiv:2006.16668, section 3.2 (experts over devices)

    Args:
        count: name of the module's attribute with the number of experts; the experts' weights must be sharded already.
        mesh_dim: the mesh dim that the experts are sharded over.
    """

    count: str = "num_experts"
    mesh_dim: str = "tp"

    def check(self, site: Site) -> None:
        found = getattr(site.module, self.count, None)
        if not isinstance(found, int):
            problem = f"found {found!r}, expected an integer attribute {self.count!r}"
            hint = "pass count=, the name of the attribute with the number of experts"
            raise self.fail(site, problem, hint)
        n, r = site.mesh.size(self.mesh_dim), site.mesh.coord(self.mesh_dim)
        if found < n:
            dim, hint = self.mesh_dim, f"choose among legal sizes of {self.mesh_dim}: 1..{found}"
            problem = f"{found} experts cannot be sharded over {dim}={n}: each rank needs one"
            raise self.fail(site, problem, hint)
        local = Placement(0).local_size(found, n, r)
        wrong = [name for name, p in site.module.named_parameters() if p.shape[0] != local]
        if wrong:
            problem = f"{wrong[0]} is not sharded to {local} of {found} experts on axis 0"
            raise self.fail(site, problem, f"call shard({wrong[0]!r}, 0, uneven=True) first")

    def apply(self, site: Site) -> None:
        module: Any = site.module
        n, r = site.mesh.size(self.mesh_dim), site.mesh.coord(self.mesh_dim)
        (run,) = Placement(0).runs(getattr(module, self.count), n, r)
        setattr(module, self.count, run.stop - run.start)
        if n > 1:
            module._is_expert_parallel = True  # transformers' experts then skip others' indices
            module.forward = _own_experts(site, run, self)
        elif site.mesh.dry_run:
            module.forward = shapes_only


def shapes_only(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return a tensor of the shape of the experts' output; a dry run on fake tensors calls this, not the experts."""
    return hidden_states + 0 * top_k_weights.sum()


def _own_experts(site: Site, run: Run, directive: ExpertParallel) -> Callable[..., Tensor]:
    module: Any = site.module
    forward = module.forward

    def divided(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        group = site.group(directive)
        outside = (top_k_index < run.start) | (top_k_index >= run.stop)
        index = (top_k_index - run.start).masked_fill(outside, run.stop - run.start)
        weights = collectives.reduce_backward(top_k_weights, group).masked_fill(outside, 0.0)
        x = collectives.reduce_backward(hidden_states, group)
        compute = shapes_only if isinstance(group, ShapeOnlyGroup) else forward
        own = compute(x, index, weights)
        if torch.is_grad_enabled() and not own.requires_grad:  # no token for these experts
            own = own + _nothing_of(x, weights, *module.parameters())
        return collectives.reduce_forward(own, group)

    return divided


def _nothing_of(*tensors: Tensor) -> Tensor:
    """Return a scalar 0 that is computed from all `tensors`. Each tensor then gets a gradient (of zeros), so every
    rank runs the same collectives in the backward.
    """
    return sum((0 * tensor.flatten()[:1].sum() for tensor in tensors), tensors[0].new_zeros(()))
