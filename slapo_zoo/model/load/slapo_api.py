"""Functions of the original Slapo's API that this package offers to users, but does not use itself."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from slapo_zoo.language.graph.traced import original_class
from slapo_zoo.language.planned_rows import plan_of
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.parallel.ranks.emulation import BUILDING
from slapo_zoo.parallel.rng.seeds import TENSOR_PARALLEL, get_cuda_rng_tracker

_SEEDS: list[int] = []


@dataclass
class ScheduleMetadata:
    """Metadata of a schedule (changes applied to a model), with the name and the fields that the original Slapo has.

    Args:
        tie_weights: tied parameter --> the name under which it is saved.
        param_tags: names of the attributes that the primitive `annotate` has set on parameters.
        primitives: primitive name --> number of its uses.
    """

    tie_weights: dict[str, str] = field(default_factory=dict)
    param_tags: set[str] = field(default_factory=set)
    primitives: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(sch: Schedule) -> "ScheduleMetadata":
        """Return the metadata of the schedule `sch`, collected from the changes that it has applied."""
        rows = plan_of(sch.state).tensors.values()
        ties = {row.name: row.tied_to for row in rows if row.tied_to}
        names = [directive.name for _, directive in sch.history]
        tags = {getattr(d, "key", "") for _, d in sch.history if d.name == "annotate"}
        return ScheduleMetadata(ties, tags, {name: names.count(name) for name in names})


@contextmanager
def init_empty_weights(enable: bool = True, include_buffers: bool = False) -> Iterator[None]:
    """Context in which modules are built on meta: their parameters take no memory.

    Args:
        enable: whether modules are built on meta; False builds them as usual.
        include_buffers: put buffers on meta too; by default they are computed as usual.
    """
    if not enable:
        yield
        return
    if include_buffers:
        with torch.device("meta"):
            yield
        return
    module_class: Any = nn.Module
    with BUILDING:  # ranks may be threads, which share this class
        register = module_class.register_parameter

        def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            register(module, name, param)
            if param is not None and not param.is_meta:  # one on meta is tied: keep it
                meta = nn.Parameter(param.detach().to("meta"), param.requires_grad)
                module._parameters[name] = meta

        module_class.register_parameter = on_meta  # restored below, whatever happens
        try:
            yield
        finally:
            module_class.register_parameter = register


def analyze_tie_weights(
    top_mod: nn.Module, is_pipeline_partitioned: bool
) -> dict[int, set[tuple[str, int]]]:
    """Return the parameters that several modules share, with their names.

    Args:
        top_mod: the model; when partitioned, its direct children are the stages.
        is_pipeline_partitioned: whether the model is split into stages; if not, every stage is 0.

    Returns:
        id of the parameter --> {(name, stage)}, for parameters with several names.
    """
    stages = {name: i for i, (name, _) in enumerate(top_mod.named_children())}
    groups: dict[int, set[tuple[str, int]]] = {}
    for name, parameter in top_mod.named_parameters(remove_duplicate=False):
        head, _, rest = name.partition(".")
        at = (rest, stages[head]) if is_pipeline_partitioned and rest else (name, 0)
        groups.setdefault(id(parameter), set()).add(at)
    return {key: names for key, names in groups.items() if len(names) > 1}


def is_module_list(module: nn.Module, name: str = "", parent: nn.Module | None = None) -> bool:
    """Return whether a module is a ModuleList, or was one before tracing replaced it by a plain module.

    Args:
        module: the module.
        name: name of the module in `parent`, needed only where tracing replaced it.
        parent: the module that contains it.
    """
    if isinstance(module, nn.ModuleList) or original_class(module) is nn.ModuleList:
        return True
    held = parent._modules.get(name) if parent is not None and name else module
    names = list(module._modules)
    is_plain = type(module) is nn.Module and held is module
    return is_plain and bool(names) and names == [str(i) for i in range(len(names))]


def is_random_seed_set() -> bool:
    """Return whether `set_random_seed` was called in this process."""
    return bool(_SEEDS)


def set_random_seed(
    seed: int = 2013,
    dp_rank: int | None = None,
    pp_rank: int | None = None,
    tp_rank: int | None = None,
    always_enable_tp_seed: bool = False,
) -> int:
    """Seed Python and torch for this rank: equal seeds on tp peers, different ones on dp and pp peers.

    Args:
        seed: the same on all ranks.
        dp_rank: this rank's dp coordinate, or None without data parallelism.
        pp_rank: this rank's pp coordinate, or None.
        tp_rank: this rank's tp coordinate, or None; with it `get_cuda_rng_tracker().fork()` draws
            differently on tp peers.
        always_enable_tp_seed: seed differently on tp peers outside `fork` too.

    Returns:
        the seed of this rank.
    """
    shared = seed + 100 * (pp_rank or 0) + 10 * (dp_rank or 0)
    own = shared + 2718 + (tp_rank or 0)
    used = own if always_enable_tp_seed and tp_rank is not None else shared
    random.seed(used)
    torch.manual_seed(used)
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    if tp_rank is not None:
        tracker.add(TENSOR_PARALLEL, own)
    _SEEDS.append(used)
    return used
