"""Reshards of `sync`, such as "RS->RR": collectives that change over which axis a tensor is sharded.

The two letters are the last two axes: R is unsharded (replicated), S is sharded over the ranks. On
activations [batch, tokens, hidden], RS shards the hidden axis and SR the tokens. The gradient of a
tensor is sharded as the tensor is, so the backward of A->B is B->A:

| form         | forward                    | backward                                            |
|:-------------|:---------------------------|:----------------------------------------------------|
| RR->RS, SR   | keep this rank's slice     | all-gather                                          |
| RS, SR->RR   | all-gather                 | slice; reduce-scatter where dy is a partial sum     |
| RS->SR, back | all-to-all                 | all-to-all back                                     |
| A->A         | nothing                    | nothing; RR->RR all-reduces where dy is a partial sum |

The gradient of an unsharded tensor is normally equal on every rank: what follows computes the same
everywhere, or is column-parallel and all-reduces its dx itself (`sync("bwd_post", "all_reduce")`,
Megatron's f). Without that, each rank has only the gradient of its own columns, a partial sum, and
`tensor_parallel_output_grad=True` makes the reshard sum it. Summing a complete gradient would make it
n times too large; slicing a partial sum would lose the other ranks' terms.
"""

from itertools import product

from torch import Tensor

from slapo_zoo.language.directive import Site
from slapo_zoo.language.primitives.sync import Sync, require_divisible, sync_op
from slapo_zoo.parallel import collectives

AXIS = {"RR": None, "RS": -1, "SR": -2}  # which axis is sharded


def reshard(x: Tensor, sync: Sync, site: Site) -> Tensor:
    """Reshard x [..., a, b] over the ranks of the directive `sync` at the module of `site`, by a name such as "RS->RR".

    Each side of "->" has a letter for axis a and one for axis b, S for sharded, R for replicated: "RS->RR" all-gathers
    axis b, "RR->SR" keeps this rank's slice of axis a. The name is `sync.sync_op_or_fn`.
    """
    group, is_part = site.group(sync), bool(sync.tensor_parallel_output_grad)
    source, target = (AXIS[form] for form in sync.sync_op_or_fn.split("->"))
    if x.ndim < 2:
        problem = f"found a tensor of shape {tuple(x.shape)}, expected two axes or more"
        raise sync.fail(site, problem, "use scatter or all_gather with axis=0")
    if source == target:
        return collectives.reduce_backward(x, group) if is_part else x
    if target is not None:
        require_divisible(x, target, sync, site)
    if source is None and target is not None:
        return collectives.scatter(x, target, group)
    if target is None and source is not None:
        return collectives.all_gather(x, source, group, sharded_gradient=is_part)
    assert source is not None  # noqa: S101 - the two cases above
    assert target is not None  # noqa: S101
    return collectives.all_to_all(x, target, source, group)


for _source, _target in product(AXIS, AXIS):
    sync_op(f"{_source}->{_target}", "fwd_pre", "fwd_post")(reshard)
