"""The checkpoint primitive: modules, subgraphs, policies and offload; the same gradients and masks."""

import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from slapo_zoo import get_cuda_rng_tracker, set_random_seed
from slapo_zoo.errors import ScheduleError
from slapo_zoo.language import offload
from slapo_zoo.language.graph.pattern import call_module
from slapo_zoo.language.primitives.checkpoint import checkpoint
from slapo_zoo.language.schedule import Schedule, from_json
from slapo_zoo.parallel.rng.layout_independent_random import RandomStream, dropout
from tiny_models import assert_same_step, batch_for, tiny_model, train_step

BLOCKS = "bert.encoder.layer.*"
INTERMEDIATE = "bert.encoder.layer.0.intermediate"


def flops(model):
    """Count the FLOPs of one training step, recomputation included."""
    counter = FlopCounterMode(display=False)
    with counter:
        train_step(model, batch_for(model, 3, 11))
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "options",
    [{}, {"policy": "save_matmuls"}, {"offload": True}, {"policy": "offload"}],
    ids=["all", "policy", "offload", "kept there"],
)
def test_recomputed_module_has_the_gradients_of_the_module_without_recomputation(options):
    sch = Schedule(tiny_model("bert"))
    sch[BLOCKS].checkpoint(**options)
    assert_same_step(sch.model, tiny_model("bert"))
    assert str(Schedule(tiny_model("bert")).replay(from_json(sch.to_json()))) == str(sch)


@pytest.mark.parametrize("policy", ["", "save_matmuls", "offload"])
def test_recomputed_batch_norm_updates_its_statistics_once_and_runs_backward_twice(policy):
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    sch = Schedule(torch.nn.Sequential(copy.deepcopy(plain)))
    sch["0"].checkpoint(policy=policy)
    for model in (plain, sch.model):
        loss = model(torch.arange(12.0).view(3, 4).sin()).sin().sum()
        for again in (True, False) if policy != "save_matmuls" else (False,):  # torch allows one
            loss.backward(retain_graph=again)
    for (name, want), found in zip(plain.state_dict().items(), sch.model.state_dict().values(), strict=True):  # fmt: skip
        assert torch.equal(found, want), name
    for want, found in zip(plain.parameters(), sch.model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, want.grad)


def test_save_matmuls_recompute_policy_adds_no_matmul_flops():
    plain, whole, selective = (Schedule(tiny_model("bert")) for _ in range(3))
    whole[BLOCKS].checkpoint()
    selective[BLOCKS].checkpoint(policy="save_matmuls")
    assert flops(plain.model) == flops(selective.model) < flops(whole.model)


LAYERS = ["bert.encoder.layer.0", "bert.encoder.layer.1"]


@pytest.mark.parametrize("options", [{"offload": True}, {"policy": "offload"}], ids=str)
def test_checkpoint_with_offload_copies_activations_out_in_forward_and_back_in_reverse_order(
    options,
):
    sch = Schedule(tiny_model("bert"))
    sch[BLOCKS].checkpoint(**options)
    sch.state.offloads.notes = notes = []
    for _ in range(2):
        train_step(sch.model, batch_for(sch.model, 3, 11))
    out, back = [("out", path) for path in LAYERS], [("back", path) for path in reversed(LAYERS)]
    assert notes == 2 * [*out, *back]
    assert flops(sch.model) >= flops(tiny_model("bert"))
    assert (flops(sch.model) == flops(tiny_model("bert"))) == ("policy" in options)


def test_views_of_one_tensor_offloaded_to_the_host_share_one_copy(monkeypatch):
    """The host copy is made as on a GPU: another tensor with the same values and strides."""
    made = []

    def away(self, tensor):
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        self.device, self.here, self._event, self.is_away = (
            tensor.device,
            whole.clone(),
            None,
            False,
        )
        made.append(tensor.untyped_storage()._cdata)

    monkeypatch.setattr(offload.HostCopy, "__init__", away)
    sch, plain = Schedule(tiny_model("bert")), tiny_model("bert")
    sch[BLOCKS].checkpoint(policy="offload")
    sch.state.offloads.notes = []
    assert_same_step(sch.model, plain)
    assert made


def test_checkpoint_directive_leaves_logits_in_eval_mode_bit_equal():
    sch, plain = Schedule(tiny_model("bert")), tiny_model("bert")
    sch[BLOCKS].checkpoint(policy="save_matmuls", offload=True)
    batch = batch_for(plain, 3, 11)
    torch.testing.assert_close(sch.model(**batch).logits, plain(**batch).logits, rtol=0, atol=0)


@pytest.mark.parametrize("by_name", [True, False])
def test_recomputed_subgraph_of_a_traced_module_has_unchanged_gradients(by_name):
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
        with pytest.raises(ScheduleError, match="holds nodes of a graph in memory"):
            sch.to_json()


def test_invalid_checkpoint_directive_raises_an_error_with_a_hint():
    sch = Schedule(tiny_model("bert"))
    with pytest.raises(ScheduleError, match="found policy 'all'"):
        sch[BLOCKS].checkpoint(policy="all")
    with pytest.raises(ScheduleError, match="found offload=True too, but policy='sharded'"):
        sch[BLOCKS].checkpoint(policy="sharded", offload=True)
    with pytest.raises(ScheduleError, match="the module has no graph"):
        sch[INTERMEDIATE].checkpoint("dense")
    sch[BLOCKS].checkpoint()
    with pytest.raises(ScheduleError, match="checkpointed already"):
        sch["bert.encoder.layer.0"].checkpoint()
    with pytest.raises(ScheduleError, match=r"call trace\(\) before that directive"):
        sch["bert.encoder.layer.0"].trace()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_function_recomputes_with_the_dropout_mask_of_the_first_forward(use_reentrant):
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


class Forks(torch.nn.Module):
    """Module whose dropout reads the generator forked for this rank."""

    def forward(self, x):
        with get_cuda_rng_tracker().fork():
            return torch.nn.functional.dropout(x * 1.0, 0.5)


@pytest.mark.parametrize("way", ["directive", True, False], ids=str)
def test_cuda_rng_tracker_fork_draws_the_same_numbers_in_recomputation(way):
    set_random_seed(123, None, None, 0)
    run, x = Forks(), torch.ones(1000, requires_grad=True)
    if way == "directive":
        sch = Schedule(torch.nn.Sequential(run))
        sch["0"].checkpoint()
        again = sch.model.train()
    else:
        again = lambda x: checkpoint(run, x, use_reentrant=way)  # noqa: E731
    first, second = again(x), again(x)
    assert not torch.equal(first, second)  # the state went on
    before = get_cuda_rng_tracker().states
    first.sum().backward()
    assert torch.equal(x.grad, first.detach())
    assert get_cuda_rng_tracker().states == before  # a backward draws nothing new
