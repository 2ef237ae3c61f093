"""Which pipeline stage holds which part of a model, and how a stage runs alone.

A stage runs the model's own forward. Modules of other stages are stand-ins: those before the stage
hand out what was received, and the forward ends when the last module of the stage has run. So
masks, positions and sizes are computed by the unmodified code on every stage, and only hidden
states cross a cut (docs/decisions/0004-stages-run-the-own-forward.md).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.directive import join
from slapo_zoo.errors import ScheduleError


class StageDone(Exception):  # noqa: N818 - not an error: it ends the forward of a stage
    """Carries the output of the last module of a stage out of the model's forward."""

    def __init__(self, output: Tensor):
        self.output = output


class Boundary:
    """What a stage received for the current micro-batch."""

    received: Tensor | None = None


class Foreign(nn.Module):
    """Stands where a module of another stage was; holds no parameters.

    rewrite:  h.3(x, ...)  -->  what the previous stage sent
    """

    def __init__(self, original: nn.Module, boundary: Boundary, is_last: bool):
        super().__init__()
        self.original_name = type(original).__name__
        self.boundary, self.is_last = boundary, is_last

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The received hidden states; only the last stand-in passes gradients to them."""
        received = self.boundary.received
        if received is None:
            raise RuntimeError(f"a stage called {self.original_name}, which an earlier stage holds")
        return received if self.is_last else received.detach()

    def extra_repr(self) -> str:
        """Shown in the tree: which class another stage holds."""
        return self.original_name


def leaf_units(model: nn.Module, blocks: list[str]) -> list[str]:
    """Paths of the modules that a stage holds as a whole, in the order in which they run.

    These are the blocks, and whatever lies beside them below the modules that contain blocks.
    """
    containers = {""}
    for block in blocks:
        parts = block.split(".")
        containers |= {".".join(parts[:i]) for i in range(1, len(parts))}

    def below(path: str, module: nn.Module) -> list[str]:
        found = []
        for name, child in module.named_children():
            at = join(path, name)
            found += below(at, child) if at in containers else [at]
        return found

    return below("", model)


def assign_stages(units: list[str], cuts: list[str]) -> dict[str, int]:
    """Unit --> stage; a stage ends with each module of `cuts`."""
    for cut in cuts:
        if cut not in units:
            problem = "it lies inside a block, or contains blocks"
            raise ScheduleError(cut, "cut_pipeline_stage()", problem, "cut after a whole block")
    stages, stage = {}, 0
    for unit in units:
        stages[unit] = stage
        stage += unit in cuts
    return stages


def stage_of(name: str, stages: Mapping[str, int]) -> int:
    """The stage that holds a parameter; one of a container goes with the first stage."""
    path = name
    while path:
        if path in stages:
            return stages[path]
        path = path.rpartition(".")[0]
    return 0


def keep_stage(model: nn.Module, stages: Mapping[str, int], stage: int) -> Boundary:
    """Replace the units of other stages by stand-ins; the module tree and all paths stay.

    Returns:
        where the runtime puts what it received before each forward.
    """
    boundary = Boundary()
    before = [unit for unit, s in stages.items() if s < stage]
    mine = [unit for unit, s in stages.items() if s == stage]
    for unit, s in stages.items():
        if s == stage:
            continue
        parent, _, name = unit.rpartition(".")
        holder = model.get_submodule(parent)
        stand_in = Foreign(holder._modules[name], boundary, bool(before) and unit == before[-1])  # pyright: ignore[reportArgumentType]
        holder._modules[name] = stand_in
    if stage < max(stages.values()):
        model.get_submodule(mine[-1]).register_forward_hook(_finish)
    return boundary


def _finish(module: nn.Module, args: Any, output: Any) -> None:
    raise StageDone(output[0] if isinstance(output, tuple) else output)


def boundary_shape(batch: Mapping[str, Any], hidden_size: int) -> tuple[int, int, int]:
    """Shape [rows, tokens, hidden] of what crosses a cut for a batch."""
    ids, embeds = batch.get("input_ids"), batch.get("inputs_embeds")
    sizes = ids.shape if ids is not None else embeds.shape[:-1]  # pyright: ignore[reportOptionalMemberAccess]
    rows = int(torch.tensor(sizes[:-1]).prod())
    return rows, sizes[-1], hidden_size
