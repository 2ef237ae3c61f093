"""`with Verify(sch, inputs):` around scheduling steps, alone and on two ranks."""

import sys

import pytest
import torch
from torch import nn

import slapo_zoo
from slapo_zoo import ScheduleError, Verify, emulate
from slapo_zoo.verify import context
from slapo_zoo.verify.report import VerifyError
from slapo_zoo.verify.safe import NoDropout

INPUTS = [torch.linspace(-1, 1, 24).reshape(3, 8)]


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8))


def column(sch):
    sch["0"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")


def unlike_on_rank_1(sch):
    sch["3"].mod.bias.register_hook(lambda grad: grad * (1 + sch.mesh.rank))


def row(sch):
    sch["3"].shard("weight", 1).sync("fwd_post", "all_reduce")


def no_backward(sch):
    sch["0"].shard("weight", 0).shard("bias", 0)


def no_forward(sch):
    sch["3"].shard("weight", 1)


def step(blocks, **options):
    """Run each block of steps in its own Verify context on this rank; return the reports."""
    with slapo_zoo.parallel.rng.layout_independent_random.drawn_from(0):
        model = two_layers()
    names = [name for name, _ in model.named_parameters()]
    sch = slapo_zoo.create_schedule(model)
    try:
        for block in blocks:
            with Verify(sch, INPUTS, **options) as verify:
                for part in block:
                    part(sch)
    except VerifyError:
        return verify.report
    assert [name for name, _ in model.named_parameters()] == names
    return verify.report


class SharedKeys(nn.Module):
    """Four queries of two features, two of which share a key."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.down = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x):
        q, k = (layer(x).unflatten(-1, (-1, 2)) for layer in (self.query, self.key))
        return self.down((q * k.repeat_interleave(q.shape[-2] // k.shape[-2], -2)).flatten(-2))


def shared_keys(wanted):
    """Shard queries over four ranks, of which two hold the same key; compare this rank's gradient of its key."""
    with slapo_zoo.parallel.rng.layout_independent_random.drawn_from(0):
        sch = slapo_zoo.create_schedule(SharedKeys())
    with Verify(sch, INPUTS):
        sch[""].sync("bwd_post", "all_reduce")
        sch["query"].shard("weight", 0).shard("bias", 0)
        for name in ("weight", "bias"):
            sch["key"].shard(name, 0, unit=2, replicate=True)
        sch["down"].shard("weight", 1).sync("fwd_post", "all_reduce")
    slapo_zoo.build(sch)(*INPUTS).sin().sum().backward()
    mine = wanted.chunk(2)[sch.mesh.rank // 2]
    torch.testing.assert_close(sch["key"].mod.weight.grad, mine)


def test_verify_and_build_sum_the_gradient_of_a_shard_that_two_ranks_hold():
    with slapo_zoo.parallel.rng.layout_independent_random.drawn_from(0):
        plain = SharedKeys()
    plain(*INPUTS).sin().sum().backward()
    emulate(shared_keys, plain.key.weight.grad, mesh=(4, 1, 1))


def wrongly_recomputed():
    with slapo_zoo.parallel.rng.layout_independent_random.drawn_from(0):
        sch = slapo_zoo.create_schedule(two_layers())
    column(sch)
    row(sch)
    with pytest.raises(ScheduleError, match="the input differs between tp ranks"):
        sch["3"].checkpoint(policy="sharded")
    sch["3"].replace(nn.Sequential(sch["3"].mod))  # nor is the input of this module equal on all
    with pytest.raises(VerifyError, match=r"3\.0\.weight"), Verify(sch, INPUTS):
        sch["3"].checkpoint(policy="sharded")


def test_verify_context_finds_a_wrong_recomputation_in_eval_mode():
    emulate(wrongly_recomputed, mesh=(2, 1, 1))


def test_verify_context_restores_weights_that_a_forward_changes():
    model = nn.Embedding(6, 4, max_norm=0.1)
    before = model.weight.detach().clone()
    with Verify(slapo_zoo.create_schedule(model), [torch.arange(6)]):
        pass
    assert torch.equal(model.weight, before)


def test_verify_finds_a_small_wrong_output_beside_a_large_one():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.large, self.small = nn.Linear(8, 8), nn.Identity()

        def forward(self, x):
            return self.large(x) * 1e6, self.small(x.detach())

    sch = slapo_zoo.create_schedule(Two())
    with pytest.raises(VerifyError, match="1 on rank 0: error 1"), Verify(sch, INPUTS):
        sch["small"].hook("fwd_post", lambda module, args, output: output * 1.01)


def test_verify_leaves_the_ranks_of_emulate_on_the_cpu_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert all(report.ok for report in emulate(step, [(column, row)], mesh=(2, 1, 1)))


@pytest.mark.parametrize("eval_mode", [True, False])
def test_verify_context_passes_a_correct_column_and_row_parallel_schedule(eval_mode):
    for report in emulate(step, [(column, row)], eval_mode=eval_mode, mesh=(2, 1, 1)):
        assert report.ok
        assert report.checks["outputs"]["compared"] == 2
        assert report.checks["outputs"]["worst"] < 1


@pytest.mark.parametrize(
    ("parts", "phase", "suspect"),
    [
        ((no_backward, row), "backward", "0"),
        ((column, no_forward), "forward", "3"),
        ((column, row, unlike_on_rank_1), "parameters", "3"),
    ],
    ids=["backward", "forward", "one rank"],
)
def test_verify_context_names_the_module_of_a_missing_collective(parts, phase, suspect):
    for report in emulate(step, [parts], mesh=(2, 1, 1)):
        assert not report.ok
        assert report.divergence.phase == phase
        assert suspect in report.divergence.suspects
        assert f"sch['{suspect}'].shard" in str(report)


def test_two_successive_verify_contexts_pass_for_correct_directives():
    steps = [(column, row), (lambda sch: sch["1"].checkpoint(),)]
    assert all(report.ok for report in emulate(step, steps, mesh=(2, 1, 1)))


def replaced(sch):
    sch["1"].replace(nn.GELU(approximate="tanh"))


def test_verify_names_the_module_that_was_replaced_by_another_function():
    report = step([(replaced,)])
    assert report.divergence.path == "1"
    assert "replace" in str(report)
    with pytest.raises(VerifyError, match="first divergence, forward: 1"):
        report.raise_if_wrong("Verify")


def state_of(model):
    """Return all state that a verification could leave behind."""
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    tensors = {n: (id(t), t.data_ptr(), t._version) for n, t in model.state_dict(keep_vars=True).items()}  # fmt: skip
    modes = [m.training for m in model.modules()]
    return hooks, tensors, modes, list(model.__dict__), torch.get_rng_state().tolist()


class Refuses:
    """Object in place of a schedule that raises on any access."""

    def __getattr__(self, name):
        raise AssertionError(f"touched {name}")


def test_no_dropout_context_disables_functional_dropout_and_dropout_of_sdpa():
    x, attention = torch.randn(1, 2, 8, 4), nn.functional.scaled_dot_product_attention
    with NoDropout():
        torch.testing.assert_close(attention(x, x, x, dropout_p=0.9), attention(x, x, x))
        assert torch.equal(nn.functional.dropout(x, 0.9), x)
    assert not torch.equal(attention(x, x, x, dropout_p=0.9), attention(x, x, x))


def test_verify_context_with_enable_false_makes_no_report_and_runs_no_model():
    """The original Slapo deep-copied the model and left a trace function behind."""
    trace = sys.gettrace()
    with Verify(Refuses(), Refuses(), enable=False) as verify:  # pyright: ignore[reportArgumentType]
        assert sys.gettrace() is trace
    assert verify.report is None
    assert set(vars(verify)) == {"sch", "inputs", "device", "eval_mode", "enable", "report"}


def test_verify_context_leaves_the_model_state_and_gradients_unchanged():
    model = two_layers()
    model(INPUTS[0]).sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    sch, before, trace = slapo_zoo.create_schedule(model), state_of(model), sys.gettrace()
    with Verify(sch, {"input": INPUTS[0]}):
        pass
    assert state_of(model) == before
    assert sys.gettrace() is trace
    assert all(p.grad is grads[n] for n, p in model.named_parameters())


def test_verify_context_raises_errors_of_its_with_block_unchanged():
    sch = slapo_zoo.create_schedule(two_layers())
    with pytest.raises(slapo_zoo.ScheduleError, match="no parameter"), Verify(sch, INPUTS):
        sch["0"].shard("nothing", 0)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.o = nn.Linear(8, 8)

    def forward(self, x, mask):
        q, k, v = (layer(x).view(2, 5, -1, 2).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(y.transpose(1, 2).reshape(2, 5, -1))


def attend(mask, right):
    """Verify a block of attention with sharded heads."""
    with slapo_zoo.parallel.rng.layout_independent_random.drawn_from(0):
        sch = slapo_zoo.create_schedule(Attention())
    x = torch.linspace(-1, 1, 80).reshape(2, 5, 8)
    try:
        with Verify(sch, [x, mask]) as verify:
            for name in "qkv":
                sch[name].shard("weight", 0).shard("bias", 0)
                if right or name != "k":
                    sch[name].sync("bwd_post", "all_reduce")
            sch["o"].shard("weight", 1).sync("fwd_post", "all_reduce")
    except VerifyError:
        return verify.report
    return verify.report


CAUSAL = torch.ones(5, 5, dtype=torch.bool).tril()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("least", [float("-inf"), torch.finfo(torch.float32).min, -1e4, None])
def test_verify_accepts_a_missing_gradient_for_constant_attention_masks(least):
    mask = CAUSAL if least is None else torch.zeros(5, 5).masked_fill(~CAUSAL, least)
    for report in emulate(attend, mask, True, mesh=(2, 1, 1)):
        assert report.ok, str(report)
    for report in emulate(attend, mask, False, mesh=(2, 1, 1)):
        assert not report.ok
        assert "k" in report.divergence.suspects


def on_meta(parts):
    with torch.device("meta"):  # the default device of this thread alone
        model = two_layers()
    sch = slapo_zoo.create_schedule(model)
    try:
        with Verify(sch, INPUTS) as verify:
            for part in parts:
                part(sch)
    except VerifyError:
        pass
    assert all(p.is_meta for p in sch.model.parameters())
    return verify.report, {n: tuple(p.shape) for n, p in sch.model.named_parameters()}


def test_verify_of_a_meta_model_computes_with_temporary_values_and_passes():
    for report, shapes in emulate(on_meta, (column, row), mesh=(2, 1, 1)):
        assert report.ok
        assert shapes["0.weight"] == (8, 8)
    assert not emulate(on_meta, (column, no_forward), mesh=(2, 1, 1))[0][0].ok


def test_random_loss_weights_of_verify_do_not_depend_on_the_global_generator(monkeypatch):
    """Another rank's thread may reset torch's generator between a seed and a draw."""
    draw, seeds = torch.randn, iter(range(100))

    def disturbed(*args, **options):
        torch.manual_seed(next(seeds))
        return draw(*args, **options)

    monkeypatch.setattr(torch, "randn", disturbed)
    outputs = {"0": torch.ones(5, requires_grad=True)}
    assert context._loss(outputs) == context._loss(outputs)
