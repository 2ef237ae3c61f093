"""The overlap primitive: the same numbers, and the all-reduce of dx runs while dw is computed."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parity import Case, checkpoint
from slapo_zoo import AutoScheduledModel, Mesh, Schedule, ScheduleError
from slapo_zoo.language.schedule import from_json
from slapo_zoo.parallel.async_reduce import ColumnForward

CASES = [
    Case("GPT2LMHeadModel", ("tokens",), dropout=0.1),
    Case("BertForMaskedLM", ("tokens",), dropout=0.1),
    Case("T5ForConditionalGeneration", ("tokens",), (("feed_forward_proj", "gated-gelu"),)),
    Case("LlamaForCausalLM", ("tokens",)),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("overlap")


# --- the same numbers ---------------------------------------------------------------------------


def steps_of(folder, case, overlap, options):
    """Losses and this rank's gradients of two training steps."""
    model = AutoScheduledModel.from_pretrained(folder, auto_class=case.cls, seed=3, **options)
    model.schedule.overlap(enable=overlap)
    ids = torch.arange(4 * 8).view(4, 8) % 90 + 3
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    losses = [model.train().train_step(batch) for _ in range(2)]  # gradients add up
    columns = sum(isinstance(m.__dict__.get("forward"), ColumnForward) for m in model.modules())
    grads = {n: p.grad for n, p in model.named_parameters()}
    return losses, grads, columns, str(model.schedule).splitlines()[-1]


def assert_same_numbers(folder, case, ranks, **options):
    n = options.get("tp", 1) * options.get("pp", 1)
    plain = ranks.run(steps_of, n, folder, case, False, options)
    mine = ranks.run(steps_of, n, folder, case, True, options)
    for (want, want_grads, none, _), (losses, grads, columns, line) in zip(
        plain, mine, strict=True
    ):
        assert losses == want
        assert grads.keys() == want_grads.keys()
        assert all(torch.equal(grads[name], want_grads[name]) for name in grads)
        assert columns > none == 0
        assert line == "sch[''].overlap()"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.cls)
def test_overlap_of_all_reduce_trains_bit_identically(case, root, ranks):
    assert_same_numbers(checkpoint(case, root), case, ranks, tp=2)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_ratio": 1.0},
        {"pp": 2},
        {"pp": 2, "pipeline_order": "zbv", "stages_per_rank": 2, "micro_batches": 4},
    ],
    ids=["recomputed", "pipeline", "zero-bubble"],
)
def test_overlap_of_all_reduce_is_bit_identical_with_other_options(options, root, ranks):
    case = Case("GPT2LMHeadModel", ("tokens",), (("n_layer", 4),), dropout=0.1)
    assert_same_numbers(checkpoint(case, root), case, ranks, tp=2, **options)


# --- the order of events ------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, two):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.gate = nn.Linear(4, 6, bias=False) if two else None

    def forward(self, x):
        y = self.up(x).tanh()
        return self.down(y if self.gate is None else y * self.gate(x))


def scheduled(two, overlap, mesh):
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(4, 4), Mlp(two))
    sch = Schedule(net, mesh)
    sch["1"].sync("bwd_post", "all_reduce")
    sch["1.up"].shard("weight", 0).shard("bias", 0)
    if two:
        sch["1.gate"].shard("weight", 0)
    sch["1.down"].shard("weight", 1).sync("fwd_post", "all_reduce")
    sch["1"].overlap(overlap)
    return sch


class Recorded:
    """Handle that records when it is waited for."""

    def __init__(self, work, events):
        self.work, self.events = work, events

    def wait(self):
        self.events.append("waited")
        return self.work.wait()


def events_of(two, overlap):
    net = scheduled(two, overlap, Mesh(tp=2, rank=dist.get_rank())).model
    events, all_reduce = [], dist.all_reduce

    def recorded(*args, async_op=False, **kwargs):
        events.append("begun" if async_op else "done at once")
        work = all_reduce(*args, async_op=async_op, **kwargs)
        return Recorded(work, events) if async_op else work

    y = net(torch.ones(3, 4))
    for name, parameter in net[1].named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: events.append(name))
    net[0].weight.register_post_accumulate_grad_hook(lambda p: events.append("before"))
    dist.all_reduce = recorded
    try:
        y.sum().backward()
    finally:
        dist.all_reduce = all_reduce
    return events


@pytest.mark.parametrize("two", [False, True], ids=["one layer", "two layers"])
def test_overlap_computes_weight_gradient_during_the_all_reduce(two, ranks):
    weights = {"up.weight", "gate.weight"} if two else {"up.weight"}
    for events in ranks.run(events_of, 2, two, True):
        begun, waited = events.index("begun"), events.index("waited")
        assert weights == set(events[begun + 1 : waited])
        assert "before" in events[waited:]  # modules before this one need the all-reduced gradient
        assert "done at once" not in events
    for events in ranks.run(events_of, 2, two, False):
        assert weights <= set(events[: events.index("done at once")])
        assert "begun" not in events


def falls_back():
    """Run autocast, no_grad and a frozen weight, which take the blocking path, and the same without overlap."""
    net, plain = (scheduled(True, on, Mesh(tp=2, rank=dist.get_rank())).model for on in (1, 0))
    found = []
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    for how in ("autocast", "no_grad", "frozen"):
        results = []
        for model in (net, plain):
            model.zero_grad()
            model[1].up.weight.requires_grad_(how != "frozen")
            with torch.autocast("cpu", enabled=how == "autocast"):
                with torch.set_grad_enabled(how != "no_grad"):
                    y = model(x)
                if how != "no_grad":
                    y.float().sum().backward()
            results.append((y.detach(), [p.grad for p in model.parameters()]))
        found.append(results)
    return found


def test_overlap_falls_back_to_blocking_all_reduce_where_unsupported(ranks):
    for found in ranks.run(falls_back, 2):
        for (y, grads), (want, wanted) in found:
            assert torch.equal(y, want)
            for grad, other in zip(grads, wanted, strict=True):
                assert (grad is None) is (other is None)
                assert grad is None or torch.equal(grad, other)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # dynamo warns about its own code
def test_overlap_of_all_reduce_causes_no_graph_break(ranks):
    for breaks in ranks.run(graph_breaks, 2):
        assert breaks == 0


def graph_breaks():
    """Count the graph breaks of the module between the collectives; an overlap must add none."""
    net = scheduled(True, True, Mesh(tp=2, rank=dist.get_rank())).model
    net(torch.ones(3, 4)).sum().backward()  # puts its forward into the layers
    return torch._dynamo.explain(net[1].up.forward)(torch.ones(3, 4)).graph_break_count


# --- the directive ------------------------------------------------------------------------------


def test_overlap_is_refused_without_all_reduce_and_survives_json():
    net = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(
        ScheduleError, match="no sync directive at or below this module all-reduces a gradient"
    ):
        Schedule(net, Mesh(tp=2)).overlap()
    sch = scheduled(False, True, Mesh(tp=2))
    again = Schedule(nn.Sequential(nn.Linear(4, 4), Mlp(False)), Mesh(tp=2, rank=1))
    again.replay(from_json(sch.to_json()))
    assert again.state.overlap == sch.state.overlap == {"1": True}
