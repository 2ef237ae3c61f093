"""sch.explain() of any module without process groups, and sch.undo(). tests/zoo/test_show_command.py compares with real runs."""

import pytest
import torch
from torch import nn

from slapo_zoo import Mesh, Schedule, ScheduleError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 4)) for _ in range(3)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def scheduled(mesh):
    sch = Schedule(Net(), mesh)
    sch["layers.*.0"].shard("weight", 0).shard("bias", 0)
    sch["layers.*"].sync("bwd_post", "all_reduce")
    sch["layers.*.2"].shard("weight", 1).sync("fwd_post", "all_reduce")
    sch["layers.1"].checkpoint()
    return sch


TEXT = """\
layers.*  (each of 2)
    sync(mode='bwd_post', sync_op_or_fn='all_reduce')
        backward: all_reduce over tp, 80 bytes
layers.*.0  (each of 3)
    shard(param_name='weight', axis=0)
    shard(param_name='bias', axis=0)
layers.*.2  (each of 3)
    shard(param_name='weight', axis=1)
    sync(mode='fwd_post', sync_op_or_fn='all_reduce')
        forward: all_reduce over tp, 80 bytes
layers.1
    sync(mode='bwd_post', sync_op_or_fn='all_reduce')
        backward: all_reduce over tp, 80 bytes
    checkpoint()
in one training step, on this rank:
    backward: 3 all_reduce over tp, 240 bytes
    forward: 3 all_reduce over tp, 240 bytes"""


def test_explain_prints_modules_with_equal_directives_as_one_group():
    sch = scheduled(Mesh(tp=2, rank=1))
    x = torch.randn(5, 4, requires_grad=True)
    found = sch.explain({"x": x})
    assert str(found) == TEXT
    assert [t.bytes for t in found.at("layers.1")] == [80]
    assert sch.explain({"x": x}).transfers == found.transfers
    assert not any(p.grad is not None or p.is_meta for p in sch.model.parameters())
    assert sch.state.mesh == Mesh(tp=2, rank=1)
    assert sch.state.forward.tape is None


def test_explain_of_a_schedule_on_one_rank_lists_no_communication():
    text = str(scheduled(Mesh()).explain())
    assert "    checkpoint()" in text
    assert text.endswith("    no collectives")


def test_explain_whose_dry_run_fails_leaves_the_model_unchanged():
    sch = scheduled(Mesh(tp=2))
    sch.model.eval()
    with pytest.raises(TypeError):
        sch.explain({"y": torch.zeros(5, 4)})
    assert not any(m.training for m in sch.model.modules())
    assert all(type(p.detach()) is torch.Tensor for p in sch.model.parameters())
    for batch in (None, torch.zeros(5, 4)):
        with pytest.raises(ScheduleError, match="dict of the forward's arguments"):
            sch.explain(batch)


def test_explain_omits_directives_applied_to_a_module_before_it_was_replaced():
    """A module installed by a later directive was not sharded by the earlier one."""
    sch = Schedule(Net())
    sch["layers.0.*:Linear"].annotate("weight", "note", 1)
    sch["layers.0.1"].replace(nn.Linear(6, 6))
    assert sch.landed == [("layers.0.0", "layers.0.2"), ("layers.0.1",)]
    assert sch.explain().done["layers.0.1"][0].startswith("replace(")


def test_undo_removes_the_last_pipeline_cut_and_refuses_directives_applied_in_place():
    sch = scheduled(Mesh())
    before, lines = list(sch.state.cuts), str(sch)
    sch["layers.*"].cut_pipeline_stage()
    assert len(sch.state.cuts) == 3
    sch.undo()
    assert (sch.state.cuts, str(sch)) == (before, lines)
    with pytest.raises(
        ScheduleError,
        match=r"changed the model in place and cannot be undone\n.*replay\(sch.history\[:-1\]\)",
    ):
        sch.undo()
    assert str(sch) == lines
    again = Schedule(Net()).replay(sch.history[:-1])  # the call that the hint shows
    assert str(again) == "\n".join(lines.splitlines()[:-1])
    with pytest.raises(ScheduleError, match="no directive was applied yet"):
        Schedule(Net()).undo()
