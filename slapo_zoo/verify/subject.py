"""Subject of a verification: a model of a config, a mesh, a schedule, and the batch that they run on."""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.hf import models as hf
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.rng.random_stream import drawn_from
from slapo_zoo.verify import batch
from slapo_zoo.verify.shrink import expressive
from slapo_zoo.zoo.outline import Outline
from slapo_zoo.zoo.table import table_for

NOISE = 0.05  # added to every new weight: biases of 0 and norms of 1 would hide mistakes
LEAST_TOKENS = 12


@dataclass(frozen=True)
class Subject:
    """What is verified: config, class, mesh, schedule and weights.

    Args:
        config: of `transformers`.
        cls: the model's class.
        sizes: of tp, pp and dp.
        schedule: "zoo", steps, or a function of the schedule.
        folder: of the weights that all runs read.
        seed: of weights, batch and dropout.
        knobs: sequence_parallel, pipeline_order, stages_per_rank, checkpoint_ratio.
        like: take the batch of that subject, in one piece.
    """

    config: Any
    cls: Any
    sizes: tuple[int, int, int]
    schedule: Any = "zoo"
    folder: Path = Path()
    seed: int = 0
    knobs: dict[str, Any] = field(default_factory=dict)
    like: "Subject | None" = None

    @property
    def mesh(self) -> Mesh:
        """The mesh as its first rank sees it."""
        return Mesh(*self.sizes)

    def outline(self) -> Outline:
        """The model on meta with every directive applied."""
        config = copy.deepcopy(self.config)
        return Outline(
            config, self.cls, self.mesh, torch.float32, seed=self.seed,
            schedule=self.schedule, **self.knobs,
        )  # fmt: skip

    @property
    def rows_per_rank(self) -> int:
        """Rows that one dp rank gets: enough micro-batches for all stages."""
        if self.like is not None:
            return self.like.rows_per_rank * self.like.sizes[2]
        return max(2, 2 * self.sizes[1])

    @property
    def micro_batches(self) -> int:
        """Return the number of parts into which the rows of a dp rank are split."""
        if table_for(self.config.model_type).batch_statistics:
            return 1
        return self.rows_per_rank if self.sizes[1] > 1 else 1

    @property
    def tokens(self) -> int:
        """Return the number of tokens of a row: every rank gets two or more under sequence parallelism."""
        tp = (self.like or self).sizes[0]
        return -(-LEAST_TOKENS // (2 * tp)) * 2 * tp

    def batch(self, step: int = 0) -> dict[str, Tensor]:
        """Return the batch of all dp ranks for a step."""
        config = copy.deepcopy(self.config)
        seam = table_for(config.model_type).seam
        model = hf.build_on_meta(self.cls, config, torch.float32, seam)
        rows = self.rows_per_rank * self.sizes[2]
        tp = (self.like or self).sizes[0]
        return batch.example(model, rows, self.tokens, self.seed + 100 + step, tp)

    def part(self, whole: dict[str, Tensor], dp_coord: int) -> dict[str, Tensor]:
        """Return the rows of one dp rank."""
        n = self.rows_per_rank
        return {k: v[dp_coord * n : (dp_coord + 1) * n] for k, v in whole.items()}


def changes_for_comparison(config: Any) -> dict[str, Any]:
    """Fields of the config that both sides run with."""
    known = config.to_dict()
    found = {name: value for name, value in expressive(config).items() if name in known}
    if hasattr(config, "num_local_experts") or hasattr(config, "num_experts"):
        found["experts_implementation"] = "eager"  # the default one knows no fp64
    return found


def write_weights(config: Any, cls: Any, folder: Path, seed: int) -> Any:
    """A checkpoint of plain `transformers` with random weights, none of which is 0 or 1.

    Returns:
        its config: without dropout, and with special tokens where the head needs them.
    """
    config = copy.deepcopy(config)
    for name, value in expressive(config).items():
        setattr(config, name, value)
    with drawn_from(seed):
        model = cls(copy.deepcopy(config))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * NOISE)
    model.save_pretrained(folder)
    return config


def one_rank(schedule: Any) -> Any:
    """The same schedule for a mesh of one rank: without pipeline cuts."""
    if isinstance(schedule, list | tuple):
        return [step for step in schedule if step[1].name != "cut_pipeline_stage"]
    if not callable(schedule):
        return schedule

    def uncut(sch: Any) -> None:
        schedule(sch)
        sch.state.cuts.clear()

    return uncut
