"""Example inputs of a module inside a `transformers` model, captured from a call of the model on a tiny batch."""

import inspect
from typing import Any

import torch
from torch import nn

from slapo_zoo.errors import ScheduleError
from slapo_zoo.hf.example_inputs import example_batch
from slapo_zoo.language.graph.patches import set_mode, unchanged
from slapo_zoo.language.graph.proxy import UNKNOWN
from slapo_zoo.language.graph.trace import calls_of
from slapo_zoo.language.graph.tracer import EXAMPLE_HINT

ROWS, TOKENS, OTHER_TOKENS = 2, 7, 5  # all different, and no width of a real model


class _Captured(Exception):  # noqa: N818 - not an error: it ends the call once the module is reached
    def __init__(self, args: tuple, kwargs: dict[str, Any]):
        self.call = args, kwargs


def capture(model: Any, path: str) -> tuple[tuple, dict[str, Any]]:
    """Return (args, kwargs) that the module at `path` receives in a call of the model on a tiny batch.

    A model that is not of `transformers` has no tiny batch: each required argument is then UNKNOWN, a tensor
    without shape, which suffices unless the forward branches on sizes.

    Args:
        model: model in training or eval mode; it is left unchanged.
        path: path of the module.
    """
    if not _is_known(model):
        return unknown_call(model.get_submodule(path))
    inputs = tiny_batch(model, path)
    if not path:
        return (), inputs

    if next(model.parameters()).is_meta:  # computing masks reads data, which meta tensors lack
        return _from_trace(model, path, inputs)

    def stop(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        raise _Captured(args, kwargs)

    handle = model.get_submodule(path).register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with unchanged(model), torch.no_grad():
            set_mode(model, training=False)
            model(**inputs)
    except _Captured as captured:
        return captured.call
    except Exception as error:
        problem = f"the example call of the model fails: {type(error).__name__}: {error}"
        raise _no_example(path, problem) from error
    finally:
        handle.remove()
    raise _no_example(path, "the example call of the model does not call this module")


def unknown_call(module: nn.Module) -> tuple[tuple, dict[str, Any]]:
    """Return (args, kwargs) with UNKNOWN, a tensor without shape, for each required argument of the module's forward."""
    empty, others = inspect.Parameter.empty, (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)  # fmt: skip
    parameters = inspect.signature(module.forward).parameters.values()
    needed = [p for p in parameters if p.default is empty and p.kind not in others]
    by_name = [p.name for p in needed if p.kind is p.KEYWORD_ONLY]
    return (UNKNOWN,) * (len(needed) - len(by_name)), dict.fromkeys(by_name, UNKNOWN)


def _is_known(model: Any) -> bool:
    main = getattr(model, "main_input_name", None)
    return getattr(model, "config", None) is not None and main in ("input_ids", "pixel_values")


def _from_trace(model: Any, path: str, inputs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    calls = calls_of(model, inputs, (path,))
    if path not in calls:
        raise _no_example(path, "the example call of the model does not call this module")
    return calls[path]


def tiny_batch(model: Any, path: str = "", hint: str = EXAMPLE_HINT) -> dict[str, Any]:
    """Return keyword arguments for a model of `transformers`: 2 rows of 7 tokens, or 2 images of the config's size.

    Args:
        model: a text or image model; any other raises ScheduleError.
        path: path of the module that is traced, for errors.
        hint: what the error for a model that is not of `transformers` says to do.
    """
    if not _is_known(model):
        problem = f"found {type(model).__name__}, but example inputs are made only for text and image models of transformers"
        raise _no_example(path, problem, hint)
    batch: dict[str, Any] = example_batch(model, ROWS, TOKENS)
    if "attention_mask" in batch:
        batch["attention_mask"][-1, ..., -2:] = 0  # at the end of the last row, as a tokenizer pads
    if "decoder_input_ids" in batch:
        for name in ("input_ids", "attention_mask"):
            batch[f"decoder_{name}"] = batch[name][:, -OTHER_TOKENS:]
    device, accepted = next(model.parameters()).device, inspect.signature(model.forward).parameters
    batch = {k: v.to(device) for k, v in batch.items() if k in accepted}
    return batch | ({"use_cache": False} if "use_cache" in accepted else {})


def _no_example(path: str, problem: str, hint: str = EXAMPLE_HINT) -> ScheduleError:
    return ScheduleError(path or "(the model)", "trace", problem, hint)
