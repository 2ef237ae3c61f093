"""Pre-scheduled HuggingFace models on a compact schedule language.

Names are loaded when they are first used: `import slapo_zoo` imports neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slapo_zoo.model.auto import AutoScheduledModel as AutoScheduledModel
    from slapo_zoo.parallel.emulation import emulate as emulate
    from slapo_zoo.errors import ArchitectureError as ArchitectureError
    from slapo_zoo.errors import CardError as CardError
    from slapo_zoo.errors import MeshError as MeshError
    from slapo_zoo.errors import RankError as RankError
    from slapo_zoo.errors import ScheduleError as ScheduleError
    from slapo_zoo.errors import SlapoError as SlapoError
    from slapo_zoo.errors import WeightsError as WeightsError
    from slapo_zoo.parallel.mesh import Mesh as Mesh
    from slapo_zoo.model.checkpoint import async_save_checkpoint as async_save_checkpoint
    from slapo_zoo.model.checkpoint import load_checkpoint as load_checkpoint
    from slapo_zoo.model.checkpoint import save_checkpoint as save_checkpoint
    from slapo_zoo.language.schedule import Schedule as Schedule
    from slapo_zoo.tune.database import Database as Database
    from slapo_zoo.tune.space import Space as Space
    from slapo_zoo.tune.symbol import Symbol as Symbol
    from slapo_zoo.verify.context import Verify as Verify

__version__ = "0.1.0"

_HOME = {
    "AutoScheduledModel": "model.auto",
    "ArchitectureError": "errors",
    "MeshError": "errors",
    "RankError": "errors",
    "ScheduleError": "errors",
    "SlapoError": "errors",
    "WeightsError": "errors",
    "Mesh": "parallel.mesh",
    "Schedule": "language.schedule",
    "ScheduleMetadata": "model.build",
    "analyze_tie_weights": "hf.meta",
    "build": "model.build",
    "consolidate_model": "model.build",
    "create_schedule": "model.build",
    "CardError": "errors",
    "emulate": "parallel.emulation",
    "get_cuda_rng_tracker": "parallel.seeds",
    "get_dialect_cls": "model.dialects",
    "get_logger": "parallel.seeds",
    "call_module": "language.graph.pattern",
    "checkpoint": "language.primitives.checkpoint",
    "list_primitives": "language.primitives.registry",
    "ModulePattern": "language.graph.pattern",
    "Pattern": "language.graph.pattern",
    "register_primitive": "language.primitives.registry",
    "trace": "language.graph.trace",
    "trace_module": "language.graph.trace",
    "init_empty_weights": "hf.meta",
    "init_target_engine": "model.dialects",
    "is_module_list": "language.graph.traced",
    "is_random_seed_set": "parallel.seeds",
    "async_save_checkpoint": "model.checkpoint",
    "Verify": "verify.context",
    "Database": "tune.database",
    "Space": "tune.space",
    "Symbol": "tune.symbol",
    "load_checkpoint": "model.checkpoint",
    "save_checkpoint": "model.checkpoint",
    "set_random_seed": "parallel.seeds",
    "shard_rule": "language.primitives.shard",
    "sync_op": "language.primitives.sync",
}
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'slapo_zoo' has no attribute {name!r}")
    return getattr(importlib.import_module(f"slapo_zoo.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
