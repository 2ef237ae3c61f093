"""Ranks of a hand-written loop that diverge in weights, gradients or code raise an error."""

import re
import time
from contextlib import nullcontext
from functools import partial
from inspect import getsourcelines

import pytest
import torch
import transformers
from torch.nn.parallel import DistributedDataParallel

from slapo_zoo import AutoScheduledModel, emulate
from slapo_zoo.errors import MeshError, RankError, SlapoError
from slapo_zoo.parallel import begun
from slapo_zoo.parallel.ranks import heartbeat, killed_rank

CONFIG = transformers.GPT2Config(
    n_embd=16, n_head=2, n_layer=2, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0,
    architectures=["GPT2LMHeadModel"], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
IDS = torch.arange(32).reshape(4, 8)


def made(tp=1, pp=1, dp=1, **options):
    return AutoScheduledModel.from_config(CONFIG, tp=tp, pp=pp, dp=dp, seed=0, **options).train()


def rows_of(model):
    rows = IDS.tensor_split(model.mesh.dp)[model.mesh.coord("dp")]
    return {"input_ids": rows, "labels": rows}


def skip_once(by_hand):
    model = made(dp=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        batch = rows_of(model)
        model(**batch).loss.backward() if by_hand else model.train_step(batch)
        if step or model.mesh.rank:
            optimizer.step()
    return "not seen"


@pytest.mark.parametrize("by_hand", [True, False])
def test_dp_replica_that_skipped_a_step_raises_at_the_next_backward(by_hand):
    with pytest.raises(MeshError, match="dp ranks have different weights") as caught:
        emulate(skip_once, by_hand, mesh=(1, 1, 2))
    assert "step() on all ranks or on none" in caught.value.hint


def perturbed(norm_of):
    """Run both backwards of SAM, the second at weights moved along the gradient; return the gradients' norm."""
    model = made(tp=2)
    model(**rows_of(model)).loss.backward()
    norm = norm_of(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(p.grad * 0.05 / norm)
    model(**rows_of(model)).loss.backward()
    return float(norm)


def test_weights_updated_with_a_gradient_norm_of_one_tp_shard_raise_at_the_next_backward():
    of_all = partial(emulate, perturbed, mesh=(2, 1, 1))
    assert len(set(of_all(lambda model: model.clip_grad_norm_(float("inf"))))) == 1
    with pytest.raises(MeshError, match="tp ranks have different values"):
        of_all(lambda model: torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))


def wrapped(wrap, layout):
    model = made(**layout)
    wrap(model)(**rows_of(model))
    return "not seen"


def fully_sharded(model):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))


@pytest.mark.parametrize(
    ("wrap", "layout", "said"),
    [(DistributedDataParallel, {"tp": 2}, "ranks [0, 1]"), (fully_sharded, {"dp": 2}, "fully_shard")],
)  # fmt: skip
def test_model_in_a_ddp_over_tp_ranks_or_in_fully_shard_is_refused(wrap, layout, said):
    with pytest.raises(MeshError, match=re.escape(said)) as caught:
        emulate(wrapped, wrap, layout, mesh=(2, 1, 1))
    assert "init_target_engine" in caught.value.hint


def by_autograd(averages, **layout):
    """Return gradients by torch.autograd.grad, averaged by hand as the error's hint says."""
    model = made(**layout)
    named = dict(model.named_parameters())
    with model.no_sync() if averages else nullcontext():
        grads = torch.autograd.grad(model(**rows_of(model)).loss, list(named.values()))
    for grad in grads:
        grad.div_(model.mesh.size("loss"))
        torch.distributed.all_reduce(grad, group=model.mesh.group("loss"))
    model(**rows_of(model)).loss.backward()
    return [(p.grad, grad) for p, grad in zip(named.values(), grads, strict=True)]


LOSS_DIMS = {"dp": {"dp": 2}, "dp+cp": {"cp": 2}}


@pytest.mark.parametrize("dims", LOSS_DIMS)
def test_autograd_grad_of_parameters_over_dp_or_cp_is_refused(dims):
    with pytest.raises(MeshError, match="not their average over " + re.escape(dims)) as caught:
        emulate(by_autograd, False, mesh=(1, 1, 2), **LOSS_DIMS[dims])
    assert "no_sync" in caught.value.hint


@pytest.mark.parametrize("dims", LOSS_DIMS)
def test_autograd_grad_in_no_sync_averaged_by_the_user_equals_the_full_batch_gradient(dims):
    for found in emulate(by_autograd, True, mesh=(1, 1, 2), **LOSS_DIMS[dims]):
        for want, grad in found:
            torch.testing.assert_close(grad, want)


def of_a_prompt():
    model = made(dp=2)
    prompt = torch.nn.Parameter(
        torch.ones(1, 8, 16).cumsum(-1)
    )  # ranks are threads of one generator
    torch.autograd.grad(model(inputs_embeds=prompt + 0).logits.sum(), prompt)


def test_autograd_grad_of_a_soft_prompt_over_dp_is_refused():
    with pytest.raises(MeshError, match="not their average over dp"):
        emulate(of_a_prompt, mesh=(1, 1, 2))


class Nested(torch.autograd.Function):
    """Autograd function whose backward calls the model and takes the gradient of an input."""

    @staticmethod
    def forward(ctx, x, model):
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            embeds = torch.zeros(2, 8, 16, requires_grad=True)
            torch.autograd.grad(ctx.model(inputs_embeds=embeds).logits.sum(), embeds)
        return grad, None


def with_a_backward_in_it():
    """Run a nested backward after all gradients have arrived, but that of wte, which gets none."""
    model = made(dp=2)
    embeds = torch.full((2, 8, 16), 1.0 + model.mesh.rank).cumsum(-1).requires_grad_()
    found = model(inputs_embeds=Nested.apply(embeds, model), output_hidden_states=True)
    found.hidden_states[-1].square().mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_nested_backward_in_a_custom_autograd_function_leaves_gradients_averaged_over_dp():
    one, other = emulate(with_a_backward_in_it, mesh=(1, 1, 2))
    for name, grad in one.items():
        torch.testing.assert_close(grad, other[name], msg=name)


def autograd_over_stages():
    model = made(pp=2)
    loss = model(**rows_of(model)).loss
    torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def test_autograd_grad_with_several_pipeline_stages_is_refused():
    """The stage of this rank has no gradient of a weight of another stage; autograd would return None."""
    with pytest.raises(SlapoError, match="model with pp > 1"):
        emulate(autograd_over_stages, mesh=(1, 2, 1))


def of_inputs_alone():
    model = made(dp=2)
    embeds = torch.randn(2, 8, 16, requires_grad=True)
    torch.autograd.grad(model(inputs_embeds=embeds).logits.sum(), embeds)


def test_autograd_grad_of_inputs_over_dp_is_allowed_and_not_averaged():
    emulate(of_inputs_alone, mesh=(1, 1, 2))


def line_search(mesh):
    model = made(*mesh)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        return model.train_step(rows_of(model))

    return float(optimizer.step(closure))


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1)])
def test_lbfgs_optimizer_on_sharded_weights_is_refused(mesh):
    with pytest.raises(SlapoError, match="dot products over all parameters"):
        emulate(line_search, mesh, mesh=mesh)


def read_alone():
    model = made(tp=2)
    loss = (output := model(**rows_of(model))).loss
    if model.mesh.rank == 0:
        print(output.logits.mean())
    loss.backward()


def step_alone():
    model = made(tp=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train_step(rows_of(model))
    if model.mesh.rank == 0:
        optimizer.step()
    model.train_step(rows_of(model))


def skip_beside(by_hand, **layout):
    """Skip a step on the second dp rank, with its tp and pp peers."""
    model = made(**layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        batch = rows_of(model)
        model(**batch).loss.backward() if by_hand else model.train_step(batch)
        if step != 1 or model.mesh.coord("dp") == 0:
            optimizer.step()
        optimizer.zero_grad()


def evaluate_alone(how, **layout):
    model = made(**layout)
    model.train_step(rows_of(model))
    if model.mesh.rank == 0:
        with torch.no_grad():
            how(model.eval())
        model.train()
    model.train_step(rows_of(model))


def generated(model):
    model.generate(IDS[:1], max_new_tokens=2, do_sample=False)


LEFT = {
    "evaluation": (partial(evaluate_alone, lambda m: m(IDS), tp=2), (2, 1, 1)),
    "generation": (partial(evaluate_alone, generated, tp=2), (2, 1, 1)),
    "evaluation over pp": (partial(evaluate_alone, lambda m: m(IDS), pp=2), (1, 2, 1)),
    "backbone": (partial(evaluate_alone, lambda m: m.transformer(IDS), tp=2), (2, 1, 1)),
    "evaluation of rows": (partial(evaluate_alone, lambda m: m(IDS), dp=2, dp_shard=2), (1, 1, 2)),
    "logits": (read_alone, (2, 1, 1)),
    "step of tp": (step_alone, (2, 1, 1)),
    "tp and dp": (partial(skip_beside, True, tp=2, dp=2), (2, 1, 2)),
    "tp and dp, train_step": (partial(skip_beside, False, tp=2, dp=2), (2, 1, 2)),
    "pp and dp, train_step": (partial(skip_beside, False, pp=2, dp=2), (1, 2, 2)),
    "dp_shard": (partial(skip_beside, True, dp=2, dp_shard=2), (1, 1, 2)),
    "dp_shard, train_step": (partial(skip_beside, False, dp=2, dp_shard=2), (1, 1, 2)),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", LEFT)
def test_training_step_run_by_only_some_ranks_raises_on_all_ranks(name, monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.1)
    loop, mesh = LEFT[name]
    told = {}

    def run():
        try:
            loop()
        except Exception as error:
            told[torch.distributed.get_rank()] = error
            raise

    with pytest.raises(SlapoError):
        emulate(run, mesh=mesh, timeout_s=60)
    assert len(told) == mesh[0] * mesh[1] * mesh[2]
    for rank, error in told.items():
        assert isinstance(error, SlapoError), f"rank {rank}: {error}"
        assert "did not" in str(error), f"rank {rank}: {error}"
        assert "imed out" not in str(error)


def test_one_dp_replica_can_run_evaluation_without_the_others():
    emulate(evaluate_alone, lambda m: m(IDS), dp=2, mesh=(1, 1, 2))


def wait_alone(what):
    """Wait on one rank while the other is busy elsewhere."""
    model = made(tp=2)
    output = model(**rows_of(model))
    if model.mesh.rank:
        time.sleep(5)
    if what == "logits":
        print(output.logits.mean())
    output.loss.backward()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("what", ["logits", "backward"])
def test_error_of_a_timed_out_collective_names_the_source_line_of_every_rank(what, monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.1)
    monkeypatch.setattr(killed_rank, "ERROR_WAIT_S", 0.2)
    monkeypatch.setattr(killed_rank, "SILENT_S", 0.2)
    with pytest.raises(RankError) as caught:
        emulate(wait_alone, what, mesh=(2, 1, 1), timeout_s=2)
    told, (source, first) = str(caught.value), getsourcelines(wait_alone)
    waits = "output.logits" if what == "logits" else "output.loss.backward"
    lines = [
        next(first + n for n, line in enumerate(source) if begin in line)
        for begin in (waits, "model(")
    ]
    for rank, line in enumerate(lines):  # rank 1 sleeps after its forward
        assert f"of rank {rank} at test_diverging_ranks.py:{line}" in told, told


def test_installed_package_outside_of_site_packages_is_not_the_user_program(tmp_path, monkeypatch):
    (tmp_path / "overlay" / "peft-1.0.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "overlay")
    assert not begun._is_of_user(str(tmp_path / "overlay" / "peft" / "model.py"))
    assert not begun._is_of_user(torch.__file__)
    assert begun._is_of_user(str(tmp_path / "train.py"))


def test_last_begun_collective_is_recorded_with_the_line_of_the_user_program():
    def run():
        made(tp=2).train_step({"input_ids": IDS, "labels": IDS})
        return begun.of_world().line

    file, line = emulate(run, mesh=(2, 1, 1))[0]
    source, first = getsourcelines(run)
    assert (file, line) == (__file__, first + 1), source


def test_second_train_step_adds_gradients_in_place():
    model = made()
    model.train_step(rows_of(model))
    before = {name: (p.grad, 2 * p.grad) for name, p in model.named_parameters()}
    model.train_step(rows_of(model))
    for name, p in model.named_parameters():
        assert p.grad is before[name][0], name
        torch.testing.assert_close(p.grad, before[name][1])
