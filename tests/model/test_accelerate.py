"""Calls of Accelerate around a sharded model: those that `prepare` makes right, and those that are refused."""

import accelerate
import pytest
import torch
import transformers
from safetensors.torch import load_file

from engine_runs import CASES
from parity import batch_of, checkpoint
from slapo_zoo import AutoScheduledModel, SlapoError, prepare
from slapo_zoo.parallel import compat

BATCH = batch_of(CASES["gpt2"], 0)


def refused(call):
    with pytest.raises(SlapoError) as error:
        call()
    return str(error.value)


def by_hand(folder, out):
    """Train 2 steps with tp=2; return learning rates, norms and the texts of errors; save the model."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # state of an earlier job of this worker
    model = AutoScheduledModel.from_pretrained(folder, tp=2).train()
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    errors = [refused(lambda: accelerator.prepare(model, optimizer))]
    loader = torch.utils.data.DataLoader([{k: v[i] for k, v in BATCH.items()} for i in range(4)], 2)
    errors += [refused(lambda: prepare(accelerator, loader, model, optimizer))]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, loader, schedule = prepare(accelerator, model, optimizer, loader, schedule)
    rates, norms = [], []
    for batch in loader:
        model.train_step(batch)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        rates.append(schedule.get_last_lr()[0])
    accelerator.save_model(model, out)
    accelerator.unwrap_model(model).save_pretrained(out / "own", save_function=accelerator.save)
    errors += [refused(lambda: accelerator.save_state(out)), refused(lambda: accelerator.load_state(out))]  # fmt: skip
    AcceleratorState._reset_state(True)
    prepare(Accelerator(cpu=True, gradient_accumulation_steps=2), model, optimizer.optimizer)
    errors += [refused(lambda: model.train_step(BATCH, 2))]
    loss = model.train_step(BATCH, 2, targets=[2 * (BATCH["labels"][:, 1:] != -100).sum()])
    errors += [refused(lambda: accelerator.clip_grad_norm_(list(model.parameters())[1:], 1.0))]
    AcceleratorState._reset_state(True)
    half = Accelerator(cpu=True, mixed_precision="bf16")
    errors += [refused(lambda: prepare(half, model, optimizer.optimizer))]
    AcceleratorState._reset_state(True)
    return rates, norms, errors, float(loss)


def of_two(folder):
    """Prepare two models with tp=2 and clip each; return the norms that remain, and the words gathered of 3 rows."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    models = [AutoScheduledModel.from_pretrained(folder, tp=2).train() for _ in range(3)]
    optimizers = [torch.optim.SGD(model.parameters()) for model in models]
    accelerator = Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(range(3), 2)
    *_, loader = prepare(accelerator, models[0], optimizers[0], models[1], optimizers[1], loader)
    prepare(accelerator, models[2], optimizers[2])
    for most, model in enumerate(models, 1):
        model.train_step(BATCH)
        accelerator.clip_grad_norm_(model.parameters(), most / 100)
    left = [float(model.clip_grad_norm_(1e9)) for model in models]
    words = [accelerator.gather_for_metrics([f"row {i}" for i in rows.tolist()]) for rows in loader]
    AcceleratorState._reset_state(True)
    return left, words


def test_accelerate_clips_each_of_several_models_by_its_own_norm_and_gathers_each_row_once(
    tmp_path, ranks
):
    for left, words in ranks.run(of_two, 2, checkpoint(CASES["gpt2"], tmp_path)):
        assert left == pytest.approx([0.01, 0.02, 0.03], rel=1e-3)
        assert words == [["row 0", "row 1"], ["row 2"]]


WORDS = (
    "use slapo_zoo.ScheduledTrainer, or slapo_zoo.prepare", "found DataLoader, expected", "call slapo_zoo.save_checkpoint",
    "call slapo_zoo.load_checkpoint", "pass targets=", "found parameters of other modules too, or not all", "precision='bf16'",
)  # fmt: skip


def test_accelerate_loop_has_the_results_of_one_process_and_refuses_unsupported_calls(
    tmp_path, ranks
):
    folder, out = checkpoint(CASES["gpt2"], tmp_path), tmp_path / "out"
    plain = transformers.GPT2LMHeadModel.from_pretrained(folder)
    plain(**{k: v[:2] for k, v in BATCH.items()}).loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
    found = ranks.run(by_hand, 2, folder, out)
    again = transformers.GPT2LMHeadModel.from_pretrained(out / "own")
    with torch.no_grad():
        half = float(again(**BATCH).loss) / 2
    for rates, norms, errors, loss in found:
        for word, error in zip(WORDS, errors, strict=True):
            assert word in error
        assert (*rates, norms[0], loss) == pytest.approx((1e-2 / 2, 1e-2 / 3, norm, half), rel=1e-5)
    whole, own = (load_file(place / "model.safetensors") for place in (out, out / "own"))
    assert {k: v.shape for k, v in whole.items()} == {k: v.shape for k, v in own.items()}


def test_accelerate_that_would_wrap_a_sharded_model_is_refused(tmp_path, monkeypatch):
    model = AutoScheduledModel.from_pretrained(checkpoint(CASES["gpt2"], tmp_path))
    monkeypatch.setattr(compat, "version", lambda package: "1.13.0")
    with pytest.raises(SlapoError, match=r"prepare: accelerate: found 1\.13\.0, expected 1\.14"):
        prepare(accelerate.Accelerator(cpu=True), model, None)
