"""overlap: run the all-reduce of dx at the entry of a module beside the computation of weight gradients."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo_zoo.dispatch import cpu_matmul as products
from slapo_zoo.language.directive import Directive, Site, primitive, subtree
from slapo_zoo.language.primitives.bias_after_sum import WEIGHT_AXES, output_of
from slapo_zoo.parallel import collectives
from slapo_zoo.parallel.async_reduce import ColumnForward, enter, possible
from slapo_zoo.parallel.mesh import ShapeOnlyGroup

# Back ends with overlap by default: those where it was measured to win (`ci/run.py bench overlap`). With
# gloo on two cores a step takes 0.98 to 1.02 of the time: the all-reduce needs the cores too. nccl: unmeasured.
DEFAULT_BACKENDS: tuple[str, ...] = ()


@primitive("overlap")
@dataclass(frozen=True)
class Overlap(Directive):
    """Run the all-reduce of dx while the weight gradients of the column-parallel layers are computed.

    rewrite:  backward: dx, dw, sum of dx  -->  dx, start the sum of dx, dw, wait for the sum
    note:     applies to every sync("bwd_post", "all_reduce") at or below the module, in steps in which
              tokens are not sharded, outside of autocast and torch.compile. No result changes.
              Without this directive the back end of the group decides: it is on for those in
              slapo_zoo.language.primitives.overlap.DEFAULT_BACKENDS
    errors:   no such sync at or below it
    source:   Megatron-LM, tensor_parallel/layers.py, `async_tensor_model_parallel_allreduce`

    Args:
        enable: False switches the overlap off where it is the default.
    """

    enable: bool = True

    def check(self, site: Site) -> None:
        if not self._found(site):
            hint = 'call sync("bwd_post", "all_reduce") before overlap()'
            problem = "no sync directive at or below this module all-reduces a gradient"
            raise self.fail(site, problem, hint)

    def apply(self, site: Site) -> None:
        site.state.overlap.update(dict.fromkeys(self._found(site), self.enable))

    def _found(self, site: Site) -> list[str]:
        applied = site.state.applied
        return [p for p in subtree(site.path, list(applied)) if "bwd_post" in applied[p]]


def sum_gradient_of(x: Tensor, group: Any, site: Site, shared: bool) -> Tensor:
    """Return `x`; in the backward its gradient is all-reduced over `group`, overlapped when enabled (Megatron's f).

    Args:
        x: input of the module.
        group: process group of the all-reduce.
        site: the module to which the `sync` directive is applied.
        shared: siblings of the module take the same `x` and share one all-reduce.
    """
    if not (x.requires_grad and possible(x) and _wanted(site, group)):
        return collectives.reduce_backward(x, group)
    return enter(x, group, _columns(site, shared))


def _wanted(site: Site, group: Any) -> bool:
    if group is None or isinstance(group, ShapeOnlyGroup):
        return False
    given = site.state.overlap.get(site.path)
    return dist.get_backend(group) in DEFAULT_BACKENDS if given is None else given


def _columns(site: Site, shared: bool) -> list[ColumnForward]:
    """Return the column-parallel layers within a module (with `shared`, within its parent), cached by the first call."""
    root = site.path.rpartition(".")[0] if shared else site.path
    key = ("overlap", root)
    if key not in site.state.shared:
        paths = subtree(root, list(site.state.modules))
        below = [Site(p, site.state.modules[p], site.state) for p in paths]
        site.state.shared[key] = [c for s in below if (c := _column(s)) is not None]
    return site.state.shared[key]


def _column(site: Site) -> ColumnForward | None:
    """Return a module's forward that can delay its weight gradient; None if it is no column-parallel Linear or Conv1D."""
    module: Any = site.module
    forward = module.__dict__.get("forward")
    if isinstance(forward, ColumnForward):
        return forward
    is_linear = type(module) is nn.Linear
    is_conv1d = type(module).__name__ == "Conv1D" and type(module).__module__.startswith(
        "transformers."
    )
    known = products.computes_as_class(forward) and (is_linear or is_conv1d)
    if not known or output_of(site) != "divided":
        return None
    multiply = torch.mm if forward is None else products.mm
    column = ColumnForward(module, WEIGHT_AXES[type(module).__name__][0] == 0, multiply)
    vars(module)["forward"] = column
    return column
