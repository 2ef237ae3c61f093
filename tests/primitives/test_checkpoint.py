"""checkpoint: whole modules, subgraphs, policies and offload; the same gradients and masks."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from slapo_zoo.errors import ScheduleError
from slapo_zoo.language.graph.pattern import call_module
from slapo_zoo.language.primitives.checkpoint import checkpoint
from slapo_zoo.parallel.random_stream import RandomStream, dropout
from slapo_zoo.language.schedule import Schedule, from_json
from tiny_models import assert_same_step, batch_for, tiny_model, train_step

BLOCKS = "bert.encoder.layer.*"
INTERMEDIATE = "bert.encoder.layer.0.intermediate"


def flops(model):
    """Of one training step, recomputation included."""
    counter = FlopCounterMode(display=False)
    with counter:
        train_step(model, batch_for(model, 3, 11))
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "options", [{}, {"policy": "save_matmuls"}, {"offload": True}], ids=["all", "policy", "offload"]
)
def test_a_module(options):
    sch = Schedule(tiny_model("bert"))
    sch[BLOCKS].checkpoint(**options)
    assert_same_step(sch.model, tiny_model("bert"))
    assert str(Schedule(tiny_model("bert")).replay(from_json(sch.to_json()))) == str(sch)


def test_a_policy_keeps_matrix_products():
    plain, whole, selective = (Schedule(tiny_model("bert")) for _ in range(3))
    whole[BLOCKS].checkpoint()
    selective[BLOCKS].checkpoint(policy="save_matmuls")
    assert flops(plain.model) == flops(selective.model) < flops(whole.model)


def test_offload_moves_what_is_kept(monkeypatch):
    """The saved inputs pass through the hooks that copy them to the host."""
    from slapo_zoo.language.primitives import checkpoint as module

    moved, original = [], module.save_on_cpu

    def counted():
        context = original()
        pack = context.pack_hook
        context.pack_hook = lambda tensor: (moved.append(tensor.shape), pack(tensor))[1]
        return context

    monkeypatch.setattr(module, "save_on_cpu", counted)
    sch = Schedule(tiny_model("bert"))
    sch[BLOCKS].checkpoint(offload=True)
    train_step(sch.model, batch_for(sch.model, 3, 11))
    assert moved.count((3, 11, 32)) == 2  # the hidden states, once per block


def test_nothing_happens_in_eval():
    sch, plain = Schedule(tiny_model("bert")), tiny_model("bert")
    sch[BLOCKS].checkpoint(policy="save_matmuls", offload=True)
    batch = batch_for(plain, 3, 11)
    torch.testing.assert_close(sch.model(**batch).logits, plain(**batch).logits, rtol=0, atol=0)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_subgraph(by_name):
    sch = Schedule(tiny_model("bert"))
    part = sch[INTERMEDIATE]
    part.trace(flatten=True)
    names = list(sch.model.state_dict())
    pattern = part.find(lambda x: torch.nn.functional.gelu(call_module("dense", x)))
    part.checkpoint("dense" if by_name else pattern)
    assert list(part.child) == ["dense", "intermediate_act_fn", "Checkpoint_0"]
    assert list(sch.model.state_dict()) == names
    assert_same_step(sch.model, tiny_model("bert"))
    if by_name:  # a linear layer alone needs nothing of what it computed
        assert str(Schedule(tiny_model("bert")).replay(from_json(sch.to_json()))) == str(sch)
    else:
        assert flops(sch.model) > flops(tiny_model("bert"))
        with pytest.raises(ScheduleError, match="names nodes of a live graph"):
            sch.to_json()


def test_errors():
    sch = Schedule(tiny_model("bert"))
    with pytest.raises(ScheduleError, match="found policy 'all'"):
        sch[BLOCKS].checkpoint(policy="all")
    with pytest.raises(ScheduleError, match="it has no graph"):
        sch[INTERMEDIATE].checkpoint("dense")
    sch[BLOCKS].checkpoint()
    with pytest.raises(ScheduleError, match="checkpointed already"):
        sch["bert.encoder.layer.0"].checkpoint()
    with pytest.raises(ScheduleError, match="trace before that directive"):
        sch["bert.encoder.layer.0"].trace()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_function_restores_the_stream(use_reentrant):
    stream = RandomStream(seed=3)
    x = torch.ones(4, 32, requires_grad=True)
    y = checkpoint(
        lambda t: dropout(t, 0.5, stream, "site").exp(),
        x,
        use_reentrant=use_reentrant,
        stream=stream,
    )
    stream.step += 1  # the next forward has begun before this backward
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.where(y > 1, 2 * y, 0.0).detach())
    y = checkpoint(torch.exp, x, use_reentrant=use_reentrant)
    torch.testing.assert_close(y, x.exp())
