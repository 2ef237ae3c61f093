"""Inputs of a verification: a plain model whose random weights let mistakes show, a batch, a schedule to try."""

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
from slapo_zoo.parallel.rng.layout_independent_random import drawn_from
from slapo_zoo.zoo.options import MESH
from slapo_zoo.zoo.outline import Outline
from slapo_zoo.zoo.survey import survey
from slapo_zoo.zoo.table import Table

NOISE = 0.05  # added to every new weight: biases of 0 and norms of 1 would hide mistakes
DROPOUT = 0.2  # every dropout rate while dropout is compared
EVALUATED = 2  # rows of a forward in eval mode: as many as a micro-batch of a derivation has
LEAST_TOKENS = 12
FIRST_BATCH = 100  # added to the seed of a case: its weights are drawn from the seed itself


@dataclass(frozen=True)
class Case:
    """Test case of a verification: a plain model in a folder, and the batch, dtypes and dropout of all its runs.

    Args:
        config: config of the model, without dropout.
        cls: class of the model.
        folder: checkpoint from which all runs read the weights.
        rows: rows of the batch, for all dp ranks together.
        tokens: tokens of each row.
        micro_rows: rows of a micro-batch.
        seed: seed of weights, batch and dropout.
        tp: number of tp ranks; the batch holds the first and the last id of each rank's vocabulary shard.
        padded: the rows of text have different lengths and are padded.
        dtype: dtype of the scheduled model.
        truth_dtype: dtype of the plain model that the scheduled one is compared with.
        drops: names of the config's dropout rates, which are set to 0.2 while dropout is compared.
        draws: whether the model draws random numbers while dropout is compared.
        thorough: compare an optimizer step, counts of collectives and saved files too; and compare dropout with a run
            of the whole batch at once, not in micro-batches.
        seen: module calls and random draws of the plain model's forward; None unless sharding rules are derived.
        truth: result of an earlier run of the plain model, which then is not run again; or None.
        batch: inputs of the first step, for all dp ranks together; if empty, they are drawn.
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
        """Draw the batch of step number `step`: {input: tensor [rows, ...]}; floating-point inputs are fp32."""
        model = hf.build_on_meta(self.cls, copy.deepcopy(self.config), torch.float32, False)
        seed = self.seed + FIRST_BATCH + step
        if not self.padded:
            return random_batch(model, self.rows, self.tokens, seed)
        return padded_batch(model, self.rows, self.tokens, seed, self.tp)

    def changes(self, dropped: bool = False) -> dict[str, Any]:
        """Return {config field: value} that each run sets when it loads the model; dropout is 0.2 if `dropped`, else 0."""
        drops = dict.fromkeys(self.drops, DROPOUT) if dropped else {}
        return {**changes_for_comparison(self.config), **drops}


@dataclass(frozen=True)
class Trial:
    """A schedule, i.e. the directives that shard a model, to be tried on a mesh with the model of a test case.

    Args:
        case: the plain model and its batch.
        sizes: sizes of tp, pp and dp.
        schedule: "zoo" (the built-in rules of the family), a Table of sharding rules, a list of (pattern of module
            paths, directive), or a function that gets the Schedule and calls directives such as `shard` on it.
        knobs: loader arguments: sequence_parallel, pipeline_order, stages_per_rank, checkpoint_ratio, kernels, cp.
        whole: True runs all rows of a dp rank as one micro-batch.
    """

    case: Case
    sizes: tuple[int, int, int]
    schedule: Any = "zoo"
    knobs: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = False

    @property
    def mesh(self) -> Mesh:
        """Return the mesh on which the schedule is tried, as rank 0 sees it; the sizes are the same on all ranks."""
        return Mesh(*self.sizes, cp=self.knobs.get("cp", 1))

    def outline(self) -> Outline:
        """Return an Outline: the test case's model on the meta device, sharded as on rank 0, and its pipeline stages."""
        config = copy.deepcopy(self.case.config)
        knobs = {name: value for name, value in self.knobs.items() if name not in MESH}
        return Outline(
            config, self.case.cls, self.mesh, torch.float32, seed=self.case.seed,
            schedule=self.schedule, **knobs,
        )  # fmt: skip

    def micro_batches(self, table: Table) -> int:
        """Return the number of micro-batches of a dp rank; 1 if `table`, the family's rules, forbids to split a batch."""
        if self.whole or table.batch_statistics or table.is_undivided(self.case.cls):
            return 1
        return self.case.rows // self.sizes[2] // self.case.micro_rows

    def part(self, batch: Mapping[str, Tensor], dp_coord: int) -> dict[str, Tensor]:
        """Return the rows of a batch that the dp rank with coordinate `dp_coord` reads."""
        n = self.case.rows // self.sizes[2]
        return {k: v[dp_coord * n : (dp_coord + 1) * n] for k, v in batch.items()}

    def on_one_rank(self, whole: bool = True) -> "Trial":
        """Return a Trial of the schedule, without its cuts into stages and without loader arguments, on one rank. If
        `whole` is True, it runs the batch as one micro-batch.
        """
        return Trial(self.case, (1, 1, 1), uncut(self.schedule), {}, whole)

    def predicted_collectives(self) -> dict[str, int] | None:
        """Return {kind such as "all_reduce": number of tp collectives that a tp rank runs in a step, over all stages}.
        Return None if tp is 1, or if activations are recomputed.
        """
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
    """Make the test case of a config, with enough micro-batches for all stages and enough tokens for all tp ranks.

    `sizes` are those of tp, pp and dp; runs will read their weights from `folder`; `seed` is that of batch and dropout.
    """
    tp, pp, dp = sizes
    rows, drops = max(2, 2 * pp), tuple(dropouts(config))
    tokens = -(-LEAST_TOKENS // (2 * tp)) * 2 * tp
    micro_rows = 1 if pp > 1 else rows
    return Case(config, cls, folder, rows * dp, tokens, micro_rows, seed, tp, drops=drops, draws=bool(drops))  # fmt: skip


def dropouts(config: Any) -> list[str]:
    """Return the names of the config's dropout probabilities, also of those that are 0."""
    values = config.to_dict()
    named = [n for n in values if "drop" in n and "layerdrop" not in n]
    return [n for n in named if values[n] is None or type(values[n]) in (int, float)]


def expressive(config: Any) -> dict[str, Any]:
    """Return {config field: value} that make mistakes show: no dropout, larger initial weights, a pad token (id 0)."""
    known = config.to_dict()
    scale = {"initializer_range": 0.2, "initializer_factor": 1.0, "init_std": 0.2}
    changes: dict[str, Any] = {n: v for n, v in scale.items() if n in known}
    changes |= {n: type(known[n])(0) for n in dropouts(config) if known[n] is not None}
    changes |= {n: 0.0 for n in known if n.endswith("layerdrop")}
    # a classifier of rows needs to know where they end, a decoder how to begin
    needed = ["pad_token_id", *(["decoder_start_token_id"] if config.is_encoder_decoder else [])]
    return changes | {name: 0 for name in needed if known.get(name) is None}


def changes_for_comparison(config: Any) -> dict[str, Any]:
    """Return {config field: value} for all compared runs: no dropout, large weights, experts_implementation="eager"."""
    known = config.to_dict()
    found = {name: value for name, value in expressive(config).items() if name in known}
    if any("experts" in name for name in known):
        found["experts_implementation"] = "eager"  # the default implementation supports no fp64
    return found


def write_weights(config: Any, cls: Any, folder: Path, seed: int = 0) -> Any:
    """Write a checkpoint of a plain model with random weights, none of them exactly 0 or 1, to a folder.

    Returns:
        the config of the checkpoint: without dropout, and with id 0 for a missing pad or decoder start token.
    """
    config = expressive_config(config)
    noisy_model(config, cls, seed).save_pretrained(folder)
    return config


def expressive_config(config: Any) -> Any:
    """Return a copy of a config without dropout and with larger initial weights, so that wrong schedules show."""
    config = copy.deepcopy(config)
    for name, value in expressive(config).items():
        setattr(config, name, value)
    return config


def noisy_model(config: Any, cls: Any, seed: int = 0) -> Any:
    """Make a plain model with random weights, none of them exactly 0 or 1, because such weights hide mistakes."""
    with drawn_from(seed):
        model = cls(copy.deepcopy(config))
        model.tie_weights()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * NOISE)
            for module in model.modules():
                if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                    module.weight[module.padding_idx] = 0  # as some classes do only when they load
    return model


def uncut(schedule: Any) -> Any:
    """Return `schedule` (list of (pattern, directive), function or "zoo") without cuts into stages, to run on one rank."""
    if isinstance(schedule, list | tuple):
        return [step for step in schedule if step[1].name != "cut_pipeline_stage"]
    if not callable(schedule):
        return schedule

    def without_cuts(sch: Any) -> None:
        schedule(sch)
        sch.state.cuts.clear()

    return without_cuts
