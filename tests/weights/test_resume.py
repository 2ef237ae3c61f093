"""Resumed training: bit-exact on the same mesh, within rounding on another."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel, MixtralConfig

from parity import EPS, FLOOR, LEARNING_RATE, Case, batch_of, checkpoint, own_error
from slapo_zoo import AutoScheduledModel
from slapo_zoo.errors import WeightsError
from slapo_zoo.model.checkpoints.resume import load_checkpoint
from slapo_zoo.model.checkpoints.training_checkpoint import save_checkpoint

ROWS, STEPS = 4, 4
DROPOUT = Case("GPT2LMHeadModel", ("tokens",), dropout=0.1)
PLAIN = Case("GPT2LMHeadModel", ("tokens",))


def start(folder, layout, case=DROPOUT, cls=torch.optim.AdamW):
    tp, pp, dp = layout
    model = AutoScheduledModel.from_pretrained(
        folder, tp=tp, pp=pp, dp=dp, seed=3, auto_class=case.cls
    ).train()
    named = list(model.named_parameters())  # the optimizer keeps the names, which differ per stage
    groups = [
        {"params": [(n, p) for n, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in named if p.ndim <= 1], "weight_decay": 0.0},
    ]
    options = {"eps": EPS} if cls is torch.optim.AdamW else {}
    optimizer = cls(groups, lr=LEARNING_RATE, **options)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=3)
    return model, optimizer, scheduler


def train(model, optimizer, scheduler, case, steps):
    mesh, losses = model.mesh, []
    part = slice(mesh.coord("dp") * ROWS // mesh.dp, (mesh.coord("dp") + 1) * ROWS // mesh.dp)
    for step in steps:
        batch = {k: v[part] for k, v in batch_of(case, step).items()}
        losses.append(float(model.train_step(batch)))
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def stop_and_go(source, out, layout, case=DROPOUT, cls=torch.optim.AdamW):
    """Train without and with a stop; fail where losses, weights or optimizer differ by a bit."""
    whole = start(source, layout, case, cls)
    losses = train(*whole, case, range(STEPS))
    first = start(source, layout, case, cls)
    torch.manual_seed(17)
    before = train(*first, case, range(STEPS // 2))
    save_checkpoint(first[0], out, *first[1:], step=2, data_position={"epoch": 1}, extra=(1, "x"))
    drawn = torch.rand(3)
    second = start(source, layout, case, cls)
    resumed = load_checkpoint(second[0], out, *second[1:])
    assert (resumed.step, resumed.data_position, resumed.extra) == (2, {"epoch": 1}, (1, "x"))
    assert torch.equal(torch.rand(3), drawn)
    after = train(*second, case, range(STEPS // 2, STEPS))
    assert before + after == losses
    expected = weights(whole[0])
    for name, tensor in weights(second[0]).items():
        assert torch.equal(tensor, expected[name]), name
    states = [list(one[1].state.values()) for one in (whole, second)]
    for one, other in zip(*states, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert whole[2].state_dict() == second[2].state_dict()
    return losses


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tmp_path_factory.mktemp("source")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", [(2, 2, 1), (1, 1, 1), (2, 1, 2)], ids=str)
def test_training_resumed_on_the_same_mesh_is_bit_equal_to_an_uninterrupted_run(
    ranks, source, tmp_path, layout
):
    folder = checkpoint(DROPOUT, source)
    size = layout[0] * layout[1] * layout[2]
    ranks.run(stop_and_go, size, folder, tmp_path / "out", layout)
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "out")  # plain transformers reads it
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert torch.equal(again.transformer.wte.weight, file.get_tensor("transformer.wte.weight"))


def test_training_by_adafactor_with_tp_resumes_bit_equal_though_its_state_has_other_shapes(
    ranks, source, tmp_path
):
    folder, optimizer = checkpoint(DROPOUT, source), torch.optim.Adafactor
    ranks.run(stop_and_go, 2, folder, tmp_path / "out", (2, 1, 1), DROPOUT, optimizer)


def first_half(folder, out, layout, case):
    state = start(folder, layout, case)
    losses = train(*state, case, range(STEPS // 2))
    save_checkpoint(state[0], out, *state[1:], step=2, max_shard_size="20KB")
    return losses


def second_half(folder, out, layout, case):
    state = start(folder, layout, case)
    step = load_checkpoint(state[0], out, *state[1:]).step
    losses = train(*state, case, range(step, STEPS))
    return losses, state[0].consolidated_state_dict()


def both_halves(threads, folder, out, one, other, case):
    sizes = [tp * pp * dp for tp, pp, dp in (one, other)]
    before = threads.run(first_half, sizes[0], folder, out, one, case)[0]
    after, found = threads.run(second_half, sizes[1], folder, out, other, case)[0]
    return before + after, found


def uninterrupted(folder, case, cls, dtype, attention):
    """Train plain transformers with the same optimizer and scheduler."""
    torch.manual_seed(0)
    model = cls.from_pretrained(folder, dtype=dtype, attn_implementation=attention).train()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=EPS)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=3)
    for step in range(STEPS):
        model(**batch_of(case, step)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {name: p.detach() for name, p in model.named_parameters()}


MOVES = [
    ((2, 2, 1), (1, 1, 1)),
    ((1, 1, 1), (2, 2, 1)),
    ((2, 1, 2), (1, 2, 1)),
    ((1, 2, 1), (4, 1, 1)),
]


@pytest.mark.one_in(4)  # test_round_trips.py loads files of any layout on any other
@pytest.mark.parametrize(("one", "other"), MOVES, ids=str)
def test_training_resumed_on_another_mesh_equals_an_uninterrupted_run(
    threads, source, tmp_path, one, other
):
    folder = checkpoint(PLAIN, source)
    _, found = both_halves(threads, folder, tmp_path / "out", one, other, PLAIN)
    runs = [
        uninterrupted(folder, PLAIN, GPT2LMHeadModel, dtype, kind)
        for dtype, kind in (
            (torch.float64, "sdpa"),
            (torch.float32, "sdpa"),
            (torch.float32, "eager"),
        )
    ]
    truth, plains = runs[0], runs[1:]
    worst = max(own_error(plains, truth, lambda run: run[name]) for name in truth)  # noqa: B023
    for name, want in truth.items():
        error = float((found[name].double() - want).abs().max())
        assert error <= 2 * worst + FLOOR, f"{name}: error {error:.2e}, plain {worst:.2e}"


def test_training_with_dropout_resumed_on_another_mesh_has_the_losses_of_one_process(
    ranks, source, tmp_path
):
    """The position of the random stream is resumed, and does not depend on the mesh."""
    folder, out = checkpoint(DROPOUT, source), tmp_path / "out"
    whole = ranks.run(stop_and_go, 1, folder, tmp_path / "one", (1, 1, 1))[0]
    losses, _ = both_halves(ranks, folder, out, (2, 2, 1), (2, 1, 2), DROPOUT)
    assert losses == pytest.approx(whole, rel=1e-5)


def test_saved_checkpoint_folder_contains_weights_optimizer_and_training_state(
    ranks, source, tmp_path
):
    ranks.run(first_half, 4, checkpoint(PLAIN, source), tmp_path / "out", (2, 2, 1), PLAIN)
    out = tmp_path / "out"
    index = json.loads((out / "optimizer.safetensors.index.json").read_text())["weight_map"]
    weights = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert "lm_head.weight.exp_avg" not in index  # tied: once, with the embedding
    kinds = ("exp_avg", "exp_avg_sq")
    assert set(index) == {f"{name}.{kind}" for name in weights for kind in kinds}
    others = {"config.json", "generation_config.json", "training_state.json", "checksums.json"}
    others |= {"optimizer.safetensors.index.json", "model.safetensors.index.json"}
    files = {*index.values(), *weights.values(), *others}
    assert {path.name for path in out.iterdir()} == files
    state = json.loads((out / "training_state.json").read_text())
    assert state["optimizer"]["groups"][0]["options"]["betas"] == {"$tuple": [0.9, 0.999]}
    assert len(state["torch_random"]["cpu"]["states"]) == 1  # equal on all ranks: kept once


def test_save_pretrained_removes_the_training_state_of_an_older_checkpoint(source, tmp_path):
    folder, out = checkpoint(PLAIN, source), tmp_path / "out"
    first_half(folder, out, (1, 1, 1), PLAIN)
    model = start(folder, (1, 1, 1), PLAIN)[0]
    model.save_pretrained(out)
    assert not list(out.glob("optimizer*"))
    with pytest.raises(
        WeightsError, match=r"training_state.json: this file of the checkpoint is missing"
    ):
        load_checkpoint(model, out)


class Factored(torch.optim.SGD):
    """Optimizer like Adafactor: its state has other shapes than the parameters."""

    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"row": torch.ones(7)}


def no_step(optimizer):
    pass


BAD_SAVES = {
    "factored": (Factored, Factored.step, {}, r"row: found a tensor of \[7\]"),
    "callable": (
        torch.optim.SGD,
        no_step,
        {"extra": {"f": [len]}},
        r"extra.f\[0\]: found a builtin",
    ),
}


@pytest.mark.parametrize("case", BAD_SAVES)
def test_unsupported_optimizer_state_is_refused_before_saving(source, tmp_path, case):
    kind, prepare, options, problem = BAD_SAVES[case]
    model = start(checkpoint(PLAIN, source), (1, 1, 1), PLAIN)[0]
    optimizer = kind(model.parameters(), lr=0.1)
    prepare(optimizer)
    with pytest.raises(WeightsError, match=problem):
        save_checkpoint(model, tmp_path / "out", optimizer, **options)
    assert not list(tmp_path.iterdir())


def other_class(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def other_groups(model):
    groups = [{"params": [p]} for p in model.parameters()]
    return torch.optim.AdamW([groups[0], {"params": [g["params"][0] for g in groups[1:]]}])


def fewer(model):
    groups = [[p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (True, False)]
    return torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1][1:]}])


def a_stranger(model):
    stranger = torch.nn.Parameter(torch.ones(2))
    return torch.optim.AdamW([{"params": [stranger]}, {"params": list(model.parameters())}])


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (other_class, "found SGD with 1 parameter groups, the saved one is AdamW with 2"),
        (other_groups, "in another group, or not at all"),
        (fewer, "the saved optimizer has this parameter, the one that you passed has not"),
        (a_stranger, "that is not in the model"),
    ],
)
def test_resume_with_an_optimizer_unlike_the_saved_one_is_refused_and_changes_nothing(
    source, tmp_path, make, problem
):
    folder = checkpoint(PLAIN, source)
    first_half(folder, tmp_path / "out", (1, 1, 1), PLAIN)
    model = start(folder, (1, 1, 1), PLAIN)[0]
    before = weights(model)
    with pytest.raises(WeightsError, match=problem):
        load_checkpoint(model, tmp_path / "out", make(model))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_restored_step_of_a_fused_or_capturable_optimizer_is_on_the_device_of_its_parameter():
    """Their kernels read it there; that of other optimizers stays on the CPU, where torch keeps it."""
    from slapo_zoo.parallel.mesh import Mesh
    from slapo_zoo.parallel.placement import TensorSpec
    from slapo_zoo.weights.optimizer import Restored, collect

    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([p])
    p.grad = torch.ones(2)
    optimizer.step()
    record, _ = collect(optimizer, {id(p): "w"})
    for options, device in (({"capturable": True}, "meta"), ({}, "cpu")):
        there = torch.nn.Parameter(torch.ones(2, device="meta"))
        target = torch.optim.AdamW([there], **options)
        spec = TensorSpec("w", (2,), "float32")
        stored = {"w": torch.float32}.__getitem__
        Restored(target, record, {id(there): "w"}, {"w": spec}, Mesh(), stored).apply()
        assert target.state[there]["step"].device.type == device


def test_training_in_fp32_can_be_resumed_in_bfloat16(source, tmp_path):
    """The moments are cast with the parameters, as by `load_state_dict` of torch; the step count stays."""
    folder, out = checkpoint(PLAIN, source), tmp_path / "out"
    first_half(folder, out, (1, 1, 1), PLAIN)
    model = AutoScheduledModel.from_pretrained(out, dtype="bfloat16").train()
    _, optimizer, scheduler = start(folder, (1, 1, 1), PLAIN)
    for group, params in zip(
        optimizer.param_groups, (lambda p: p.ndim > 1, lambda p: p.ndim <= 1), strict=True
    ):
        group["params"] = [p for p in model.parameters() if params(p)]
    load_checkpoint(model, out, optimizer, scheduler)
    assert {s["exp_avg"].dtype for s in optimizer.state.values()} == {torch.bfloat16}
    train(model, optimizer, scheduler, PLAIN, [2])


def test_checkpoint_saved_without_an_optimizer_loads(source, tmp_path):
    folder, out = checkpoint(PLAIN, source), tmp_path / "out"
    model, optimizer, scheduler = start(folder, (1, 1, 1), PLAIN)
    save_checkpoint(model, out, step=7)
    assert load_checkpoint(model, out).step == 7
    with pytest.raises(WeightsError, match="saved without optimizer"):
        load_checkpoint(model, out, optimizer)
    with pytest.raises(WeightsError, match="saved without scheduler"):
        load_checkpoint(model, out, None, scheduler)


BROKEN = {
    "no json": ("{", "this is not valid JSON"),
    "a list": ("[]", "found 'list', expected"),
    "other": ('{"format": "x"}', "found 'x', expected"),
    "empty": ('{"format": "slapo-zoo-training-state/1"}', "step: found no such field"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_malformed_training_state_json_is_refused(source, tmp_path, case):
    model = start(checkpoint(PLAIN, source), (1, 1, 1), PLAIN)[0]
    save_checkpoint(model, tmp_path / "out")
    (tmp_path / "out" / "training_state.json").write_text(BROKEN[case][0])
    (tmp_path / "out" / "checksums.json").unlink()  # as in checkpoints of older releases
    with pytest.raises(WeightsError, match=BROKEN[case][1]):
        load_checkpoint(model, tmp_path / "out")


def mixtral(tp, pp):
    """Train a tiny Mixtral, whose files hold each expert separately, for a step."""
    config = MixtralConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=50, num_local_experts=4, max_position_embeddings=16,
    )  # fmt: skip
    model = AutoScheduledModel.from_config(config, tp=tp, pp=pp, auto_class="MixtralForCausalLM")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(24).view(2, 12)
    model.train().train_step({"input_ids": ids, "labels": ids})
    optimizer.step()
    return model, optimizer


def save_experts(out, tp, pp):
    model, optimizer = mixtral(tp, pp)
    save_checkpoint(model, out, optimizer)
    return model.consolidated_state_dict()


def load_experts(out, again, tp, pp):
    model, optimizer = mixtral(tp, pp)
    optimizer.state.clear()
    load_checkpoint(model, out, optimizer)
    save_checkpoint(model, again, optimizer)
    return model.consolidated_state_dict()


def test_checkpoint_of_a_mixture_of_experts_resumes_on_another_mesh_with_equal_state(
    ranks, tmp_path
):
    saved = ranks.run(save_experts, 2, tmp_path / "a", 2, 1)[0]
    found = ranks.run(load_experts, 2, tmp_path / "a", tmp_path / "b", 1, 2)[0]
    assert saved.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())
    for stem in ("model", "optimizer"):
        one, other = (load_file(tmp_path / x / f"{stem}.safetensors") for x in "ab")
        assert one.keys() == other.keys()
        assert all(torch.equal(other[key], tensor) for key, tensor in one.items())
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in load_file(
        tmp_path / "a" / "model.safetensors"
    )
