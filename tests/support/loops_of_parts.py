"""Loops that call a submodule: the backbone, an encoder, a layer, alone or beside the full model."""

from contextlib import suppress
from typing import Any

import torch
from torch.nn import functional

from loop_families import MASKED, ONE_STACK, PAIRS, TEXT
from loops import Trainee, loop

MODES = "sequence_parallel=True: this backward goes through a forward with sharded tokens"
PART = {"pp": "pp=1", "dp_shard": "dp_shard="}  # errors of a submodule called alone
PARTS = (*ONE_STACK, *PAIRS, "clip")
STEPS = 2


def _alone(t: Trainee) -> Any:
    return lambda part: t.read(t.hidden(part), part)


@loop("backbone", families=PARTS, **PART)
def backbone(t: Trainee) -> None:
    for step in range(STEPS):
        t.by_hand(step, _alone(t))


@loop("backbone in eval", families=PARTS, **PART)
def in_eval_mode(t: Trainee) -> None:
    """Train in eval mode: without dropout, with gradients."""
    t.model.eval()
    for step in range(STEPS):
        t.by_hand(step, _alone(t))


@loop("backbone after a step", families=PARTS, **PART)
def after_a_step(t: Trainee) -> None:
    """Call the backbone after a step, on a batch of the same shape with other padding."""
    for step in range(STEPS):
        _own(t, step)
        t.by_hand(step + 10, _alone(t))


@loop("backbone before a step", families=PARTS, **PART)
def before_a_step(t: Trainee) -> None:
    for step in range(STEPS):
        t.by_hand(step + 10, _alone(t))
        _own(t, step)


@loop("backbone after a forward", families=ONE_STACK, tp2_sp=MODES, **PART)
def after_a_forward(t: Trainee) -> None:
    """Add a loss on hidden states to the model's own loss: two forwards, one backward."""
    for step in range(STEPS):
        t.by_hand(step, lambda part: t.model(**part).loss + t.read(t.hidden(part), part))


@loop("backbone before a forward", families=ONE_STACK, tp2_sp=MODES, **PART)
def before_a_forward(t: Trainee) -> None:
    for step in range(STEPS):
        t.by_hand(step, lambda part: t.read(t.hidden(part), part) + t.model(**part).loss)


@loop("backbone of another length", families=(*TEXT, *PAIRS), **PART)
def of_another_length(t: Trainee) -> None:
    for step in range(STEPS):
        _own(t, step)
        t.by_hand(step + 10, _alone(t), tokens=9)
        t.by_hand(step + 20, _alone(t), tokens=10)


@loop("embeddings amid training", families=PARTS, **PART)
def embeddings(t: Trainee) -> None:
    """Compute sentence embeddings for an evaluation between steps on the model's own loss."""
    for step in range(STEPS):
        _own(t, step)
        t.model.eval()
        with torch.no_grad():
            for part in t.parts(step + 30):
                t.show("embedding", t.pooled(t.hidden(part), part))
            for part in t.parts(step + 40, None if "clip" in t.family.cls.lower() else 8):
                t.show("embedding", t.pooled(t.hidden(part), part))
        t.model.train()


@loop("embeddings in training mode", families=PARTS, **PART)
def embeddings_in_training_mode(t: Trainee) -> None:
    for step in range(STEPS):
        _own(t, step)
        with torch.no_grad():
            for part in t.parts(step + 30):
                t.show("embedding", t.pooled(t.hidden(part), part))


@loop("two towers", families=PARTS, **PART)
def two_towers(t: Trainee) -> None:
    """Train two towers that share one backbone: two calls with other rows, in-batch negatives."""

    def loss_of(part: dict) -> torch.Tensor:
        other = {k: v.flip(0) if torch.is_tensor(v) else v for k, v in part.items()}
        a, b = (functional.normalize(t.pooled(t.hidden(x), x), dim=-1) for x in (part, other))
        return functional.cross_entropy(a @ b.T / 0.5, torch.arange(len(a)))

    for step in range(STEPS):
        t.by_hand(step, loss_of)


@loop("head by hand", families=ONE_STACK, **PART)
def head_by_hand(t: Trainee) -> None:
    for step in range(STEPS):
        t.by_hand(step, lambda part: _cross_entropy(t.family.head(t.model, t.hidden(part)), part))


@loop("head by hand after a step", families=ONE_STACK, **PART)
def head_after_a_step(t: Trainee) -> None:
    for step in range(STEPS):
        _own(t, step)
        t.by_hand(
            step + 10, lambda part: _cross_entropy(t.family.head(t.model, t.hidden(part)), part)
        )


def _cross_entropy(logits: torch.Tensor, part: dict) -> torch.Tensor:
    labels = part["labels"].flatten()
    return functional.cross_entropy(logits.reshape(len(labels), -1), labels)


@loop("chunked loss", families=TEXT, **PART)
def chunked(t: Trainee) -> None:
    """Compute logits of a few tokens at a time, so that memory never holds all of them."""

    def loss_of(part: dict) -> torch.Tensor:
        total = torch.zeros((), dtype=t.dtype)
        hidden, labels = t.hidden(part), part["labels"]
        for h, y in zip(hidden.split(5, 1), labels.split(5, 1), strict=True):
            logits = t.family.head(t.model, h)
            total = total + functional.cross_entropy(
                logits.flatten(0, 1), y.flatten(), reduction="sum"
            )
        return total / (labels != -100).sum()

    for step in range(STEPS):
        t.by_hand(step, loss_of)


@loop(
    "layer alone",
    families=(
        "bert",
        "roberta",
        "distilbert",
        "electra",
        "gpt2",
        "llama",
        "qwen3",
        "opt",
        "vit",
        "t5",
        "esm",
    ),
    **PART,
)
def layer_alone(t: Trainee) -> None:
    """Call a block on synthetic hidden states, as layer-wise distillation and probes do."""
    layer = t.model.get_submodule(t.family.layers)[1]

    def loss_of(part: dict) -> torch.Tensor:
        out = layer(_made_up(t), **_beside(t))
        return (out[0] if isinstance(out, tuple) else out).square().mean()

    for step in range(STEPS):
        t.by_hand(step, loss_of)


@loop("layer alone after a step", families=("bert", "gpt2", "llama", "opt", "vit", "t5"), **PART)
def layer_after_a_step(t: Trainee) -> None:
    _own(t, 5)
    layer_alone(t)


def _width(t: Trainee) -> int:
    config = t.model.config
    return getattr(config, "hidden_size", None) or config.dim


def _made_up(t: Trainee) -> torch.Tensor:
    size = (4 // (t.mesh.dp if t.scheduled else t.dp), 8, _width(t))
    g = torch.Generator().manual_seed(7 + t.here)
    return torch.randn(size, generator=g).to(t.dtype)


def _beside(t: Trainee) -> dict[str, Any]:
    """Return what a rotary block needs beside its input."""
    if "Llama" not in t.family.cls and "Qwen" not in t.family.cls:
        return {}
    hidden = _made_up(t)
    places = torch.arange(hidden.shape[1])[None]
    return {"position_embeddings": t.model.model.rotary_emb(hidden, places)}


@loop("encoder", families=("bert", "roberta", "albert", "electra", "distilbert", "esm"), **PART)
def encoder(t: Trainee) -> None:
    """Call the stack of blocks without its embeddings."""
    stack = t.backbone.get_submodule("transformer" if "Distil" in t.family.cls else "encoder")
    for step in range(STEPS):
        t.by_hand(step, lambda part: stack(_made_up(t)).last_hidden_state.square().mean())


@loop("get_encoder", families=PAIRS, **PART)
def encoder_by_its_getter(t: Trainee) -> None:
    for step in range(STEPS):
        t.by_hand(step, lambda part: t.read(t.hidden(part, t.model.get_encoder()), part))


@loop("encoder outputs by hand", families=PAIRS, **PART)
def encoder_outputs(t: Trainee) -> None:
    """Call the encoder once for two calls of the decoder."""

    def loss_of(part: dict) -> torch.Tensor:
        source = {k: part[k] for k in ("input_ids", "attention_mask")}
        found = t.model.get_encoder()(**source)
        mask, labels = part["attention_mask"], part["labels"]
        both = (
            t.model(encoder_outputs=found, attention_mask=mask, labels=y).loss
            for y in (labels, labels.flip(1))
        )
        return sum(both)

    for step in range(STEPS):
        t.by_hand(step, loss_of)


@loop("decoder alone", families=PAIRS, **PART)
def decoder_alone(t: Trainee) -> None:
    def loss_of(part: dict) -> torch.Tensor:
        ids = part["labels"].clamp(min=3)
        decoder = t.model.get_decoder()
        out = decoder(input_ids=ids, encoder_hidden_states=_made_up(t), use_cache=False)
        return out.last_hidden_state.square().mean()

    for step in range(STEPS):
        t.by_hand(step, loss_of)


@loop("features", families=("clip",), **PART)
def features(t: Trainee) -> None:
    """Call CLIP's towers and compute the contrastive loss by hand."""

    def loss_of(part: dict) -> torch.Tensor:
        text = t.model.get_text_features(
            input_ids=part["input_ids"], attention_mask=part["attention_mask"]
        )
        image = t.model.get_image_features(pixel_values=part["pixel_values"])
        found = [x if torch.is_tensor(x) else x.pooler_output for x in (text, image)]
        for x in found:
            t.show("features", x)
        a, b = (functional.normalize(x, dim=-1) for x in found)
        return functional.cross_entropy(a @ b.T * 2, torch.arange(len(a)))

    for step in range(STEPS):
        t.by_hand(step, loss_of)


@loop("image features", families=("clip",), **PART)
def image_features(t: Trainee) -> None:
    def loss_of(part: dict) -> torch.Tensor:
        found = t.model.get_image_features(pixel_values=part["pixel_values"])
        found = found if torch.is_tensor(found) else found.pooler_output
        return (found - 1).square().mean()

    for step in range(STEPS):
        t.by_hand(step, loss_of)


@loop("input embeddings alone", families=TEXT, **PART)
def input_embeddings(t: Trainee) -> None:
    """Read the embedding table by hand: a penalty, a nearest neighbour, a soft label."""

    def loss_of(part: dict) -> torch.Tensor:
        return t.model.get_input_embeddings()(part["input_ids"]).square().mean()

    for step in range(STEPS):
        t.by_hand(step, loss_of)


@loop("inputs_embeds to the backbone", families=TEXT, **PART)
def embedded_by_hand(t: Trainee) -> None:
    def loss_of(part: dict) -> torch.Tensor:
        embeds = t.model.get_input_embeddings()(part["input_ids"])
        out = t.backbone(inputs_embeds=embeds, attention_mask=part["attention_mask"])
        return t.read(out.last_hidden_state, part)

    for step in range(STEPS):
        t.by_hand(step, loss_of)


@loop("a call that failed", families=ONE_STACK, **PART)
def failed_call(t: Trainee) -> None:
    """Call a submodule that raises; the state that its call sets up has to end with it."""
    for step in range(STEPS):
        _own(t, step)
        for part in t.parts(step + 10):
            wrong = {
                k: part[k][..., None, None] for k in ("input_ids", "pixel_values") if k in part
            }
            with suppress(ValueError, RuntimeError, IndexError, TypeError):
                t.hidden({**part, **wrong})
        t.by_hand(step + 20, _alone(t))


@loop("backbone while hidden states are asked", families=ONE_STACK, **PART)
def layers_shown(t: Trainee) -> None:
    def loss_of(part: dict) -> torch.Tensor:
        inputs = {
            k: v for k, v in part.items() if k in ("input_ids", "attention_mask", "pixel_values")
        }
        out = t.backbone(**inputs, output_hidden_states=True)
        return sum(t.read(h, part) for h in out.hidden_states)

    for step in range(STEPS):
        t.by_hand(step, loss_of)


@loop("backbone without gradients kept", families=MASKED, **PART)
def probe(t: Trainee) -> None:
    """Train a linear probe: the backbone under no_grad in training mode, a plain torch head."""
    head = torch.nn.Linear(_width(t), 3, dtype=t.dtype)
    with torch.no_grad():
        head.weight.copy_(torch.sin(torch.arange(head.weight.numel())).view_as(head.weight))
    for step in range(STEPS):
        for part in t.parts(step):
            with torch.no_grad():
                hidden = t.pooled(t.hidden(part), part)
            t.show("probe", head(hidden))


def _own(t: Trainee, step: int) -> None:
    """Take a step on the model's own loss; CLIP's needs the full batch, so its step trains one tower by hand."""
    if "CLIP" in t.family.cls:
        t.by_hand(
            step,
            lambda part: t.model(**{**part, "return_loss": False}).logits_per_text.square().mean(),
        )
    else:
        t.own(step)
