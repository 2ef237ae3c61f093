"""Pre-scheduled HuggingFace models: tensor, pipeline, data and context parallelism by a compact schedule language.

Names are loaded when they are first used: `import slapo_zoo` imports neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

from slapo_zoo.parallel.version import VERSION

if TYPE_CHECKING:
    from slapo_zoo.errors import ArchitectureError as ArchitectureError
    from slapo_zoo.errors import CardError as CardError
    from slapo_zoo.errors import MeshError as MeshError
    from slapo_zoo.errors import RankError as RankError
    from slapo_zoo.errors import ScheduleError as ScheduleError
    from slapo_zoo.errors import SlapoError as SlapoError
    from slapo_zoo.errors import WeightsError as WeightsError
    from slapo_zoo.language.graph.pattern import ModulePattern as ModulePattern
    from slapo_zoo.language.graph.pattern import Pattern as Pattern
    from slapo_zoo.language.graph.pattern import call_module as call_module
    from slapo_zoo.language.graph.trace import trace as trace
    from slapo_zoo.language.graph.trace import trace_module as trace_module
    from slapo_zoo.language.primitives.checkpoint import checkpoint as checkpoint
    from slapo_zoo.language.primitives.primitive_registry import list_primitives as list_primitives
    from slapo_zoo.language.primitives.primitive_registry import (
        register_primitive as register_primitive,
    )
    from slapo_zoo.language.primitives.shard import shard_rule as shard_rule
    from slapo_zoo.language.primitives.sync_ops import sync_op as sync_op
    from slapo_zoo.language.schedule import Schedule as Schedule
    from slapo_zoo.language.schedule import Selection as Selection
    from slapo_zoo.language.schedule import from_json as from_json
    from slapo_zoo.model.checkpoints.resume import load_checkpoint as load_checkpoint
    from slapo_zoo.model.checkpoints.training_checkpoint import (
        async_save_checkpoint as async_save_checkpoint,
    )
    from slapo_zoo.model.checkpoints.training_checkpoint import save_checkpoint as save_checkpoint
    from slapo_zoo.model.dp.sampler import MeshSampler as MeshSampler
    from slapo_zoo.model.dp.sampler import broadcast_batch as broadcast_batch
    from slapo_zoo.model.gradients.optimizers import OptimizerWarning as OptimizerWarning
    from slapo_zoo.model.gradients.optimizers import whole_matrices as whole_matrices
    from slapo_zoo.model.gradients.scaler import GradScaler as GradScaler
    from slapo_zoo.model.integrations.dialects import get_dialect_cls as get_dialect_cls
    from slapo_zoo.model.integrations.dialects import init_target_engine as init_target_engine
    from slapo_zoo.model.integrations.dialects import register_dialect as register_dialect
    from slapo_zoo.model.integrations.trainer import ScheduledTrainer as ScheduledTrainer
    from slapo_zoo.model.integrations.trainer import prepare as prepare
    from slapo_zoo.model.load.auto import AutoScheduledModel as AutoScheduledModel
    from slapo_zoo.model.load.build import apply_card as apply_card
    from slapo_zoo.model.load.build import build as build
    from slapo_zoo.model.load.build import consolidate_model as consolidate_model
    from slapo_zoo.model.load.build import create_schedule as create_schedule
    from slapo_zoo.model.load.build import publish_card as publish_card
    from slapo_zoo.model.load.slapo_api import ScheduleMetadata as ScheduleMetadata
    from slapo_zoo.model.load.slapo_api import analyze_tie_weights as analyze_tie_weights
    from slapo_zoo.model.load.slapo_api import init_empty_weights as init_empty_weights
    from slapo_zoo.model.load.slapo_api import is_module_list as is_module_list
    from slapo_zoo.model.load.slapo_api import is_random_seed_set as is_random_seed_set
    from slapo_zoo.model.load.slapo_api import set_random_seed as set_random_seed
    from slapo_zoo.model.numerics import NumericsError as NumericsError
    from slapo_zoo.model.numerics import NumericsWarning as NumericsWarning
    from slapo_zoo.model.numerics import NumericsWatch as NumericsWatch
    from slapo_zoo.parallel.mesh import Mesh as Mesh
    from slapo_zoo.parallel.ranks.emulation import emulate as emulate
    from slapo_zoo.parallel.ranks.launch import run_local as run_local
    from slapo_zoo.parallel.ranks.process_group import init_distributed as init_distributed
    from slapo_zoo.parallel.ranks.process_group import shutdown_distributed as shutdown_distributed
    from slapo_zoo.parallel.rng.seeds import get_cuda_rng_tracker as get_cuda_rng_tracker
    from slapo_zoo.parallel.rng.seeds import get_logger as get_logger
    from slapo_zoo.tune.database import Database as Database
    from slapo_zoo.tune.planner.hardware import Hardware as Hardware
    from slapo_zoo.tune.planner.hardware import data_sheet as data_sheet
    from slapo_zoo.tune.planner.hardware import find_hardware as find_hardware
    from slapo_zoo.tune.planner.layout import Layout as Layout
    from slapo_zoo.tune.planner.layout_search import Planner as Planner
    from slapo_zoo.tune.space import Space as Space
    from slapo_zoo.tune.space import Symbol as Symbol
    from slapo_zoo.tune.tuner import Limits as Limits
    from slapo_zoo.tune.tuner import Tuner as Tuner
    from slapo_zoo.verify.context import Verify as Verify
    from slapo_zoo.verify.core import verify as verify
    from slapo_zoo.weights.reshard import reshard as reshard
    from slapo_zoo.zoo.schedule_source import extend as extend

__version__ = VERSION

_HOMES = {  # module --> public names that are found in it
    "errors": (
        "ArchitectureError",
        "CardError",
        "MeshError",
        "RankError",
        "ScheduleError",
        "SlapoError",
        "WeightsError",
    ),
    "language.graph.pattern": ("ModulePattern", "Pattern", "call_module"),
    "language.graph.trace": ("trace", "trace_module"),
    "language.primitives.checkpoint": ("checkpoint",),
    "language.primitives.primitive_registry": ("list_primitives", "register_primitive"),
    "language.primitives.shard": ("shard_rule",),
    "language.primitives.sync_ops": ("sync_op",),
    "language.schedule": ("Schedule", "Selection", "from_json"),
    "model.checkpoints.resume": ("load_checkpoint",),
    "model.checkpoints.training_checkpoint": ("async_save_checkpoint", "save_checkpoint"),
    "model.dp.sampler": ("MeshSampler", "broadcast_batch"),
    "model.gradients.optimizers": ("OptimizerWarning", "whole_matrices"),
    "model.gradients.scaler": ("GradScaler",),
    "model.integrations.dialects": ("get_dialect_cls", "init_target_engine", "register_dialect"),
    "model.integrations.trainer": ("ScheduledTrainer", "prepare"),
    "model.load.auto": ("AutoScheduledModel",),
    "model.load.build": (
        "apply_card",
        "build",
        "consolidate_model",
        "create_schedule",
        "publish_card",
    ),
    "model.load.slapo_api": (
        "ScheduleMetadata",
        "analyze_tie_weights",
        "init_empty_weights",
        "is_module_list",
        "is_random_seed_set",
        "set_random_seed",
    ),
    "model.numerics": ("NumericsError", "NumericsWarning", "NumericsWatch"),
    "parallel.mesh": ("Mesh",),
    "parallel.ranks.emulation": ("emulate",),
    "parallel.ranks.launch": ("run_local",),
    "parallel.ranks.process_group": ("init_distributed", "shutdown_distributed"),
    "parallel.rng.seeds": ("get_cuda_rng_tracker", "get_logger"),
    "tune.database": ("Database",),
    "tune.planner.hardware": ("Hardware", "data_sheet", "find_hardware"),
    "tune.planner.layout": ("Layout",),
    "tune.planner.layout_search": ("Planner",),
    "tune.space": ("Space", "Symbol"),
    "tune.tuner": ("Limits", "Tuner"),
    "verify": ("verify",),
    "verify.context": ("Verify",),
    "weights.reshard": ("reshard",),
    "zoo.schedule_source": ("extend",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'slapo_zoo' has no attribute {name!r}")
    return getattr(importlib.import_module(f"slapo_zoo.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
