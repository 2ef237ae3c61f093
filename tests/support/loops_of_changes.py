"""Loops on a model that was changed: hooks, patched classes, another attention, recomputation, other layers."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from loop_families import CAUSAL, ONE_STACK, TEXT
from loops import CALL_TRAIN_STEP, Trainee, loop
from loops_of_parts import PART

STEPS = 2
LAYERED = tuple(f for f in ONE_STACK if f != "albert")  # its groups are no list of blocks
WHOLE = {"families": ONE_STACK, "pp": CALL_TRAIN_STEP}


def _layers(t: Trainee) -> Any:
    return t.model.get_submodule(t.family.layers)


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def _masked_mean(hidden: torch.Tensor, part: dict) -> torch.Tensor:
    mask = part.get("attention_mask")
    if mask is None:
        return hidden.square().mean()
    return (hidden.square() * mask[..., None]).sum() / mask.sum() / hidden.shape[-1]


@loop("hooks on layers", families=LAYERED, pp=CALL_TRAIN_STEP, unlike=("tp2-sp",))
def layerwise(t: Trainee) -> None:
    """Distil layer by layer: the loss reads each block's output under the mask (with sequence parallelism only a shard)."""
    seen: list[torch.Tensor] = []
    for layer in _layers(t):
        layer.register_forward_hook(lambda _m, _i, out: seen.append(_first(out)))

    def loss_of(part: dict) -> torch.Tensor:
        seen.clear()
        own = t.model(**part).loss
        return own + sum(_masked_mean(h, part) for h in seen)

    for step in range(STEPS):
        t.by_hand(step, loss_of)


@loop("a hook on the backbone", **WHOLE, unlike=("pp2",))
def on_the_backbone(t: Trainee) -> None:
    """Train on the backbone's output, at padding too."""
    seen: list[Any] = []
    t.backbone.register_forward_hook(lambda _m, _i, out: seen.append(out.last_hidden_state))

    def loss_of(part: dict) -> torch.Tensor:
        seen.clear()
        own = t.model(**part).loss
        return own + 0.1 * seen[0].square().mean()

    for step in range(STEPS):
        t.by_hand(step, loss_of)


@loop("hooks that change what layers return", families=LAYERED, pp=CALL_TRAIN_STEP)
def changing(t: Trainee) -> None:
    for layer in _layers(t):
        layer.register_forward_hook(
            lambda _m, _i, out: (out[0] * 1.5, *out[1:]) if isinstance(out, tuple) else out * 1.5
        )
    for step in range(STEPS):
        t.by_hand(step, lambda part: t.model(**part).loss)


@loop("pre-hooks that read positions", families=LAYERED, pp=CALL_TRAIN_STEP, unlike=("tp2-sp",))
def steered(t: Trainee) -> None:
    """Steer activations at the first token of each row; with sequence parallelism a hook sees its shard (docs/your_own_loop.md)."""

    def steer(_m: Any, args: tuple, kwargs: dict) -> tuple:
        hidden = args[0] if args else kwargs["hidden_states"]
        at = torch.zeros_like(hidden)
        at[:, 0] = 0.5
        if args:
            return (hidden + at, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden + at}

    _layers(t)[1].register_forward_pre_hook(steer, with_kwargs=True)
    for step in range(STEPS):
        t.by_hand(step, lambda part: t.model(**part).loss)


@loop("backward hooks on layers", families=LAYERED, pp=CALL_TRAIN_STEP)
def gradients_seen(t: Trainee) -> None:
    seen: list[torch.Tensor] = []
    for layer in _layers(t):
        layer.register_full_backward_hook(lambda _m, _i, out: seen.append(out[0].detach()))
    for step in range(STEPS):
        t.by_hand(step, lambda part: t.model(**part).loss)


def _another_attention(kind: str) -> Any:
    def run(t: Trainee) -> None:
        t.own(0)
        t.model.set_attn_implementation(kind)
        for step in range(STEPS):
            t.by_hand(step, lambda part: t.model(**part).loss)
        t.own(5)

    return run


for _kind in ("eager", "sdpa"):
    loop(f"set_attn_implementation {_kind}", **WHOLE)(_another_attention(_kind))


@loop("eager attention and tags", families=("bert", "roberta", "albert"), pp=CALL_TRAIN_STEP,
      cls=lambda family: family.cls.replace("MaskedLM", "TokenClassification"))  # fmt: skip
def tags(t: Trainee) -> None:
    t.model.set_attn_implementation("eager")
    for step in range(STEPS):
        t.by_hand(
            step, lambda part: t.model(**{**part, "labels": part["labels"].clamp(max=1)}).loss
        )


@loop("rows do not see each other", **WHOLE)
def apart(t: Trainee) -> None:
    """Check that the logits of a row equal those of the row alone."""
    t.model.set_attn_implementation("eager")
    for part in t.parts(0):
        t.show("first row", _logits(t, part)[:1])
        t.show(
            "first row",
            _logits(t, {k: v[:1] if torch.is_tensor(v) else v for k, v in part.items()}),
        )


def _logits(t: Trainee, part: dict) -> torch.Tensor:
    """Return the logits with zeros at padding."""
    logits, mask = t.model(**part).logits, part.get("attention_mask")
    return logits if mask is None else logits * mask[..., None]


@loop("logits at padding", families=TEXT, pp=CALL_TRAIN_STEP)
def at_padding(t: Trainee) -> None:
    """Train on a loss over all positions, with labels that ignore padding."""

    def loss_of(part: dict) -> torch.Tensor:
        out = t.model(**part)
        t.show("logits", out.logits)
        return out.loss + functional.cross_entropy(
            out.logits.flatten(0, 1), part["input_ids"].flatten()
        )

    for step in range(STEPS):
        t.by_hand(step, loss_of)


@loop("hidden states asked", families=ONE_STACK, pp="pp=1")
def hidden_states(t: Trainee) -> None:
    def loss_of(part: dict) -> torch.Tensor:
        out = t.model(**part, output_hidden_states=True)
        return out.loss + sum(_masked_mean(h, part) for h in out.hidden_states)

    for step in range(STEPS):
        t.by_hand(step, loss_of)


def _wrapped(reentrant: bool) -> Any:
    def run(t: Trainee) -> None:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
            CheckpointImpl,
            checkpoint_wrapper,
        )

        impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        t.model.config.use_cache = False
        layers = _layers(t)
        for i, layer in enumerate(layers):
            layers[i] = checkpoint_wrapper(layer, impl)
        _train(t)

    return run


def _train(t: Trainee) -> None:
    for step in range(STEPS):
        t.by_hand(step, lambda part: t.model(**part).loss)


loop("checkpoint_wrapper", **WHOLE)(_wrapped(False))
loop("reentrant checkpoint_wrapper", **WHOLE)(_wrapped(True))


def recomputed(forward: Any, reentrant: bool) -> Any:
    """Recompute each block's forward; torch's reentrant checkpoint takes no keywords."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=reentrant)

    return run


def _by_hand(reentrant: bool) -> Any:
    def run(t: Trainee) -> None:
        t.model.config.use_cache = False  # as every recipe sets it: a cache would be filled twice
        for layer in _layers(t):
            layer.forward = recomputed(layer.forward, reentrant)
        _train(t)

    return run


loop("checkpoint in each block", **WHOLE)(_by_hand(False))
loop("reentrant checkpoint in each block", **WHOLE)(_by_hand(True))


@loop("checkpoint around the loss", families=TEXT, pp=CALL_TRAIN_STEP)
def checkpointed_loss(t: Trainee) -> None:
    for step in range(STEPS):
        t.by_hand(step, lambda part: checkpoint(lambda: t.model(**part).loss, use_reentrant=False))


@loop("HF's switch by hand", families=LAYERED, pp=CALL_TRAIN_STEP)
def switched(t: Trainee) -> None:
    t.model.gradient_checkpointing_enable({"use_reentrant": False})
    _train(t)


def _patch(name: str, change: Any) -> Any:
    """Context in which a class of transformers has another forward, as recipes set before loading."""

    @contextmanager
    def around() -> Iterator[None]:
        module, cls = name.split(".")
        owner = getattr(getattr(transformers.models, module), f"modeling_{module}")
        patched = getattr(owner, cls)
        before = patched.forward
        patched.forward = functools.wraps(before)(change(before))
        try:
            yield
        finally:
            patched.forward = before

    around.__name__ = f"patch {name}"
    return around


def _scaled(before: Any) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = before(self, *args, **kwargs)
        return (out[0] * 1.7, *out[1:]) if isinstance(out, tuple) else out * 1.7

    return forward


PATCHES = {
    "llama.LlamaMLP": "llama", "llama.LlamaRMSNorm": "llama", "llama.LlamaAttention": "llama", "llama.LlamaDecoderLayer": "llama",
    "qwen3.Qwen3MLP": "qwen3", "qwen3.Qwen3RMSNorm": "qwen3", "t5.T5LayerNorm": "t5", "t5.T5DenseActDense": "t5", "t5.T5LayerFF": "t5",
    "gpt2.GPT2MLP": "gpt2", "gpt2.GPT2Attention": "gpt2", "bert.BertIntermediate": "bert", "bert.BertOutput": "bert",
    "bert.BertSelfOutput": "bert", "bert.BertSelfAttention": "bert", "bert.BertLayer": "bert", "bert.BertEmbeddings": "bert", "bert.BertLMPredictionHead": "bert",
    "roberta.RobertaIntermediate": "roberta", "roberta.RobertaOutput": "roberta", "roberta.RobertaLMHead": "roberta", "albert.AlbertLayer": "albert",
    "albert.AlbertAttention": "albert", "electra.ElectraIntermediate": "electra", "electra.ElectraOutput": "electra", "esm.EsmIntermediate": "esm", "esm.EsmOutput": "esm",
    "opt.OPTAttention": "opt", "opt.OPTDecoderLayer": "opt", "vit.ViTAttention": "vit", "vit.ViTLayer": "vit", "vit.ViTMLP": "vit",
    "distilbert.FFN": "distilbert", "distilbert.TransformerBlock": "distilbert", "modernbert.ModernBertMLP": "modernbert", "bart.BartEncoderLayer": "bart",
    "bart.BartAttention": "bart", "gpt2.GPT2Block": "gpt2", "electra.ElectraLayer": "electra",
}  # fmt: skip


def _own(t: Trainee) -> None:
    for step in range(STEPS):
        t.own(step)


for _name, _family in PATCHES.items():
    loop(f"patched {_name}", families=(_family,), around=_patch(_name, _scaled))(_own)


def _changed_layers(change: Any) -> Any:
    def run(t: Trainee) -> None:
        t.model.config.use_cache = False
        change(_layers(t))
        t.new_optimizer()
        _train(t)

    return run


def _cut(layers: Any) -> None:
    del layers[2:]


def _swapped(layers: Any) -> None:
    layers[0], layers[1] = layers[1], layers[0]


def _shared(layers: Any) -> None:
    layers[2] = layers[1]  # with a cache both would fill one place


for _word, _change in {"cut": _cut, "swapped": _swapped, "shared": _shared}.items():
    _told = {"pp": "block", "tp2_sp": "block was replaced or removed", "dp_shard": "block"}
    _changed = tuple(f for f in LAYERED if f != "modernbert")
    loop(f"layers {_word}", families=_changed, **_told)(_changed_layers(_change))


@loop("packed rows by hand", families=CAUSAL, pp=CALL_TRAIN_STEP)
def packed_by_hand(t: Trainee) -> None:
    for step in range(STEPS):
        t.by_hand(step, lambda part: t.model(**_packed(part, t)).loss)


@loop("packed rows", families=CAUSAL)
def packed(t: Trainee) -> None:
    """Train on rows of several documents, separated by position ids that restart at 0."""
    for step in range(STEPS):
        t.by_loss_fn(step, _token_loss, lambda part: _packed(part, t))


def _packed(part: dict, t: Trainee) -> dict:
    """Return a batch of packed documents; a plain model needs use_cache=False, or documents attend to each other."""
    ids = part["input_ids"].clamp(min=1)
    places = torch.arange(12).remainder(5).expand(len(ids), 12)
    made = {"input_ids": ids, "labels": ids, "position_ids": places}
    return made if t.scheduled else {**made, "use_cache": False}


def _token_loss(out: Any, part: dict) -> torch.Tensor:
    return functional.cross_entropy(out.logits.flatten(0, 1), part["input_ids"].flatten())


@loop("decoding amid training", families=CAUSAL, **PART)
def cached_backbone(t: Trainee) -> None:
    """Run a prompt through the backbone with a cache, then the rest of the rows."""
    for step in range(STEPS):
        t.own(step)
        t.model.eval()
        with torch.no_grad():
            for part in t.parts(step + 10):
                ids = part["input_ids"].clamp(min=3)
                first = t.backbone(input_ids=ids[:, :7], use_cache=True)
                rest = t.backbone(
                    input_ids=ids[:, 7:], past_key_values=first.past_key_values, use_cache=True
                )
                t.show("hidden", rest.last_hidden_state)
        t.model.train()
