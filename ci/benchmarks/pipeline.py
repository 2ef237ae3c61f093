"""Pipeline bubbles against their formulas, and automatic pipeline cuts against the best cuts.

For bubbles, stages sleep for a known time in the forward and in each part of the backward, so they can be measured on
fewer cores than ranks. Cuts are compared by the CPU time of each stage, since other work on the machine adds to wall
time.
"""

import copy
import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import ranks
from slapo_zoo.pipeline.orders import StageMap
from slapo_zoo.pipeline.timeline import Action, Span, bubble, makespan, simulate

PP, MICRO_BATCHES = 4, 8
FORMULAS = {  # p ranks, m micro-batches, v stages per rank; sources: slapo_zoo/pipeline/orders.py
    "1f1b": ("(p-1)/(m+p-1)", lambda p, m, v: (p - 1) / (m + p - 1)),
    "gpipe": ("(p-1)/(m+p-1)", lambda p, m, v: (p - 1) / (m + p - 1)),
    "interleaved_1f1b": ("(p-1)/(vm+p-1)", lambda p, m, v: (p - 1) / (v * m + p - 1)),
    "zbv": ("(p-1)/(6m+p-1)", lambda p, m, v: (p - 1) / (6 * m + p - 1)),
}
MOST_OFF = 0.10  # relative error against the formula
MOST_SLOWER = 1.03  # limit of the step time, relative to the best cuts
TOKENS = 512  # tokens of a micro-batch


class Wait(torch.autograd.Function):
    """Identity that sleeps `forward` seconds in its forward and `backward` seconds in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_s = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return grads[0], None, None


def wait_in(norm: torch.nn.LayerNorm, unit_s: float) -> None:
    """Make a norm sleep `unit_s` seconds in its forward, for the gradient of its input, and for those of its weights."""

    def forward(input: Tensor) -> Tensor:
        bias: Any = Wait.apply(norm.bias, 0.0, unit_s)
        waited: Any = Wait.apply(input, unit_s, unit_s)
        return functional.layer_norm(waited, norm.normalized_shape, norm.weight, bias, norm.eps)

    norm.forward = forward


def gpt2(**changes: Any) -> Any:
    """Return the config of a GPT-2 so small that its computation takes no time beside the sleeping; `changes` are
    fields.
    """
    from transformers import GPT2Config

    config = GPT2Config(
        **{"n_embd": 8, "n_head": 1, "n_positions": 64, "vocab_size": 16, **changes},
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config.architectures, config.loss_type = ["GPT2LMHeadModel"], "ForCausalLMLoss"
    return config


def cut_after(paths: Sequence[str]) -> Any:
    """Return a value of `schedule=` that only cuts the pipeline after the modules at `paths`."""

    def program(sch: Any) -> None:
        for path in paths:
            sch[path].cut_pipeline_stage()

    return program


def timelines(unit_s: dict[str, float], repeats: int) -> dict[str, list[list[Span]]]:
    """Run pipeline steps of every order on this rank; return {order: `repeats` recorded steps, each a list of spans}.

    `unit_s` maps an order to the seconds that the stages of one rank sleep.
    """
    from slapo_zoo import AutoScheduledModel
    from slapo_zoo.pipeline.profiler import record_step

    found = {}
    for order in unit_s:
        places = StageMap.make(order, PP, None)
        blocks = [f"transformer.h.{i}" for i in range(places.num_stages)]
        model: Any = AutoScheduledModel.from_config(
            gpt2(n_layer=len(blocks)), pp=PP, pipeline_order=order, schedule=cut_after(blocks[:-1])
        ).train()
        for stage in places.stages_of(model.mesh.coord("pp")):
            wait_in(model.transformer.h[stage].ln_1, unit_s[order] / places.per_rank)
        ids = torch.ones((MICRO_BATCHES, 4), dtype=torch.int64)
        batch = {"input_ids": ids, "labels": ids}
        record_step(model, batch, MICRO_BATCHES)  # connects the ranks
        found[order] = [record_step(model, batch, MICRO_BATCHES) for _ in range(repeats)]
    return found


def bubbles(quick: bool) -> list[dict[str, Any]]:
    """Return a table row per order: the measured bubble beside its formula."""
    unit_s = 0.02 if quick else 0.15
    places = {order: StageMap.make(order, PP, None) for order in FORMULAS}
    want = {order: FORMULAS[order][1](PP, MICRO_BATCHES, p.per_rank) for order, p in places.items()}
    # longer units for smaller bubbles, so that the runtime's own time weighs the same in each
    units = {order: unit_s * want["1f1b"] / share for order, share in want.items()}
    found = ranks.on_ranks(timelines, PP, units, 1 if quick else 3)
    rows = []
    for order, steps in found[0].items():
        best = min(steps, key=makespan)  # other work on the machine only ever adds to a step
        measured = bubble(best)
        on_paper = bubble(simulate(places[order].actions(MICRO_BATCHES), unit_cost))
        off = measured / want[order] - 1
        rows.append({
            "what": order, "p": PP, "m": MICRO_BATCHES, "stages per rank": places[order].per_rank,
            "formula": FORMULAS[order][0], "predicted": want[order], "simulated": on_paper,
            "measured": measured, "off": f"{off:+.1%}", "step s": makespan(best),
            "beyond": ["off"] if abs(off) > MOST_OFF and not quick else [],
        })  # fmt: skip
    return rows


def unit_cost(action: Action) -> float:
    """Return the cost of an action: a full backward takes two units, each other action one."""
    return 2.0 if action.kind == "B" else 1.0


def uneven_models(quick: bool) -> dict[str, tuple[Any, int]]:
    """Return {name: (config, pp)} of small models with an expensive head, or with an encoder unlike the decoder."""
    from transformers import T5Config

    width = 32 if quick else 128
    t5 = T5Config(
        d_model=width, d_kv=width // 4, num_heads=4, d_ff=4 * width, num_layers=2,
        num_decoder_layers=5, vocab_size=8 * width,
    )  # fmt: skip
    t5.architectures, t5.decoder_start_token_id = ["T5ForConditionalGeneration"], 0
    head = gpt2(n_layer=8, n_embd=width, n_head=4, vocab_size=32 * width)
    found = {"gpt2, 8 blocks, dear head": (head, 2), "t5, encoder 2, decoder 5": (t5, 2)}
    return found if quick else {**found, "gpt2 on 4 ranks": (head, 4)}


def stage_seconds(
    config: Any, pp: int, all_cuts: list[list[tuple[str, int]]], repeats: int
) -> list[list[dict[str, float]]]:
    """Return, for each of `all_cuts` and each repeat, the CPU seconds of this rank's stage: {"F": forward, "B":
    backward}.

    The choices of cuts take turns, so that a slow phase of the machine affects all of them.
    """
    from slapo_zoo import AutoScheduledModel
    from slapo_zoo.hf.example_inputs import random_batch
    from slapo_zoo.pipeline.unit_costs import usual_tokens

    tokens = usual_tokens(config)
    models = []
    for cuts in all_cuts:
        program = cut_after([unit for unit, _ in cuts])
        models.append(AutoScheduledModel.from_config(
            copy.deepcopy(config), pp=pp, schedule=program, pipeline_order="gpipe").train())  # fmt: skip
    found: list[list[dict[str, float]]] = [[] for _ in models]
    for _ in range(1 + repeats):
        for model, times in zip(models, found, strict=True):
            batch = random_batch(model, 2 * TOKENS // tokens, tokens)
            times.append(cpu_seconds(model, batch))
    return [times[1:] for times in found]


def cpu_seconds(model: Any, batch: dict[str, Tensor]) -> dict[str, float]:
    """Run one step; return this rank's CPU seconds per micro-batch as {"F": forwards, "B": backwards}."""
    model._slapo.pipeline.spans, model._slapo.pipeline.clock = [], time.thread_time
    try:
        model.train_step(batch, 2)
        total = {"F": 0.0, "B": 0.0}
        for span in model._slapo.pipeline.spans:
            total[span.action.kind] += (span.end - span.begin) / 2
        return total
    finally:
        model._slapo.pipeline.spans, model._slapo.pipeline.clock = None, time.monotonic


def stage_of(choice: list[tuple[str, int]], stage: int) -> tuple[Any, Any]:
    """Return (cut before a stage, cut after it) for a list of cuts, `choice`; None at the ends of the model."""
    return (choice[stage - 1] if stage else None, choice[stage] if stage < len(choice) else None)


def fastest(
    choices: list[list[tuple[str, int]]], found: list[list[list[dict[str, float]]]]
) -> dict[Any, dict[str, float]]:
    """Return {stage, as `stage_of` names it: its least seconds by kind} over all choices of cuts that contain the
    stage.

    `found` has the results of `stage_seconds` by rank. The least counts, since other work only adds to a time.
    """
    least: dict[Any, dict[str, float]] = {}
    for rank, per_choice in enumerate(found):
        for choice, times in zip(choices, per_choice, strict=True):
            kept = least.setdefault(stage_of(choice, rank), {})
            for kind in ("F", "B"):
                kept[kind] = min(kept.get(kind, float("inf")), *(t[kind] for t in times))
    return least


def step_time(per_stage: Sequence[dict[str, float]]) -> float:
    """Return the simulated seconds of a 1F1B step of MICRO_BATCHES micro-batches; `per_stage`: seconds by kind of
    action.
    """
    order = StageMap.make("1f1b", len(per_stage), None).actions(MICRO_BATCHES)
    return makespan(simulate(order, lambda action: per_stage[action.stage][action.kind]))


def cuts(quick: bool) -> list[dict[str, Any]]:
    """Return a table row per uneven model: the step time with automatic cuts beside that of all other choices."""
    from slapo_zoo import Mesh
    from slapo_zoo.zoo.apply import block_paths
    from slapo_zoo.zoo.outline import Outline

    rows = []
    for name, (config, pp) in uneven_models(quick).items():
        outline = Outline(config, None, Mesh(pp=pp), torch.float32)
        auto = list(outline.state.cuts)
        blocks = block_paths(outline.schedule, outline.table)
        choices = [[(b, 0) for b in c] for c in itertools.combinations(blocks, pp - 1)]
        found = ranks.on_ranks(stage_seconds, pp, config, pp, choices, 2 if quick else 8)
        least = fastest(choices, found)
        times = [step_time([least[stage_of(choice, i)] for i in range(pp)]) for choice in choices]
        best = min(range(len(choices)), key=times.__getitem__)
        ratio = times[choices.index(auto)] / times[best]
        rows.append({
            "model": name, "pp": pp, "choices": len(choices),
            "best cuts": " ".join(unit for unit, _ in choices[best]),
            "automatic cuts": " ".join(unit for unit, _ in auto),
            "best step ms": times[best] * 1e3, "automatic step ms": times[choices.index(auto)] * 1e3,
            "worst step ms": max(times) * 1e3, "ratio": round(ratio, 3),
            "beyond": ["ratio"] if ratio > MOST_SLOWER and not quick else [],
        })  # fmt: skip
    return rows


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of bubbles and of cuts."""
    return {
        f"bubble of stages of known cost: measured within {MOST_OFF:.0%} of the formula": bubbles(
            quick
        ),
        f"1F1B step by each stage's CPU time: automatic <= {MOST_SLOWER} x best cuts": cuts(quick),
    }
