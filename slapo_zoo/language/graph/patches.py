"""Temporary patches of torch and builtins during a trace; each is undone on exit, also after an error."""

import builtins
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from slapo_zoo.language.graph.proxy import ValueProxy, has_proxy
from slapo_zoo.language.graph.tracer import ValueTracer, recorded
from slapo_zoo.parallel.ranks.emulation import BUILDING
from slapo_zoo.parallel.replaced import replaced
from slapo_zoo.parallel.rng.seeds import gpu_of

# Functions that create a tensor, or read a dtype, without a tensor among their arguments.
FACTORIES = ("ones", "zeros", "full", "arange", "empty", "tensor", "linspace", "eye")
FACTORIES += ("finfo", "iinfo", "promote_types", "broadcast_shapes")
RANDOM = ("rand", "randn", "randint", "randperm")  # drawn anew in each call of the graph


@contextmanager
def recording(tracer: ValueTracer) -> Iterator[None]:
    """Context in which calls of torch factories (`torch.arange`, ...) become nodes of the graph of `tracer`.

    Storing a proxy in a module, or passing a proxy to an autograd function, raises ScheduleError. Virtual ranks
    (threads of one process) trace one after the other, because the patches, like those of torch.fx, are process-wide.
    """
    with BUILDING, ExitStack() as stack:
        for name in FACTORIES + RANDOM:
            new = recorded(tracer, getattr(torch, name), always=name in RANDOM)
            stack.enter_context(replaced(torch, name, new))
        stack.enter_context(replaced(builtins, "isinstance", _is_instance))
        stack.enter_context(replaced(nn.Module, "__setattr__", _setattr(tracer)))
        apply = classmethod(_apply(tracer))
        stack.enter_context(replaced(torch.autograd.Function, "apply", apply))
        yield


_isinstance = isinstance


def _is_instance(value: Any, classes: Any) -> bool:
    """Replacement of `isinstance` during a trace: a proxy also counts as an instance of its example value's class.

    A proxy whose `__class__` is that of its value would not do, since torch's C code would take it for a tensor.
    """
    if type(value) is ValueProxy and not _isinstance(value, classes):
        value = value.node.meta["value"]
    return _isinstance(value, classes)


def _setattr(tracer: ValueTracer) -> Any:
    original = nn.Module.__setattr__

    def setattr_(module: nn.Module, name: str, value: Any) -> None:
        if has_proxy(value):
            problem = f"the forward stores a result in self.{name}, which a graph cannot record"
            raise tracer.fail(problem, tracer.leaf_hint())
        original(module, name, value)

    return setattr_


def _apply(tracer: ValueTracer) -> Any:
    original = torch.autograd.Function.__dict__["apply"]  # classmethod; from torch 2.14 on one of C

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not tracer.evaluating and has_proxy(args, kwargs):
            problem = f"the forward calls the autograd function {cls.__name__}, whose backward a graph would lose"
            raise tracer.fail(problem, tracer.leaf_hint())
        return original.__get__(None, cls)(*args, **kwargs)

    return apply


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Context that on exit restores torch's random state, a module's buffers and train/eval modes, and drops attributes
    that the module got inside.
    """
    buffers = [(b, b.detach().clone()) for b in module.buffers() if not b.is_meta]
    flags = [(m, m.training) for m in module.modules()]
    attributes = set(module.__dict__)
    with torch.random.fork_rng(gpu_of(module)):
        try:
            yield
        finally:
            for m, training in flags:
                m.training = training
            for name in set(module.__dict__) - attributes:  # constants that fx added
                del module.__dict__[name]
            with torch.no_grad():
                for buffer, before in buffers:
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)


def set_mode(module: nn.Module, training: bool) -> None:
    """Set `training` on a module, and on all submodules at any depth whose `training` equalled the module's before."""
    before = module.training
    for m in module.modules():
        if m.training == before:
            m.training = training
