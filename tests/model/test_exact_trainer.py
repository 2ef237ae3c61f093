"""ScheduledTrainer with a model loaded with `exact=`: the same bits on every mesh, also after a resume."""

import pytest
import transformers

from parity import Case, batch_of, checkpoint
from slapo_zoo import AutoScheduledModel, ScheduledTrainer, SlapoError

CASE = Case("GPT2LMHeadModel", ("tokens",), dropout=0.1, rows=4)
VIRTUAL = {"tp": 2, "pp": 1, "dp": 2}


def rows(count=8):
    batches = [batch_of(CASE, step) for step in range(count // CASE.rows)]
    return [{k: v[i] for k, v in b.items()} for b in batches for i in range(CASE.rows)]


def arguments(out, **changes):
    known = {
        "output_dir": str(out), "use_cpu": True, "max_steps": 2, "learning_rate": 1e-3, "report_to": [],
        "logging_steps": 1, "save_strategy": "steps", "save_steps": 1, "disable_tqdm": True,
        "lr_scheduler_type": "linear", "dataloader_pin_memory": False,
    }  # fmt: skip
    return transformers.TrainingArguments(**{**known, **changes})


def train(folder, out, tp, dp, resume):
    """Losses, norms, evaluation and digest of a run of ScheduledTrainer on this process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # state of an earlier job of this worker
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, dp=dp, exact=VIRTUAL, seed=3)
    sizes = {"per_device_train_batch_size": 4 // dp, "per_device_eval_batch_size": 2 // dp}
    try:
        trainer = ScheduledTrainer(
            model=model, args=arguments(out, **sizes),
            train_dataset=rows(), eval_dataset=rows(4),
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        steps = [one for one in trainer.state.log_history if "loss" in one]
        digest = model.step_digest()
        found = [(one["loss"], float(one["grad_norm"]), one["learning_rate"]) for one in steps]
        return found, digest, trainer.evaluate()["eval_loss"]
    finally:
        model.close()


def test_trainer_in_bit_exact_mode_resumed_on_another_mesh_is_bit_equal_to_one_process(
    tmp_path, ranks
):
    folder = checkpoint(CASE, tmp_path)
    ((steps, digest, judged),) = ranks.run(train, 1, folder, tmp_path / "one", 1, 1, None)
    assert len(steps) == 2
    whole = ranks.run(train, 2, folder, tmp_path / "two", 2, 1, None, timeout=200)
    assert whole == [(steps, digest, judged)] * 2
    saved = str(tmp_path / "two" / "checkpoint-1")
    for found, end, loss in ranks.run(
        train, 2, folder, tmp_path / "three", 1, 2, saved, timeout=200
    ):
        assert (found[-1:], end) == (steps[-1:], digest)
        assert loss == pytest.approx(judged, rel=1e-6)


REFUSED = {
    "gradient_accumulation_steps": (2, "micro_batches=N"),
    "bf16": (True, 'precision="bf16"'),
    "label_smoothing_factor": (0.1, "the model's own loss"),
    "per_device_train_batch_size": (3, "dataloader_drop_last=True"),  # for 16 rows
}


def test_trainer_in_bit_exact_mode_refuses_options_whose_results_depend_on_the_mesh(tmp_path):
    model = AutoScheduledModel.from_pretrained(checkpoint(CASE, tmp_path), exact={"dp": 2}, seed=3)
    try:
        for name, (value, words) in REFUSED.items():
            args = arguments(tmp_path)
            setattr(args, name, value)
            with pytest.raises(SlapoError, match=words):
                ScheduledTrainer(model=model, args=args, train_dataset=rows())
    finally:
        model.close()
