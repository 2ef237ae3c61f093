"""Check that a model trains with the same bits on a mesh of processes and in one process: `slapo-zoo verify --exact`."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from slapo_zoo.model.load.auto import AutoScheduledModel
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks.launch import run_local
from slapo_zoo.pipeline.orders import StageMap
from slapo_zoo.verify.case import DROPOUT, Case, case_for, write_weights
from slapo_zoo.zoo.tiny_config import tiny_like

STEPS = 3
Sizes = tuple[int, int, int]


@dataclass(frozen=True)
class Exactness:
    """Bitwise comparison of two trainings with `exact=`, which runs the ranks of a mesh as threads: once on one process
    per rank, once with all ranks in one process. `str()` gives a paragraph.

    Args:
        sizes: sizes of tp, pp and dp, the same in both trainings.
        digests: SHA-256 of loss, gradient norm and weights after each step of the training on one process per rank.
        of_one: SHA-256 of the same after each step of the training in one process.
        difference: first operation in which the two trainings differ; "" if they are equal.
    """

    sizes: Sizes
    digests: list[str]
    of_one: list[str]
    difference: str = ""

    def document(self) -> dict[str, Any]:
        """Return this comparison as JSON data: its fields, and "verdict", which is "verified" or "different"."""
        verdict = "verified" if self.digests == self.of_one else "different"
        return {"verdict": verdict, "digests": self.digests, "of_one": self.of_one, "difference": self.difference}  # fmt: skip

    def __str__(self) -> str:
        tp, pp, dp = self.sizes
        where = f"{prod(self.sizes)} processes (tp={tp} pp={pp} dp={dp}) and one process"
        if self.digests == self.of_one:
            return f"{where}: the same bits in {STEPS} steps of AdamW with dropout, digest {self.digests[-1][:12]}"
        step = [a == b for a, b in zip(self.digests, self.of_one, strict=True)].index(False)
        return f"{where}: step {step} has other bits; {self.difference or 'no operation differs when it is repeated'}"  # fmt: skip


def compare_meshes(config: Any, cls: Any, sizes: Sizes, knobs: Mapping[str, Any]) -> Exactness:
    """Train a small model of a family on a mesh of local processes and in one process; return a comparison of all bits.

    Args:
        config: config of a model of the family; the small model has fewer and narrower layers.
        cls: class of the model.
        sizes: sizes of tp, pp and dp.
        knobs: further arguments of `from_pretrained`.
    """
    order, per_rank = knobs.get("pipeline_order", "1f1b"), knobs.get("stages_per_rank")
    stages = StageMap.make(order, sizes[1], per_rank).num_stages
    small = tiny_like(config, Mesh(*sizes), stages)
    with tempfile.TemporaryDirectory() as folder:
        small = write_weights(small, cls, Path(folder))
        case = case_for(small, cls, sizes, Path(folder))
        many, one = (_runs(case, real, sizes, knobs, False) for real in (sizes, (1, 1, 1)))
        if many == one:
            return Exactness(sizes, many, one)
        traces = [_runs(case, real, sizes, knobs, True) for real in (sizes, (1, 1, 1))]
        return Exactness(sizes, many, one, traces[0].first_difference(traces[1]))


def _runs(case: Case, real: Sizes, virtual: Sizes, knobs: Mapping[str, Any], traced: bool) -> Any:
    """Train the small model that `case` describes on new processes, one per rank of a mesh of sizes `real` (tp, pp,
    dp). `exact=` runs the ranks of a mesh of sizes `virtual` as threads of these processes. Return process 0's list of
    digests (of loss, gradient norm and weights) per step or, if `traced`, its ExactTrace, a record of all operations.
    `knobs` are further arguments of `from_pretrained`.
    """
    return run_local(_train, prod(real), (case, real, virtual, dict(knobs), traced), threads=1, device="cpu")[0]  # fmt: skip


def _train(case: Case, real: Sizes, virtual: Sizes, knobs: dict[str, Any], traced: bool) -> Any:
    """Train the small model that `case` describes in this process, one of a mesh of sizes `real` (tp, pp, dp). `exact=`
    runs the ranks of a mesh of sizes `virtual` as threads of these processes. Return a digest (of loss, gradient norm
    and weights) per step or, if `traced`, an ExactTrace, a record of operations. `knobs` are further arguments.
    """
    names = ("tp", "pp", "dp")
    model = AutoScheduledModel.from_pretrained(
        case.folder, **dict(zip(names, real, strict=True)), exact=dict(zip(names, virtual, strict=True)),
        auto_class=case.cls, seed=case.seed, **dict.fromkeys(case.drops, DROPOUT), **knobs,
    )  # fmt: skip
    try:
        model.train()
        if not traced:
            return _steps(model, case)
        with model.tracing() as trace:
            _steps(model, case)
        return trace
    finally:
        model.close()


def _steps(model: Any, case: Case) -> list[str]:
    optimizer, digests = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    rows = case.rows // model.mesh.dp
    first = model.mesh.coord("dp") * rows
    for step in range(STEPS):
        batch = {k: v[first : first + rows] for k, v in case.batch_of(step).items()}
        model.train_step(batch, micro_batches=case.rows // model.virtual.dp // case.micro_rows)
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        digests.append(model.step_digest())
    return digests
