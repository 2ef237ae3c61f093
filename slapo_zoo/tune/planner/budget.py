"""Choose for each block to keep, recompute or offload activations, so that those of a rank stay within a budget."""

from typing import Any

import torch

from slapo_zoo.errors import MeshError, SlapoError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.tune.planner.hardware import HARDWARE, Hardware
from slapo_zoo.tune.planner.layout import Layout
from slapo_zoo.tune.planner.layout_search import Planner
from slapo_zoo.tune.planner.mixtures import choose
from slapo_zoo.tune.planner.runtime_kind import precision_of
from slapo_zoo.weights.ledger import human
from slapo_zoo.zoo.options import BuildOptions


def policies_within(
    budget: int, asked: str, config: Any, auto_class: Any, mesh: Mesh, options: BuildOptions,
    dtype: torch.dtype, shape: tuple[int, int], micro_batches: int | None,
) -> tuple[str, ...]:  # fmt: skip
    """Return one activation policy (keep, recompute, ...) per transformer block of the model, in order, chosen so that
    the saved activations of every rank fit into `budget` bytes in the least time.

    Args:
        budget: bytes of saved activations per rank.
        asked: the argument `activation_memory=` of `from_pretrained` as text, for the error.
        config: config of the model.
        auto_class: model class or Auto class of `transformers`, or its name; None: the class that `config` names.
        mesh: sizes of tp, pp and dp.
        options: other arguments of the loader, e.g. pipeline order, ZeRO stage and device.
        dtype: dtype of the parameters.
        shape: (rows, tokens) of a micro-batch.
        micro_batches: micro-batches per step; None takes 2 * pp, or 1 without a pipeline.

    Raises:
        MeshError: no choice of policies fits; the error names the smallest budget that would do.
    """
    rows, tokens = shape
    layout = Layout.of(options, mesh, rows, micro_batches)
    precision = options.precision or precision_of(str(dtype))
    planner = Planner(config, hardware_of(options.place), tokens, precision, "eager", auto_class)
    chosen, least = choose(planner, layout, budget)
    if chosen is None:
        problem = f"activations need at least {human(least)} per rank, even with full recomputation"
        unit, name = (10**6, "MB") if least > 10**7 else (1000, "KB")
        hint = f'pass activation_memory="{-(-least // unit)}{name}", the least that fits, or fewer rows in micro_batch_shape='
        raise MeshError("from_pretrained", f"activation_memory={asked}", problem, hint)
    return chosen


def hardware_of(device: torch.device | str) -> Hardware:
    """Return the planner's hardware profile of the CPU or of this machine's GPU; for an unknown GPU, that of an H100."""
    kind = torch.device(device)
    if kind.type != "cuda":
        return HARDWARE["cpu"]
    name = torch.cuda.get_device_name(kind).lower()
    return HARDWARE[next((key for key in ("h200", "h100", "a100", "v100") if key in name), "h100")]


def require_shape(value: Any) -> tuple[int, int]:
    """Return `value`, the argument `micro_batch_shape=` of `from_pretrained`, as (rows, tokens) of a micro-batch.

    Raises:
        SlapoError: `value` is not a pair of positive integers.
    """
    if not (isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value)):  # fmt: skip
        problem = f"found {value!r}, expected (rows, tokens) of a micro-batch"
        hint = "activation_memory= needs both numbers, e.g. micro_batch_shape=(4, 1024)"
        raise SlapoError("from_pretrained", "micro_batch_shape", problem, hint)
    return value[0], value[1]
