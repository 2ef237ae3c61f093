"""The input guard and the numerics watch: errors that they detect, and runs that they accept."""

import math
import warnings
from typing import Any

import pytest
import torch
import transformers

from slapo_zoo import AutoScheduledModel, MeshError, emulate
from slapo_zoo.model.gradients.batch_check import SAMPLE, InputWarning, digest
from slapo_zoo.model.numerics import NumericsError, NumericsWarning, NumericsWatch

CONFIG = transformers.GPT2Config(
    n_embd=32, n_head=4, n_layer=2, vocab_size=65, n_positions=32, bos_token_id=0, eos_token_id=0,
    architectures=["GPT2LMHeadModel"],
)  # fmt: skip


def rows(kind, mesh):
    """Return token ids that are equal everywhere, or depend on the dp coordinate or the rank."""
    offset = {"same": 0, "by dp": mesh.coord("dp"), "by rank": mesh.rank}[kind]
    return (torch.arange(48).reshape(4, 12) + 7 * offset) % 65


def fed(kind, interval, tp, pp, dp):
    """Run two steps; return this rank's error, or "ok"."""
    model = AutoScheduledModel.from_config(CONFIG, tp=tp, pp=pp, dp=dp, seed=0).train()
    if interval is not None:
        model.input_check_interval = interval
    ids = rows(kind, model.mesh)
    try:
        for _ in range(2):
            model.train_step({"input_ids": ids, "labels": ids})
    except MeshError as error:
        return str(error)
    return "ok"


@pytest.mark.parametrize(
    "layout", [(2, 1, 1), (1, 2, 1), pytest.param((2, 1, 2), marks=pytest.mark.slow)]
)
def test_different_batches_on_ranks_of_a_tp_group_raise_on_every_rank(layout):
    for said in emulate(fed, "by rank", None, *layout, mesh=layout):
        assert "were fed another batch than rank" in said


def evaluated(kind, training, layout):
    """Run a forward without a backward; return this rank's error, or "ok"."""
    model = AutoScheduledModel.from_config(CONFIG, seed=0, **layout).train(training)
    try:
        with torch.no_grad():
            model(input_ids=rows(kind, model.mesh))
    except MeshError as error:
        return str(error)
    return "ok"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"cp": 2}], ids=str)
def test_forward_without_backward_refuses_different_batches_on_tp_or_pp_ranks_of_a_dp_replica(
    layout, training
):
    """Each cp rank computes all tokens then, so that it may have rows of its own."""
    refused = "cp" not in layout
    for said in emulate(evaluated, "by rank", training, layout, mesh=(2, 1, 1)):
        assert ("were fed another batch than rank" in said) is refused
    assert set(emulate(evaluated, "same", training, layout, mesh=(2, 1, 1))) == {"ok"}


@pytest.mark.parametrize(
    "layout",
    [(2, 1, 2), *(pytest.param(x, marks=pytest.mark.slow) for x in ((2, 1, 1), (1, 2, 1)))],
)
def test_equal_batches_on_ranks_of_a_tp_group_raise_nothing(layout):
    assert set(emulate(fed, "by dp", None, *layout, mesh=layout)) == {"ok"}


def test_train_step_with_the_same_batch_on_all_dp_ranks_warns():
    with pytest.warns(InputWarning, match="fed the same rows"):
        assert set(emulate(fed, "same", None, 1, 1, 2, mesh=(1, 1, 2))) == {"ok"}


def test_check_for_different_batches_on_tp_peers_can_be_switched_off():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(emulate(fed, "same", 0, 1, 1, 2, mesh=(1, 1, 2))) == {"ok"}


@pytest.mark.parametrize(
    "change",
    [lambda x: x.flip(0), lambda x: x + 1, lambda x: x[:, :-1], lambda x: x.roll(1, 1),
     lambda x: x.float()],
)  # fmt: skip
def test_batch_hash_changes_with_order_values_and_shape_of_tensors(change):
    x = torch.arange(24).reshape(4, 6) % 5
    assert int(digest({"input_ids": x})) == int(digest({"input_ids": x.clone()}))
    assert int(digest({"input_ids": x})) != int(digest({"input_ids": change(x)}))


def test_batch_hash_changes_with_tensor_names_and_with_values_of_large_tensors():
    x, y = torch.arange(6), torch.arange(6) + 1
    assert int(digest({"a": x, "b": y})) != int(digest({"a": y, "b": x}))
    large = torch.zeros(4 * SAMPLE)
    assert int(digest({"pixel_values": large})) != int(digest({"pixel_values": large + 1}))


def broken(where, how, tp, pp):
    """Run a step in which rank 1 produces NaN in one module."""
    model = AutoScheduledModel.from_config(CONFIG, tp=tp, pp=pp, seed=0).train()
    if model.mesh.rank == 1:
        module = model.get_submodule(where)
        if how == "forward":
            module.register_forward_hook(lambda m, a, y: y * math.nan)
        else:
            module.register_full_backward_hook(lambda m, dx, dy: (dx[0] / 0,))
    ids = rows("same", model.mesh)
    with NumericsWatch(model):
        model.train_step({"input_ids": ids, "labels": ids}, micro_batches=4)


@pytest.mark.parametrize(
    ("where", "how", "shows"),
    [("transformer.h.1.mlp.c_fc", "forward", "transformer.h.1.mlp.c_fc, output"),
     ("transformer.h.1.ln_1", "backward", "transformer.h.0, gradient of its output")],
)  # fmt: skip
def test_numerics_watch_raises_at_the_first_nan_and_names_module_rank_and_rows(
    where, how, shows, ranks
):
    with pytest.raises(NumericsError, match=r"in rows 0\.\.0") as caught:
        ranks.run(broken, 2, where, how, 2, 1)
    assert shows in str(caught.value)
    assert "rank 1" in str(caught.value)


def shards_drift(zero_stage):
    """Make two dp replicas, each sharded over two ranks; change one rank's shard."""
    model: Any = AutoScheduledModel.from_config(
        CONFIG, dp=4, dp_shard=2, zero_stage=zero_stage, seed=0
    ).train()
    batch = {"input_ids": rows("by dp", model.mesh), "labels": rows("by dp", model.mesh)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with NumericsWatch(model) as watch:
        model.train_step(batch)
        optimizer.step()
        same = watch.replicas()
        if model.mesh.rank == 3:
            with torch.no_grad():
                model.transformer.ln_f.weight.add_(1e-7)
        return same, watch.replicas()


@pytest.mark.filterwarnings("ignore::slapo_zoo.model.numerics.NumericsWarning")
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_check_for_equal_replicas_under_zero_compares_only_ranks_with_the_same_shard(zero_stage):
    found = emulate(shards_drift, zero_stage, mesh=(1, 1, 4))
    assert all(same == [] for same, _ in found)
    assert all(
        "ln_f.weight on rank 3 differs from that of rank 1" in differs[0] for _, differs in found
    )


def drift(tp):
    model = AutoScheduledModel.from_config(CONFIG, tp=tp, seed=0).train()
    with NumericsWatch(model) as watch:
        same = watch.replicas()
        if model.mesh.rank == 1:
            with torch.no_grad():
                model.transformer.ln_f.weight.add_(1e-7)
        return same, watch.replicas(), watch.reports


def test_check_for_equal_replicas_names_parameters_that_differ_between_dp_ranks():
    with pytest.warns(NumericsWarning, match="ln_f.weight on rank 1"):
        everyone = emulate(drift, 2, mesh=(2, 1, 1))
    for same, found, reports in everyone:
        assert same == []
        assert found == ["transformer.ln_f.weight on rank 1 differs from that of rank 0"]
        assert reports == found


def test_numerics_watch_warns_of_a_loss_spike_and_removes_its_hooks_on_exit():
    model = AutoScheduledModel.from_config(CONFIG)
    hooks = [len(m._forward_hooks) for m in model.modules()]
    with NumericsWatch(model) as watch:
        assert not any(watch.step(4.0 - i / 10) for i in range(10))
        with pytest.warns(NumericsWarning, match=r"loss 40: the median of the last is 3\.55"):
            assert watch.step(40.0)
        with pytest.warns(NumericsWarning, match="loss nan"):
            assert watch.step(math.nan)
        assert not watch.step(3.0)
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert issubclass(NumericsError, ArithmeticError)
