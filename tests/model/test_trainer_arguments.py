"""TrainingArguments whose effect lies in a step: ScheduledTrainer replaces the Trainer's own step."""

import transformers

from engine_runs import CASES
from parity import batch_of, checkpoint
from slapo_zoo import AutoScheduledModel, ScheduledTrainer
from slapo_zoo.model.integrations import trainer as own


def test_scheduled_trainer_empties_the_device_cache_every_torch_empty_cache_steps(
    tmp_path, monkeypatch
):
    emptied = []
    monkeypatch.setattr(own, "clear_device_cache", lambda: emptied.append(made.state.global_step))
    batch = batch_of(CASES["gpt2"], 0)
    rows = [{name: value[i] for name, value in batch.items()} for i in range(2)]
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=4, report_to=[], save_strategy="no",
        disable_tqdm=True, dataloader_pin_memory=False, torch_empty_cache_steps=2,
    )  # fmt: skip
    model = AutoScheduledModel.from_pretrained(checkpoint(CASES["gpt2"], tmp_path))
    made = ScheduledTrainer(model=model, args=args, train_dataset=rows)
    made.train()
    assert emptied == [0, 2]
