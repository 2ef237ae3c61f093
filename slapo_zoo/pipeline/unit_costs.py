"""Estimate the cost of each unit (block, embedding, head) in a training step, from shapes alone.

The model runs once on fake tensors; of blocks that differ only in weights two run, and the recorded operators of the
second are repeated for the others. The cost of an operator is its floating-point operations, plus 64 (ELEMENT) per
number that it writes: softmax, norms and losses multiply little but move memory.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_flatten, tree_map

from slapo_zoo.errors import MeshError
from slapo_zoo.hf import models as hf
from slapo_zoo.hf.configs import config_key
from slapo_zoo.hf.example_inputs import training_batch
from slapo_zoo.language.tape import Row, Tape, is_view

EXPERTS = "experts"  # row: computation of a layer's experts for all tokens
ELEMENT = 64.0  # floating-point operations in the time of writing one number to memory
POSITIONS = {"layer_idx", "layer_id", "layer_number", "layer_index"}  # position of a block
MOST_TOKENS, SCANNED_TOKENS = 512, 16  # a scan's cost is linear in tokens
_turn = threading.Lock()

Seen = list[tuple[list[Row], Any]]  # (rows, output) of each call


@dataclass(frozen=True)
class UnitCost:
    """Cost of one call of a unit (a block, an embedding, a head) for one micro-batch.

    Args:
        unit: path of the unit.
        call: index among the calls of this unit in a forward; 0 unless the unit runs several times.
        forward: cost of the forward, in operations (see `operation_cost`).
        parameters: number of weights, whose gradients each backward writes and adds.
    """

    unit: str
    call: int
    forward: float
    parameters: int

    @property
    def step(self) -> float:
        """Return the cost of a forward and backward of one micro-batch, in operations."""
        return 2.0 * self.forward + (self.forward + 2.0 * ELEMENT * self.parameters)


def operation_cost(row: Row) -> float:
    """Return the cost of the recorded operator `row`: its floating-point operations, plus 64 per number it writes."""
    if isinstance(row.op, str):
        return row.amount if row.op == EXPERTS else 0.0
    if is_view(row.op):
        return 0.0
    flops, written = 0.0, sum(math.prod(x.shape) for x in row.writes)
    if row.product is not None:
        flops = row.product.flops
        if row.product.n == 0:  # fused attention also returns tensors for its backward
            written = math.prod(row.reads[0].shape)
    return flops + ELEMENT * written


def most_positions(config: Any) -> int | None:
    """Return the most tokens that a row may have: the smallest `max_position_embeddings` of a config and its sub-configs,
    or None when none has that attribute.
    """
    from transformers import PreTrainedConfig

    towers = (value for value in vars(config).values() if isinstance(value, PreTrainedConfig))
    found = [getattr(config, "max_position_embeddings", None), *map(most_positions, towers)]
    return min((n for n in found if n), default=None)


def usual_tokens(config: Any) -> int:
    """Return the default number of tokens per row: `max_position_embeddings` of `config`, but at most 512."""
    return min(most_positions(config) or MOST_TOKENS, MOST_TOKENS)


def row_length(config: Any, seq_len: int | None) -> int:
    """Return the number of tokens per row: `seq_len`, or if None the model's maximum, but at most 512.

    Raises:
        MeshError: `seq_len` exceeds the model's maximum number of positions.
    """
    longest = most_positions(config) or getattr(config, "max_target_positions", None)
    tokens = seq_len or min(usual_tokens(config), longest or MOST_TOKENS)
    if longest and tokens > longest:
        problem = f"found {tokens} tokens per row, but the model has {longest} positions"
        raise MeshError("plan", "--seq", problem, f"pass a --seq of at most {longest}")
    return tokens


def unit_costs(model: Any, units: Sequence[str], seq_len: int | None = None) -> list[UnitCost]:
    """Return the cost of every call of a unit in one training step, in the order in which they run.

    Args:
        model: unscheduled model on meta; only its class and config are used.
        units: paths of the modules that are never split between stages: blocks, embeddings, heads.
        seq_len: tokens per row; None takes the model's `max_position_embeddings`, but at most 512.
    """
    tokens = seq_len or usual_tokens(model.config)
    counted = min(tokens, SCANNED_TOKENS) if hasattr(model.config, "state_size") else tokens
    with _turn:  # ranks that are threads wait for the first
        found = _unit_costs(type(model), _Config(model.config), tuple(units), counted)
    return [replace(cost, forward=cost.forward * tokens / counted) for cost in found]


class _Config:
    """Hashable wrapper of a config (`.config`), equal to another if the configs' contents are: key of a cache."""

    def __init__(self, config: Any):
        self.config, self._key = config, config_key(config)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Config) and other._key == self._key


@lru_cache(maxsize=128)
def _unit_costs(
    cls: Any, config: _Config, units: tuple[str, ...], tokens: int
) -> tuple[UnitCost, ...]:
    mode, model = hf.build_fake(cls, config.config, torch.float32)
    tape = Tape(model, units)
    _stand_in_for_experts(tape, model)
    skip_repeated(tape, model, units)
    ended_early = False
    try:
        tape.run(model, mode, training_batch(model, 1, tokens))
    except (DynamicOutputShapeException, DataDependentOutputException):
        ended_early = True  # the head branches on data: estimate by its weights
    return tuple(_costs_of(tape.rows, model, units, tokens if ended_early else 0))


def _costs_of(
    rows: Sequence[Row], model: nn.Module, units: Sequence[str], tokens: int
) -> Iterator[UnitCost]:
    """Yield the cost of each call of a unit (a block, embedding or head) in a recorded forward.

    Operators between two calls count with the later call, the loss counts with the last.

    Args:
        rows: recorded operators.
        model: the model of fake tensors.
        units: paths of the units.
        tokens: tokens per row if the forward ended early, to estimate the units that did not run; else 0.
    """
    sizes = {unit: sum(p.numel() for p in model.get_submodule(unit).parameters())
             for unit in units}  # fmt: skip
    names = [row.path for row in rows if row.output is not None]
    costs, at = [0.0] * len(names), 0
    for row in rows if names else ():
        costs[at] += operation_cost(row)
        at = min(at + (row.output is not None), len(names) - 1)
    for i, (name, cost) in enumerate(zip(names, costs, strict=True)):
        yield UnitCost(name, names[:i].count(name), cost, sizes[name])
    for unit in units if tokens else ():
        if unit not in names:
            yield UnitCost(unit, 0, 2.0 * tokens * sizes[unit], sizes[unit])


def _stand_in_for_experts(tape: Tape, model: nn.Module) -> None:
    """Replace the forward of a model's experts by a copy of its input; `tape`, the recorder of a forward's operators,
    records the copy with the cost of the experts.

    The expert that a token goes to depends on data; the cost does not.
    """
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            size = sum(p.numel() for p in module.parameters()) / len(next(module.parameters()))

            def forward(hidden: Tensor, *others: Any, _size: float = size, **_: Any) -> Tensor:
                index = others[0] if others else hidden[..., 0]
                tape.note(EXPERTS, amount=2.0 * index.numel() * _size)
                return hidden * 1.0

            module.forward = forward


def skip_repeated(
    tape: Tape, model: nn.Module, units: Sequence[str], repeat_rows: bool = True
) -> None:
    """Make forwards run only the first two calls of equal blocks (equal up to weights), until `tape` is closed.

    rewrite:  y = block(x)  -->  a tensor of the shape of y; the tape records the second block's operations once more

    Args:
        tape: tape that records the forward.
        model: model of fake tensors.
        units: paths of blocks, embeddings and heads; those without children always run.
        repeat_rows: False records of a skipped call only its output, not the second block's operations.
    """
    calls: dict[Any, Seen] = {}
    for unit in units:
        module = model.get_submodule(unit)
        if any(True for _ in module.children()):
            tape.on_close(partial(restore_forward, module, vars(module).get("forward")))
            module.forward = _once_more(tape, module.forward, signature(module), calls, repeat_rows)


def restore_forward(module: nn.Module, forward: Any) -> None:
    """Restore a module's replaced forward; `forward` is the instance attribute that the module had before, or None."""
    del module.forward
    if forward is not None:
        module.forward = forward


def signature(module: nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for modules that compute the same up to weights: classes, shapes, plain attributes,
    and names of replaced forwards and hooks, of `module` and its submodules.
    """
    rows = []
    for path, part in module.named_modules():
        added = (
            vars(part).get("forward"),
            *part._forward_pre_hooks.values(),
            *part._forward_hooks.values(),
        )
        shapes = (*((n, tuple(p.shape)) for n, p in part._parameters.items() if p is not None),
                  *(getattr(f, "__qualname__", type(f).__name__) for f in added))  # fmt: skip
        plain = {n: v for n, v in vars(part).items() if isinstance(v, bool | int | float | str)}
        rows.append((path, type(part), shapes, tuple(sorted(
            (n, v) for n, v in plain.items() if n not in POSITIONS))))  # fmt: skip
    return tuple(rows)


def _once_more(
    tape: Tape, forward: Callable, who: Any, calls: dict[Any, Seen], repeat_rows: bool
) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        earlier = calls.setdefault((who, _shapes((args, kwargs))), [])
        begin = len(tape.rows)
        if len(earlier) > 1:
            rows, like = earlier[1]
            output = tree_map(_alike, like)
            tape.rows[begin:] = rows if repeat_rows else []  # without those of making the output
            return output
        output = forward(*args, **kwargs)
        earlier.append((tape.rows[begin:], output))
        return output

    return run


def _alike(x: Any) -> Any:
    """Return for a tensor `x` an uninitialised one like it, into which code may write; return other values as is."""
    if not isinstance(x, Tensor):
        return x
    found = torch.empty_like(x)
    return found.requires_grad_() * 1 if x.requires_grad else found


def _shapes(tree: Any) -> tuple[Any, ...]:
    leaves, spec = tree_flatten(tree)
    described = [(tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, Tensor)
                 else x if isinstance(x, bool | int | float | str | None) else type(x)
                 for x in leaves]  # fmt: skip
    return tuple(described), str(spec)
