"""Everything we take from `transformers` beyond its documented front door, in one place."""

import copy
import importlib
import pkgutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from slapo_zoo.hf import attention
from slapo_zoo.hf.attention_backends import NAME
from slapo_zoo.errors import ArchitectureError


@cache
def register_models() -> None:
    """Make the models of `slapo_zoo.hf.own` known to the Auto classes; each file registers its own."""
    package = importlib.import_module("slapo_zoo.hf.own")
    for found in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{found.name}")


def resolve_class(config: Any, auto_class: Any = None) -> type:
    """The model class: `auto_class` resolved for the config, or the checkpoint's own.

    Args:
        config: of `transformers`.
        auto_class: None, a model class, an Auto class, or the name of either.
    """
    import transformers

    if auto_class is None:
        names = getattr(config, "architectures", None)
        auto_class = names[0] if names else "AutoModel"
    if isinstance(auto_class, str):
        beside_config = sys.modules[type(config).__module__]  # a model of our own
        found = getattr(transformers, auto_class, getattr(beside_config, auto_class, None))
        if found is None:
            problem = "transformers has no class of that name"
            hint = "pass auto_class=, e.g. AutoModelForCausalLM"
            raise ArchitectureError("from_pretrained", f"auto_class={auto_class!r}", problem, hint)
        auto_class = found
    if hasattr(auto_class, "_model_mapping"):  # an Auto class
        try:
            auto_class = auto_class._model_mapping[type(config)]
        except KeyError:
            problem = f"it has no class for {type(config).__name__}"
            hint = "choose another auto_class"
            name = auto_class.__name__
            raise ArchitectureError("from_pretrained", name, problem, hint) from None
    return auto_class


_BUILDING = threading.RLock()  # torch's default dtype and what transformers patches are global


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Modules built within have floating parameters of `dtype`; one thread at a time."""
    with _BUILDING:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def build_on_meta(cls: Any, config: Any, dtype: torch.dtype, own_attention: bool = True) -> Any:
    """The unmodified model of a class, without storage, its weights tied.

    Args:
        cls: of `transformers`.
        config: its config; `_attn_implementation` is set to our seam, and `dtype`.
        dtype: of the floating parameters.
        own_attention: False keeps the attention implementation that the config asks for.
    """
    from transformers.initialization import no_init_weights

    attention.register_attention()
    if own_attention:
        config._attn_implementation = NAME
    config.dtype = dtype  # a head that builds its base model by an Auto class asks the config
    with torch.device("meta"), default_dtype(dtype), no_init_weights():
        model = cls(config)
    model.tie_weights()
    return model.train(False)


def count_parameters(config: Any, auto_class: Any) -> int:
    """Of the whole model; nothing is allocated."""
    model = build_on_meta(resolve_class(config, auto_class), copy.deepcopy(config), torch.float32, False)  # fmt: skip
    return sum(p.numel() for p in model.parameters())


def build_fake(cls: Any, config: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """The unmodified model made of fake tensors (shapes on a device), and their mode."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers.initialization import no_init_weights

    mode, config = FakeTensorMode(), copy.deepcopy(config)
    if str(config._attn_implementation).startswith(NAME):
        config._attn_implementation = NAME  # masks of other back ends look at data
    config.dtype = dtype
    with mode, default_dtype(dtype), no_init_weights():
        model = cls(config)
        model.tie_weights()
    return mode, model.train(False)


def tied_names(model: Any) -> dict[str, str]:
    """Tied parameter --> the one it shares memory with, for the whole model."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def init_module(model: Any, module: nn.Module) -> None:
    """Run the model's own initialisation on a module and all below it, children first."""
    for child in module.children():
        init_module(child if hasattr(child, "_init_weights") else model, child)
    model._init_weights(module)


def mark_initialized(tensor: torch.Tensor, value: bool = True) -> None:
    """Tell the initialisation of `transformers` to leave a tensor alone."""
    tensor._is_hf_initialized = value  # pyright: ignore[reportAttributeAccessIssue]


def ignored_keys(model: Any) -> list[str]:
    """Regular expressions of checkpoint keys that the class does not expect to use."""
    return list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])
