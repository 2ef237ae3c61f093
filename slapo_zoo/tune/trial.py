"""Worker process of the tuner: build a model in one configuration, compare its loss with one rank's, time its steps."""

import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from slapo_zoo.hf.example_inputs import random_batch
from slapo_zoo.model.loader import new_model
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks.launch import run_local
from slapo_zoo.tune.outcome import NO_MEMORY, OK, OUT_OF_MEMORY, RESULT, WRONG, Outcome
from slapo_zoo.weights.ledger import AnonymousPeak
from slapo_zoo.weights.load_rank_slices import to_dtype
from slapo_zoo.zoo.argument_values import config_of
from slapo_zoo.zoo.kernels_for_modules import kernels_of
from slapo_zoo.zoo.options import KNOBS, MESH, LoaderOptions

PROBE_ROWS, WARM_UP = 2, 1
# dtype of the forward --> largest relative difference of the probe's loss; for others 1e-3
LOOSE = {torch.bfloat16: 5e-2, torch.float16: 2e-2}
OWN = ("batch_size", "threads")  # symbols that are no arguments of `from_pretrained`


@dataclass(frozen=True)
class Job:
    """Request for one measurement: model, configuration, steps and limits.

    Args:
        model: a family, a folder or a Hub id; only its config is used.
        point: symbol --> value, for arguments of `from_pretrained` (`kernels` as a text, "a+b" for two kernels),
            `batch_size` (rows per step and replica) and `threads` (of torch on the CPU).
        steps: number of timed steps.
        seq_len: tokens of a row.
        changes: fields of the config to override.
        dtype: dtype of the parameters, by any name that torch or `precision=` has for it.
        device: "cpu" or "cuda"; None takes a GPU where there is one.
        memory: bytes that a rank may use; 0 for no limit.
        probe: expected loss on the probe, a small random batch, as one rank with reference kernels computed it; or None.
    """

    model: str
    point: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 5
    seq_len: int = 128
    changes: Mapping[str, Any] | None = None
    dtype: str = "float32"
    device: str | None = None
    memory: int = 0
    probe: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", str(to_dtype(self.dtype)).removeprefix("torch."))

    @property
    def mesh(self) -> Mesh:
        """Return the mesh of the ranks that run the job; a size that its configuration lacks is 1."""
        return replace(Mesh(), **{name: self.point.get(name) or 1 for name in MESH})

    @property
    def options(self) -> LoaderOptions:
        """Return the arguments of the loader for the job's configuration."""
        knobs = {name: value for name, value in self.point.items() if name in KNOBS}
        knobs["kernels"] = kernels_of(knobs.get("kernels", "auto"))
        found = LoaderOptions(**{"device": self.device, "seed": 0, **knobs})
        return found.but(dtype=to_dtype(knobs.get("dtype") or found.parameter_dtype(self.dtype)))

    @property
    def computes(self) -> torch.dtype:
        """Return the dtype of forward and backward in the job's configuration."""
        return self.options.compute_dtype or self.options.dtype

    def config(self) -> tuple[Any, str | None]:
        """Return (config of the model with `changes`, name of its model class; None if the config names that)."""
        config, head = config_of(self.model)
        for name, value in (self.changes or {}).items():
            setattr(config, name, value)
        return config, head


def build(job: Job) -> Any:
    """Return this rank's part of the model of a job, with random weights and in training mode."""
    config, head = job.config()
    model: Any = new_model("tune", job.options.but(auto_class=head), config)
    return model.train()


def measure(job: Job) -> Outcome:
    """Time `job.steps` training steps on this rank. Return an Outcome: rows per second and peak bytes, or the kind
    "wrong" if the loss of a small batch differs from `job.probe`. Raise an error if over `job.memory` bytes are needed.
    """
    limit_memory(job)
    torch.set_num_threads(int(job.point.get("threads") or 1))
    with AnonymousPeak(exact=False) as peak:
        model = build(job)
        device = next(model.parameters()).device
        loss = float(model.train_step(_batch(model, PROBE_ROWS, job.seq_len, device), 1))
        model.zero_grad()
        if problem := differs(loss, job):
            return Outcome(WRONG, message=problem)
        rows = int(job.point.get("batch_size") or 8)
        seconds = timed_steps(model, _batch(model, rows, job.seq_len, device), job)
    taken = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak.growth
    rate = rows * job.mesh.dp / statistics.median(seconds)
    return Outcome(OK, rate, int(taken), job.steps, f"loss of the probe {loss!r}")


def differs(loss: float, job: Job) -> str:
    """Return why `loss` is wrong: not finite, or off from `job.probe` by 0.1 % (bfloat16 5 %, float16 2 %); else ""."""
    if loss != loss or abs(loss) == float("inf"):
        return f"the loss of the probe is {loss}"
    if job.probe is None:
        return ""
    most = max(
        LOOSE.get(one, 1e-3) for one in (job.computes, to_dtype(job.dtype))
    )  # the probe's too
    off = abs(loss - job.probe) / max(abs(job.probe), 1e-12)
    return (f"the loss of the probe is {loss:.6g}, the plain schedule's {job.probe:.6g}" if off > most else "")  # fmt: skip


def timed_steps(model: Any, batch: Any, job: Job) -> list[float]:
    """Return the seconds of each of `job.steps` training steps (with AdamW) on `batch`, after one to warm up."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    found = []
    for _ in range(WARM_UP + job.steps):
        begin = time.perf_counter()
        model.train_step(batch, job.point.get("micro_batches"))
        optimizer.step()
        optimizer.zero_grad()
        if next(iter(batch.values())).is_cuda:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return found[WARM_UP:]


def _batch(model: Any, rows: int, seq_len: int, device: torch.device) -> dict[str, Any]:
    return {k: v.to(device) for k, v in random_batch(model, rows, seq_len).items()}


def limit_memory(job: Job) -> None:
    """Let this process allocate at most `job.memory` bytes; 0 sets no limit.

    On a GPU torch's allocator sets the limit, on a CPU the operating system does, beyond what the process uses now.
    """
    if not job.memory:
        return
    if torch.cuda.is_available() and job.device != "cpu":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.memory / total))
        return
    import resource

    from slapo_zoo.weights.ledger import anonymous_bytes

    most = anonymous_bytes() + job.memory
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def run(job: Job) -> Outcome:
    """Measure a job in new processes, one per rank of its mesh (for one rank, in this one); return rank 0's outcome,
    with the highest peak memory of all. If any rank lacks memory, its kind is "out_of_memory"; other errors are raised.
    """
    try:
        world = job.mesh.world_size
        found = [measure(job)] if world == 1 else run_local(measure, world, (job,), device=job.device)  # fmt: skip
    except (RuntimeError, MemoryError) as error:
        text = f"{type(error).__name__}: {error}"
        if not any(word in text.lower() for word in NO_MEMORY):
            raise
        return Outcome(OUT_OF_MEMORY, message=text.splitlines()[0][:300])
    most = max(outcome.peak_memory for outcome in found)
    first = found[0]
    return Outcome(first.kind, first.throughput, most, first.steps, first.message)


def main() -> None:
    """Run the job in argv[1] (JSON); write its outcome to the file of the environment variable SLAPO_ZOO_RESULT."""
    outcome = run(Job(**json.loads(sys.argv[1])))
    path = Path(os.environ[RESULT])
    path.with_suffix(".part").write_text(json.dumps(vars(outcome)))
    path.with_suffix(".part").replace(path)


if __name__ == "__main__":
    main()
