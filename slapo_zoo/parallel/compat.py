"""Functions of torch whose names differ between the supported releases (2.11 to 2.14), or that are not public."""

import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from importlib.metadata import version
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from slapo_zoo.errors import SlapoError
from slapo_zoo.parallel.version import VERSION

MADE_WITHIN_S = 40.0
_installed = cache(version)  # reads the metadata of a package

# 2.13 deprecates the old names with a warning per call; 2.11 lacks the new ones.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

# 2.13 renames the argument of DistributedDataParallel that sends buffers before each forward.
_DDP = inspect.signature(torch.nn.parallel.DistributedDataParallel.__init__).parameters
DDP_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _DDP else "broadcast_buffers"


def software() -> dict[str, str]:
    """Return {"slapo-zoo": version, "torch": version, "transformers": version}, to be stored with measurements."""
    return {"slapo-zoo": VERSION} | {name: _installed(name) for name in ("torch", "transformers")}


def require_release(where: str, package: str, least: str, because: str) -> None:
    """Raise SlapoError if the installed release of `package` is older than `least`; `because` says why none may be."""
    if TorchVersion(found := version(package)) < least:
        problem = f"found {found}, expected {least} or newer: {because}"
        raise SlapoError(where, package, problem, f"pip install -U {package}")


# of each default group, held weakly, since the threads of a group that is kept alive go on polling
_GROUPS: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()


def new_group(ranks: Sequence[int]) -> Any:
    """Return the process group of `ranks`, which is made once for all models; a collective call of all ranks.

    The group has the timeout of the default group: with torch's 30 minutes, peers of a dead rank would hang.
    """
    world: Any = dist.group.WORLD
    known, key = _GROUPS.setdefault(world, {}), tuple(ranks)
    if len(key) < dist.get_world_size() and key not in known:
        known[key] = dist.new_group(ranks, timeout=timedelta(seconds=timeout_of_world()))
    return known.get(key, world)


def timeout_of_world() -> float:
    """Return the timeout of the default process group in seconds."""
    world: Any = dist.group.WORLD
    return world._get_backend(group_device()).options._timeout.total_seconds()


def forget_groups() -> None:
    """Reset torch's count of process groups, which is part of a group's name, after a failed `init_process_group`."""
    dist.distributed_c10d._world.group_count = 0


def patient_group(seconds: float) -> Any:
    """Create a gloo group of all ranks whose collectives time out after `seconds`; a collective call of all ranks.

    Its creation times out after MADE_WITHIN_S (40) seconds, since a rank may die before it has connected.
    """
    group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=MADE_WITHIN_S))
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=seconds))
    return group


def hooks_around() -> Any:
    """Return the innermost active saved-tensor hooks (pack, unpack), or None; torch has no public function for this."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]


def group_device() -> torch.device:
    """Return a device whose tensors the default group can send: the CPU if possible, else this rank's GPU."""
    kinds = group_kinds()
    return torch.device("cpu" if "cpu" in kinds else next(iter(kinds)))


def group_kinds() -> set[str]:
    """Return the device types whose tensors the default group can send, e.g. {"cuda"} if its backend is nccl."""
    world: Any = dist.group.WORLD
    return {device.type for device in world._device_types}


def is_for_gpus() -> bool:
    """Return False if the default group has no backend made for GPUs, as gloo; True with nccl, or without a group."""
    if not dist.is_initialized():
        return True
    config = str(dist.get_backend_config())  # "cuda:nccl", "cpu:gloo,cuda:gloo", ...
    return "cuda:" in config and "cuda:gloo" not in config


class _WorldPerThread:
    """Replacement of `distributed_c10d._world` that gives every thread its own process groups."""

    NAMES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")

    def __init__(self, before: Any) -> None:
        """Start every thread without process groups, but the current thread with those of `before`, torch's own state."""
        # `states` keeps all groups alive: a forked child loses other threads' locals, and freeing a gloo group there crashes
        self.__dict__.update(local=threading.local(), states=[])
        self._state().update({name: getattr(before, name) for name in self._state()})

    def _state(self) -> dict[str, Any]:
        if not hasattr(self.local, "state"):
            state = {name: {} for name in (*self.NAMES, "pg_coalesce_state")}
            self.local.state = state | {"default_pg": None, "group_count": 0, "comms": []}
            self.states.append(self.local.state)
        return self.local.state

    def __getattr__(self, name: str) -> Any:
        try:
            return self._state()[name]
        except KeyError:
            problem = f"torch reads the attribute {name!r} of its process groups, which ranks as threads lack: install torch 2.11 to 2.14, or run one process per rank"
            raise AttributeError(problem) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._state()[name] = value

    @property
    def pg_config_info(self) -> list[dict[str, Any]]:
        """Return an empty list; torch reads this attribute for its error reports."""
        return []


def ranks_are_threads() -> bool:
    """Return whether ranks are threads of this process (`emulate`, a load with `exact=`) and share its generator."""
    return isinstance(dist.distributed_c10d._world, _WorldPerThread)


@contextmanager
def process_groups_per_thread() -> Iterator[None]:
    """Context in which every thread has its own process groups: a thread that calls `init_process_group` is a rank."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed import distributed_c10d

    # without a GPU, torch built for CUDA keeps, for the process, an object of the first thread to enter: no rank's, which end
    with FakeTensorMode():
        isolate = torch._C._distributed_c10d._set_thread_isolation_mode  # pyright: ignore[reportAttributeAccessIssue]
    before = distributed_c10d._world
    distributed_c10d._world = _WorldPerThread(before)
    isolate(True)
    try:
        yield
    finally:
        isolate(False)
        distributed_c10d._world = before
