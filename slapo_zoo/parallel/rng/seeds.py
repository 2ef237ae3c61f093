"""Random seeds per rank and named generator states; the names of functions are those of the original Slapo library."""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from slapo_zoo.errors import ScheduleError
from slapo_zoo.parallel.replaced import replaced

TENSOR_PARALLEL = "model-parallel-rng"


def get_logger(name: str = "Slapo", level: int = logging.INFO) -> logging.Logger:
    """Return the logger `name`, set to `level`; if it has no handler, one that writes to stderr is added."""
    logger = logging.getLogger(name)
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    return logger


def devices_in_use() -> range:
    """Return the indices of all GPUs if this process has used CUDA, else none, as reading a state would start CUDA."""
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)


@contextmanager
def seeded(seed: int, devices: Sequence[int] = ()) -> Iterator[None]:
    """Context in which torch's generators of the CPU and of the GPUs `devices` (indices) start from `seed`; at its end
    they continue from their states before. Generators of other GPUs do not change.
    """
    with torch.random.fork_rng(devices, device_type="cuda"):
        cpu_generator().manual_seed(seed)
        for index in devices:
            torch.cuda.default_generators[index].manual_seed(seed)
        yield


def gpu_of(module: torch.nn.Module) -> list[int]:
    """Return the index of the GPU that holds the first parameter of a module, in a list; [] on another device."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    return [device.index] if device.type == "cuda" and device.index is not None else []


@dataclass
class RngTracker:
    """Collection of named states of torch's generators (CPU and CUDA), from which torch draws within `fork`."""

    states: dict[str, tuple[torch.Tensor, list[torch.Tensor]]] = field(default_factory=dict)
    seeds: dict[str, int] = field(default_factory=dict)  # of states made before CUDA was used

    def reset(self) -> None:
        """Forget all named states."""
        self.states.clear()

    def add(self, name: str, seed: int) -> None:
        """Add a named state made from a seed; torch's generators do not change."""
        self.seeds[name] = seed
        with seeded(seed, devices_in_use()):
            self.states[name] = self._current()

    def _current(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return torch.get_rng_state(), [torch.cuda.get_rng_state(i) for i in devices_in_use()]

    @contextmanager
    def fork(self, name: str = TENSOR_PARALLEL) -> Iterator[None]:
        """Context in which torch draws, on CPU and GPUs, from the state `name`, where the last `fork` of this name
        stopped; at the end the generators' own states return. ScheduleError for an unknown name.
        """
        if name not in self.states:
            problem = f"found no generator state of this name, only {sorted(self.states)}"
            hint = "call set_random_seed(..., tp_rank=...) first, or add(name, seed) for a name of your own"
            raise ScheduleError("rng tracker", f"fork({name!r})", problem, hint)
        cpu, cuda = self.states[name]
        with seeded(self.seeds.get(name, 0), devices_in_use()):
            torch.set_rng_state(cpu)
            for index, state in enumerate(cuda):
                torch.cuda.set_rng_state(state, index)
            yield
            self.states[name] = self._current()

    def at(self, states: dict[str, tuple[torch.Tensor, list[torch.Tensor]]]) -> Any:
        """Context in which `fork` uses `states` instead of the tracker's own. `states` is {name: (state of the CPU's
        generator, [state of each GPU's])}.
        """
        return replaced(self, "states", dict(states))


class GeneratorOfThreads(threading.local):
    """Wrapper of torch's CPU generator for ranks that are threads of one process; all draw from this one generator.

    Each thread has its own `mark`, a hash of the state in which the generator would be if the rank were a process;
    seeding, setting a state and `advance_generator` change it. Equal marks tell a recompute from a new call.
    """

    def __init__(self, own: torch.Generator):
        self.own, self.mark, self.states = own, 0, WeakIdKeyDictionary()

    def get_state(self) -> torch.Tensor:
        state = self.own.get_state()
        self.states[state] = self.mark
        return state

    def set_state(self, state: torch.Tensor) -> None:
        self.own.set_state(state)
        mark = self.states.get(state)  # a dry run's state is fake and has no bytes
        self.mark = hash(state.numpy().tobytes()) if mark is None else mark

    def manual_seed(self, seed: int) -> torch.Generator:
        self.mark = hash((seed, "seed"))
        return self.own.manual_seed(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


def cpu_generator() -> Any:
    """Return the CPU generator from which functions of torch.random draw; a GeneratorOfThreads if ranks are threads."""
    return torch.random.default_generator  # pyright: ignore[reportPrivateImportUsage]


def mark_of_generator() -> int:
    """Return a number that identifies the current state of torch's CPU generator; equal states have equal numbers."""
    own = cpu_generator()
    is_shared = isinstance(own, GeneratorOfThreads)
    return own.mark if is_shared else hash(own.get_state().numpy().tobytes())


def advance_generator() -> None:
    """Advance torch's CPU generator by one draw."""
    generator = cpu_generator()
    if isinstance(generator, GeneratorOfThreads):
        generator.mark = hash((generator.mark, "drawn"))
    else:
        torch.empty((), dtype=torch.int64, device="cpu").random_()


_TRACKER = RngTracker()


def get_cuda_rng_tracker() -> RngTracker:
    """Return the `RngTracker` of this process, which tracks the CPU's generator too."""
    return _TRACKER
