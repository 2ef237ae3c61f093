"""Recording of the inputs, outputs and gradients of every module in one training step."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slapo_zoo.kernels.loss.vocab_logits import VocabLogits
from slapo_zoo.pipeline.stages import Foreign


class Event(NamedTuple):
    """Key of one recorded tensor, which entered or left a module.

    Args:
        path: path of the module.
        when: "in" for an argument, "out" for an output.
        call: number of the call of this module within one forward, from 0.
        leaf: name or index of the tensor among the arguments or outputs.
        first_row: first row of the micro-batch, counted in the whole batch.
    """

    path: str
    when: str
    call: int
    leaf: str
    first_row: int = 0


class Seen:
    """Copy of a tensor that entered or left a module (`value`), and of the gradient of an output (`grad`, or None).
    `rows` is the number of rows of the micro-batch (0: unknown); `source` is the `id()` of the original tensor.
    """

    def __init__(self, value: Tensor, rows: int, source: int):
        self.value, self.rows, self.source = value, rows, source
        self.grad: Tensor | None = None


class Recorder:
    """Context that copies the arguments, outputs and output gradients of all modules into `events`: {Event (path, "in"
    or "out", ...): Seen (the copy and its gradient)}.

    Args:
        model: the model; hooks that its schedule registered run before the recording ones.
        stream: RandomStream of the model, which knows the rows of the current micro-batch; None: rows are not recorded.
        units: paths of this rank's blocks, embeddings and heads; only modules within them are recorded. Empty: all are.
    """

    def __init__(self, model: nn.Module, stream: Any = None, units: Sequence[str] = ()):
        self.model, self.stream, self.units = model, stream, units
        self.events: dict[Event, Seen] = {}
        self.inside: list[str] = []  # paths of the calls that have not returned
        self.left = ""  # path of the call that returned last
        self._calls: dict[tuple[str, int], int] = {}
        self._last_row = 0
        self._hooks: list[Any] = []
        self._alive: list[Any] = []  # so that no other tensor gets the id of one seen

    def __enter__(self) -> "Recorder":
        for path, module in self.model.named_modules():
            if path and not isinstance(module, Foreign) and self._counts(path):
                before, after = self._around(path)
                self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(after, with_kwargs=True))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            places = (*self.inside[-1:], self.left)
            error.slapo_modules = tuple(p for p in places if p)  # pyright: ignore[reportAttributeAccessIssue]
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._alive.clear()

    def _counts(self, path: str) -> bool:
        return not self.units or any(f"{path}.".startswith(f"{unit}.") for unit in self.units)

    def _around(self, path: str) -> tuple[Any, Any]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            key = (path, self._row())
            if key[1] != self._last_row:  # the last stage ended its forward by an exception
                self.inside.clear()
            self._last_row = key[1]
            self._calls[key] = self._calls.get(key, -1) + 1
            self.inside.append(path)
            named = {str(i): x for i, x in enumerate(args)} | kwargs
            self._note(path, "in", named)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if path in self.inside:
                del self.inside[self.inside.index(path) :]
            self.left = path
            self._note(path, "out", _named(output))

        return before, after

    def _row(self) -> int:
        return self.stream.first_row if self.stream is not None else 0

    def _note(self, path: str, when: str, named: dict[str, Any]) -> None:
        first_row = self._row()
        rows = self.stream.num_rows if self.stream is not None else 0
        call = self._calls.get((path, first_row), 0)
        for leaf, x in named.items():
            if not isinstance(x, Tensor):
                continue
            event = Event(path, when, call, leaf, first_row)
            if event in self.events:
                continue
            with torch._C.DisableTorchFunctionSubclass():
                x = x.local() if isinstance(x, VocabLogits) else x
                seen = Seen(x.detach().clone(), rows, id(x))
                self._alive.append(x)
                self.events[event] = seen
                if x.requires_grad and when == "out":
                    x.register_hook(_keep_gradient(seen))


def _keep_gradient(seen: Seen) -> Any:
    def keep(grad: Tensor) -> None:
        seen.grad = grad.detach().clone()

    return keep


def _named(output: Any) -> dict[str, Any]:
    if isinstance(output, Tensor):
        return {"0": output}
    if hasattr(output, "items"):
        return dict(output.items())
    if isinstance(output, tuple | list):
        return {str(i): x for i, x in enumerate(output)}
    return {}
