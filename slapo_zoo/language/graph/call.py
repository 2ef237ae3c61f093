"""Bind the example inputs of a module to its forward, and create the placeholders of its graph."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.errors import ScheduleError
from slapo_zoo.language.graph import guards
from slapo_zoo.language.graph.proxy import UNKNOWN
from slapo_zoo.language.graph.tracer import ValueTracer

LITERALS = (bool, int, float, str, type(None), torch.dtype, torch.device)
NO_DEFAULT = inspect.Parameter.empty


@dataclass(frozen=True)
class Argument:
    """One parameter of the traced forward, and its value in the example call.

    Args:
        name: name of the placeholder; the n-th extra positional argument of `*args` is `args_n`.
        value: value in the example call.
        default: default in the signature of the forward, or NO_DEFAULT.
        how: "positional", "keyword", or "default" when the example leaves the argument out. Then the forward is
            called without it, because decorators of `transformers` fill some arguments from the config.
    """

    name: str
    value: Any
    default: Any
    how: str

    @property
    def live(self) -> bool:
        """Return True if the example value is or contains a tensor: a graph input. Other values become constants."""
        return _has_tensor(self.value)


@dataclass(frozen=True)
class Call:
    """The example call with which one module is traced.

    Args:
        module: module whose forward is traced.
        where: path of the module, for errors.
        arguments: example values, in order: one per parameter, and one per value passed in `*args` or `**kwargs`.
        others: name of the forward's `**kwargs` parameter, or ''.
    """

    module: nn.Module
    where: str
    arguments: tuple[Argument, ...]
    others: str

    @classmethod
    def of(cls, module: nn.Module, where: str, args: tuple, kwargs: dict[str, Any]) -> "Call":
        """Construct the Call of the example arguments (*args, **kwargs) of `module.forward`; arguments that do not fit
        the signature raise ScheduleError. `where` is the path of the module, for the error.
        """
        signature = inspect.signature(module.forward)
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            hint = f"pass the arguments of {type(module).__name__}.forward{signature}"
            at = where or "(the model)"
            raise ScheduleError(at, "example inputs", str(error), hint) from None
        arguments, others = [], ""
        varies = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                extra = enumerate(bound.get(name, ()))
                arguments += [Argument(f"{name}_{i}", v, NO_DEFAULT, "positional") for i, v in extra]  # fmt: skip
            elif parameter.kind is parameter.VAR_KEYWORD:
                others = name
                named = bound.get(name, {}).items()
                arguments += [Argument(k, v, None, "keyword") for k, v in named]
            else:
                keyword = parameter.kind is parameter.KEYWORD_ONLY or not (
                    varies or parameter.kind is parameter.POSITIONAL_ONLY
                )
                how = "keyword" if keyword else "positional"
                value = bound.get(name, parameter.default)
                how = how if name in bound or how == "positional" else "default"
                arguments.append(Argument(name, value, parameter.default, how))
        call = cls(module, where, tuple(arguments), others)
        call._check()
        return call

    def _check(self) -> None:
        for a in self.arguments:
            if not a.live and not _is_literal(a.value):
                found = type(a.value).__name__
                problem = f"argument {a.name!r} is a {found}: neither tensor nor literal"
                hint = "leave the argument out of the example (for a KV cache: use_cache=False)"
                raise ScheduleError(self.where or "(the model)", "trace", problem, hint)

    def inputs(self) -> dict[str, Any]:
        """Return {name of a placeholder: its value in the example call}."""
        values = {a.name: a.value for a in self.arguments}
        return {**values, f"**{self.others}": {}}

    def record(self, tracer: ValueTracer) -> tuple[Callable[[], Any], list[Any]]:
        """Add a placeholder per argument to the graph of `tracer`. Return, as fx.Tracer expects, (function to trace, its
        list of arguments): a function of no arguments that runs the forward on the placeholders, and [].
        """
        proxies, optional = [], False
        for a in self.arguments:
            optional = optional or a.default is not NO_DEFAULT
            default = (a.default if _is_literal(a.default) else None,) if optional else ()
            proxies.append(tracer.create_proxy("placeholder", a.name, default, {}))
        if self.others:
            self._refuse_others(tracer)
        positional, keywords = [], {}
        for a, proxy in zip(self.arguments, proxies, strict=True):
            value = self._value(a, proxy, tracer)
            if a.how == "keyword":
                keywords[a.name] = value
            elif a.how == "positional":
                positional.append(value)
        return lambda: self.module.forward(*positional, **keywords), []

    def _value(self, a: Argument, proxy: Any, tracer: ValueTracer) -> Any:
        if not a.live:
            args = (proxy.node, a.value, self.where or "(the model)", f"argument {a.name!r}")
            tracer.create_node("call_function", guards.expect, args, {})
            return a.value
        if proxy.node.args:  # it has a default, so a caller may leave it out
            args = (proxy.node, self.where or "(the model)", a.name)
            tracer.create_node("call_function", guards.expect_given, args, {})
        return proxy

    def _refuse_others(self, tracer: ValueTracer) -> None:
        others: Any = tracer.create_proxy("placeholder", f"**{self.others}", (), {})
        args = (others.node, self.where or "(the model)")
        tracer.create_node("call_function", guards.expect_no_others, args, {})


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    if isinstance(value, (tuple, list)):
        return any(map(_has_tensor, value))
    return isinstance(value, Tensor) or value is UNKNOWN


def _is_literal(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_literal, value))
    return isinstance(value, LITERALS)
