"""The trainers of TRL behind ScheduledTrainer: the run of the plain one in one process."""

import warnings

import pytest
import torch
import transformers

from cli_runs import tokenizer
from parity import Case, checkpoint
from slapo_zoo import SlapoError

CASE = Case("LlamaForCausalLM", ("tokens",), (("vocab_size", 300), ("max_position_embeddings", 64)))
ANSWERS = [("to be", " or not", " not"), ("or", " not to", " be"), ("not", " to be", " to"), ("be", " to", " or to")]  # fmt: skip


def pairs():
    from datasets import Dataset

    names = ("prompt", "chosen", "rejected")
    return Dataset.from_list([dict(zip(names, row, strict=True)) for row in ANSWERS * 2])


def texts():
    from datasets import Dataset

    return Dataset.from_list([{"text": prompt + chosen} for prompt, chosen, _ in ANSWERS * 2])


def trained(folder, out, layout, kind):
    """Losses of TRL's trainer; plain where layout is None."""
    import trl
    from accelerate.state import AcceleratorState

    from slapo_zoo import AutoScheduledModel, ScheduledTrainer

    AcceleratorState._reset_state(True)
    dp = 1 if layout is None else layout[2]
    common = {
        "output_dir": str(out), "use_cpu": True, "bf16": False, "max_steps": 3, "logging_steps": 1, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-2, "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 4 // dp, "gradient_checkpointing": False, "seed": 5,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    base = getattr(trl, f"{kind}Trainer")
    words = tokenizer(eos_token="<|endoftext|>", pad_token="<|pad|>")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = getattr(trl, f"{kind}Config")(**common)
        if layout is None:
            model = transformers.LlamaForCausalLM.from_pretrained(folder)
            cls = base
        else:
            tp, pp, dp = layout
            model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp, dp=dp, seed=0)
            cls = type("Mine", (ScheduledTrainer, base), {})
        data = pairs() if kind == "DPO" else texts()
        more = {}
        if kind == "DPO":
            import copy

            more["ref_model"] = copy.deepcopy(model)
        trainer = cls(model=model, args=args, train_dataset=data, processing_class=words, **more)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 1, 2)], ids=["tp2", "dp2"])
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_trl_trains_as_in_one_process(kind, layout, tmp_path, ranks):
    folder = checkpoint(CASE, tmp_path)
    want = ranks.run(trained, 1, folder, tmp_path, None, kind, timeout=200)[0]
    for losses in ranks.run(trained, 2, folder, tmp_path, layout, kind, timeout=200):
        torch.testing.assert_close(losses, want, atol=1e-4, rtol=1e-4)


def sft(folder, out, **more):
    """TRL's SFT trainer on one process with LoRA by `peft_config=`."""
    import trl
    from peft import LoraConfig

    from slapo_zoo import AutoScheduledModel, ScheduledTrainer

    cls = type("Mine", (ScheduledTrainer, trl.SFTTrainer), {})
    args = trl.SFTConfig(
        output_dir=str(out), use_cpu=True, bf16=False, max_steps=1, report_to=[], disable_tqdm=True,
        per_device_train_batch_size=4, gradient_checkpointing=False, **more,
    )  # fmt: skip
    return cls(
        model=AutoScheduledModel.from_pretrained(folder, seed=0), args=args, train_dataset=texts(),
        processing_class=tokenizer(eos_token="<|endoftext|>", pad_token="<|pad|>"),
        peft_config=LoraConfig(r=2, target_modules=["q_proj"]),
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the config of TRL
def test_an_adapter_of_peft_config_is_what_trains_and_what_is_saved(tmp_path):
    trainer = sft(checkpoint(CASE, tmp_path), tmp_path / "run", save_strategy="no")
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    changed = {
        name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])
    }
    assert changed
    assert all("lora" in name for name in changed)
    trainer.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "adapter" / "model.safetensors").exists()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_checkpoints_of_an_adapter_are_refused_before_the_first_step(tmp_path):
    with pytest.raises(SlapoError, match='save_strategy="no"'):
        sft(checkpoint(CASE, tmp_path), tmp_path / "run", save_strategy="steps")


def test_dpo_with_an_adapter_asks_for_its_reference(tmp_path):
    import trl
    from peft import LoraConfig

    from slapo_zoo import AutoScheduledModel, ScheduledTrainer

    cls = type("Mine", (ScheduledTrainer, trl.DPOTrainer), {})
    model = AutoScheduledModel.from_pretrained(checkpoint(CASE, tmp_path), seed=0)
    with pytest.raises(SlapoError, match=r"ref_model=copy\.deepcopy"):
        cls(model=model, peft_config=LoraConfig(r=2, target_modules=["q_proj"]))
