"""Runtimes (how a step is run) and precisions (bytes per parameter) that the planner simulates."""

from dataclasses import dataclass

from slapo_zoo.errors import SlapoError
from slapo_zoo.zoo.options import precision_name

HOST = 8.0  # fitted to published single-node runs, as are the seconds of an operation


@dataclass(frozen=True)
class Runtime:
    """Constants of one way to run a model: eager, with kernels, compiled, or by Megatron.

    Args:
        fused: True if a chain of element-wise operations is one kernel.
        host: factor of the host's time to launch a kernel, for views, autograd and Python; 1 unless `fused`.
        scores: True if attention with dropout writes its scores to memory.
        parts: True if, under sequence parallelism, a rank keeps only its own tokens for the backward, which gathers all
            again; a dropout mask then takes one byte per element.
        accumulates: True if the matrix product of a weight gradient also adds the sum of earlier micro-batches.
        scatters: True if every tp rank sends only 1/tp of a stage's output to the next stage.
        fused_optimizer: True if the optimizer step makes no temporary tensors.
        overlapped: True if the all-reduce over dp overlaps with the backward of the last micro-batch.
        even: True if all stages get the same number of blocks; False if they get about the same work.
        casts: True if 16-bit copies of float32 master weights are freed before the optimizer step.
    """

    fused: bool = False
    host: float = 1.0
    scores: bool = True
    parts: bool = False
    accumulates: bool = False
    scatters: bool = False
    fused_optimizer: bool = False
    overlapped: bool = True
    even: bool = False
    casts: bool = True


RUNTIMES = {
    "eager": Runtime(),
    "kernels": Runtime(fused=True, host=HOST, scores=False),
    "compiled": Runtime(fused=True),
    "megatron": Runtime(fused=True, host=HOST, parts=True, accumulates=True, scatters=True,
                        fused_optimizer=True, overlapped=False, even=True, casts=False),
}  # fmt: skip


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter for its weight, gradient and optimizer state in one precision.

    Args:
        dtype: dtype of products and activations.
        weights: bytes of a weight.
        gradients: bytes of the gradient that micro-batches accumulate.
        optimizer: bytes of AdamW's states and, if there is one, the float32 master copy.
    """

    dtype: str
    weights: int
    gradients: int
    optimizer: int

    @property
    def itemsize(self) -> int:
        """Return the bytes of one element of an activation."""
        return 4 if self.dtype == "float32" else 2

    @property
    def state_itemsize(self) -> int:
        """Return the bytes of one element of an optimizer state; the update is computed in the dtype of the states."""
        return 4 if self.optimizer >= 8 else 2

    @property
    def has_masters(self) -> bool:
        """Return whether the optimizer updates float32 master copies instead of the weights."""
        return self.optimizer > 2 * self.state_itemsize


PRECISIONS = {
    "fp32": Precision("float32", 4, 4, 8),
    "bf16": Precision("bfloat16", 2, 4, 12),
    "fp16": Precision("float16", 2, 4, 12),
    "bf16-pure": Precision("bfloat16", 2, 2, 4),
    "fp16-pure": Precision("float16", 2, 2, 4),
}


def find_runtime(name: str) -> Runtime:
    """Return the runtime called `name` ("eager", "kernels", ...); SlapoError for an unknown name lists all names."""
    if name not in RUNTIMES:
        hint = f"choose one of {', '.join(RUNTIMES)}"
        raise SlapoError("plan", f"runtime={name!r}", "no such runtime", hint)
    return RUNTIMES[name]


def find_precision(name: str) -> Precision:
    """Return the precision called `name` ("bf16", "fp32", ...); an unknown name raises SlapoError, which lists all."""
    name = precision_name(name)
    if name not in PRECISIONS:
        hint = f"choose one of {', '.join(PRECISIONS)}"
        raise SlapoError("plan", f"precision={name!r}", "no such precision", hint)
    return PRECISIONS[name]


def precision_of(dtype: str) -> str:
    """Return the precision of weights and gradients in `dtype`: "bf16-pure", "fp16-pure", or for all others "fp32"."""
    name = dtype.removeprefix("torch.")
    found = (n for n, p in PRECISIONS.items() if p.dtype == name and p.weights == p.gradients)
    return next(found, "fp32")
