"""Pre-scheduled HuggingFace models on a compact schedule language.

Names are loaded when they are first used: `import slapo_zoo` imports neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slapo_zoo.auto import AutoScheduledModel as AutoScheduledModel
    from slapo_zoo.emulation import emulate as emulate
    from slapo_zoo.errors import ArchitectureError as ArchitectureError
    from slapo_zoo.errors import CardError as CardError
    from slapo_zoo.errors import MeshError as MeshError
    from slapo_zoo.errors import RankError as RankError
    from slapo_zoo.errors import ScheduleError as ScheduleError
    from slapo_zoo.errors import SlapoError as SlapoError
    from slapo_zoo.errors import WeightsError as WeightsError
    from slapo_zoo.mesh import Mesh as Mesh
    from slapo_zoo.resume import async_save_checkpoint as async_save_checkpoint
    from slapo_zoo.resume import load_checkpoint as load_checkpoint
    from slapo_zoo.resume import save_checkpoint as save_checkpoint
    from slapo_zoo.schedule import Schedule as Schedule
    from slapo_zoo.tune.database import Database as Database
    from slapo_zoo.tune.space import Space as Space
    from slapo_zoo.tune.symbol import Symbol as Symbol
    from slapo_zoo.verify.context import Verify as Verify

__version__ = "0.1.0"

_HOME = {
    "AutoScheduledModel": "auto",
    "ArchitectureError": "errors",
    "MeshError": "errors",
    "RankError": "errors",
    "ScheduleError": "errors",
    "SlapoError": "errors",
    "WeightsError": "errors",
    "Mesh": "mesh",
    "Schedule": "schedule",
    "ScheduleMetadata": "create",
    "analyze_tie_weights": "meta",
    "build": "create",
    "consolidate_model": "create",
    "create_schedule": "create",
    "CardError": "errors",
    "emulate": "emulation",
    "get_cuda_rng_tracker": "seeds",
    "get_dialect_cls": "dialects",
    "get_logger": "seeds",
    "call_module": "graph.pattern",
    "checkpoint": "primitives.checkpoint",
    "list_primitives": "primitives.registry",
    "ModulePattern": "graph.pattern",
    "Pattern": "graph.pattern",
    "register_primitive": "primitives.registry",
    "trace": "graph.trace",
    "trace_module": "graph.trace",
    "init_empty_weights": "meta",
    "init_target_engine": "dialects",
    "is_module_list": "graph.traced",
    "is_random_seed_set": "seeds",
    "async_save_checkpoint": "resume",
    "Verify": "verify.context",
    "Database": "tune.database",
    "Space": "tune.space",
    "Symbol": "tune.symbol",
    "load_checkpoint": "resume",
    "save_checkpoint": "resume",
    "set_random_seed": "seeds",
    "shard_rule": "primitives.shard",
    "sync_op": "primitives.sync",
}
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'slapo_zoo' has no attribute {name!r}")
    return getattr(importlib.import_module(f"slapo_zoo.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
