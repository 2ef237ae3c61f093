"""Apply a family's sharding rules to a model: sharded weights, dropout masks, kernels, recomputation, pipeline cuts."""

import dataclasses
import re
from typing import Any

from slapo_zoo.errors import ArchitectureError, MeshError
from slapo_zoo.language.directive import Directive
from slapo_zoo.language.primitives import (
    Checkpoint,
    CoreAttentionSeam,
    CutPipelineStage,
    ForkRng,
    Shard,
    SumGradient,
    Sync,
)
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.pipeline.orders import balanced_cuts
from slapo_zoo.pipeline.stages import leaf_units
from slapo_zoo.pipeline.unit_costs import UnitCost, unit_costs
from slapo_zoo.zoo.kernels_for_modules import apply_kernels, device_name
from slapo_zoo.zoo.options import BuildOptions
from slapo_zoo.zoo.rules import Row, Rule, all_tokens, dropout, dropout_tokens
from slapo_zoo.zoo.table import Table, base_prefix

DEFAULT = BuildOptions()
TRAINED_ACTIVATIONS = ("PReLU", "XIELUActivation")  # the classes with parameters
DRAWS = re.compile("layerdrop|jitter")  # attributes
# of every family: chunks of a rank's tokens would be others than those of the row
NEEDS: tuple[tuple[Any, ...], ...] = (("chunk_size_feed_forward", 0, "sp"), ("chunk_size_feed_forward", 0, "cp"))  # fmt: skip
KEEP, RECOMPUTE = "keep", "recompute"


def block_paths(sch: Schedule, table: Table) -> list[str]:
    """Return the paths of the model's repeated blocks, in running order; [] if `table`, the family's sharding rules,
    has no patterns of blocks. ScheduleError if the patterns match no module.
    """
    prefix = base_prefix(sch.model)
    if not table.blocks:
        return []
    found = [path for pattern in table.blocks for path in sch[prefix + pattern].paths]
    return found or sch.matching(prefix + table.blocks[0], "blocks")


def units_of(model: Any, table: Table, blocks: list[str]) -> list[str]:
    """Return the paths of the modules that a pipeline never splits (blocks, embeddings, heads), in running order.

    `blocks` are the paths of the repeated blocks; `table`, the family's sharding rules, says what runs after them.
    """
    late = [base_prefix(model) + path for path in table.after_blocks]
    return leaf_units(model, blocks, late, table.order)


def apply_table(
    sch: Schedule,
    table: Table,
    options: BuildOptions = DEFAULT,
    num_stages: int | None = None,
    tuned_kernels: Any = None,
) -> Schedule:
    """Apply the sharding rules of a family to the model of the schedule `sch`; return `sch`, which records the changes.

    The changes are tensor and sequence parallelism, dropout that drops the same elements on every mesh, kernels,
    recomputation and pipeline cuts. A rule is skipped if its pattern matches no module of this model (the rules serve
    all head classes of the family); so is the sharding of a tensor that a module lacks (a Linear without bias).

    Args:
        sch: schedule of a model on the meta device to which nothing was applied yet.
        table: table of the model's family.
        options: the arguments of `from_pretrained` that change how the model runs; `options.schedule` is not read.
        num_stages: number of pipeline stages; None takes the pp size of the schedule's mesh.
        tuned_kernels: kernels that a tuning search found fastest for this very model, e.g. "geglu+rms_norm", used if
            `options.kernels` is "auto"; None if there was no search.
    """
    _require_needed(sch, table, options.sequence_parallel)
    blocks = block_paths(sch, table)
    cuts = place_cuts(sch, table, num_stages or sch.mesh.pp)
    rows = [(p, _with_backend(rule, options.attention)) for p, rule in table.rows(sch.model)]
    divided = options.sequence_parallel and sch.mesh.tp > 1
    if divided:  # first: a product inside such a module then sums the gradient of all tokens
        prefix = base_prefix(sch.model)
        _apply_rows(sch, [(prefix + pattern, all_tokens[:1]) for pattern in table.all_tokens])
    _apply_rows(sch, rows)
    _apply_rows(sch, _activation_rows(sch, blocks))
    if divided:
        _apply_rows(sch, _sequence_rows(sch, table, rows))
    _apply_rows(sch, [*_drawing_rows(sch), ("**:Dropout", dropout)])
    device = device_name(options.place)
    apply_kernels(sch, options.kernels, device, options.attention, tuned_kernels)
    for block, policy in zip(blocks, block_policies(len(blocks), options), strict=True):
        if policy != KEEP:
            sch.do(block, Checkpoint(policy="" if policy == RECOMPUTE else policy))
    for block, call in cuts:
        sch.do(block, CutPipelineStage(call))
    return sch


def _require_needed(sch: Schedule, table: Table, tokens_divided: bool) -> None:
    """Raise ArchitectureError if a config field has another value than the family's rules need on the mesh of `sch`
    (`table.needs` lists these fields). `tokens_divided` is True under sequence parallelism.
    """
    config, mesh = sch.model.config, sch.mesh
    sizes = {name: mesh.size(name) for name in ("pp", "cp")}
    where = {
        "": mesh.tp > 1,
        "sp": tokens_divided and mesh.tp > 1,
        **{n: sizes[n] > 1 for n in sizes},
    }
    hints = {"sp": "leave sequence_parallel out"} | {name: f"use {name}=1" for name in sizes}
    beside = {"sp": " with sequence_parallel", **{n: f" with {n}={sizes[n]}" for n in sizes}}
    for name, needed, only in ((*need, "")[:3] for need in (*NEEDS, *table.needs)):
        applies = where[only] if only in where else where[""] and getattr(config, only)
        found = getattr(config, name, needed)
        if found == needed or not applies:
            continue
        what = f"config field {name} of {table.model_type}"
        problem = f"found {found!r}, expected {needed!r}"
        problem += beside.get(only, only and f" with {only}")
        hint = f"pass {name}={needed!r}, or {hints.get(only, 'use tp=1')}"
        raise ArchitectureError("from_pretrained", what, problem, hint)


def block_policies(count: int, options: BuildOptions) -> list[str]:
    """Return the activation policy of each of a model's `count` blocks: KEEP (save all activations), RECOMPUTE, or a
    name such as "save_matmuls". `checkpoint_policy` of `options` lists one for each block, or is one ("": RECOMPUTE)
    for the share `checkpoint_ratio` of blocks, spread evenly; the other blocks KEEP.

    Raises:
        ArchitectureError: one policy with a ratio of 0; a list together with a ratio, or not of length `count`.
    """
    policy, ratio = options.checkpoint_policy, options.checkpoint_ratio
    what = f"checkpoint_policy={policy!r:.60}"
    if isinstance(policy, str):
        chosen = spread(count, ratio)
        if policy and not chosen:
            problem = f"no block is recomputed at checkpoint_ratio={ratio}"
            raise ArchitectureError("from_pretrained", what, problem, "pass checkpoint_ratio=1.0")
        return [(policy or RECOMPUTE) if i in chosen else KEEP for i in range(count)]
    if len(policy) != count or ratio:
        problem = f"found {len(policy)} policies and checkpoint_ratio={ratio:g}, the model has {count} blocks"
        hint = "pass one policy per block (keep, recompute, save_matmuls, ...), and leave checkpoint_ratio out"
        raise ArchitectureError("from_pretrained", what, problem, hint)
    return list(policy)


def _with_backend(rule: Rule, attention: str | None) -> Rule:
    if attention is None:
        return rule
    return tuple(
        dataclasses.replace(d, backend=attention) if isinstance(d, CoreAttentionSeam) else d
        for d in rule
    )


def _apply_rows(sch: Schedule, rows: list[Row]) -> None:
    for pattern, rule in rows:
        for directive in rule if sch[pattern].paths else ():
            for where in _applicable(sch, pattern, directive):
                sch.do(where, directive)


def _activation_rows(sch: Schedule, blocks: list[str]) -> list[Row]:
    """Return (path, rule) of every activation in `blocks` that has parameters (PReLU, xIELU). The rule sums their
    gradients over tp, because the activation gets only one rank's shard of the columns.
    """
    within = tuple(f"{path}." for path in blocks)
    return [(path, tuple(map(SumGradient, module._parameters))) for path, module in sch.state.modules.items()
            if path.startswith(within) and type(module).__name__ in TRAINED_ACTIVATIONS]  # fmt: skip


def _drawing_rows(sch: Schedule) -> list[Row]:
    """Return (path, rule) for modules whose own forward draws random values: layers that LayerDrop skips, noise on a
    router's input. The rule makes all tp ranks draw the same; modules to which it was applied before are left out.
    """
    return [(path, dropout) for path, module in sch.state.modules.items()
            if any(value for name, value in vars(module).items() if DRAWS.search(name))
            and ForkRng.name not in sch.state.applied.get(path, ())]  # fmt: skip


def _sequence_rows(sch: Schedule, table: Table, rows: list[Row]) -> list[Row]:
    """Return the (pattern of module paths, rule) pairs that sequence parallelism (arXiv:2205.05198) needs besides those
    of tensor parallelism, `rows`, which gather the tokens before column-parallel linears and reduce-scatter them after
    row-parallel ones. The returned rules shard the tokens before the first block of each list in `table.blocks`, gather
    them after the last one (ALBERT: at each call of its one shared block), and sum gradients of parameters that are
    replicated inside blocks. The model is that of the Schedule `sch`.
    """
    leave = any(isinstance(d, Sync) and d.sequence_axis is not None for _, r in rows for d in r)
    if not leave and not table.all_tokens:
        problem = "slapo_zoo has no rule that shards tokens for this family"
        hint = "leave sequence_parallel out, and use tp without it"
        what = f"sequence_parallel of {table.model_type}"
        raise ArchitectureError("from_pretrained", what, problem, hint)
    prefix, found = base_prefix(sch.model), []
    patterns = [prefix + pattern for pattern in table.blocks]
    keep = [prefix + pattern for pattern in table.all_tokens]
    found += [(pattern, all_tokens[1:]) for pattern in keep]
    within = [name for pattern in keep for name in (pattern, f"{pattern}.**")]
    whole_paths = {path for pattern in within for path in sch[pattern].paths}
    for pattern in patterns:
        if stack := sch[pattern].paths:
            first, last = (stack, stack) if table.calls else (stack[:1], stack[-1:])
            found += [(path, (Sync("fwd_pre", "divide_tokens"),)) for path in first]
            found += [(path, (Sync("fwd_post", "join_tokens"),)) for path in last]
    blocks = tuple(f"{path}." for path in block_paths(sch, table))
    for pattern, rule in rows:
        paths = [p for p in sch[pattern].paths if p not in whole_paths]
        inside = [p for p in paths if f"{p}.".startswith(blocks)]
        if inside and not rule:
            names = {n: None for p in inside for n in sch.state.modules[p]._parameters}
            found.append((pattern, tuple(SumGradient(n, sequence=True) for n in names)))
        elif inside and any(isinstance(d, Sync) and d.sequence_axis is not None
                            and d.mode == "fwd_post" for d in rule):  # fmt: skip
            found.append((pattern, (SumGradient("bias", sequence=True),)))
    found += [(f"{pattern}.**:Dropout", dropout) for pattern in keep]
    found += [(f"{pattern}.**:Dropout", dropout_tokens) for pattern in patterns]
    return found


def _applicable(sch: Schedule, pattern: str, directive: Directive) -> list[str]:
    """Return [pattern] if a directive (one change of a module) can be applied to every module at `pattern`. Otherwise
    return the paths of the matching modules that have the parameter which the directive shards, or whose gradient it sums.
    """
    if not isinstance(directive, Shard | SumGradient):
        return [pattern]
    name, modules = directive.param_name, sch.state.modules
    paths = sch[pattern].paths
    held = {p: modules[p]._parameters.get(name, modules[p]._buffers.get(name)) for p in paths}
    having = [p for p, tensor in held.items() if tensor is not None]
    return [pattern] if having == list(paths) else having


def place_cuts(sch: Schedule, table: Table, num_stages: int) -> list[tuple[str, int]]:
    """Return (path of a block, index of its call) for each call of a block after which a pipeline stage ends, in order.

    The index is 0 unless a forward calls one block several times (ALBERT). Stages are balanced by the estimated cost of
    blocks, embeddings, heads and loss. Raises MeshError for more stages than calls of blocks.
    """
    blocks = block_paths(sch, table)
    calls = getattr(sch.model.config, table.calls) if table.calls else 1
    if num_stages == 1:
        return []
    if num_stages > (most := len(blocks) * calls):
        both = "" if num_stages == sch.mesh.pp else "and stages_per_rank with a product "
        hint = f"choose pp {both}between 1 and {max(1, most)}"
        problem = f"{num_stages} stages, but the model has {most} blocks"
        raise MeshError("mesh", f"pp={sch.mesh.pp}", problem, hint)
    costs = step_costs(sch.model, units_of(sch.model, table, blocks), blocks, num_stages)
    may_cut = [i for i, cost in enumerate(costs) if cost.unit in blocks]
    ends = balanced_cuts([cost.step for cost in costs], may_cut, num_stages)
    return [(costs[i].unit, costs[i].call) for i in ends]


def step_costs(model: Any, units: list[str], blocks: list[str], num_stages: int) -> list[UnitCost]:
    """Return, for each call of a block, embedding or head (paths: `units`) in a forward on fake tensors, in running
    order, its number of weights and of estimated operations. If the forward fails, or has fewer calls of `blocks` than
    there are cuts between stages, each of `units` counts as called once, with as many operations as weights.
    """
    try:
        found = unit_costs(model, units)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError):
        found = []
    if sum(cost.unit in blocks for cost in found) >= num_stages - 1:
        return found
    sizes = [sum(p.numel() for p in model.get_submodule(unit).parameters()) for unit in units]
    return [UnitCost(unit, 0, float(n), n) for unit, n in zip(units, sizes, strict=True)]


def spread(num_blocks: int, ratio: float) -> list[int]:
    """Return the indices of round(ratio * num_blocks) evenly spread blocks; MeshError for a ratio outside 0..1."""
    if not 0.0 <= ratio <= 1.0:
        what, hint = (
            f"checkpoint_ratio={ratio}",
            "choose 0.0 to keep all activations, 1.0 to recompute all",
        )
        raise MeshError("from_pretrained", what, "expected a number from 0 to 1", hint)
    count = round(ratio * num_blocks)
    return [num_blocks * i // count for i in range(count)]
