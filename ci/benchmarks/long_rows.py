"""Simulated steps of one long row on H100s: sequence parallelism, context parallelism, or both; docs/long_rows.md.

Every figure is the planner's, from dry runs of the real program on fake tensors; none was measured on a device.
Rows are causal, full and one document, so that without cp no mask is in memory.
"""

from typing import Any

LENGTHS = (32768, 131072, 262144, 1048576)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 8B": ("LlamaForCausalLM", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256}),
    "Qwen3 1.7B": ("Qwen3ForCausalLM", {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True}),
}  # fmt: skip
SHARDED: dict[int, dict[str, dict[str, Any]]] = {
    8: {
        "tp=8 sp": {"tp": 8, "sequence_parallel": True},
        "tp=2 sp, cp=4": {"tp": 2, "sequence_parallel": True, "cp": 4, "dp_shard": 4},
        "cp=8": {"cp": 8, "dp_shard": 8},
        "cp=8 ulysses": {"cp": 8, "dp_shard": 8, "cp_attention": "ulysses"},
    },
    64: {
        "tp=8 sp, cp=8": {"tp": 8, "sequence_parallel": True, "cp": 8, "dp_shard": 8},
        "cp=64": {"cp": 64, "dp_shard": 64},
    },
}


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Return a table per model and number of devices; with `quick` one length of one model."""
    import transformers

    from slapo_zoo.tune.planner.hardware import HARDWARE
    from slapo_zoo.tune.planner.layout_search import Planner

    tables: dict[str, list[dict[str, Any]]] = {}
    for model, (name, sizes) in list(MODELS.items())[: 1 if quick else None]:
        config = getattr(transformers, name).config_class(
            **sizes, max_position_embeddings=LENGTHS[-1]
        )
        config.architectures = [name]
        for tokens in LENGTHS[: 1 if quick else None]:
            planner = Planner(config, HARDWARE["h100"], tokens, padding=False)
            for gpus, layouts in SHARDED.items():
                for what, sizes_of in layouts.items():
                    row = step(planner, gpus, what, sizes_of)
                    print(model, *row.values(), flush=True)
                    tables.setdefault(f"{model} on {gpus} H100, simulated", []).append(row)
    return tables


def step(planner: Any, gpus: int, what: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Forecast a step of one row: all blocks recomputed, or none where that fits."""
    from slapo_zoo.tune.planner.hardware import GIB
    from slapo_zoo.tune.planner.layout import Layout

    limit, tokens = planner.hardware.memory - planner.hardware.reserved, planner.seq_len
    for ratio in (0.0, 1.0):
        found = planner.forecast(Layout(**sizes, checkpoint_ratio=ratio))
        if found.memory <= limit:
            break
    seconds, size = found.step.seconds, (found.memory + planner.hardware.reserved) / GIB
    fits = found.memory <= limit
    return {
        "tokens": tokens, "layout": what, "recompute": ratio, "GiB": round(size, 1), "fits": "yes" if fits else "no",
        "step s": seconds, "tokens/s/GPU": tokens / seconds / gpus, "GB sent": (found.step.tp_bytes + found.step.cp_bytes) / 1e9,
    }  # fmt: skip
