"""Memory of a pipeline step: it depends on the micro-batches in flight, not on their total number."""

import gc

import pytest
import torch

from in_flight import most_in_flight
from parity import Case, checkpoint
from slapo_zoo.parallel.live_bytes import LiveBytes
from slapo_zoo.pipeline.in_flight import arrivals
from slapo_zoo.pipeline.orders import ORDERS, StageMap
from slapo_zoo.pipeline.timeline import BACKWARD, BACKWARD_WEIGHT, FORWARD, Action

SIZES = (("n_layer", 8), ("n_head", 4), ("n_embd", 64), ("n_positions", 64))
GPT2 = Case("GPT2LMHeadModel", ("tokens",), SIZES)
FOUR = Case("GPT2LMHeadModel", ("tokens",), (("n_layer", 4), *SIZES[1:]))
ALL_AT_ONCE = ("gpipe", "looped_bfs")  # every forward before any backward: all are in flight


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("in_flight")


def peaks(folder, pp, orders):
    """Return the peak bytes of the second of two steps, per (order, number of micro-batches)."""
    from slapo_zoo import AutoScheduledModel

    found = []
    for order, count in orders:
        model = AutoScheduledModel.from_pretrained(folder, pp=pp, pipeline_order=order).train()
        ids = torch.arange(count * 64).reshape(count, 64) % 90
        batch = {"input_ids": ids, "labels": ids}
        model.train_step(batch, count)
        gc.collect()
        with LiveBytes() as alive:
            model.train_step(batch, count)
        found.append(alive.peak)
    return found


def test_peak_memory_of_a_zbv_pipeline_does_not_grow_with_the_number_of_micro_batches(root, ranks):
    runs = [("zbv", 4), ("zbv", 16)]
    for few, many in ranks.run(peaks, 2, checkpoint(FOUR, root), 2, runs):
        assert many <= 1.05 * few


@pytest.mark.slow  # four ranks, 64 micro-batches
@pytest.mark.parametrize("order", [name for name in ORDERS if name not in ALL_AT_ONCE])
def test_peak_memory_of_middle_stages_does_not_grow_with_the_number_of_micro_batches(
    order, root, ranks
):
    found = ranks.run(peaks, 4, checkpoint(GPT2, root), 4, [(order, 8), (order, 64)])
    for few, many in found[1:3]:
        assert many <= 1.05 * few


def sent_bytes(folder, order):
    """Return the bytes of stage 0's outputs when their backwards begin."""
    from torch.distributed.pipelining import PipelineStage

    from slapo_zoo import AutoScheduledModel

    found, original = [], PipelineStage.backward_one_chunk

    def noting(stage, chunk, **kwargs):
        if stage.stage_index == 0:
            outputs = [x for x in stage.fwd_cache[chunk][0] if x.requires_grad]
            found.extend(x.untyped_storage().nbytes() for x in outputs)
        return original(stage, chunk, **kwargs)

    model = AutoScheduledModel.from_pretrained(folder, pp=2, pipeline_order=order).train()
    ids = torch.arange(8 * 64).reshape(8, 64) % 90
    PipelineStage.backward_one_chunk = noting
    try:
        model.train_step({"input_ids": ids, "labels": ids}, 8)
    finally:
        PipelineStage.backward_one_chunk = original
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("order", ["1f1b", "gpipe", "interleaved_1f1b", "zbv"])
def test_activations_sent_to_the_next_stage_are_freed_to_one_element_on_the_sender(
    order, root, ranks
):
    first, second = ranks.run(sent_bytes, 2, checkpoint(FOUR, root), order)
    assert (first, second) == ([4] * 8, [])  # one number each


@pytest.mark.parametrize("order", ORDERS)
def test_send_buffers_are_freed_after_receipt_in_every_pipeline_order(order):
    """A rank holds sent gradients only of micro-batches in flight, and releases none before it is sent."""
    places = StageMap.make(order, 4, None)
    ranks = places.actions(64)
    for rank, actions in enumerate(ranks):
        due, held, most = arrivals(ranks, places.rank_of, rank), set(), 0
        for action in actions:
            if action.kind == BACKWARD_WEIGHT:
                continue
            kind = FORWARD if action.kind == FORWARD else BACKWARD
            action = Action(action.stage, kind, action.micro_batch)
            assert held.issuperset(due[action])
            held.difference_update(due[action])
            to = action.stage + (1 if kind == FORWARD else -1)
            if 0 <= to < places.num_stages and places.rank_of(to) != rank:
                held.add(action)
            most = max(most, sum(sent.kind == BACKWARD for sent in held))
        assert most <= most_in_flight(actions) + places.num_stages


def in_shares(folder, layout, order, options):
    """Return gradients and peak bytes of a step that recomputes all blocks, then with saved inputs sharded."""
    from slapo_zoo import AutoScheduledModel

    found, (tp, pp, dp) = [], layout
    for policy in ("", "sharded"):
        model = AutoScheduledModel.from_pretrained(
            folder, tp=tp, pp=pp, dp=dp, checkpoint_ratio=1.0, checkpoint_policy=policy,
            **({"pipeline_order": order} if pp > 1 else {}), **options,
        ).train()  # fmt: skip
        ids = (torch.arange(8 * 64).reshape(8, 64) + model.mesh.coord("dp")) % 90
        batch = {"input_ids": ids, "labels": ids}
        model.train_step(batch, 4)
        model.zero_grad()
        gc.collect()
        with LiveBytes() as alive:
            loss = model.train_step(batch, 4)
        found.append((loss, {n: p.grad for n, p in model.named_parameters()}, alive.peak))
    return found


T5 = Case("T5ForConditionalGeneration", ("tokens",), (("num_layers", 2), ("num_decoder_layers", 2)))
BLOCK_INPUT = 2 * 64 * 64 * 4  # bytes for a micro-batch of GPT2


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize(
    ("case", "layout", "order", "options", "least"),
    [(GPT2, (2, 1, 1), "", {}, 2.5), (GPT2, (2, 2, 1), "1f1b", {}, 2), (GPT2, (2, 2, 1), "zbv", {}, 2),
     (T5, (2, 2, 1), "1f1b", {}, 0.2), (GPT2, (2, 2, 1), "1f1b", {"sequence_parallel": True}, 0),
     (GPT2, (2, 1, 2), "", {"dp_shard": 2, "precision": "bf16"}, 1)],
    ids=str,
)  # fmt: skip
def test_sharded_recompute_policy_saves_tp_shards_of_block_inputs_with_equal_gradients(
    case, layout, order, options, least, root, ranks
):
    """`least`: block inputs by which the peak memory shrinks at least; 0 where tokens are already sharded."""
    world = layout[0] * layout[1] * layout[2]
    found = ranks.run(in_shares, world, checkpoint(case, root), layout, order, options)
    for whole, shares in found:
        assert torch.equal(whole[0], shares[0])
        assert all(torch.equal(grad, shares[1][name]) for name, grad in whole[1].items())
    if least:
        assert found[0][0][2] - found[0][1][2] >= least * BLOCK_INPUT
