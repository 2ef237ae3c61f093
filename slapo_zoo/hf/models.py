"""Uses of `transformers` beyond its documented interface: classes, models on meta or fake tensors, initialisation."""

import copy
import importlib
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slapo_zoo.errors import ArchitectureError, SlapoError
from slapo_zoo.hf import attention
from slapo_zoo.hf.attention_backends import NAME
from slapo_zoo.hf.no_waits import without_waits
from slapo_zoo.parallel.ranks.emulation import BUILDING


@cache
def register_models() -> None:
    """Register the models of `slapo_zoo.hf.own` with the Auto classes, by importing each file."""
    package = importlib.import_module("slapo_zoo.hf.own")
    for found in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{found.name}")


def resolve_class(config: Any, auto_class: Any = None) -> type:
    """Return the model class for `config`. `auto_class` is a model class, an Auto class, or the name of either; None
    takes the config's `architectures`. ArchitectureError: `transformers` has no such class, or it is no model class.
    """
    import transformers

    if auto_class is None:
        names = getattr(config, "architectures", None)
        if names and not (isinstance(names, list | tuple) and isinstance(names[0], str)):
            hint = "correct `architectures` in config.json, or pass auto_class=, e.g. AutoModelForCausalLM"
            raise ArchitectureError("from_pretrained", f"architectures={names!r:.80}", "expected a list of class names", hint)  # fmt: skip
        auto_class = names[0] if names else "AutoModel"
    if isinstance(auto_class, str):
        beside_config = sys.modules[type(config).__module__]  # a class of slapo_zoo.hf.own
        found = getattr(transformers, auto_class, getattr(beside_config, auto_class, None))
        if found is None:
            problem = "transformers has no class of that name"
            hint = "pass auto_class=, e.g. AutoModelForCausalLM, or correct `architectures` in config.json"
            raise ArchitectureError("from_pretrained", f"model class {auto_class!r}", problem, hint)
        auto_class = found
    if hasattr(auto_class, "_model_mapping"):  # an Auto class
        try:
            auto_class = auto_class._model_mapping[type(config)]
        except KeyError:
            problem = f"this Auto class has no model class for {type(config).__name__}"
            hint = "pass another auto_class=, e.g. AutoModel"
            name = auto_class.__name__
            raise ArchitectureError("from_pretrained", name, problem, hint) from None
    if not (isinstance(auto_class, type) and issubclass(auto_class, transformers.PreTrainedModel)):
        name = getattr(auto_class, "__name__", repr(auto_class))
        problem = "expected a model class of transformers"
        hint = "pass a class of transformers, e.g. auto_class=AutoModelForCausalLM"
        raise ArchitectureError("from_pretrained", f"auto_class={name!r:.80}", problem, hint)
    return auto_class


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context in which new modules have floating parameters of `dtype`; other threads wait until it ends."""
    with BUILDING:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Context in which `transformers` shows no progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def calls_interface(cls: type) -> bool:
    """Return whether the file of transformers that defines a class calls AttentionInterface; True if none defines it."""
    names = {c.__module__ for c in cls.__mro__ if "transformers.models." in c.__module__}
    return not names or any(hasattr(sys.modules[n], "ALL_ATTENTION_FUNCTIONS") for n in names)


def build_on_meta(
    cls: Any, config: Any, dtype: torch.dtype, own_attention: bool | None = True
) -> Any:
    """Return the model of class `cls` and `config` as `transformers` defines it, on the meta device, with floating
    parameters of `dtype`, with weights tied, in eval mode. The config's `dtype` is set, and with `own_attention` (None:
    if `calls_interface(cls)`) also its `_attn_implementation`, to slapo_zoo's attention function.
    """
    from transformers.initialization import no_init_weights

    attention.register_attention()
    if calls_interface(cls) if own_attention is None else own_attention:
        config._attn_implementation = NAME
    config.dtype = dtype  # read by heads that build their base by an Auto class
    try:
        with torch.device("meta"), default_dtype(dtype), no_init_weights(), _Numbers():
            model = cls(config)
        model.loss_type = model.loss_type or "ForCausalLM"  # as transformers does, with a warning
        _keep_numbers(model)
        _widen(model, lambda name, _module: _is_listed(model, name, dtype))
        model.tie_weights()
    except SlapoError:
        raise
    except Exception as error:  # classes raise many types on bad values
        what = str(error).strip().partition("\n")[0]
        problem = f"this class cannot be built from this config: {type(error).__name__}: {what:.200}"  # fmt: skip
        hint = "check the values of config.json against those of a model that works"
        raise ArchitectureError("from_pretrained", cls.__name__, problem, hint) from error
    _forget_loose_ties(model)
    without_waits(model)
    return model.train(False)


class _Numbers(TorchFunctionMode):
    """Mode in which `torch.tensor(number)` stays on the CPU while a model is built on meta, to keep its value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        is_tensor = getattr(func, "__name__", "") == "tensor"  # torch.tensor, or a wrapper of it
        if is_tensor and args and isinstance(args[0], int | float):
            kwargs["device"] = kwargs.get("device") or "cpu"
        found = func(*args, **kwargs)
        return found.to("meta") if getattr(func, "__name__", "") == "expand" else found


def _keep_numbers(model: Any) -> None:
    """Move the parameters and buffers of `model` that are not on meta to meta: those that its constructor made by
    `torch.tensor(number)`. Store {full name: value} in its attribute `given_numbers`.
    """
    found = {
        f"{path}.{name}".lstrip("."): tensor.detach()
        for path, module in model.named_modules()
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items() if tensor is not None and not tensor.is_meta
    }  # fmt: skip
    swap_tensors(model.modules(), lambda x: x if x.is_meta else like(x, x.detach().to("meta")))
    model.__dict__["given_numbers"] = found


def given_numbers(model: Any) -> dict[str, torch.Tensor]:
    """Return name --> value of a model's parameters and buffers that torch.tensor(number) made (CLIP's logit scale)."""
    return model.__dict__.get("given_numbers", {})


def _forget_loose_ties(model: Any) -> None:
    """Remove from `model.all_tied_weights_keys` the pairs that `tie_weights` did not tie (XLM-RoBERTa's causal head)."""
    held = dict(model.named_parameters(remove_duplicate=False))
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    loose = [a for a, b in ties.items() if a in held and b in held and held[a] is not held[b]]
    if loose:
        model.all_tied_weights_keys = {a: b for a, b in ties.items() if a not in loose}


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of most elements of a model's parameters; some classes keep a few in fp32."""
    dtypes = dict.fromkeys(p.dtype for p in model.parameters())
    return max(dtypes, key=lambda d: sum(p.numel() for p in model.parameters() if p.dtype == d))


def count_parameters(config: Any, auto_class: Any) -> int:
    """Return the number of parameters of a config's unsharded model of class `auto_class` (None: that of the config)."""
    model = build_on_meta(resolve_class(config, auto_class), copy.deepcopy(config), torch.float32, False)  # fmt: skip
    return sum(p.numel() for p in model.parameters())


def build_fake(cls: Any, config: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return (a FakeTensorMode, the model of a config as `transformers` defines it, made of fake tensors, in eval mode)."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers.initialization import no_init_weights

    mode, config = FakeTensorMode(allow_non_fake_inputs=True), copy.deepcopy(config)
    if str(config._attn_implementation).startswith(NAME):
        config._attn_implementation = NAME  # other back ends' masks branch on data
    config.dtype = dtype
    with torch.device("meta"), default_dtype(dtype), no_init_weights():
        model = cls(config)  # outside of the mode: some constructors read data
        model.loss_type = model.loss_type or "ForCausalLM"
        model.tie_weights()
    with mode, default_dtype(dtype):
        to_fakes(model)
        if dtype.itemsize == 2:
            _widen(model, lambda name, module: stays_wide(model, name, module, dtype))
    return mode, model.train(False)


def to_fakes(model: nn.Module) -> Callable[[], None]:
    """Replace all tensors of a model by CPU tensors of the active FakeTensorMode; return a function that restores them."""
    return swap_tensors(model.modules(), lambda x: like(x, empty_like(x)), attributes=True)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty CPU tensor of the same shape and dtype; under a FakeTensorMode it is a fake tensor."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def like(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return `values`, as an nn.Parameter with the requires_grad of `tensor` if `tensor` is a parameter, else unchanged."""
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(values, tensor.requires_grad) if is_parameter else values


def swap_tensors(
    modules: Iterable[nn.Module], new: Callable[[torch.Tensor], torch.Tensor], attributes: bool = False
) -> Callable[[], None]:  # fmt: skip
    """Replace each parameter and buffer of `modules` (children not included) by `new(tensor)`; where modules share a
    tensor, they share the new one. Return a function that undoes it. With `attributes`, plain attributes that are
    tensors are replaced too.
    """
    made: dict[int, torch.Tensor] = {}
    before = []
    held: dict[str, Any]
    for module in modules:
        for held in (module._parameters, module._buffers, *([vars(module)] if attributes else [])):
            found = {name: x for name, x in held.items() if isinstance(x, torch.Tensor)}
            before.append((held, found))
            for name, x in found.items():
                made[id(x)] = made[id(x)] if id(x) in made else new(x)
                held[name] = made[id(x)]

    def undo() -> None:
        for held, tensors in before:
            held.update(tensors)

    return undo


def _widen(model: nn.Module, is_wide: Callable[[str, nn.Module], bool]) -> None:
    """Replace the floating parameters and buffers for which `is_wide(name, module)` is True by new ones in fp32."""
    held: dict[str, Any]
    for path, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for name, x in held.items():
                if x is not None and x.is_floating_point() and is_wide(f"{path}.{name}", module):
                    held[name] = like(x, x.detach().float())  # fake tensors have no cast in place


def as_computed(name: str, x: Any, dtype: torch.dtype | None) -> Any:
    """Return `x`, the argument `name` of a forward; a floating tensor that is no label is cast to `dtype`, if given."""
    casts = isinstance(x, torch.Tensor) and x.is_floating_point() and "label" not in name
    return x.to(dtype) if casts and dtype is not None else x


def stays_wide(model: Any, name: str, module: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether the tensor `name` of `model`, held by `module`, stays in fp32 where the others are of `dtype`, a
    16-bit type: tensors of batch norms do, and those whose names match `_keep_in_fp32_modules` (float16 only) or
    `_keep_in_fp32_modules_strict` of the model's class.
    """
    return isinstance(module, nn.modules.batchnorm._BatchNorm) or _is_listed(model, name, dtype)


def _is_listed(model: Any, name: str, dtype: torch.dtype) -> bool:
    """Return whether `transformers` loads the tensor `name` in fp32 where the other tensors are of `dtype`."""
    rules = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        rules |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return dtype.itemsize == 2 and any(re.search(rule.replace("*", ".*"), name) for rule in rules)


def tied_names(model: Any) -> dict[str, str]:
    """Return name of each tied parameter --> name of the parameter with which it shares memory in the unsharded model."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def init_module(model: Any, module: nn.Module) -> None:
    """Run the model's `_init_weights` on a module and all modules below it, children first."""
    for child in module.children():
        init_module(child if hasattr(child, "_init_weights") else model, child)
    model._init_weights(module)


def init_own(model: Any, path: str) -> None:
    """Run `_init_weights` of the innermost PreTrainedModel around `path` on the module there, not on its children."""
    parts = path.split(".") if path else []
    above = [model.get_submodule(".".join(parts[:i])) for i in range(len(parts) + 1)]
    model = next(m for m in reversed(above) if hasattr(m, "_init_weights"))
    model._init_weights(initialized_as(above[-1]))


def initialized_as(module: Any) -> Any:
    """Return the module to initialise: `module`, or the original if `module` is a pipeline stage's placeholder for it."""
    return module.__dict__.get("_original", module)


def mark_initialized(tensor: torch.Tensor, value: bool = True) -> None:
    """Mark a tensor so that the initialisation of `transformers` leaves it unchanged; `value` False removes the mark."""
    tensor._is_hf_initialized = value  # pyright: ignore[reportAttributeAccessIssue]


def ignored_keys(model: Any) -> list[str]:
    """Return regular expressions of checkpoint keys that a load of this model ignores if the model lacks them."""
    return list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])


def freeze_as_made(model: Any) -> Any:
    """Freeze the parameters that the model's own constructor freezes (Whisper's sine positions); return the model."""
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        made = type(model)(copy.deepcopy(model.config))
    for name, parameter in made.named_parameters():
        model.get_parameter(name).requires_grad_(parameter.requires_grad)
    return model
