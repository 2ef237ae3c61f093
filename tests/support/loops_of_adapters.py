"""Loops that train LoRA matrices beside a frozen model, in the forms that peft writes."""

import tempfile
import threading
from functools import cache
from typing import Any

import torch

from loop_families import CAUSAL, FAMILIES
from loops import Trainee, loop

STEPS = 2


def _adapted(**options: Any) -> Any:
    def run(t: Trainee) -> None:
        from peft import LoraConfig  # it imports for seconds

        config = LoraConfig(r=2, lora_alpha=4, **options)
        t.model.add_adapter(config)
        _fill(t)
        t.new_optimizer()
        for step in range(STEPS):
            t.own(step)
        _evaluate_adapted(t)

    return run


def _fill(t: Trainee) -> None:
    """Fill the unsharded matrices of an adapter with values that depend only on their names."""
    with torch.no_grad():
        for name, p in t.model.named_parameters():
            if "lora_" in name:
                p.fill_(0.02 if "lora_A" in name or "embedding_A" in name else -0.03)


def _evaluate_adapted(t: Trainee) -> None:
    t.model.eval()
    with torch.no_grad():
        for part in t.parts(30):
            t.show("loss", t.model(**part).loss)


LORA = {"families": CAUSAL, "weights": False}
NO_PLACE = dict.fromkeys(("tp", "pp", "dp"), "target_modules")
loop("LoRA", **LORA)(_adapted(target_modules=r".*\.(c_attn|q_proj|v_proj)"))
loop("LoRA in some layers", families=("llama", "qwen3", "opt"), weights=False, pp="target_modules")(
    _adapted(target_modules=["q_proj", "v_proj"], layers_to_transform=[1])
)
loop("LoRA on embeddings", weights=False, families=CAUSAL, **NO_PLACE)(
    _adapted(target_modules=r".*\.(wte|embed_tokens)")
)
loop(
    "LoRA on the head",
    weights=False,
    families=("llama", "qwen3"),
    tp="sharded over a padded vocabulary",
)(_adapted(target_modules=["lm_head", "q_proj"]))


def _classes(family: Any) -> str:
    return family.cls.replace("LMHeadModel", "ForSequenceClassification").replace("CausalLM", "SequenceClassification")  # fmt: skip


@loop(
    "a classifier's LoRA",
    families=CAUSAL,
    weights=False,
    cls=_classes,
    **dict.fromkeys(("tp", "pp", "dp"), "modules_to_save"),
)
def classifier(t: Trainee) -> None:
    """Train a peft classifier: the head beside the LoRA matrices."""
    t.model.load_adapter(str(_saved_adapter(t.family.cls)))
    t.model.eval()
    with torch.no_grad():
        for part in t.parts(0):
            inputs = {k: part[k] for k in ("input_ids", "attention_mask")}
            t.show("logits", t.model(**inputs).logits)


_ONE_AT_A_TIME = threading.Lock()


def _saved_adapter(cls: str) -> str:
    with _ONE_AT_A_TIME:
        return _written_adapter(cls)


@cache
def _written_adapter(cls: str) -> str:
    from peft import LoraConfig, get_peft_model

    from parity import Case, tiny_config

    family = next(f for f in FAMILIES.values() if f.cls == cls)
    config, made = tiny_config(Case(_classes(family), (), family.config))
    targets = ["c_attn"] if cls.startswith("GPT2") else ["q_proj", "v_proj"]
    lora = LoraConfig(r=2, task_type="SEQ_CLS", target_modules=targets, init_lora_weights=False)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    folder = tempfile.mkdtemp()
    get_peft_model(made(config), lora).save_pretrained(folder)
    torch.set_rng_state(state)
    return folder
