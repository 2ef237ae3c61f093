"""Join the outputs of a process's virtual ranks (with `exact=` a process runs several, one thread each) to one output.

rewrite:  {rank: output}  -->  output of the process's rows;  d_output  -->  backward of each rank in its thread
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from slapo_zoo.errors import SlapoError
from slapo_zoo.kernels.loss.logits_on_demand import LogitsOnDemand
from slapo_zoo.kernels.loss.vocab_logits import VocabLogits
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.once import once
from slapo_zoo.parallel.ranks.emulation import HostedRanks


def joined(
    outputs: Mapping[int, Any], host: HostedRanks, virtual: Mesh, after: Callable[[], None]
) -> Any:
    """Return this process's output: the rows of its virtual dp ranks concatenated, their scalars averaged. Virtual
    ranks (`exact=` runs several per process, one thread each) that differ in tp or pp only have equal outputs.

    Args:
        outputs: global index of each virtual rank of this process --> output of its model.
        host: runs functions in the threads of these virtual ranks.
        virtual: mesh of the virtual ranks of all processes.
        after: called at the end of each backward through the returned output.
    """
    leaves = {rank: tree_flatten(output) for rank, output in outputs.items()}
    first = min(leaves)
    firsts = [r for r in leaves if all(virtual.coord(d, r) == virtual.coord(d, first) for d in virtual.sizes if d != "dp")]  # fmt: skip
    values, spec = leaves[first]
    found = [_join([leaves[r][0][i] for r in firsts]) for i in range(len(values))]
    graded = [i for i, x in enumerate(values) if isinstance(x, Tensor) and x.requires_grad]
    if graded:
        parts = {rank: [leaf[i] for i in graded] for rank, (leaf, _) in leaves.items()}
        trigger = torch.zeros((), requires_grad=True)
        bridged: Any = _Bridge.apply(
            trigger, host, parts, len(firsts), after, *[found[i] for i in graded]
        )
        for i, value in zip(graded, bridged, strict=True):
            found[i] = value
    return tree_unflatten(found, spec)


def computed(value: Any) -> Any:
    """Return `value`, an entry of a model's output; if it is logits computed on demand or sharded over the vocabulary,
    compute or all-gather (on all tp ranks) and return them as a plain tensor.
    """
    if isinstance(value, LogitsOnDemand):
        return value.tensor()
    return value.gathered() if isinstance(value, VocabLogits) else value


def _join(parts: list[Any]) -> Any:
    """Return the output for a batch from `parts`, the outputs for slices of its rows: tensors concatenated, the mean
    of scalars, and the first of other values.
    """
    if not isinstance(parts[0], Tensor):
        return parts[0]
    if parts[0].ndim == 0:
        return torch.stack([part.detach() for part in parts]).mean()
    return torch.cat([part.detach() for part in parts])


class _Bridge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trigger, host, parts, copies, after, *found):
        ctx.given = host, parts, copies, after
        ctx.set_materialize_grads(False)
        return ctx.mark_dirty(*found) or found  # the user may change them in place

    @staticmethod
    @once
    def backward(ctx: Any, *grads):
        host, parts, copies, after = ctx.given
        if copies > 1 and any(grad is not None and grad.ndim for grad in grads):
            problem = f"this loss of the logits mixes the rows of {copies} virtual dp ranks (exact=), which this process runs: its bits depend on the mesh; expected one loss per virtual rank"
            hint = "call train_step(batch, loss_fn=...), which calls loss_fn once for each virtual rank"
            raise SlapoError("ExactModel", "backward", problem, hint)

        def call(rank: int) -> None:
            pairs = [pair for pair in zip(parts[rank], grads, strict=True) if pair[1] is not None]
            torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])

        host.run(call)
        after()
        return (None,) * (5 + len(grads))
