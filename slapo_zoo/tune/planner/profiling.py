"""Profile a model: measure the cost of every block, embedding and head on one tp rank by dry runs on fake tensors.

A model of many blocks of equal shapes is run with three per stack (encoder, decoder): the first, which may also make
masks; the last, whose backward comes first; and one that stands for all others. Two numbers of rows are run; costs for
other numbers are interpolated linearly.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from slapo_zoo.errors import ArchitectureError
from slapo_zoo.hf import models as hf
from slapo_zoo.hf.attention import ATTRIBUTE
from slapo_zoo.hf.cut_body import sharding
from slapo_zoo.hf.example_inputs import cut_example, training_batch
from slapo_zoo.language.directive import ForwardContext
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.language.tape import Tape
from slapo_zoo.parallel.known import Known, knowing
from slapo_zoo.parallel.losses.heads import head_of
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.rng.layout_independent_random import RandomStream
from slapo_zoo.parallel.token_cut import WAYS
from slapo_zoo.pipeline.dataflow import Call, calls_of
from slapo_zoo.pipeline.pipeline_runtime import fake_schedule
from slapo_zoo.pipeline.stages import StagePlan
from slapo_zoo.pipeline.unit_costs import SCANNED_TOKENS
from slapo_zoo.tune.planner.dry_run_costs import Footprint, parameter_bytes
from slapo_zoo.tune.planner.profile import ROWS, Profile, Unit, Use
from slapo_zoo.zoo.apply import block_paths
from slapo_zoo.zoo.outline import Outline
from slapo_zoo.zoo.schedule_source import find_table
from slapo_zoo.zoo.table import Table

T = TypeVar("T")
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "num_decoder_layers")
KEPT_BLOCKS = 3  # first, middle, last


class Family:
    """Model to profile, on the meta device: the model of a config and, if its blocks have equal shapes, one with fewer
    blocks. The costs of the blocks of the smaller model are repeated to the full depth.

    Two attributes may be set before the first profile: `target_len`, the tokens of a decoder's row if they are fewer
    than an encoder's, and `padding`, whether batches carry an attention mask.

    Args:
        config: config of `transformers`; it is not changed.
        auto_class: model class or Auto class of `transformers`, or its name; None: the class that `config` names.
    """

    def __init__(self, config: Any, auto_class: Any = None):
        hf.register_models()
        self.config, self.target_len, self.padding = copy.deepcopy(config), 0, True
        for name in [n for n in vars(config) if n.endswith("layerdrop")]:
            setattr(self.config, name, 0.0)  # a randomly skipped layer costs as one that runs
        self.cls: Any = hf.resolve_class(self.config, auto_class)
        self.table: Table = find_table(self.config)
        self.model, self.blocks = self._built(self.config)
        self.total_parameters = sum(p.numel() for p in self.model.parameters())
        small = self._small()
        self.small: Any = small or self.config
        self.is_small = small is not None

    def lengths(self, seq_len: int) -> list[int]:
        """Return [seq_len, tokens of a non-text input (image patches, audio)]; [seq_len] for a model of text alone."""
        other = self.table.num_tokens
        return [seq_len, *([other(self.config)] if other else [])]

    @property
    def cuts(self) -> bool:
        """Return whether context parallelism can shard the tokens of this model's rows over cp ranks."""
        return self.table.positions_of(self.cls) is not None

    def require_cuts(self) -> None:
        """Raise ArchitectureError if context parallelism cannot shard the tokens of this model's rows over cp ranks."""
        if not self.cuts:
            problem = f"{self.cls.__name__} is not known to train right with tokens sharded over cp"
            raise ArchitectureError("plan", "cp > 1", problem, "use cp=1")

    def _built(self, config: Any) -> tuple[Any, list[str]]:
        """Return (model of `config` on the meta device, paths of its transformer blocks)."""
        model = hf.build_on_meta(self.cls, copy.deepcopy(config), torch.float32, self.table.seam)
        return model, block_paths(Schedule(model, Mesh()), self.table)

    def _small(self) -> Any:
        """Return the config of a copy of the model with three blocks per stack (list of blocks). Return None if no
        stack has over four, if a stack's blocks differ or run several times, or if no config field sets their number.
        """
        kinds = _stacks(self.blocks)
        if self.table.calls or max(map(len, kinds.values())) <= KEPT_BLOCKS + 1:
            return None
        for kind in kinds.values():
            if len({_shapes(self.model, block) for block in kind[1:]}) > 1:
                return None
        small = shorter(self.config, {len(kind) for kind in kinds.values()})
        kept = [] if small is None else map(len, _stacks(self._built(small)[1]).values())
        return small if set(kept) == {KEPT_BLOCKS} else None

    def profile(
        self, tp: int, sequence_parallel: bool, seq_len: int, dtype: torch.dtype,
        attention: str | None = None, on_cpu: bool = False, scores: bool = True,
        parts: bool = False, cp: int = 1, cp_attention: str = WAYS[0],
    ) -> Profile:  # fmt: skip
        """Return the costs of the model's units (blocks, embeddings, heads) on one tp rank, from dry runs.

        With cp > 1 these are the costs of the rank with the last tokens of each row, which see most keys if causal.

        Args:
            tp: ranks that shard each layer.
            sequence_parallel: tp ranks shard the tokens too.
            seq_len: tokens of a row.
            dtype: dtype of the parameters.
            attention: attention implementation of `transformers`, e.g. "sdpa"; None takes the default.
            on_cpu: whether the model would run on a CPU.
            scores: whether attention with dropout writes its scores to memory.
            parts: whether under sequence parallelism a rank keeps only its own tokens for the backward.
            cp: ranks that shard the tokens of each row.
            cp_attention: how attention sees the tokens of all cp ranks: "gather", "ulysses" or "ring".
        """
        mesh = Mesh(tp=tp, cp=cp, rank=tp * (cp - 1))
        outline = Outline(self.small, self.cls, mesh, dtype, attention=attention,
                          sequence_parallel=sequence_parallel and tp > 1, cp_attention=cp_attention)  # fmt: skip
        if cp > 1:
            self.require_cuts()
        scans = hasattr(self.config, "state_size")  # a scan runs token by token; its cost is linear
        tokens = min(seq_len, SCANNED_TOKENS) if scans else seq_len
        lengths, longer = (tokens, self.target_len), seq_len / tokens
        masks, stream = self.padding, _Masks(on_cpu, parts)
        runs = (dry_run(outline, rows, lengths, stream, scores, masks) for rows in ROWS)
        few, many = ([(name, use.times(longer)) for name, use in run] for run in runs)
        sizes, shared = parameter_bytes(outline.model, outline.units)
        blocks = set(block_paths(outline.schedule, outline.table))
        if parts and sequence_parallel:
            few, many = _in_parts(few, blocks, tp), _in_parts(many, blocks, tp)
        units = []
        for (name, a), (_, b) in zip(few, many, strict=True):
            own = sizes.pop(name, (0, 0))  # weights of a shared block count at its first call
            units.append(Unit(name, a, b, *own, is_block=name in blocks))
        return Profile(self._whole(units), shared, seq_len, dtype.itemsize, self.total_parameters)

    def _whole(self, units: list[Unit]) -> list[Unit]:
        """Return the units of the full model. `units` are those of the model of the dry run: if that has fewer blocks,
        its units are repeated as in `repeat`, else they are returned.
        """
        named = {unit.name: unit for unit in units}
        if not self.is_small:
            return units
        names = self.repeat([(unit.name, unit.name) for unit in units])
        return [replace(named[like], name=name) for name, like in names]

    def repeat(self, calls: list[tuple[str, T]]) -> list[tuple[str, T]]:
        """Return (path, value) pairs for the full model. `calls` has those of the model of the dry run: if that has
        three blocks per list of blocks (`is_small`), its middle block's value is repeated; else `calls` is returned.
        """
        found, kinds = [], _stacks(self.blocks) if self.is_small else {}
        for name, value in calls:
            kind, _, index = name.rpartition(".")
            names = kinds.get(kind, [name])
            if len(names) == 1 or int(index) == 0:
                found.append((name, value))
            elif int(index) == KEPT_BLOCKS - 1:
                found.append((names[-1], value))
            else:
                found += [(middle, value) for middle in names[1:-1]]
        return found


def _stacks(blocks: list[str]) -> dict[str, list[str]]:
    """Return {path of a module list (stack of blocks): paths of its blocks} for the paths `blocks`."""
    kinds: dict[str, list[str]] = {}
    for block in blocks:
        kinds.setdefault(block.rpartition(".")[0], []).append(block)
    return kinds


def _shapes(model: Any, block: str) -> tuple[Any, ...]:
    module = model.get_submodule(block)
    return (type(module), *((name, tuple(p.shape)) for name, p in module.named_parameters()))


def shorter(config: Any, counts: set[int]) -> Any:
    """Return a copy of `config` with KEPT_BLOCKS (3) layers per stack, or None if its layers differ from each other.

    Args:
        config: config of the whole model.
        counts: numbers of blocks in the stacks of the model; config fields with one of these values are reduced.
    """
    small = copy.deepcopy(config)
    if hasattr(config, "attention_types"):
        return None  # GPT-Neo: neighbours differ in what they compute, not in their shapes
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) in counts and name.startswith("layer"):
            if len(set(map(str, value))) > 1:
                return None
            setattr(small, name, value[:KEPT_BLOCKS])
    for name in LAYER_COUNTS:
        if getattr(config, name, None) in counts:
            setattr(small, name, KEPT_BLOCKS)
    parts = {name: shorter(part, counts) for name, part in _parts(config)}
    for name, part in parts.items():
        setattr(small, name, part)
    return None if None in parts.values() else small


def _parts(config: Any) -> list[tuple[str, Any]]:
    found = ((name, getattr(config, name, None)) for name in config.sub_configs)
    return [(name, part) for name, part in found if part is not None]


class _Masks(RandomStream):
    """Random stream of a dry run, which allocates dropout masks of the right size but draws no random numbers.

    Args:
        on_cpu: whether the model would run on a CPU.
        in_bytes: True: a byte per element, of this rank alone; False: the tensor's dtype, partly for all ranks.
    """

    def __init__(self, on_cpu: bool, in_bytes: bool = False):
        super().__init__()
        self.on_cpu, self.in_bytes = on_cpu, in_bytes

    def draws_in_blocks(self, device: torch.device) -> bool:
        """Return `on_cpu`, whatever `device` is: True if a generator draws masks block by block, as on a CPU."""
        return self.on_cpu

    def hashes(self, device: torch.device) -> bool:
        """Return False: on any `device` dropout masks count as held in memory, not as hashed from seeds in a kernel."""
        return False

    def cells(self, count: int, site: str, heads: Any = ()) -> list[int]:
        """Return zeros as seeds of a mask's blocks (cells): one per row (`count`) or row and head; `site` is unused."""
        return [0] * (count * max(len(heads), 1))

    def uniform(self, x: Tensor, site: str) -> Tensor:
        """Return an uninitialised tensor of the shape of x instead of random numbers; the path `site` is unused."""
        return torch.empty_like(x)

    def keep_mask(self, x: Tensor, p: float, site: str, heads: Any = (), first: int = 0) -> Tensor:
        """Return an uninitialised dropout mask of the shape of x; all other arguments are unused."""
        return torch.empty_like(x, dtype=torch.uint8 if self.in_bytes else None)

    def keep_columns(self, x: Tensor, p: float, site: str, run: Any, size: int) -> Tensor:
        """Return an uninitialised dropout mask for x, which has columns run[0]..run[1]-1 of `size`; `p`, `site` are unused."""
        if self.in_bytes:
            return x.new_empty((*x.shape[:-1], run[1] - run[0]), dtype=torch.uint8)
        return x.new_empty((*x.shape[:-1], size))[..., run[0] : run[1]]

    def keep_tokens(self, x: Tensor, p: float, site: str, n: int, r: int) -> Tensor:
        """Return an uninitialised dropout mask for x, which has one of `n` slices of the tokens; `p`, `site`, `r` are unused."""
        if self.in_bytes or x.ndim > 2:
            return self.keep_mask(x, p, site)
        return x.new_empty(n * x.shape[0], x.shape[1])[: x.shape[0]].clone()


def dry_run(
    outline: Outline,
    rows: int,
    tokens: tuple[int, int],
    stream: "_Masks",
    scores: bool = True,
    padding: bool = True,
) -> list[tuple[str, Use]]:
    """Run forward and backward on fake tensors (dropout on); return (path, cost) per call of a block, embedding, head.

    Args:
        outline: model on the meta device, sharded as one rank holds it.
        rows: rows of the micro-batch.
        tokens: (tokens of a row, tokens of a decoder's row, or 0 for the same number).
        stream: source of dropout masks, which allocates masks and draws none.
        scores: whether attention with dropout writes its scores to memory; with cp > 1 it does.
        padding: whether the batch has an attention mask.

    Raises:
        ArchitectureError: the head has no loss.
    """
    dtype = next(outline.model.parameters()).dtype
    kinds = ("cut_pipeline_stage", "checkpoint")
    mode, schedule = fake_schedule(outline.schedule, outline.cls, kinds, stream)
    model: Any = schedule.model
    model.train()
    mesh = schedule.mesh
    for name, module in model.named_modules() if not scores and mesh.cp == 1 else ():
        if name.rpartition(".")[2] == ATTRIBUTE:
            module.eval()  # attention is one operation, with dropout or not
    made = training_batch(outline.model, rows, tokens[0])
    batch: Any = {k: v.to(dtype) if v.is_floating_point() else v for k, v in made.items()}
    short = {"labels", "decoder_input_ids"} & batch.keys() if tokens[1] else ()
    batch |= {name: batch[name][:, : tokens[1]].contiguous() for name in short}
    numbers_choose = head_of(outline.cls.__name__).over_real_tokens  # and there are none here
    if numbers_choose or not padding:
        batch.pop("attention_mask", None)
    if mesh.cp > 1 and schedule.state.body is None:
        batch = cut_example(outline.model, batch, mesh.cp, outline.state.positions)
    if not any(name.startswith(("label", "start_pos")) for name in batch):
        problem = f"{outline.cls.__name__} has no loss that the planner knows"
        hint = "name a class that takes labels in `architectures` of the config, or as auto_class="
        raise ArchitectureError("plan", "model", problem, hint)
    _untie(model, mode)
    cores = [name for name, _ in model.named_modules() if name.rpartition(".")[2] == ATTRIBUTE]
    tape = Tape(model, outline.units, cores, last=outline.units[-1])
    schedule.state.forward = ForwardContext(outline.state.sequence_parallel, tape=tape)
    numbers = Known() if padding else Known(packed=False)
    with sharding(schedule.state, tape.cut_of(mesh, outline.state.cp_attention)), knowing(numbers):
        tape.run(model, mode, batch, lambda output: _loss(tape, output))
    received = _received(calls_of(tape.rows))
    uses = Footprint(tape.rows, outline.units[-1]).uses()
    return [(name, use._replace(received=n)) for (name, use), n in zip(uses, received, strict=True)]


def _loss(tape: Tape, output: Any) -> Tensor:
    if output is not None:
        return output.loss
    return torch.stack([x.float().mean() for x in tape.losses]).sum()


def _in_parts(calls: list[tuple[str, Use]], blocks: set[str], tp: int) -> list[tuple[str, Use]]:
    """Return the (path, cost) pairs `calls` of a dry run with fewer bytes kept for the backward, as a rank keeps 1/`tp`
    of the tokens: divided are the bytes of calls before the first of `blocks` (paths), and what the first block keeps
    beyond the second (such as masks). Return `calls` unchanged if no second block follows.
    """
    first = next(i for i, (name, _) in enumerate(calls) if name in blocks)
    if calls[first + 1][0] not in blocks:
        return calls
    usual = calls[first + 1][1].kept
    kept = [use.kept / tp for _, use in calls[:first]]
    kept.append(usual + (calls[first][1].kept - usual) / tp)
    changed = [(name, use._replace(kept=n)) for (name, use), n in zip(calls, kept, strict=False)]
    return changed + calls[first + 1 :]


def _untie(model: Any, mode: Any) -> None:
    """Give modules that share a parameter one each, made under FakeTensorMode `mode`, so each has a gradient."""
    seen: set[int] = set()
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and id(p) in seen:
                with mode:
                    module._parameters[name] = torch.nn.Parameter(torch.empty_like(p))
            elif p is not None:
                seen.add(id(p))


def _received(calls: list[Call]) -> Iterator[int]:
    """Yield for each call of a block, embedding or head the bytes that a stage beginning there would receive."""
    yield 0
    for i in range(1, len(calls)):
        plan = StagePlan(tuple(calls), (0,) * i + (1,) * (len(calls) - i), 0)
        shapes = [plan.shape(value) for value in plan.crossing(1)]
        yield sum(shape.empty("meta").nbytes for shape in shapes)
