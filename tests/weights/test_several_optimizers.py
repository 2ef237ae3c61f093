"""Training by several optimizers with a schedule for each is saved and resumed."""

import pytest
import torch

from parity import Case, batch_of, checkpoint
from slapo_zoo import AutoScheduledModel, load_checkpoint, save_checkpoint
from slapo_zoo.errors import WeightsError

PLAIN = Case("GPT2LMHeadModel", ("tokens",))


class OfShape(torch.optim.Optimizer):
    """Momentum for matrices, squares for vectors: parameters of one group have unlike states."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            name = "momentum" if p.ndim == 2 else "square"
            kept = self.state[p].setdefault(name, torch.zeros_like(p))
            p -= self.param_groups[0]["lr"] * kept.mul_(0.9).add_(p.grad)


def several(folder, pp):
    """A model with two optimizers and a schedule for each."""
    model = AutoScheduledModel.from_pretrained(folder, pp=pp, seed=3).train()
    bias = [p for name, p in model.named_parameters() if name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    each = [torch.optim.AdamW(bias, lr=0.01), OfShape(others)]
    return model, each, [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in each]


def steps_of_several(model, each, schedules, numbers):
    losses = []
    for number in numbers:
        losses.append(float(model.train_step(batch_of(PLAIN, number))))
        for one in (*each, *schedules):
            one.step()
        for one in each:
            one.zero_grad()
    return losses


def half_of_several(folder, out):
    made = several(folder, 2)
    steps_of_several(*made, range(2))
    save_checkpoint(made[0], out, made[1], made[2], step=2)
    return steps_of_several(*made, range(2, 4))


def test_training_by_several_optimizers_and_schedules_resumes_on_another_mesh(threads, tmp_path):
    folder = checkpoint(PLAIN, tmp_path)
    expected = threads.run(half_of_several, 2, folder, tmp_path / "out")[0]
    made = several(folder, 1)
    assert load_checkpoint(made[0], tmp_path / "out", made[1], made[2]).step == 2
    assert steps_of_several(*made, range(2, 4)) == pytest.approx(expected, rel=1e-5)
    assert [one.get_last_lr() for one in made[2]] == [[0.01 / 16]] * 2
    with pytest.raises(
        WeightsError, match=r"found AdamW with 1 .* the saved one is AdamW\+OfShape"
    ):
        load_checkpoint(made[0], tmp_path / "out", made[1][0])
    others = [torch.optim.lr_scheduler.StepLR(one, 1) for one in made[1]]
    with pytest.raises(WeightsError, match=r"scheduler.0: the checkpoint has {'gamma': 0.5"):
        load_checkpoint(made[0], tmp_path / "out", made[1], others)
