"""Emulation of all ranks of a mesh as threads of one process: for notebooks, debuggers and quick checks.

The same collectives run as on many processes, with the same results.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from slapo_zoo.errors import MeshError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks.hosted_ranks import HostedRanks


def emulate(
    function: Callable[..., Any],
    *args: Any,
    mesh: tuple[int, int, int],
    timeout_s: float = 60.0,
    **kwargs: Any,
) -> list[Any]:
    """Run `function(*args, **kwargs)` on every rank of a mesh, each a thread of this process.

    Within, `AutoScheduledModel.from_pretrained(..., tp=tp, pp=pp)` works as under torchrun, e.g.
    `losses = emulate(train, "gpt2", mesh=(4, 2, 1))`. Draws from torch's global generator (dropout
    without a directive) come in an order that differs from run to run.

    Args:
        function: runs on every rank; `torch.distributed.get_rank()` returns its rank.
        args: positional arguments of the function.
        mesh: sizes of tp, pp and dp.
        timeout_s: seconds after which a waiting collective raises.
        kwargs: keyword arguments of the function.

    Returns:
        the results of the ranks, in order.

    Raises:
        MeshError: this process has a process group already.
        Exception: the error of the first rank that failed, with its traceback as the cause.
    """
    if dist.is_initialized():
        problem = "this process has a process group already"
        raise MeshError("emulate", "", problem, "call it in a process that no launcher started")
    size = Mesh(*mesh).world_size
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]

    @functools.wraps(function)
    def call(_rank: int) -> Any:
        return function(*args, **kwargs)

    with HostedRanks(store, range(size), size, timeout_s) as ranks:
        return ranks.run(call)
