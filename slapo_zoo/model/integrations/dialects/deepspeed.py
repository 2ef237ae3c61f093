"""DeepSpeed with a scheduled model: ZeRO 0-3 over dp together with our tp, and DeepSpeed's own pipeline.

Sources: arXiv:1910.02054 (ZeRO); https://www.deepspeed.ai/docs/config-json for the config.
"""

import copy
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slapo_zoo.errors import MeshError, SlapoError
from slapo_zoo.kernels.loss.logits_on_demand import make_logits_at_once
from slapo_zoo.model.dp.data_parallel import (
    sum_partial_gradients_in_backward,
    use_engine,
)
from slapo_zoo.model.integrations.dialects import register_dialect
from slapo_zoo.model.integrations.dialects.engine import (
    TargetEngine,
    made_optimizer,
    require_scheduled,
)
from slapo_zoo.model.integrations.dialects.zero_state import Zero
from slapo_zoo.parallel.compat import new_group
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.rank_plan import REPLICAS

BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu")


@register_dialect("runtime_engine", "deepspeed")
def deepspeed_engine(
    sch: Any,
    config: Mapping[str, Any] | str | os.PathLike[str],
    optimizer: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Put a scheduled model into a DeepSpeed engine; return (engine with `update(batch)` for a step, its optimizer).

    With pp > 1 the stages run in DeepSpeed's PipelineModule, tied weights as TiedLayerSpec.

    Args:
        sch: a scheduled model.
        config: DeepSpeed's config, a dict or the path of a JSON file. It sets clipping and gradient
            accumulation; the default clipping is DeepSpeed's.
        optimizer: torch optimizer, or a function parameters --> optimizer; None takes the config's.
        **options: options of deepspeed.initialize.
    """
    model = require_scheduled(sch, "deepspeed")
    settings = read_config(config)
    _check(model, settings)
    deepspeed = import_deepspeed()
    model.train()  # copies memory-mapped weights into memory
    mark_counted(model)
    if model.mesh.pp > 1:
        from slapo_zoo.model.integrations.dialects.deepspeed_pipeline import pipeline_engine

        return pipeline_engine(deepspeed, model, settings, optimizer, options)
    parameters = [p for p in model.parameters() if p.requires_grad]
    made = made_optimizer(optimizer, parameters)
    groups = [list(g["params"]) for g in made.param_groups] if made else [parameters]
    sum_partial_gradients_in_backward(model)
    native, ds_optimizer, *_ = deepspeed.initialize(
        model=model, optimizer=made, model_parameters=None if made else parameters,
        config=settings, mpu=MeshUnit(model.mesh), dist_init_required=False, **options,
    )  # fmt: skip
    if native.zero_optimization_stage() == 3:
        make_logits_at_once(model)
    use_engine(model, _Zero(native, groups, float(model.mesh.size("loss"))))
    return DeepSpeedTarget(model, native, ds_optimizer), ds_optimizer


class DeepSpeedTarget(TargetEngine):
    """Scheduled model in a DeepSpeed engine (attribute `native`), which clips, steps and clears gradients itself."""

    def update(self, batch: Mapping[str, Any], micro_batches: int | None = None) -> Tensor:
        loss = self.model.train_step(batch, micro_batches or self._accumulation())
        self.native.step()
        return loss

    def train_step(self, batch: Mapping[str, Any], micro_batches: int | None = None) -> Tensor:
        """Run forward and backward of `batch` in `micro_batches` parts; return on all ranks the mean loss over dp.

        The caller then calls `step()`. `micro_batches=None` takes `gradient_accumulation_steps` of DeepSpeed's config.
        """
        return self.model.train_step(batch, micro_batches or self._accumulation())

    def _accumulation(self) -> int:
        return self.native.gradient_accumulation_steps()

    @property
    def grad_norm(self) -> float:
        norm = self.native.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)


def import_deepspeed() -> Any:
    """Return the module deepspeed, after a call of its `init_distributed`; SlapoError if it is not installed."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        hint = "pip install slapo-zoo[deepspeed]"
        raise SlapoError("target='deepspeed'", "import deepspeed", str(error), hint) from error
    if not torch.cuda.is_available():  # else its first use compiles an all-reduce for shared memory
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        alone = not dist.is_initialized()
        deepspeed.init_distributed(dist_init_required=alone)
    return deepspeed


def read_config(config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """Return a copy of a DeepSpeed config (dict or JSON file), with micro-batch size 1 if it gives no batch size, with
    `zero_allow_untested_optimizer` and, for Adam on a CPU, with `torch_adam`, unless it has these options.
    """
    if isinstance(config, Mapping):
        settings = copy.deepcopy(dict(config))
    else:
        try:
            settings = json.loads(Path(config).read_text())
        except (OSError, json.JSONDecodeError) as error:
            hint = "pass a dict, or the path of a JSON file"
            raise SlapoError("target='deepspeed'", f"config={config!r}", str(error), hint) from None
    if not any(name in settings for name in BATCH_SIZES):
        settings["train_micro_batch_size_per_gpu"] = 1  # it only serves DeepSpeed's own statistics
    settings.setdefault("zero_allow_untested_optimizer", True)
    kind = settings.get("optimizer", {}).get("type", "")
    if kind.lower() in ("adam", "adamw") and not torch.cuda.is_available():
        settings["optimizer"].setdefault("params", {}).setdefault("torch_adam", True)
    return settings


def _check(model: Any, settings: Mapping[str, Any]) -> None:
    stage = settings.get("zero_optimization", {}).get("stage", 0)
    if model.mesh.pp > 1 and stage > 1:
        problem = f"found stage {stage} with pp={model.mesh.pp}; DeepSpeed's pipeline takes 0 and 1"
        hint = "choose stage 1, or pp=1"
        raise MeshError("target='deepspeed'", "zero_optimization", problem, hint)


def mark_counted(model: Any) -> None:
    """Mark parameters (`model_parallel`) so that DeepSpeed counts each one once in the global gradient norm.

    DeepSpeed counts all parameters of the first rank in its model-parallel group, and those with a mark on the other
    ranks. So tp shards are marked, and with pp > 1 also the replicated parameters of each stage's first tp rank. If
    several ranks hold the same KV heads, only the first of these ranks marks them.
    """
    mesh, plan = model.mesh, model._slapo.plan
    for name, p in model.named_parameters():
        row = plan.of(name)
        later = (
            {one.ranks(mesh)[0] for one in row.sums(True, REPLICAS)} - {mesh.rank} if row else ()
        )
        divided = row is not None and row.placement is not None and mesh.tp > 1 and not later
        counts = divided or (mesh.pp > 1 and mesh.coord("tp") == 0)
        p.model_parallel = p.tensor_model_parallel = counts and plan.owns(name)


class MeshUnit:
    """Object for DeepSpeed's argument `mpu`, whose methods, e.g. `get_data_parallel_group()`, describe our mesh."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.groups = {name: _group(mesh, name) for name in mesh.sizes}

    def __getattr__(self, name: str) -> Any:
        found = re.fullmatch(r"get_(\w+?)_(rank|world_size|group|src_rank)", name)
        mesh_dim = UNIT_NAMES.get(found[1]) if found else None
        if found is None or mesh_dim is None:
            known = f"get_X_rank, get_X_world_size, get_X_group and get_X_src_rank, X one of {', '.join(UNIT_NAMES)}"
            raise AttributeError(f"DeepSpeed's mpu object has no {name!r}, only {known}")
        mesh = self.mesh
        answers = {
            "rank": mesh.coord(mesh_dim),
            "world_size": mesh.size(mesh_dim),
            "group": self.groups[mesh_dim],
            "src_rank": mesh.peers(mesh_dim)[0],
        }
        return lambda: answers[found[2]]


UNIT_NAMES = {
    "model_parallel": "tp",
    "tensor_model_parallel": "tp",
    "slice_parallel": "tp",
    "data_parallel": "dp",
    "pipeline_model_parallel": "pp",
    "pipe_parallel": "pp",
}


def _group(mesh: Mesh, mesh_dim: str) -> Any:
    """Return the process group of the mesh dim `mesh_dim`; for size 1 a group of this rank alone. A collective call."""
    if (group := mesh.group(mesh_dim)) is not None:
        return group
    alone = [new_group([rank]) for rank in range(mesh.world_size)]
    return alone[mesh.rank]


class _Zero(Zero):
    """Data parallelism by DeepSpeed, without pipeline stages; DeepSpeed's engine runs each forward and backward."""

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        self.native.set_gradient_accumulation_boundary(is_last)
        yield
        if not is_last:
            self.native.step()  # counts the micro-batch; no optimizer step before the boundary

    def backward(self, loss: Tensor) -> None:
        self.native.backward(loss * self.loss_scale, scale_wrt_gas=False)

    def clip_grad_norm_(self, model: Any, max_norm: float) -> Tensor:
        hint = 'set "gradient_clipping" in DeepSpeed\'s config; the norm is engine.get_global_grad_norm()'
        problem = "DeepSpeed holds the gradients and clips in its step"
        raise SlapoError("target='deepspeed'", "clip_grad_norm_", problem, hint)


@register_dialect("log_parser", "deepspeed")
def parse_log(path: str | os.PathLike[str]) -> tuple[float, float, float, int]:
    """Parse the DeepSpeed log at `path`; return (number of parameters on a rank, samples/s, peak GB, error code).

    A figure that is missing is 0. Error codes: 0 none, 1 out of memory, 2 no throughput.
    """
    text = Path(path).read_text(errors="replace")
    rates = re.findall(r"(?:RunningAvgSamplesPerSec=|samples/sec: )([\d.]+)", text)
    memory = [float(gb) for gb in re.findall(r"MaxMemAllocated=([\d.]+)GB", text)]
    parameters = [float(n) for n in re.findall(r"STAGE_PARAMS=(\d+)", text)]
    code = 0 if rates else 1 if "out of memory" in text else 2
    rate = float(rates[-1]) if rates else 0.0
    return max(parameters, default=0.0), rate, max(memory, default=0.0), code
