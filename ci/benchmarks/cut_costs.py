"""Costs of context parallelism: the largest sum of live tensors in a step, and bytes that a rank sends per layer.

Both are counts, the same on any machine: tensors by torch's dispatcher (`LiveBytes`), sends by the collectives that
the emulated ranks run. The models are small: 4 layers of width 64, 2 rows.
"""

from typing import Any

import torch

MOST, OFF = 1.1, 0.02  # a rank's peak in shares 1 / cp of one rank's; bytes sent off the formula
LAYERS, HEADS, KV_HEADS, HEAD_SIZE, TOKENS, ROWS = 4, 8, 2, 8, 512, 2
WIDTH, FP32 = HEADS * HEAD_SIZE, 4
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
USUAL = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "vocab_size": 64,
    "max_position_embeddings": TOKENS, **ENDS,
}  # fmt: skip
# class --> tokens of a row, config; all but Llama with their dropout
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "LlamaForCausalLM": (
        TOKENS,
        {**USUAL, "intermediate_size": 224, "num_key_value_heads": KV_HEADS},
    ),
    "GPT2LMHeadModel": (128, {"n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS, "n_positions": 128,
                              "vocab_size": 64, "loss_type": "ForCausalLMLoss", **ENDS}),
    "BertForMaskedLM": (128, {**USUAL, "intermediate_size": 256}),
    "OPTForCausalLM": (128, {**USUAL, "max_position_embeddings": 128, "ffn_dim": 256, "word_embed_proj_dim": WIDTH,
                             "attention_dropout": 0.1}),  # else gradients, which cp does not shard, are a fifth of the peak
    "T5ForConditionalGeneration": (128, {
        "d_model": WIDTH, "num_heads": HEADS, "d_kv": HEAD_SIZE, "num_layers": LAYERS // 2, "d_ff": 256,
        "vocab_size": 64, "decoder_start_token_id": 0}),
}  # fmt: skip


def model_of(cls: str, cp: int, **options: Any) -> Any:
    """Return a scheduled model of MODELS in training mode; `options` are arguments of the loader."""
    import transformers

    from slapo_zoo import AutoScheduledModel

    config = getattr(transformers, cls).config_class(**MODELS[cls][1])
    options = {"dp": 1, "seed": 0, "kernels": "reference", **options}
    return AutoScheduledModel.from_config(config, auto_class=cls, cp=cp, **options).train()


def batch_of(cls: str, padded: bool) -> dict[str, torch.Tensor]:
    """Return a batch for a model of MODELS; with `padded` it has a mask, and one row ends with padding."""
    tokens = MODELS[cls][0]
    ids = torch.arange(tokens).remainder(60).add(3).expand(ROWS, -1).contiguous()
    real = (torch.arange(tokens) < torch.tensor([[tokens], [tokens - 9]])).long()
    return {"input_ids": ids, "labels": ids, **({"attention_mask": real} if padded else {})}


def peak(cls: str, padded: bool, cp: int, **options: Any) -> int:
    """Return the most bytes of live tensors in a step, of all that the step makes: saved, temporary and gradients."""
    from slapo_zoo.parallel.live_bytes import LiveBytes

    model = model_of(cls, cp, **options)
    with LiveBytes() as live:
        model.train_step(batch_of(cls, padded))
    return live.peak


# collective --> (bytes of its tensor, ranks) --> bytes that a rank sends
SENT = {
    "all_gather": lambda size, n: size * (n - 1) / n,
    "reduce_scatter": lambda size, n: size * (n - 1) / n,
    "all_to_all": lambda size, n: size * (n - 1) / n,
    "shift": lambda size, n: size,
}


def sent(cp: int, way: str) -> dict[str, float]:
    """Return the bytes of floating-point tensors that a cp rank sends in a step of Llama, by collective."""
    from slapo_zoo.parallel import collectives

    model, found = model_of("LlamaForCausalLM", cp, cp_attention=way), dict.fromkeys(SENT, 0.0)
    group = model.mesh.group("cp")

    def note(kind: str, whole: Any, over: Any) -> None:
        if over is group and kind in SENT and whole.is_floating_point():
            found[kind] += SENT[kind](whole.nbytes, cp)

    collectives.OBSERVERS.append(note)
    try:
        model.train_step(batch_of("LlamaForCausalLM", padded=False))
    finally:
        collectives.OBSERVERS.remove(note)
    return found


def formula(cp: int, way: str) -> dict[str, float]:
    """Return what `sent` should, by the formulas of docs/guide.md, "Long rows"."""
    token = ROWS * TOKENS * HEAD_SIZE * FP32 * LAYERS  # one head's keys in all layers
    kv = max(KV_HEADS, cp)  # by heads, at least one on each rank
    of_way = {
        "gather": {"all_gather": 4 * KV_HEADS * token * (cp - 1) / cp, "reduce_scatter": 2 * KV_HEADS * token * (cp - 1) / cp},
        "ulysses": {"all_to_all": 4 * (HEADS + kv) * token * (cp - 1) / cp**2},
        "ring": {"shift": (6 * cp - 4) * KV_HEADS * token / cp},
    }  # fmt: skip
    return dict.fromkeys(SENT, 0.0) | of_way[way]


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of peaks and of bytes; with `quick` for one model."""
    from slapo_zoo import emulate
    from slapo_zoo.parallel.token_cut import WAYS

    peaks, bytes_ = [], []
    for cls in list(MODELS)[: 1 if quick else None]:
        for padded in (False, True):
            one = peak(cls, padded, 1)
            for way in WAYS:
                row = {"model": cls, "padding": padded, "attention": way, "cp 1 bytes": one}
                for cp in (2, 4):
                    most = max(emulate(peak, cls, padded, cp, cp_attention=way, mesh=(1, 1, cp)))
                    row |= {f"cp {cp} bytes": most, f"x {cp} / one": round(most * cp / one, 4)}
                row["beyond"] = [f"x {cp} / one" for cp in (2, 4) if row[f"x {cp} / one"] > MOST]
                peaks.append(row)
    for way in WAYS:
        for cp in (2, 4):
            found = max(sum(x.values()) for x in emulate(sent, cp, way, mesh=(1, 1, cp)))
            found, expected = found / LAYERS, sum(formula(cp, way).values()) / LAYERS
            off = round(found / expected - 1, 4)
            row = {"attention": way, "cp": cp, "sent per layer": found, "formula": expected, "off": off}  # fmt: skip
            bytes_.append({**row, "beyond": ["off"] if abs(off) > OFF else []})
    return {"peak of a step": peaks, "bytes of a rank": bytes_}
