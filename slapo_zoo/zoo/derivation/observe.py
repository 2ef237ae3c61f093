"""Observation of how a tiny model uses its parameters in the forward of a training step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from slapo_zoo.language.directive import join
from slapo_zoo.language.primitives.fork_rng import DRAWS
from slapo_zoo.zoo.derivation.chains import Chains
from slapo_zoo.zoo.derivation.spelling import Spelling

NEVER = 1 << 30  # position of a module that did not run


def linear_axis(module: nn.Module) -> int | None:
    """Return the axis of a linear's weight that belongs to its outputs: 0 for nn.Linear, 1 for Conv1D; else None."""
    is_read = isinstance(module, NonDynamicallyQuantizableLinear)  # by nn.MultiheadAttention
    plain = "weight" in module._parameters and not is_read
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return 0 if plain else None
    return 1 if type(module).__name__ == "Conv1D" and plain else None


@dataclass
class Observation:
    """Record of what one forward of a tiny model did: calls, uses of parameters, random draws, feed-forwards.

    Args:
        calls: path of a module --> number of its calls.
        uses: name of a parameter --> when it was first used, as a position in the order of the forward.
        entered: path of a module --> when it was first called, as a position in the same order.
        foreign: names of parameters that are used in the forward of a module which does not hold them.
        called_in_part: paths of modules that were not running when one of their children was called.
        draws: paths of modules whose own forward draws random numbers, children not counted.
        targets: number of targets of each cross-entropy in the forward, in order.
        spelling: rules that turn the keys of the family's files into names of the model's tensors.
        shifts_labels: True if the loss compares each token with the next label, False if with its own; None where
            the batch does not tell.
        chains: path of a linear that can be row-parallel --> paths of the linears before it in a feed-forward.
        dropouts: path of a dropout --> paths of the linears whose output columns it drops.
    """

    calls: dict[str, int] = field(default_factory=dict)
    uses: dict[str, int] = field(default_factory=dict)
    entered: dict[str, int] = field(default_factory=dict)
    foreign: set[str] = field(default_factory=set)
    called_in_part: set[str] = field(default_factory=set)
    draws: set[str] = field(default_factory=set)
    targets: list[int] = field(default_factory=list)
    spelling: Spelling = field(default_factory=Spelling)
    shifts_labels: bool | None = None
    chains: dict[str, list[str]] = field(default_factory=dict)
    dropouts: dict[str, set[str]] = field(default_factory=dict)

    @property
    def wanted_everywhere(self) -> set[str]:
        """Return paths of modules that all pipeline stages must hold: other modules read their weights or call a child."""
        readers = {name.rpartition(".")[0] for name in self.foreign} - self.calls.keys()
        return readers | (self.called_in_part & self.calls.keys())

    def first_use(self, path: str) -> int:
        """Return at which position in the forward the module at `path` first used a parameter or ran; NEVER if it did not."""
        found = [at for name, at in self.uses.items() if name.startswith(f"{path}.")]
        return min(found, default=self.entered.get(path, NEVER))

    def idle(self, model: nn.Module) -> list[str]:
        """Return paths of the outermost modules with parameters that never ran (image encoder); [] if no module ran."""
        ran, found = "\n".join(["", *(f"{path}." for path in self.calls)]), ["."]
        for path, module in model.named_modules() if self.calls else ():
            outer = f"\n{path}." in ran or path.startswith(found[-1])
            if not (outer or type(module) is nn.ModuleList) and len([*module.parameters()]):
                found.append(f"{path}.")
        return [path[:-1] for path in found[1:]]


class Watch(TorchFunctionMode):
    """Torch function mode that records calls and parameter uses of a model's modules in `seen`, an `Observation`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.seen, self.stack, self.chains = Observation(), [""], Chains()
        self.linears = {p for p, m in model.named_modules() if linear_axis(m) is not None}
        self.names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(parameter), []).append(name)
        self._hooks = []
        for path, module in model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(self._enter(path)))
            self._hooks.append(module.register_forward_hook(self._leave(path), always_call=True))

    def _enter(self, path: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            parent = path.rpartition(".")[0]
            if parent and not f"{self.stack[-1]}.".startswith(f"{parent}."):
                self.seen.called_in_part.add(parent)
            self.stack.append(path)
            self.seen.calls[path] = self.seen.calls.get(path, 0) + 1
            self.seen.entered.setdefault(path, self._now())
            self.chains.enter(path, module, path in self.linears, args)

        return enter

    def _leave(self, path: str) -> Any:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.stack.pop()
            if path in self.linears:
                self.chains.leave(path, output)

        return leave

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record which parameters a torch function uses and whether it draws random numbers, then call it."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        here = self.stack[-1]
        draws = name in DRAWS and _draws_numbers(name, args, kwargs)
        if draws:
            self.seen.draws.add(here)
        if func is nn.functional.cross_entropy:
            target = kwargs.get("target", args[1] if len(args) > 1 else None)
            if isinstance(target, Tensor) and not target.is_floating_point():
                self.seen.targets.append(int((target != -100).sum()))
        if name != "__get__":  # reads of shape, dtype or device are no use
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, nn.Parameter) and id(value) in self.names:
                    self._use(self.names[id(value)])
        out = func(*args, **kwargs)
        if here not in self.linears:
            self.chains.call(name, args, kwargs, out, draws and here not in self.chains.dropouts)
        return out

    def _now(self) -> int:
        return len(self.seen.uses) + len(self.seen.entered)

    def _use(self, names: list[str]) -> None:
        here = self.stack[-1]
        own = [name for name in names if name == join(here, name.rpartition(".")[2])]
        for name in own or names:
            self.seen.uses.setdefault(name, self._now())
        if not own:
            self.seen.foreign.update(names)

    def close(self) -> None:
        """Remove the forward hooks by which this mode observes the model."""
        for hook in self._hooks:
            hook.remove()


def _draws_numbers(name: str, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of the torch function `name` draws random numbers; dropout at p = 0 or in eval does not."""
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p") or (len(args) > 4 and args[4]))
    if name != "dropout":
        return True
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    return bool(p) and bool(kwargs.get("training", args[2] if len(args) > 2 else True))


def observe(model: Any, batch: Mapping[str, Tensor]) -> Observation:
    """Run one training forward of a model; return its module calls, parameter uses, random draws and feed-forwards.

    Args:
        model: a tiny model in train mode, to which no schedule was applied.
        batch: keyword arguments of the forward.
    """
    watch = Watch(model)
    try:
        with watch, torch.no_grad():
            model(**batch)
    finally:
        watch.close()
    watch.seen.chains, watch.seen.dropouts = watch.chains.found(), watch.chains.dropouts
    labels = batch.get("labels")
    if labels is not None and labels.ndim > 1:
        every, later = (int((part != -100).sum()) for part in (labels, labels[..., 1:]))
        found = {count: count in watch.seen.targets for count in (every, later)}
        watch.seen.shifts_labels = found[later] if found[every] != found[later] else None
    return watch.seen
