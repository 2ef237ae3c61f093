"""The trainers of TRL behind ScheduledTrainer: the run of the plain one in one process."""

import warnings

import pytest
import torch
import transformers

from cli_runs import tokenizer
from parity import Case, checkpoint

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
