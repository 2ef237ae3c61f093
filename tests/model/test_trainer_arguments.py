"""TrainingArguments whose effect lies in a step: ScheduledTrainer replaces the Trainer's own step."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from cli_runs import tokenizer
from engine_runs import CASES
from parity import batch_of, checkpoint
from slapo_zoo import AutoScheduledModel, ScheduledTrainer, SlapoError
from slapo_zoo.model.integrations import trainer as own
from slapo_zoo.model.integrations.trainer_options import refuse_options, seed_samples
from slapo_zoo.parallel.mesh import Mesh
from trainer_runs import arguments, rows, run


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


def test_trainer_checkpoint_whose_save_was_killed_after_its_rename_resumes_at_its_step(
    tmp_path, monkeypatch
):
    def killed(*_args):
        raise KeyboardInterrupt

    def trainer():
        args = arguments(tmp_path / "out", max_steps=3, save_strategy="steps", save_steps=2)
        model = AutoScheduledModel.from_pretrained(folder)
        return ScheduledTrainer(model=model, args=args, train_dataset=rows())

    folder = checkpoint(CASES["gpt2"], tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(transformers.TrainerState, "save_to_json", killed)
        with pytest.raises(KeyboardInterrupt):
            trainer().train()
    again = trainer()
    losses, _ = run(again, resume=True)
    assert (again.state.global_step, len(losses)) == (3, 3)  # two of them in the log before


def test_run_with_samples_grouped_by_length_resumes_in_a_later_epoch_at_its_next_sample(tmp_path):
    def losses(resume=None):
        args = arguments(
            tmp_path / "out", max_steps=8, save_strategy="steps", save_steps=6,
            per_device_train_batch_size=4, train_sampling_strategy="group_by_length",
        )  # fmt: skip
        model = AutoScheduledModel.from_pretrained(folder, seed=0)
        return run(ScheduledTrainer(model=model, args=args, train_dataset=rows()), resume)[0]

    folder = checkpoint(CASES["gpt2"], tmp_path)
    expected = losses()
    assert losses(str(tmp_path / "out" / "checkpoint-6")) == pytest.approx(expected, rel=1e-5)


OVER_RANKS = [  # (argument, sizes of the mesh, sequence_parallel, words of the error)
    ({"neftune_noise_alpha": 5.0}, {"cp": 2}, False, "scale the noise by its own tokens only"),
    ({"neftune_noise_alpha": 5.0}, {"tp": 2}, True, "scale the noise by its own tokens only"),
    ({"precompute_ref_log_probs": True}, {"tp": 2}, False, "with other rows on each process"),
    ({"scale_rewards": "batch"}, {"tp": 2}, False, "pass 'group', or load the model with dp alone"),
    (
        {"normalize_advantages": True},
        {"tp": 2},
        False,
        "a statistic over the rows of all processes",
    ),
]


@pytest.mark.parametrize(("argument", "sizes", "sequence_parallel", "words"), OVER_RANKS)
def test_scheduled_trainer_refuses_arguments_that_assume_one_dp_rank_per_process(
    argument, sizes, sequence_parallel, words
):
    schedule = SimpleNamespace(state=SimpleNamespace(sequence_parallel=sequence_parallel))
    own = SimpleNamespace(peft_config=None)
    model = SimpleNamespace(mesh=Mesh(**sizes), schedule=schedule, _slapo=own)
    with pytest.raises(SlapoError, match=words):
        refuse_options(model, SimpleNamespace(**argument), "")


def test_tp_ranks_of_a_sampling_trl_trainer_draw_the_same_samples_and_dp_ranks_others():
    """TRL seeds each process apart; with tp=2 the ranks would generate different tokens."""
    drawn = []
    for rank in range(4):
        seed_samples(Mesh(2, 1, 2, rank=rank), SimpleNamespace(num_generations=2, seed=3))
        drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


class Counted(transformers.Seq2SeqTrainer):
    """A user's Trainer that counts the calls of `training_step`."""

    calls = 0

    def training_step(self, *args, **kwargs):
        self.calls += 1
        return super().training_step(*args, **kwargs)


class Collator:
    """Collator of a user, which holds the tokenizer."""

    def __init__(self):
        self.tokenizer = tokenizer(eos_token="<|endoftext|>")

    def __call__(self, rows):
        return transformers.default_data_collator(rows)


def over_tp(folder, out):
    """Train 2 steps of 2 rows with tp=2 and predict 3 rows; return what the Trainer counted, read, gathered and saved."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # state of an earlier job of this worker
    batch = batch_of(CASES["gpt2"], 0)
    rows = [{name: value[i] for name, value in batch.items()} for i in range(4)]
    args = transformers.Seq2SeqTrainingArguments(
        output_dir=str(out), use_cpu=True, max_steps=2, report_to=[], save_strategy="steps", save_steps=2, disable_tqdm=True,
        dataloader_pin_memory=False, per_device_train_batch_size=2, per_device_eval_batch_size=2, save_only_model=True,
        train_sampling_strategy="batch_rebalance", include_num_input_tokens_seen="all", dataloader_num_workers=1,
    )  # fmt: skip
    model = AutoScheduledModel.from_pretrained(folder, tp=2)
    cls = type("Mine", (ScheduledTrainer, Counted), {})
    trainer = cls(model=model, args=args, train_dataset=rows, data_collator=Collator())
    worker = trainer.get_train_dataloader().worker_init_fn.keywords["rank"]
    args.dataloader_num_workers = 0
    trainer.train()
    predicted = trainer.predict(rows[:3])
    shapes = predicted.predictions.shape, predicted.label_ids.shape
    return trainer.state.num_input_tokens_seen, trainer.calls, worker, shapes


def test_scheduled_trainer_over_tp_counts_seeds_and_gathers_by_dp_rank_not_by_process(
    tmp_path, ranks
):
    """A sampler that balances lengths, a base class's `training_step` and Seq2SeqTrainer's gather work too."""
    for found in ranks.run(over_tp, 2, checkpoint(CASES["gpt2"], tmp_path), tmp_path / "out"):
        assert found == (2 * 2 * 12, 2, 0, ((3, 12, 99), (3, 12)))
    files = {path.name for path in (tmp_path / "out" / "checkpoint-2").iterdir()}
    assert {"model.safetensors", "tokenizer.json", "training_state.json"} <= files
    assert not any("optimizer" in name for name in files), "save_only_model=True"
