"""Let users call a part of a model alone (`model.bert(...)`, an encoder, `get_image_features`).

Such a call does what a call of the whole model does for its modules: it casts weights and inputs to the compute dtype,
gathers ZeRO's shards, chooses the dropout masks, and completes the gradients in the backward.
"""

import copy
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from slapo_zoo.hf.example_inputs import accepts
from slapo_zoo.language.copying import independent_copy, plain_copy
from slapo_zoo.language.directive import ForwardContext
from slapo_zoo.model.gradients.module_changes import WHOLE
from slapo_zoo.model.step.forward import require_together
from slapo_zoo.model.step.mixed_precision import computing_forward
from slapo_zoo.model.step.runtime import count_rows

FEATURES = re.compile(r"get_\w+_features")  # methods of CLIP and its kin that compute


class Part:
    """Mixin for submodules such as `model.bert` or `model.encoder`, so that users may call them alone and train."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as torch does. If no call of the whole model is running, first cast weights and inputs to the
        compute dtype, gather ZeRO's shards, choose the dropout masks and register gradient hooks.
        """
        own: Any = super()
        model = self.__dict__[WHOLE]()
        if self.training and model.schedule.state.checkpointed and accepts(type(self), "use_cache"):  # pyright: ignore[reportAttributeAccessIssue]
            kwargs["use_cache"] = False  # a recomputation would append to the cache again
        return called(model, own.__call__, args, kwargs)


def called(model: Any, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a submodule of a model by `run(*args, **kwargs)` and return its output. If no call of the model is running,
    first cast weights and inputs, gather ZeRO's shards, choose the dropout masks and register gradient hooks.
    """
    calls, state = model._slapo.calls, model.schedule.state
    if state.forward.is_call or (torch.compiler.is_compiling() and not model.training):
        return run(*args, **kwargs)
    if torch.compiler.is_compiling():  # a compiled graph would always draw the same dropout masks
        return torch.compiler.disable(called, recursive=False)(model, run, args, kwargs)  # pyright: ignore[reportCallIssue]
    batch = {**{str(i): x for i, x in enumerate(args)}, **kwargs}
    require_together(model, batch)
    rows = count_rows(batch)
    draws = state.random.call(False, rows * model.mesh.coord("batch"), rows)
    compute = computing_forward(lambda _model, *args, **kwargs: run(*args, **kwargs))
    with state.within(ForwardContext(is_call=True)), draws:
        calls.begin(model, batch, model.training)
        output = compute(model, *args, **kwargs)
        calls.watch(output)
    return output


def call_parts_alone(model: Any, blocks: Iterable[str] = (), blocks_too: bool = False) -> None:
    """Let users call modules that contain blocks (an encoder, a base model) outside the forward of `model`: give them a
    subclass of their class and Part. `blocks` are the paths of the layers; with `blocks_too` layers get one, too. All
    modules with such a class then refer to `model` as theirs; for a deep copy, whose modules have the classes already,
    a call without `blocks` does only this.
    """
    first = 0 if blocks_too else 1
    parts = {path.rsplit(".", i)[0] for path in blocks for i in range(first, path.count(".") + 1)}
    for module in map(model.get_submodule, sorted(parts)):
        cls = type(module)
        if cls.forward is not nn.ModuleList.forward:
            module.__class__ = type(cls.__name__, (Part, cls), {"__module__": cls.__module__})
    for module in model.modules():
        if isinstance(module, Part):
            module.__dict__[WHOLE] = lambda: model  # so that deepcopy does not copy the model
        if module is not model:
            module.__dict__["__deepcopy__"] = functools.partial(_copied, model, module)


def _copied(model: Any, module: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of a submodule of `model`; `memo` is that of `copy.deepcopy`. A Part, which may be called alone,
    is that of a copy of the whole model. Another module, e.g. a layer, stays one of `model`: its forwards and hooks
    compute with the copy's weights, and share the model's state (random stream, mesh).
    """
    if id(model) in memo:
        return plain_copy(module, memo)
    if isinstance(module, Part):
        path = next(path for path, part in model.named_modules() if part is module)
        return copy.deepcopy(model, memo).get_submodule(path)
    runtime, state, inside = model._slapo, model.schedule.state, {id(m) for m in module.modules()}
    shared = [runtime, state, state.random, state.mesh, *runtime.groups.values()]
    shared += [m for m in model.modules() if id(m) not in inside]
    memo |= (added := {id(x): x for x in shared if id(x) not in memo})
    try:
        return independent_copy(module, memo)
    finally:
        for key in added:
            del memo[key]


def features_alone(cls: type) -> dict[str, Callable[..., Any]]:
    """Return {name: wrapper} for the methods `get_..._features` of the class `cls` (e.g. `get_image_features`). Users
    call these alone, outside a forward of the model, so a wrapper, which has the method's arguments, first casts
    weights, hooks gradients and chooses dropout masks.
    """

    def alone(method: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(method)(
            lambda self, *args, **kwargs: called(
                self, functools.partial(method, self), args, kwargs
            )
        )

    return {name: alone(getattr(cls, name)) for name in dir(cls) if FEATURES.fullmatch(name)}
