"""A policy for each block, so that what a rank keeps for its backwards stays within a budget."""

from dataclasses import replace
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
    """A policy for each block, so that what a rank keeps for its backwards fits.

    Args:
        budget: bytes of a rank.
        asked: the argument, as the error names it.
        config: of the model.
        auto_class: its head.
        mesh: its layout.
        options: of the model.
        dtype: of its parameters.
        shape: rows and tokens of a micro-batch.
        micro_batches: of a step.

    Raises:
        MeshError: nothing fits; the nearest that does is named.
    """
    rows, tokens = shape
    layout = Layout(
        mesh.tp, mesh.pp, mesh.dp, rows, micro_batches or max(1, 2 * mesh.pp * (mesh.pp > 1)),
        options.pipeline_order, options.stages_per_rank or 1, dp_shard=options.dp_shard,
        sequence_parallel=options.sequence_parallel, zero_stage=options.zero_stage,
    )  # fmt: skip
    layout = replace(layout, stages_per_rank=_per_rank(layout, options))
    precision = options.precision or precision_of(str(dtype))
    planner = Planner(config, hardware_of(options.device), tokens, precision, "eager", auto_class)
    chosen, least = choose(planner, layout, budget)
    if chosen is None:
        problem = f"the planner counts {human(least)} where every block keeps as little as it can"
        unit, name = (10**6, "MB") if least > 10**7 else (1000, "KB")
        hint = (
            f'the nearest that fits is activation_memory="{-(-least // unit)}{name}"; or fewer rows'
        )
        raise MeshError("from_pretrained", f"activation_memory={asked}", problem, hint)
    return chosen


def _per_rank(layout: Layout, options: BuildOptions) -> int:
    from slapo_zoo.pipeline.orders import StageMap

    return StageMap.make(layout.pipeline_order, layout.pp, options.stages_per_rank).per_rank


def hardware_of(device: torch.device | str) -> Hardware:
    """The profile of a device, or of the one that is most like it."""
    kind = torch.device(device)
    if kind.type != "cuda":
        return HARDWARE["cpu"]
    name = torch.cuda.get_device_name(kind).lower()
    return HARDWARE[next((key for key in ("h200", "h100", "a100", "v100") if key in name), "h100")]


def require_shape(value: Any) -> tuple[int, int]:
    """Return (rows, tokens) of `micro_batch_shape`; MeshError where it is none.

    Raises:
        SlapoError: they are not two positive numbers.
    """
    if not (isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value)):  # fmt: skip
        problem = f"found {value!r}, expected (rows, tokens) of a micro-batch"
        hint = "a budget for activations depends on them: micro_batch_shape=(4, 1024)"
        raise SlapoError("from_pretrained", "micro_batch_shape", problem, hint)
    return value[0], value[1]
