"""A case: a small plain model whose weights show mistakes, the batch of all runs, and trials of schedules on it."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.hf import models as hf
from slapo_zoo.hf.example_inputs import padded_batch, random_batch
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.rng.random_stream import drawn_from
from slapo_zoo.zoo.outline import Outline
from slapo_zoo.zoo.shrink import dropouts, expressive
from slapo_zoo.zoo.survey import survey
from slapo_zoo.zoo.table import Table

NOISE = 0.05  # added to every new weight: biases of 0 and norms of 1 would hide mistakes
DROPOUT = 0.2  # of every dropout while dropout is compared
EVALUATED = 2  # rows of a forward in eval mode: as many as a micro-batch of a derivation has
LEAST_TOKENS = 12
FIRST_BATCH = 100  # added to the seed of a case: its weights are drawn from the seed itself


@dataclass(frozen=True)
class Case:
    """A plain model in a folder, and how all its runs are made: batch, dtypes, dropout.

    Args:
        config: of the model, without dropout.
        cls: its class.
        folder: of the weights that all runs read.
        rows: of the batch, for all dp ranks together.
        tokens: of each row.
        micro_rows: rows of a micro-batch.
        seed: of weights, batch and dropout.
        tp: ranks whose parts of the vocabulary begin and end with ids of the batch.
        padded: whether rows of text have unlike lengths.
        dtype: of the scheduled model.
        truth_dtype: of the plain model that it is compared with.
        drops: fields of the config that are `DROPOUT` while dropout is compared.
        draws: whether anything draws random numbers then.
        thorough: whether a step of the optimizer, collectives and files are compared too, and whether
            dropout is compared with that of the batch in one piece, not in micro-batches.
        seen: what the model does with its parameters, where a table is derived for it.
        truth: a run of the plain model, where there is one already.
        batch: of the first step, for all dp ranks together; made where none is given.
    """

    config: Any
    cls: Any
    folder: Path
    rows: int
    tokens: int
    micro_rows: int
    seed: int = 0
    tp: int = 1
    padded: bool = True
    dtype: torch.dtype = torch.float32
    truth_dtype: torch.dtype = torch.float64
    drops: tuple[str, ...] = ()
    draws: bool = True
    thorough: bool = True
    seen: Any = None
    truth: Any = None
    batch: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.batch:
            object.__setattr__(self, "batch", self.batch_of(0))

    def batch_of(self, step: int) -> dict[str, Tensor]:
        """Make the batch of a step: name --> tensor [rows, ...], floats in fp32."""
        model = hf.build_on_meta(self.cls, copy.deepcopy(self.config), torch.float32, False)
        if not self.padded:
            return random_batch(model, self.rows, self.tokens)
        seed = self.seed + FIRST_BATCH + step
        return padded_batch(model, self.rows, self.tokens, seed, self.tp)

    def changes(self, dropped: bool = False) -> dict[str, Any]:
        """Return the fields of the config with which every run loads the model, with or without dropout."""
        drops = dict.fromkeys(self.drops, DROPOUT) if dropped else {}
        return {**changes_for_comparison(self.config), **drops}


@dataclass(frozen=True)
class Trial:
    """A schedule of a case on a mesh.

    Args:
        case: the plain model and its batch.
        sizes: of tp, pp and dp.
        schedule: "zoo", a Table, steps, or a function of the schedule.
        knobs: sequence_parallel, pipeline_order, stages_per_rank, checkpoint_ratio, kernels.
        whole: take the rows of a rank as one micro-batch.
    """

    case: Case
    sizes: tuple[int, int, int]
    schedule: Any = "zoo"
    knobs: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = False

    @property
    def mesh(self) -> Mesh:
        """The mesh as its first rank sees it."""
        return Mesh(*self.sizes)

    def outline(self) -> Outline:
        """Make the model on meta with every directive applied."""
        config = copy.deepcopy(self.case.config)
        return Outline(
            config, self.case.cls, self.mesh, torch.float32, seed=self.case.seed,
            schedule=self.schedule, **self.knobs,
        )  # fmt: skip

    def micro_batches(self, table: Table) -> int:
        """Return the number of parts into which the rows of a dp rank are split; 1 where its table allows no more."""
        if self.whole or table.batch_statistics or table.is_undivided(self.case.cls):
            return 1
        return self.case.rows // self.sizes[2] // self.case.micro_rows

    def part(self, batch: Mapping[str, Tensor], dp_coord: int) -> dict[str, Tensor]:
        """Return the rows of one dp rank."""
        n = self.case.rows // self.sizes[2]
        return {k: v[dp_coord * n : (dp_coord + 1) * n] for k, v in batch.items()}

    def on_one_rank(self, whole: bool = True) -> "Trial":
        """Return the trial of the same schedule on a mesh of one rank, the batch in one piece or in micro-batches."""
        return Trial(self.case, (1, 1, 1), uncut(self.schedule), {}, whole)

    def predicted_collectives(self) -> dict[str, int] | None:
        """Count the collectives over tp in one step of one tp rank, all stages together; None where unknown."""
        outline = self.outline()
        if outline.state.checkpointed or self.sizes[0] == 1:
            return None
        parts = self.micro_batches(outline.table)
        rows = self.case.rows // self.sizes[2] // parts
        counts: dict[str, int] = {}
        for row in survey(outline, rows, self.case.tokens).traffic:
            if row.mesh_dim == "tp" and row.phase in ("forward", "backward"):
                counts[row.kind] = counts.get(row.kind, 0) + row.count * parts
        return counts


def case_for(
    config: Any, cls: Any, sizes: tuple[int, int, int], folder: Path, seed: int = 0
) -> Case:
    """Return the case of a config for a mesh: enough micro-batches for all stages, tokens for all tp ranks.

    Args:
        config: of the weights in the folder.
        cls: of the model.
        sizes: of tp, pp and dp.
        folder: of the weights.
        seed: of batch and dropout.
    """
    tp, pp, dp = sizes
    rows, drops = max(2, 2 * pp), tuple(dropouts(config))
    tokens = -(-LEAST_TOKENS // (2 * tp)) * 2 * tp
    micro_rows = 1 if pp > 1 else rows
    return Case(
        config, cls, folder, rows * dp, tokens, micro_rows, seed, tp, drops=drops, draws=bool(drops)
    )


def changes_for_comparison(config: Any) -> dict[str, Any]:
    """Return the fields of a config that every run without dropout loads the model with."""
    known = config.to_dict()
    found = {name: value for name, value in expressive(config).items() if name in known}
    if any("experts" in name for name in known):
        found["experts_implementation"] = "eager"  # the default one knows no fp64
    return found


def write_weights(config: Any, cls: Any, folder: Path, seed: int = 0) -> Any:
    """Write a checkpoint of `noisy_model` to a folder.

    Returns:
        its config: without dropout, and with special tokens where the head needs them.
    """
    config = expressive_config(config)
    noisy_model(config, cls, seed).save_pretrained(folder)
    return config


def expressive_config(config: Any) -> Any:
    """Return a copy of a config under which mistakes show: `slapo_zoo.zoo.shrink.expressive`."""
    config = copy.deepcopy(config)
    for name, value in expressive(config).items():
        setattr(config, name, value)
    return config


def noisy_model(config: Any, cls: Any, seed: int = 0) -> Any:
    """Make a plain model with random weights, none of which is 0 or 1: such would hide mistakes."""
    with drawn_from(seed):
        model = cls(copy.deepcopy(config))
        model.tie_weights()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * NOISE)
            for module in model.modules():
                if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                    module.weight[module.padding_idx] = 0  # as the classes make it, some at a load
    return model


def uncut(schedule: Any) -> Any:
    """Return the same schedule without pipeline cuts, for a mesh of one rank."""
    if isinstance(schedule, list | tuple):
        return [step for step in schedule if step[1].name != "cut_pipeline_stage"]
    if not callable(schedule):
        return schedule

    def without_cuts(sch: Any) -> None:
        schedule(sch)
        sch.state.cuts.clear()

    return without_cuts
