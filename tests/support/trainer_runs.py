"""Runs of the plain Trainer and of ScheduledTrainer on the same rows."""

import warnings

import torch
import transformers

from engine_runs import CASES
from parity import batch_of

ROWS = 20  # rows of the data set: 5 steps of 4 rows, or 2 of 8 and a short one
CASE = CASES["gpt2"]


def rows(family="gpt2"):
    """Return rows with different numbers of targets."""
    case = CASES[family]
    batches = [batch_of(case, step) for step in range(ROWS // case.rows)]
    return [{k: v[i] for k, v in b.items()} for b in batches for i in range(case.rows)]


def arguments(out, **changes):
    known = {
        "output_dir": str(out), "use_cpu": True, "max_steps": 4, "learning_rate": 1e-3,
        "weight_decay": 0.1, "adam_epsilon": 1e-5, "max_grad_norm": 1.0, "logging_steps": 1,
        "report_to": [], "save_strategy": "no", "disable_tqdm": True, "seed": 5,
        "lr_scheduler_type": "linear", "per_device_eval_batch_size": 1, "dataloader_pin_memory": False,
    }  # fmt: skip
    return transformers.TrainingArguments(**{**known, **changes})


def run(trainer, resume=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train(resume_from_checkpoint=resume)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [entry["loss"] for entry in history], [float(entry["grad_norm"]) for entry in history]


def plain(folder, out, family="gpt2", **changes):
    """Run the plain Trainer in one process."""
    model = getattr(transformers, CASES[family].cls).from_pretrained(folder)
    if family == "gpt2":
        model.loss_type = "ForCausalLM"  # by this name the plain Trainer counts shifted labels
    trainer = transformers.Trainer(
        model=model, args=arguments(out, **changes), train_dataset=rows(family)
    )
    losses, norms = run(trainer)
    metrics = transformers.Trainer(
        model=model, args=arguments(out, **changes), eval_dataset=rows(family)[:7]
    ).evaluate()
    return losses, norms, dict(model.named_parameters()), metrics["eval_loss"]


def divided(folder, out, layout, changes, resume=None, save=None, push=False, family="gpt2", cp=1):
    """Run ScheduledTrainer on this rank."""
    from accelerate.state import AcceleratorState

    from slapo_zoo import AutoScheduledModel
    from slapo_zoo.model.integrations.trainer import ScheduledTrainer

    AcceleratorState._reset_state(True)  # state of an earlier job of this worker
    tp, pp, dp = layout
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp, dp=dp, cp=cp, seed=0)
    args = arguments(out, **changes)
    trainer = ScheduledTrainer(
        model=model, args=args, train_dataset=rows(family), eval_dataset=rows(family)[:7]
    )
    losses, norms = run(trainer, resume)
    loss = trainer.evaluate()["eval_loss"]
    if save:
        trainer.save_model(save)
    if push:
        trainer.push_to_hub()
    return losses, norms, model.consolidated_state_dict(), loss


def assert_same(found, expected):
    losses, norms, weights, loss = expected
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(losses), atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(norms), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(found[3], loss, atol=2e-6, rtol=1e-6)
    for name, want in weights.items():
        torch.testing.assert_close(found[2][name], want.detach(), atol=5e-6, rtol=1e-5, msg=name)
