"""Predicted against measured memory per rank: families, sizes, layouts and recomputation.

Measured is the growth of anonymous memory of new processes over two training steps with AdamW. Tensors of 64 KiB or
more get pages of their own (mallopt M_MMAP_THRESHOLD), as on a GPU with expandable segments: by default glibc keeps
the holes of freed memory, which adds 10 to 100 % and is no property of a model.
"""

import ctypes
from typing import Any

import torch

from benchmarks import ranks
from slapo_zoo.errors import RankError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.tune.planner.hardware import HARDWARE
from slapo_zoo.tune.planner.layout import Layout
from slapo_zoo.tune.planner.layout_search import Planner

MOST_OFF, MIB, M_MMAP_THRESHOLD = 0.10, 2**20, -3
SIZES = {  # hidden size, blocks, vocabulary, tokens of a row; all with 8 rows
    "small": (384, 4, 12000, 128),
    "medium": (512, 4, 16000, 128),
    "large": (512, 8, 16000, 128),
}
ROWS, MICRO_BATCHES = 8, 4
LAYOUTS = {"1": Mesh(), "tp=2": Mesh(tp=2), "pp=2": Mesh(pp=2), "cp=2": Mesh(cp=2)}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "blocks": {"checkpoint_ratio": 1.0},
    "all but products": {"checkpoint_ratio": 1.0, "checkpoint_policy": "save_matmuls"},
}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def config_of(family: str, size: str) -> Any:
    """Return the config of a family in one of SIZES, with its default dropout."""
    import transformers

    width, blocks, words, tokens = SIZES[size]
    usual = {
        "hidden_size": width, "num_attention_heads": width // 64, "num_hidden_layers": blocks,
        "vocab_size": words, "max_position_embeddings": tokens, **ENDS,
    }  # fmt: skip
    own: dict[str, dict[str, Any]] = {
        "GPT2LMHeadModel": {"n_embd": width, "n_head": width // 64, "n_layer": blocks, "n_positions": tokens,
                            "vocab_size": words, "loss_type": "ForCausalLMLoss", **ENDS},
        "BertForMaskedLM": {**usual, "intermediate_size": 4 * width},
        "T5ForConditionalGeneration": {
            "d_model": width, "num_heads": width // 64, "num_layers": blocks // 2,
            "num_decoder_layers": blocks // 2, "d_ff": 4 * width, "vocab_size": words,
            "decoder_start_token_id": 0},
        "OPTForCausalLM": {**usual, "ffn_dim": 4 * width, "word_embed_proj_dim": width},
        "LlamaForCausalLM": {**usual, "intermediate_size": 3 * width, "num_key_value_heads": width // 64},
    }  # fmt: skip
    heads = {head.lower(): head for head in own}
    head = next(heads[name] for name in heads if name.startswith(family))
    config = getattr(transformers, head).config_class(**own[head])
    config.architectures = [head]
    return config


FAMILIES = ("gpt2", "bert", "t5", "opt", "llama")


def growth(
    config: Any, mesh: dict[str, int], tokens: int, count: int, knobs: dict[str, Any]
) -> int:
    """Build a model and run two steps on this rank; return by how many bytes its memory grew at the peak.

    Args:
        config: config of the model.
        mesh: sizes (tp, pp).
        tokens: tokens per row.
        count: micro-batches per step.
        knobs: further arguments of `from_config`.
    """
    from slapo_zoo import AutoScheduledModel
    from slapo_zoo.hf.example_inputs import random_batch
    from slapo_zoo.weights.ledger import AnonymousPeak

    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    ranks.barrier()
    with AnonymousPeak() as peak:
        model: Any = AutoScheduledModel.from_config(
            config, **mesh, device="cpu", kernels="reference", **knobs
        ).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        batch = random_batch(model, ROWS, tokens)
        for _ in range(2):
            model.train_step(batch, count)
            optimizer.step()
            optimizer.zero_grad()
    return peak.growth


def cells(
    family: str, size: str, layouts: dict[str, Mesh], recompute: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return one table row for each layout, recomputation and pipeline rank of a family: predicted and measured
    memory.
    """
    config, tokens = config_of(family, size), SIZES[size][3]
    planner = Planner(config, HARDWARE["cpu"], tokens, "fp32")
    rows = []
    for name, mesh in layouts.items():
        count, peers = MICRO_BATCHES if mesh.pp > 1 else 1, mesh.tp * mesh.cp
        for what, knobs in recompute.items():
            if mesh.cp > 1 and "checkpoint_policy" in knobs:
                continue  # refused
            found = patiently(growth, mesh.world_size, config, mesh.sizes, tokens, count, knobs)
            at = Layout(mesh.tp, mesh.pp, 1, ROWS // count, count, cp=mesh.cp, **knobs)
            for rank, predicted in enumerate(planner.forecast(at).ranks):
                measured = max(found[rank * peers : (rank + 1) * peers])
                expected = predicted.total + planner.hardware.reserved
                off = expected / measured - 1
                rows.append({
                    "model": family, "size": size, "layout": name, "recomputed": what, "stage": rank,
                    "weights MiB": predicted.weights / MIB, "predicted MiB": expected / MIB,
                    "measured MiB": measured / MIB, "off": round(off, 4),
                    "beyond": ["off"] if abs(off) > MOST_OFF else [],
                })  # fmt: skip
                print(*rows[-1].values(), flush=True)
    return rows


def patiently(fn: Any, nprocs: int, *args: Any) -> list[Any]:
    """Run `fn(*args)` on `nprocs` new ranks and return their results; if a rank fails, as on a busy machine, try once
    more.
    """
    try:
        return ranks.on_ranks(fn, nprocs, *args)
    except RankError:
        return ranks.on_ranks(fn, nprocs, *args)


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Return the table of all layouts; with `quick` one size of one family."""
    if quick:
        rows = cells("gpt2", "small", {"1": LAYOUTS["1"]}, RECOMPUTE)
        return {"memory of a rank": rows}
    rows = [row for s in SIZES for f in FAMILIES for row in cells(f, s, LAYOUTS, RECOMPUTE)]
    high = sum(row["off"] > 0 for row in rows)
    most = max(abs(row["off"]) for row in rows)
    named = len({(row["model"], row["size"], row["layout"], row["recomputed"]) for row in rows})
    summary = {"what": f"{len(rows)} ranks of {named} cells", "predicted high": high,
               "furthest off": most}  # fmt: skip
    return {f"memory of a rank: predicted within {MOST_OFF:.0%}": rows, "in all": [summary]}
