"""Families that the loops train, and the paths of their submodules."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from parity import Case

KV1 = (("num_key_value_heads", 1),)


@dataclass(frozen=True)
class Family:
    """Class of transformers that loops train.

    Args:
        cls: its name.
        backbone: path of the model without its head; of T5, BART and CLIP one half.
        layers: path of its blocks.
        head: (model, last hidden states) --> logits, as its forward computes them.
        labels: what a batch holds, see `parity.LABELS`.
        config: changes to the tiny config.
    """

    cls: str
    backbone: str
    layers: str
    head: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    labels: tuple[str, ...] = ("tokens",)
    config: tuple[tuple[str, object], ...] = ()

    @property
    def case(self) -> Case:
        """Return the case of tests/support/parity.py for this family."""
        return Case(self.cls, self.labels, self.config)


def _distilbert(m, h):
    return m.vocab_projector(m.vocab_layer_norm(m.activation(m.vocab_transform(h))))


def _lm_head(m, h):
    return m.lm_head(h)


FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", "transformer", "transformer.h", _lm_head),
    "bert": Family("BertForMaskedLM", "bert", "bert.encoder.layer", lambda m, h: m.cls(h)),
    "t5": Family("T5ForConditionalGeneration", "encoder", "encoder.block"),
    "llama": Family("LlamaForCausalLM", "model", "model.layers", _lm_head, config=KV1),
    "qwen3": Family("Qwen3ForCausalLM", "model", "model.layers", _lm_head),
    "mixtral": Family("MixtralForCausalLM", "model", "model.layers", _lm_head),
    "roberta": Family("RobertaForMaskedLM", "roberta", "roberta.encoder.layer", _lm_head),
    "albert": Family("AlbertForMaskedLM", "albert", "albert.encoder.albert_layer_groups", lambda m, h: m.predictions(h)),
    "distilbert": Family("DistilBertForMaskedLM", "distilbert", "distilbert.transformer.layer", _distilbert),
    "electra": Family("ElectraForMaskedLM", "electra", "electra.encoder.layer", lambda m, h: m.generator_lm_head(m.generator_predictions(h))),
    "opt": Family("OPTForCausalLM", "model", "model.decoder.layers", _lm_head),
    "bart": Family("BartForConditionalGeneration", "model.encoder", "model.encoder.layers"),
    "vit": Family("ViTForImageClassification", "vit", "vit.layers", lambda m, h: m.classifier(h[:, 0]), ("class",), (("num_labels", 3),)),
    "clip": Family("CLIPModel", "text_model", "text_model.encoder.layers", labels=("pairs",)),
    "esm": Family("EsmForMaskedLM", "esm", "esm.encoder.layer", _lm_head),
    "modernbert": Family("ModernBertForMaskedLM", "model", "model.layers", lambda m, h: m.decoder(m.head(h))),
}  # fmt: skip
TEXT_SIX = tuple(FAMILIES)[:6]
MASKED = ("bert", "roberta", "albert", "distilbert", "electra", "esm", "modernbert")
CAUSAL = ("gpt2", "opt", "llama", "qwen3")
PAIRS = ("t5", "bart")
TEXT = (*MASKED, *CAUSAL)  # one stack of text and a head
ONE_STACK = (*TEXT, "vit")
ALL = (*ONE_STACK, *PAIRS, "clip")
DROPPING = ("bert", "roberta", "albert", "distilbert", "electra", "gpt2", "opt", "t5", "bart", "vit", "esm", "modernbert")  # fmt: skip
