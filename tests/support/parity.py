"""Comparison of plain `transformers` in one process with a scheduled model on a mesh, value by value.

The tolerance is relative to the reference's own error: the scheduled fp32 run may be at most twice
as far from the fp64 truth as the plain fp32 run is, plus a floor of a few units in the last place
for quantities whose true value is 0 (docs/decisions/0003-relative-tolerance.md).
"""

from dataclasses import dataclass, field
from functools import cache

import torch
import transformers

from tiny_configs import TINY

ROWS, TOKENS, STEPS = 4, 12, 3
# AdamW multiplies the rounding of a gradient near 0 by up to LEARNING_RATE / EPS: with this EPS by 1,
# so what is compared after training is the gradients, not chance (docs/decisions/0003).
LEARNING_RATE, EPS = 1e-3, 1e-3
FLOOR = 8 * torch.finfo(torch.float32).eps
LAYOUTS = {
    "1x1x1": (1, 1, 1), "2x1x1": (2, 1, 1), "4x1x1": (4, 1, 1),
    "1x2x1": (1, 2, 1), "2x2x1": (2, 2, 1), "2x1x2": (2, 1, 2),
    "2x1x1-sp": (2, 1, 1, True), "2x2x1-sp": (2, 2, 1, True),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Head class of a family, and the contents of its batch.

    Args:
        cls: name of the class in transformers.
        labels: which of LABELS.
        config: changes to the tiny config.
        dropout: probability in every dropout.
        rows: of a batch, all dp ranks together.
        variant: "bare" (no attention mask, nothing padded), "types" (token types), "decoder"
            (decoder inputs and mask), "eos" (one end of sequence per row), "twice" (two batches
            before each optimizer step).
    """

    cls: str
    labels: tuple[str, ...]
    config: tuple[tuple[str, object], ...] = ()
    choices: int = 0
    dropout: float = 0.0
    rows: int = ROWS
    variant: tuple[str, ...] = ()


@dataclass
class Result:
    """Result of one run: full tensors under their HuggingFace names."""

    loss: torch.Tensor
    outputs: dict[str, torch.Tensor]
    grads: dict[str, torch.Tensor]
    norm: torch.Tensor
    losses: list[float]
    weights: dict[str, torch.Tensor] = field(repr=False)


# Head counts, widths and vocabularies that divide evenly by neither 2 nor 4.
# The default of Mixtral's experts, grouped_mm, knows no fp64; plain and scheduled run the same one.
CHANGES = {"Mixtral": {"experts_implementation": "eager"}}
DROPOUTS = (
    "resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_dropout", "classifier_dropout",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob", "dropout",
    "attention_dropout", "resid_dropout", "embed_dropout", "dropout_rate", "activation_dropout", "seq_classif_dropout", "qa_dropout", "hidden_dropout", "embedding_dropout", "mlp_dropout", "drop_path_rate",
)  # fmt: skip


def tiny_config(case):
    """Return the tiny config of a case's family, with its dropout probability everywhere."""
    cls = getattr(transformers, case.cls)
    tiny = TINY.get(cls.config_class.model_type, {})
    known = vars(cls.config_class()) | {"classifier_dropout": None}
    drops = {name: case.dropout for name in DROPOUTS if name in known}
    scale = (
        {"initializer_factor": 1.0}
        if cls.config_class.model_type == "t5"
        else {"initializer_range": 0.2}
    )
    return cls.config_class(**{**drops, **tiny, **scale, **dict(case.config)}), cls


def changes_of(case):
    """Arguments of from_pretrained that the family needs here."""
    return next((v for k, v in CHANGES.items() if case.cls.startswith(k)), {})


def batch_of(case, step=0):
    """Return a batch of padded rows with ignored labels; every row has at least 4 real tokens."""
    g = torch.Generator().manual_seed(100 + step)
    if case.cls.startswith(WITHOUT_TEXT):
        audio = case.cls.startswith("Whisper")
        inputs = _features(case.rows, g) if audio else _pixels(case.rows, g)
        (values,) = inputs.values()
        labels = [LABELS[kind](values, None, g) for kind in case.labels]
        return {**inputs, **(labels[0] if labels else {})}
    shape = (case.rows, case.choices, TOKENS) if case.choices else (case.rows, TOKENS)
    ids = torch.randint(3, 99, shape, generator=g)
    lengths = torch.randint(4, TOKENS + 1, shape[:-1], generator=g)
    mask = (torch.arange(TOKENS) < lengths[..., None]).long()
    mask = torch.ones_like(mask) if "bare" in case.variant else mask
    ids = ids * mask
    batch = {"input_ids": ids, "attention_mask": mask}
    for kind in case.labels:
        batch |= LABELS[kind](ids, mask, g)
    if dict(case.config).get("add_cross_attention"):
        batch["encoder_hidden_states"] = torch.randn(case.rows, 5, 30, generator=g)
    if "ForConditionalGeneration" in case.cls:  # targets of another length than the source
        batch["labels"] = batch["labels"][:, : TOKENS - 4].contiguous()
    elif case.cls.endswith("T5Model"):
        batch["decoder_input_ids"] = ids[:, : TOKENS - 4].contiguous()
    for name in case.variant:
        batch |= VARIANTS.get(name, lambda batch, g: {})(batch, g)
    batch |= BESIDE_TEXT.get(case.cls, lambda batch, g: {})(batch, g)
    return {k: v for k, v in batch.items() if v is not None}


def _pixels(rows, g):
    return {"pixel_values": torch.randn(rows, 3, 12, 12, generator=g)}


def _features(rows, g):
    return {"input_features": torch.randn(rows, 8, 24, generator=g)}


def _spoken(batch, g):
    """Return a batch with audio for the encoder; the decoder reads the ids, or makes its own from the labels."""
    ids = batch["input_ids"]
    decoder = {} if "labels" in batch else {"decoder_input_ids": ids}
    return {"input_ids": None, "attention_mask": None, **_features(len(ids), g), **decoder}


WITHOUT_TEXT = ("ViT", "Swin", "CLIPFor", "WhisperForAudio")
BESIDE_TEXT = {
    "WhisperModel": _spoken,
    "WhisperForConditionalGeneration": _spoken,
    "CLIPModel": lambda batch, g: _pixels(len(batch["input_ids"]), g),
}


def _with_decoder_inputs(batch, g):
    shape = batch.get("labels", batch["input_ids"]).shape
    lengths = torch.randint(2, shape[1] + 1, shape[:1], generator=g)
    mask = (torch.arange(shape[1]) < lengths[:, None]).long()
    return {"decoder_input_ids": _ints(99, shape, g, 2), "decoder_attention_mask": mask}


def _with_one_end(batch, g):
    """Make the last real token of each row, and no other, the end of sequence (1)."""
    last = batch["attention_mask"].sum(-1, keepdim=True) - 1
    return {"input_ids": batch["input_ids"].scatter(1, last, 1)}


VARIANTS = {
    "bare": lambda batch, g: {"attention_mask": None},
    "types": lambda batch, g: {"token_type_ids": _ints(2, batch["input_ids"].shape, g)},
    "decoder": _with_decoder_inputs,
    "eos": _with_one_end,
}


def batches_of(case, step):
    """Return the batches of one optimizer step: one, or two whose gradients are accumulated."""
    return [batch_of(case, step), *([batch_of(case, step + 50)] if "twice" in case.variant else [])]


def _ints(high, shape, g, low=0):
    return torch.randint(low, high, shape, generator=g)


def _tokens(ids, mask, g):
    some = torch.rand(ids.shape, generator=g) < 0.7
    return {"labels": ids.masked_fill(~(some & mask.bool()), -100)}


def _span(ids, mask, g):
    start, end = _ints(TOKENS + 3, (2, len(ids)), g)  # some lie beyond the sequence: ignored
    return {"start_positions": start, "end_positions": end}


LABELS = {
    "tokens": _tokens,
    "span": _span,
    "tags": lambda ids, m, g: {"labels": _ints(3, ids.shape, g).masked_fill(~m.bool(), -100)},
    "replaced": lambda ids, m, g: {"labels": _ints(2, ids.shape, g)},
    "class": lambda ids, m, g: {"labels": _ints(3, (len(ids),), g)},
    "two": lambda ids, m, g: {"labels": _ints(2, (len(ids),), g)},
    "multi": lambda ids, m, g: {"labels": _ints(2, (len(ids), 3), g).float()},
    "number": lambda ids, m, g: {"labels": torch.randn(len(ids), generator=g)},
    "choice": lambda ids, m, g: {"labels": _ints(ids.shape[1], (len(ids),), g)},
    "order": lambda ids, m, g: {"sentence_order_label": _ints(2, (len(ids),), g)},
    "patches": lambda pixels, m, g: {
        "bool_masked_pos": torch.rand(len(pixels), 9, generator=g) < 0.5
    },
    "windows": lambda pixels, m, g: {
        "bool_masked_pos": torch.rand(len(pixels), 36, generator=g) < 0.5
    },
    "pairs": lambda ids, m, g: {"return_loss": True},
    "next": lambda ids, m, g: {"next_sentence_label": _ints(2, (len(ids),), g)},
    "mc": lambda ids, m, g: {
        "mc_labels": _ints(ids.shape[1], (len(ids),), g),
        "mc_token_ids": m.sum(-1) - 1,
    },
}


def cast(batch, dtype):
    """Cast floating inputs to the dtype of the model."""
    floating = {k: v for k, v in batch.items() if torch.is_tensor(v) and v.is_floating_point()}
    return batch | {k: v.to(dtype) for k, v in floating.items()}


@cache
def checkpoint(case, root):
    """Save the case's model with random weights by plain transformers; return the folder."""
    folder = root / f"{case.cls}-{abs(hash(case)) % 10**8}"
    config, cls = tiny_config(case)
    torch.manual_seed(0)
    model = cls(config)
    with torch.no_grad():
        for p in model.parameters():  # biases and norms of 0 and 1 would hide mistakes
            p.add_(torch.randn_like(p) * 0.05)
    model.save_pretrained(folder)
    return folder


def references(case, folder):
    """Return the plain run in fp64, and plain fp32 runs with both attentions, which give fp32's own error."""
    kinds = ("sdpa", "eager") if getattr(transformers, case.cls)._supports_sdpa else ("eager",)
    truth = plain(case, folder, torch.float64, kinds[0])
    return truth, [plain(case, folder, torch.float32, kind) for kind in kinds]


def saved_names(model):
    """Return parameters by the names in files; of tied ones `named_parameters` gives the first."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return ((tied.get(name, name), p) for name, p in model.named_parameters())


@cache
def plain(case, folder, dtype, attention):
    """Run the reference: plain transformers, one process, the full batch at once."""
    from slapo_zoo.hf.models import freeze_as_made

    cls = getattr(transformers, case.cls)
    changes = changes_of(case)
    model = cls.from_pretrained(folder, dtype=dtype, attn_implementation=attention, **changes)
    freeze_as_made(model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, eps=EPS)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for batch in reversed(batches_of(case, step)):  # the first one's outputs are kept
            output = model(**cast(batch, dtype))
            output.loss.backward()
        if step == 0:
            grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                     for n, p in saved_names(model)}  # fmt: skip
            outputs = {k: v.detach() for k, v in output.items() if isinstance(v, torch.Tensor)}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms.append(norm)
        optimizer.step()
        losses.append(float(output.loss.detach()))
    weights = {n: p.detach() for n, p in saved_names(model)}
    return Result(outputs["loss"], outputs, grads, norms[0], losses, weights)


def scheduled(case, folder, layout, micro_batches=None, seed=0, out=None, **options):
    """Run the scheduled model on this rank of a mesh; rank 0 returns the Result."""
    from slapo_zoo import AutoScheduledModel

    (tp, pp, dp), sequence_parallel = layout[:3], layout[3:] == (True,)
    model = AutoScheduledModel.from_pretrained(
        folder, tp=tp, pp=pp, dp=dp, seed=seed, micro_batches=micro_batches, auto_class=case.cls,
        sequence_parallel=sequence_parallel, **{**changes_of(case), **options},
    )  # fmt: skip
    if out is not None:
        model.save_pretrained(out)
    dtype = next(model.parameters()).dtype
    output = model.eval()(**cast(batch_of(case), dtype))
    outputs = {k: v.detach() for k, v in output.items() if isinstance(v, torch.Tensor)}
    if not case.labels:
        return outputs
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, eps=EPS)
    rows = case.rows // dp
    part = slice(model.mesh.coord("dp") * rows, (model.mesh.coord("dp") + 1) * rows)
    model.train()
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for batch in reversed(batches_of(case, step)):
            batch = {k: v[part] if torch.is_tensor(v) else v for k, v in batch.items()}
            loss = model.train_step(cast(batch, dtype))
        losses.append(float(loss))
        if step == 0:
            grads = model.consolidated_state_dict(grads=True)
        norm = model.clip_grad_norm_(1.0)
        norms.append(norm)
        optimizer.step()
    weights = model.consolidated_state_dict()
    replicated = {n: p.detach().double().sum().item() for n, p in model.named_parameters()
                  if n not in model.schedule.state.placed}  # fmt: skip
    first = torch.tensor(losses[0], dtype=torch.float64)
    return Result(first, outputs, grads, norms[0], losses, weights), replicated


def own_error(plains, truth, what):
    """Return the largest difference of the plain fp32 runs from the fp64 truth."""
    return max(float((what(plain).double() - what(truth).double()).abs().max()) for plain in plains)


def assert_close(name, what, result, plains, truth, scale=0.0):
    """Fail where a value is more than twice as far from fp64 as the plain fp32 runs.

    Args:
        what: takes the tensor to compare from a Result.
        scale: magnitude of the values that this one was computed from, for the floor.
    """
    found, want = what(result).double(), what(truth).double()
    assert found.shape == want.shape, f"{name}: {tuple(found.shape)} != {tuple(want.shape)}"
    scale = max(float(want.abs().max()), scale)
    allowed = 2 * own_error(plains, truth, what) + FLOOR * scale
    error = float((found - want).abs().max())
    assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}, scale {scale:.2e}"


def compare(result, plains, truth):
    """Compare outputs, loss, every gradient, the norm, and the weights after STEPS steps."""
    for name in truth.outputs:
        assert_close(f"output {name}", lambda r: r.outputs[name], result, plains, truth)  # noqa: B023
    assert set(result.grads) == set(truth.grads)
    largest = max(float(g.abs().max()) for g in truth.grads.values())
    for name in truth.grads:
        assert_close(f"gradient {name}", lambda r: r.grads[name], result, plains, truth, largest)  # noqa: B023
    assert_close("norm", lambda r: r.norm, result, plains, truth)
    for step in range(STEPS):
        assert_close(f"loss {step}", lambda r: torch.tensor(r.losses[step]), result, plains, truth)  # noqa: B023
    compare_weights(result, plains, truth)


def compare_weights(result, plains, truth):
    """Compare the weights after STEPS steps; the tolerance is the largest error of plain runs in any weight."""
    worst = max(own_error(plains, truth, lambda r: r.weights[n]) for n in truth.weights)  # noqa: B023
    for name, want in truth.weights.items():
        error = float((result.weights[name].double() - want).abs().max())
        allowed = 2 * worst + FLOOR
        assert error <= allowed, f"weight {name}: error {error:.2e}, allowed {allowed:.2e}"
