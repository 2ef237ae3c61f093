"""Models without storage, and what their parameters share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def init_empty_weights(enable: bool = True, include_buffers: bool = False) -> Iterator[None]:
    """Build modules on meta within the context: their parameters take no memory.

    Args:
        enable: False changes nothing.
        include_buffers: put buffers on meta too; without, they are computed as usual.
    """
    if not enable:
        yield
        return
    if include_buffers:
        with torch.device("meta"):
            yield
        return
    module_class: Any = nn.Module
    register = module_class.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta:  # one on meta is shared: keep the tie
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
    """Find the parameters that several modules share.

    Args:
        top_mod: the model; when partitioned, its direct children are the stages.
        is_pipeline_partitioned: False gives every name stage 0.

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
