"""One training step on fake tensors, backward included: which bytes are alive when, and what is computed.

Every storage that an operation makes is followed from its birth to its death, so transient tensors, the
loss and the gradients count, and whatever a family does in its forward is seen as it is.
"""

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from slapo_zoo.hf.attention import ATTRIBUTE
from slapo_zoo.language.primitives.checkpoint import POLICIES
from slapo_zoo.language.traffic import Traffic
from slapo_zoo.pipeline.dataflow import DryRun
from slapo_zoo.planner.meter import Meter
from slapo_zoo.planner.use import Use, Work

MATMULS = POLICIES["save_matmuls"]
ADD = torch.ops.aten.add.Tensor
# Bytes that one rank moves per byte of the whole tensor, on a ring of many ranks.
RING = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "send": 1.0}


class _Done(Exception):  # noqa: N818 - not an error: the loss is known, so the forward may end
    pass


class Footprint(DryRun):
    """A dry run of forward and backward that follows memory and work.

    Args:
        model: scheduled, of fake tensors.
        units: whose calls are distinguished.
        traffic: where the collectives are noted.
        last: unit after which the forward may end, once a parallel loss was noted.
    """

    def __init__(self, model: nn.Module, units: Sequence[str], traffic: Traffic, last: str = ""):
        self.live = self.peak = self.grown = self.gradients = 0
        self.meter = Meter()
        self.attention: dict[int, tuple[Work, float]] = {}  # call --> of its attentions
        self.traffic, self.last = traffic, last
        tensors = [*model.parameters(), *model.buffers()]
        self._known = {t.untyped_storage()._cdata for t in tensors}
        self._sizes: dict[int, int] = {}
        self._made_in: dict[int, int] = {}  # storage --> call
        self._kept: list[int] = []
        self._ahead: list[int] = []
        self._outside: set[int] = set()  # storages that were made between units
        self._matmuls = 0
        self._returned: set[int] = set()
        self.ends: list[dict[str, float]] = []
        self.begins: dict[int, dict[str, float]] = {}
        super().__init__(model, units)
        for name, module in model.named_modules():
            if name.rpartition(".")[2] == ATTRIBUTE:
                self._watch(module)
        for p in (p for p in model.parameters() if p.requires_grad):
            p.register_post_accumulate_grad_hook(self._accumulated)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.meter.note(func, args, kwargs or {}, out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._born(tensor, self._sum_in_place(func, args))
        if func in MATMULS:
            self._matmuls += sum(t.nbytes for t in tree_leaves(out) if isinstance(t, Tensor))
        return out

    def run(self, mode: Any, model: nn.Module, batch: Mapping[str, Any]) -> list[Use]:
        """Forward and backward of a micro-batch; what each call of a unit took, in order."""
        inputs = {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in batch.items()}
        for value in inputs.values():
            if isinstance(value, Tensor):
                self._known.add(value.untyped_storage()._cdata)
        with mode, self, torch.enable_grad():
            loss = self._forward(model, inputs)
            self.ends[-1] = self._now()  # the loss belongs to the last unit
            self._kept, self._ahead = self._survivors()
            self._restart()
            loss.backward()
            del loss
        self.close()
        return self._uses()

    def _forward(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        try:
            loss = model(**inputs).loss
        except _Done:
            loss = None
        return (
            torch.stack([x.float().mean() for x in self.traffic.losses]).sum()
            if loss is None
            else loss
        )

    def _survivors(self) -> tuple[list[int], list[int]]:
        """Bytes that each call has made and that wait for its backward; those of them from before it began."""
        found, before = [0] * len(self.ends), [0] * len(self.ends)
        for key, size in self._sizes.items():
            at = min(self._made_in[key], len(found) - 1)
            found[at] += size
            before[at] += size * (key in self._outside)
        return found, before

    def _after(self, unit: str) -> Any:
        record = super()._after(unit)

        def and_note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            record(module, args, kwargs, output)
            leaves = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
            new = [x for x in leaves if x.untyped_storage()._cdata not in self._returned]
            self._returned |= {x.untyped_storage()._cdata for x in new}
            self.ends.append(self._now() | {"output": sum(x.nbytes for x in new)})
            self._matmuls = 0
            index = len(self.ends) - 1
            for leaf in leaves if unit != self.last else ():
                if leaf.requires_grad:
                    leaf.register_hook(lambda grad: self._begin(index))
            self._restart()
            if unit == self.last and self.traffic.losses:
                raise _Done

        return and_note

    def _begin(self, index: int) -> None:
        """The backward of a call begins with the first gradient of an output of it."""
        if index not in self.begins:
            self.begins[index] = self._now()
            self._restart()

    def _now(self) -> dict[str, Any]:
        gathered = sum(t.bytes for t in self.traffic.transfers if t.kind == "all_gather")
        return {
            "gathered": gathered, "work": self._work(), "live": self.live, "peak": self.peak, "grown": self.grown,
            "gradients": self.gradients, "matmuls": self._matmuls, "output": 0,
        }  # fmt: skip

    def _work(self) -> tuple[float, ...]:
        """Return the work done until now; a phase ends here, so its results count as written."""
        self.meter.settle()
        self.meter.comm = sum(RING[t.kind] * t.bytes for t in self.traffic.transfers)
        self.meter.collectives = len(self.traffic.transfers)
        return self.meter.now()

    def _watch(self, core: nn.Module) -> None:
        """Note what an attention does, and what it keeps beside its inputs and its output."""
        begun: list[tuple[tuple[float, ...], int]] = []

        def before(module: nn.Module, args: Any) -> None:
            begun.append((self._work(), self.live))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            begin, live = begun.pop()
            result = sum(x.nbytes for x in tree_leaves((args[:3], output)) if isinstance(x, Tensor))
            work, kept = self.attention.get(len(self.ends), (Work(), 0.0))
            work = work.plus(self.meter.between(begin, self._work()))
            self.attention[len(self.ends)] = work, kept + max(self.live - live - result, 0.0)

        self._hooks += [core.register_forward_pre_hook(before), core.register_forward_hook(after)]

    def _restart(self) -> None:
        self.peak, self.grown = self.live, self.live + self.gradients

    def _sum_in_place(self, func: Any, args: Any) -> int | None:
        """The storage that a sum of autograd goes into: it adds in place, but not to fake tensors."""
        if func is not ADD or torch._C._current_graph_task_id() == -1:
            return None
        keys = [x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)]
        same = len(keys) == 2 and args[0].shape == args[1].shape
        return keys[0] if same and keys[0] in self._sizes else None

    def _born(self, tensor: Tensor, over: int | None) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        weakref.finalize(storage, self._died, key)
        if over is not None:
            self._sizes[key], self._sizes[over] = self._sizes[over], 0
            self._made_in[key] = self._made_in[over]
            return
        self._sizes[key], self._made_in[key] = storage.nbytes(), len(self.ends)
        if not self._inside:
            self._outside.add(key)
        self.live += self._sizes[key]
        self.peak = max(self.peak, self.live)
        self.grown = max(self.grown, self.live + self.gradients)

    def _died(self, key: int) -> None:
        self._known.discard(key)
        self._returned.discard(key)
        self._outside.discard(key)
        self.meter.died(key)
        self.live -= self._sizes.pop(key)

    def _accumulated(self, parameter: Tensor) -> None:
        """Gradients stay; they are counted apart, for in a later micro-batch they are there already."""
        grad = parameter.grad
        key = None if grad is None else grad.untyped_storage()._cdata
        if key in self._sizes:
            self.live -= self._sizes[key]
            self.gradients += self._sizes[key]
            self._sizes[key] = 0

    def _uses(self) -> list[Use]:
        found, top, below = [], len(self.ends) - 1, 0
        begun = Meter().now()
        self.begins[top] = self.ends[top]
        order = sorted(self.begins, reverse=True)
        after = {i: self.begins[j] for i, j in itertools.pairwise(order)}
        between, gathered = self.meter.between, 0.0
        for i, end in enumerate(self.ends):
            first = self.begins.get(i)
            last = after.get(i, self._now())
            attention, apart = self.attention.get(i, (Work(), 0.0))
            found.append(Use(
                between(begun, end["work"]),
                between(first["work"], last["work"]) if first else Work(), attention,
                self._kept[i], apart, end["gathered"] - gathered, end["matmuls"], end["output"],
                forward_peak=end["peak"] - below,
                backward_peak=last["peak"] - below if first else 0.0,
                backward_growth=last["grown"] - first["gradients"] - below if first else 0.0,
                before=self._ahead[i],
            ))  # fmt: skip
            begun, gathered, below = end["work"], end["gathered"], below + self._kept[i]
        return found


def parameter_bytes(
    model: Any, units: list[str]
) -> tuple[dict[str, tuple[int, int]], list[tuple[int, frozenset[str]]]]:
    """Return, for every unit, the bytes of its own parameters and of the largest one; and the shared ones."""
    holders: dict[int, tuple[int, set[str]]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        unit = next((u for u in units if name == u or name.startswith(f"{u}.")), units[0])
        holders.setdefault(id(p), (p.nbytes, set()))[1].add(unit)
    sizes = {unit: [0, 0] for unit in units}
    shared = []
    for size, names in holders.values():
        if len(names) > 1:
            shared.append((size, frozenset(names)))
            continue
        (unit,) = names
        sizes[unit][0] += size
        sizes[unit][1] = max(sizes[unit][1], size)
    return {unit: (own, most) for unit, (own, most) in sizes.items()}, shared
