"""Contexts of a run in which collectives are checked and counted, and dropout is switched off."""

import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slapo_zoo.errors import ScheduleError
from slapo_zoo.parallel import collectives


@contextmanager
def _observed(observer: Any) -> Iterator[None]:
    collectives.OBSERVERS.append(observer)
    try:
        yield
    finally:
        collectives.OBSERVERS.remove(observer)


@contextmanager
def agreed_collectives(mesh: Any, recorder: Any = None) -> Iterator[None]:
    """Return a context in which tp ranks that are about to call different collectives raise instead of hanging. Before
    every collective over tp the ranks all-gather a hash of its kind, shape and dtype.

    Args:
        mesh: mesh with this rank's coordinates.
        recorder: a `Recorder` that knows which module is running, for the error; or None.

    Raises:
        ScheduleError: kinds, shapes or dtypes differ between ranks.
    """
    group = mesh.group("tp")
    if group is None:
        yield
        return

    def check(kind: str, whole: Tensor, over: Any) -> None:
        if over is not group:  # a collective of another thread's rank, or over dp
            return
        what = f"{kind} of {list(whole.shape)} {whole.dtype}"
        mine = torch.tensor([zlib.crc32(what.encode())], device=whole.device)
        each = [torch.zeros_like(mine) for _ in range(mesh.tp)]
        dist.all_gather(each, mine, group=group)
        if any(int(other) != int(mine) for other in each):
            where = recorder.inside[-1] if recorder and recorder.inside else "a collective"
            differ = [i for i, other in enumerate(each) if int(other) != int(mine)]
            rank = mesh.coord("tp")
            problem = f"tp rank {rank} calls {what}, tp ranks {differ} call a different one"
            hint = "the ranks have different sizes here: shard an axis that tp divides, or pass pad=True to `shard`"
            raise ScheduleError(where, "collective", problem, hint)

    with _observed(check):
        yield


@contextmanager
def counted(mesh: Any, counts: dict[str, int]) -> Iterator[None]:
    """Return a context at whose end `counts` gets the number of this rank's tp collectives by kind ("all_reduce", ...)."""
    if mesh.tp == 1:
        yield
        return
    group, found = mesh.group("tp"), Counter[str]()

    def count(kind: str, whole: Tensor, over: Any) -> None:
        if over is group:  # each rank has its own, also where ranks are threads of one process
            found[kind] += 1

    with _observed(count):
        yield
    counts.update(found)


def silence(model: nn.Module) -> None:
    """Set the rate of all dropout modules of a model to 0, also where the rate does not come from the config."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


class NoDropout(TorchFunctionMode):
    """Mode of torch in which `F.dropout` is the identity and fused attention is called without dropout."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.dropout:
            return args[0] if args else kwargs["input"]
        if func is nn.functional.scaled_dot_product_attention:
            kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)
