"""Loops on a model with hooks on the model or its head, deep copies of its modules, or an embedding with other options."""

import copy
from typing import Any

from loops import CALL_TRAIN_STEP, STEPS, Trainee, loop

OUTSIDE = "the module is called outside the model's forward"
OF_A_COPY = "the module is that of a deep copy of the model"
BLOCK = "block was replaced or removed"


def _own(t: Trainee) -> None:
    for step in range(STEPS):
        t.own(step)


def _train(t: Trainee) -> None:
    for step in range(STEPS):
        t.by_hand(step, lambda part: t.model(**part).loss)


@loop("a hook on the model", families=("bert", "llama", "t5", "vit"))
def on_the_model(t: Trainee) -> None:
    """Scale the loss by a hook and by a patched forward."""

    def halved(out: Any) -> Any:
        out.loss = out.loss * 0.5
        return out

    own = t.model.forward
    t.model.register_forward_hook(lambda _m, _i, out: halved(out))
    t.model.forward = lambda **batch: halved(own(**batch))
    _own(t)


@loop("backward hooks on the head", families=("bert", "gpt2", "llama", "t5"), pp=CALL_TRAIN_STEP)
def on_the_head(t: Trainee) -> None:
    head = t.model.get_output_embeddings()
    head.register_full_backward_hook(lambda _m, grads, _: tuple(grad * 0.5 for grad in grads))
    _train(t)


@loop(
    "another backbone",
    families=("bert", "gpt2"),
    tp2_sp=BLOCK,
    tp=OF_A_COPY,
    dp=OF_A_COPY,
    pp=OUTSIDE,
)
def replaced(t: Trainee) -> None:
    setattr(t.model, t.family.backbone, copy.deepcopy(t.backbone))
    t.model.tie_weights()
    t.new_optimizer()
    _train(t)


@loop("gradients by frequency", families=("bert", "gpt2"), tp="after the load", pp=CALL_TRAIN_STEP)
def by_frequency(t: Trainee) -> None:
    t.model.get_input_embeddings().scale_grad_by_freq = True
    _train(t)


@loop("another padding", families=("bert", "gpt2"))
def another_padding(t: Trainee) -> None:
    t.model.get_input_embeddings().padding_idx = 50
    _own(t)


@loop(
    "layers copied",
    families=("bert", "gpt2", "llama"),
    pp=OUTSIDE,
    tp2_sp=BLOCK,
    dp_shard=OF_A_COPY,
)
def copied(t: Trainee) -> None:
    t.model.config.use_cache = False
    layers = t.model.get_submodule(t.family.layers)
    layers[2] = copy.deepcopy(layers[1])
    t.new_optimizer()
    _train(t)
