"""How a step is run, and in which precision: what the planner has to know of it."""

from dataclasses import dataclass

from slapo_zoo.errors import SlapoError
from slapo_zoo.zoo.precisions import precision_name

HOST = 8.0  # fitted, with the seconds of an operation, to published single-node runs


@dataclass(frozen=True)
class Runtime:
    """Constants of one way to run a model: eager, with kernels, compiled, or by Megatron.

    Args:
        fused: chains of element-wise operations are one kernel.
        host: operations of the host for a kernel of such a chain: views, autograd, Python.
        scores: attention writes its scores to memory wherever it drops probabilities.
        parts: under sequence parallelism a rank keeps its part of the tokens alone, and gathers the others
            again in the backward; a dropout keeps a byte per number.
        accumulates: the product that makes a weight's gradient adds it to those of earlier micro-batches.
        scatters: a stage sends every tp rank's share of its output, and not the whole of it from each.
        fused_optimizer: the optimizer's step makes no temporary tensors.
        overlapped: sums over dp run in buckets while the last micro-batch's backward does.
        even: stages have equally many blocks, whatever the embedding and the head cost.
        casts: 16-bit weights beside masters live while forwards and backwards run, and no longer.
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
    "megatron": Runtime(
        fused=True,
        host=HOST,
        parts=True,
        accumulates=True,
        scatters=True,
        fused_optimizer=True,
        overlapped=False,
        even=True,
        casts=False,
    ),
}


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter for its weight, gradient and optimizer state in one precision.

    Args:
        dtype: of products and activations.
        weights: of the parameter itself.
        gradients: of what micro-batches add up to.
        optimizer: of AdamW's states, and of a copy in float32.
    """

    dtype: str
    weights: int
    gradients: int
    optimizer: int

    @property
    def itemsize(self) -> int:
        """Bytes of one element of an activation."""
        return 4 if self.dtype == "float32" else 2

    @property
    def update(self) -> int:
        """Bytes of one element of an optimizer state."""
        return 4 if self.optimizer >= 8 else 2

    @property
    def has_masters(self) -> bool:
        """Return whether the optimizer steps copies of the weights, and not the weights."""
        return self.optimizer > 2 * self.update

    @property
    def per_parameter(self) -> int:
        """Bytes per parameter: weight, gradient and optimizer state together."""
        return self.weights + self.gradients + self.optimizer


PRECISIONS = {
    "fp32": Precision("float32", 4, 4, 8),
    "bf16": Precision("bfloat16", 2, 4, 12),
    "fp16": Precision("float16", 2, 4, 12),
    "bf16-pure": Precision("bfloat16", 2, 2, 4),
    "fp16-pure": Precision("float16", 2, 2, 4),
}


def find_runtime(name: str) -> Runtime:
    """Return the runtime of a name; an unknown one is an error that lists all."""
    if name not in RUNTIMES:
        hint = f"choose one of {', '.join(RUNTIMES)}"
        raise SlapoError("Planner", f"runtime={name!r}", "no such runtime", hint)
    return RUNTIMES[name]


def find_precision(name: str) -> Precision:
    """Return the precision of a name; an unknown one is an error that lists all."""
    name = precision_name(name)
    if name not in PRECISIONS:
        hint = f"choose one of {', '.join(PRECISIONS)}"
        raise SlapoError("Planner", f"precision={name!r}", "no such precision", hint)
    return PRECISIONS[name]


def precision_of(dtype: str) -> str:
    """The precision in which everything has one dtype, as `torch.float32` or `bfloat16`."""
    name = dtype.removeprefix("torch.")
    found = (n for n, p in PRECISIONS.items() if p.dtype == name and p.weights == p.gradients)
    return next(found, "fp32")
