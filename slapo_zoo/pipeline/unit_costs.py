"""Cost of each unit of a model in a training step, estimated from shapes alone.

The model runs once on fake tensors. The cost of an operation is its floating-point operations, plus
ELEMENT for every number that it writes: softmax, norms and losses move memory and multiply little, and a
head over a large vocabulary is dear in both.
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from slapo_zoo.errors import MeshError
from slapo_zoo.hf import models as hf
from slapo_zoo.hf.example_inputs import training_batch
from slapo_zoo.pipeline.dataflow import Call, DryRun, Shape
from slapo_zoo.pipeline.repeated_blocks import skip_repeated

ELEMENT = 64.0  # operations that a core does while it writes one number to memory
MOST_TOKENS, SCANNED_TOKENS = 512, 16  # a scan runs token by token, and its cost grows evenly


@dataclass(frozen=True)
class UnitCost:
    """Operations and bytes of one call of a unit (a block, an embedding, a head).

    Args:
        unit: its path.
        call: 0, or which call of a shared block.
        forward: operations of a micro-batch.
        parameters: numbers whose gradients are written and added in every backward.
        saved: bytes that the forward keeps for the backward of a micro-batch.
        output: bytes that it returns.
    """

    unit: str
    call: int
    forward: float
    parameters: int
    saved: int = 0
    output: int = 0

    @property
    def step(self) -> float:
        """Operations of forward and backward of a micro-batch."""
        return self.forward + self.backward_inputs + self.backward_weights

    @property
    def backward_inputs(self) -> float:
        """Operations of the part of the backward that other stages wait for."""
        return self.forward

    @property
    def backward_weights(self) -> float:
        """Operations of the backward that makes weight gradients."""
        return self.forward + 2.0 * ELEMENT * self.parameters


class Counting(DryRun):
    """A dry run that also sums what every operation costs, and what is kept for the backward."""

    def __init__(self, model: nn.Module, units: Sequence[str]):
        self.done, self.saved, self.at_end, self.ended_early = 0.0, 0, [], False
        held = [p.untyped_storage() for p in model.parameters()]
        self._kept = {storage._cdata: storage for storage in held}  # alive: addresses return
        super().__init__(model, units)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.done += operation_cost(func, args, kwargs or {}, out)
        return out

    def keep(self, tensor: Tensor) -> Tensor:
        """Note a tensor that autograd saves; two views of one memory count once."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._kept:
            self._kept[storage._cdata] = storage
            self.saved += storage.nbytes()
        return tensor

    def run(self, mode: Any, model: nn.Module, batch: Mapping[str, Any]) -> None:
        """One forward; a head that looks into its input ends it early.

        Dropouts do nothing in a dry run; the mask that each keeps is counted. One of attention
        probabilities, which also gives up the fused attention, is not.
        """
        for module in model.modules():
            if isinstance(module, nn.Dropout) and module.p > 0.0:
                module.register_forward_hook(self._keep_mask)
        inputs = {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in batch.items()}
        if "use_cache" in inspect.signature(type(model).forward).parameters:
            inputs["use_cache"] = False
        keeping = torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor)
        try:
            with mode, self, torch.enable_grad(), keeping:
                model(**inputs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            self.ended_early = True  # the weights of what was not reached are counted instead
        finally:
            self.close()

    def _keep_mask(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.saved += output.nbytes

    def _after(self, unit: str) -> Any:
        record = super()._after(unit)

        def and_note(*call: Any) -> None:
            record(*call)
            self.at_end.append((self.done, self.saved))

        return and_note


def operation_cost(func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> float:
    """Floating-point operations of one operator call, and ELEMENT for each number written."""
    returns = func._schema.returns
    if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
        return 0.0  # a view
    written = sum(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))
    packet = func._overloadpacket
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=out) + ELEMENT * written
    if "scaled_dot_product" in str(packet):
        query, key = args[0].shape, args[1].shape
        return 4.0 * math.prod(query) * key[-2] + ELEMENT * math.prod(query)
    return ELEMENT * written


def most_positions(config: Any) -> int | None:
    """The fewest that a config, or one of a tower within it, has; None where none says."""
    from transformers import PreTrainedConfig

    towers = (value for value in vars(config).values() if isinstance(value, PreTrainedConfig))
    found = [getattr(config, "max_position_embeddings", None), *map(most_positions, towers)]
    return min((n for n in found if n), default=None)


def usual_tokens(config: Any) -> int:
    """Tokens of a row when nobody says: all positions of the model, at most MOST_TOKENS."""
    return min(most_positions(config) or MOST_TOKENS, MOST_TOKENS)


def row_length(config: Any, seq_len: int | None) -> int:
    """Tokens of a row that the model has positions for; `usual_tokens` when nobody says.

    Raises:
        MeshError: the model has fewer positions.
    """
    longest = most_positions(config) or getattr(config, "max_target_positions", None)
    tokens = seq_len or min(usual_tokens(config), longest or MOST_TOKENS)
    if longest and tokens > longest:
        problem = f"found {tokens}, the model has {longest} positions"
        raise MeshError("plan", "--seq", problem, "shorten the rows")
    return tokens


def unit_costs(model: Any, units: Sequence[str], seq_len: int | None = None) -> list[UnitCost]:
    """The cost of every unit call of one training step, in the order in which they run.

    Args:
        model: unscheduled, on meta; its class and config count.
        units: what a stage holds as a whole.
        seq_len: tokens of a row.
    """
    tokens = seq_len or usual_tokens(model.config)
    counted = min(tokens, SCANNED_TOKENS) if hasattr(model.config, "state_size") else tokens
    found = _unit_costs(type(model), _Config(model.config), tuple(units), counted)
    return [replace(cost, forward=cost.forward * tokens / counted) for cost in found]


class _Config:
    """A config that can be the key of a cache."""

    def __init__(self, config: Any):
        self.config, self._key = config, config.to_json_string(use_diff=False)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Config) and other._key == self._key


@lru_cache(maxsize=32)
def _unit_costs(
    cls: Any, config: _Config, units: tuple[str, ...], tokens: int
) -> tuple[UnitCost, ...]:
    mode, model = hf.build_fake(cls, config.config, torch.float32)
    counting = Counting(model, units)
    _stand_in_for_experts(counting, model)
    skip_repeated(counting, model, units)
    counting.run(mode, model, training_batch(model, 1, tokens))
    return tuple(costs_of(counting, model, units, tokens))


def costs_of(
    counting: Counting, model: nn.Module, units: Sequence[str], tokens: int
) -> Iterator[UnitCost]:
    """Counts of a dry run, per call; the loss counts with the last unit.

    Args:
        counting: after its run.
        model: that ran.
        units: of the model.
        tokens: of the micro-batch, for units that were not reached.
    """
    sizes = {unit: sum(p.numel() for p in model.get_submodule(unit).parameters())
             for unit in units}  # fmt: skip
    ends = [*counting.at_end[:-1], (counting.done, counting.saved)]
    seen: dict[str, int] = {}
    for call, begin, end in zip(counting.calls, [(0.0, 0), *ends], ends, strict=False):
        nth = seen[call.unit] = seen.get(call.unit, -1) + 1
        forward, saved = end[0] - begin[0], end[1] - begin[1]
        yield UnitCost(call.unit, nth, forward, sizes[call.unit], saved, _bytes(call))
    for unit in units if counting.ended_early else ():
        if unit not in seen:
            yield UnitCost(unit, 0, 2.0 * tokens * sizes[unit], sizes[unit])


def _bytes(call: Call) -> int:
    shapes = [leaf for leaf in call.leaves if isinstance(leaf, Shape)]
    return sum(math.prod(shape.shape) * shape.dtype.itemsize for shape in shapes)


def _stand_in_for_experts(counting: Counting, model: nn.Module) -> None:
    """Replace experts by a computation of the same cost: which token goes where depends on data, the cost does not."""
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            size = sum(p.numel() for p in module.parameters()) / len(next(module.parameters()))

            def forward(hidden: Tensor, *others: Any, _size: float = size, **_: Any) -> Tensor:
                index = others[0] if others else hidden[..., 0]
                counting.done += 2.0 * index.numel() * _size
                return hidden * 1.0

            module.forward = forward
