"""dp_shard=: parameters, gradients and optimizer states sharded over dp, in every layout."""

import copy

import pytest
import torch
import transformers
from safetensors.torch import load_file

import parity
from mixed_precision import BERT, GPT2, LLAMA, T5, compare
from parity import Case, batch_of, checkpoint, references, scheduled
from slapo_zoo import AutoScheduledModel, extend, load_checkpoint, save_checkpoint
from slapo_zoo.errors import MeshError, SlapoError
from slapo_zoo.model.dp.dp_shard import check_dp_shard
from slapo_zoo.parallel.live_bytes import LiveBytes
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks.emulation import emulate

DIAGONAL = [
    (GPT2, "bf16", (2, 1, 2), "1f1b", 2), (LLAMA, "fp32", (1, 2, 2), "zbv", 3),
    (T5, "fp16", (1, 1, 2), "1f1b", 1), (BERT, "bf16", (1, 2, 2), "interleaved_1f1b", 3),
]  # fmt: skip
GRID = [
    (case, precision, (tp, pp, 2), order, stage)
    for case in (GPT2, BERT, T5, LLAMA) for precision in ("fp32", "bf16", "fp16") for stage in (1, 2, 3)
    for tp, pp, order in ((1, 1, "1f1b"), (2, 1, "1f1b"), (1, 2, "1f1b"), (1, 2, "interleaved_1f1b"), (1, 2, "zbv"))
    if (case, precision, (tp, pp, 2), order, stage) not in DIAGONAL
]  # fmt: skip


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("dp_shard")


def train(case, folder, layout, order, stage, precision):
    count = 2 if layout[1] > 1 else None
    return scheduled(case, folder, layout, count, pipeline_order=order, precision=precision,
                     dp_shard=2, zero_stage=stage)  # fmt: skip


def ids(value):
    return getattr(value, "cls", str(value))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("case", "precision", "layout", "order", "stage"), DIAGONAL, ids=ids)
def test_dp_shard_training_has_the_losses_and_gradients_of_plain_transformers(
    case, precision, layout, order, stage, root, threads
):
    folder, world = checkpoint(case, root), layout[0] * layout[1] * layout[2]
    result = threads.run(train, world, case, folder, layout, order, stage, precision)[0][0]
    if precision == "fp32":
        truth, plains = references(case, folder)
        parity.compare(result, plains, truth)
    else:
        compare(result, case, folder, precision)


@pytest.mark.slow  # 176 runs
@pytest.mark.parametrize(("case", "precision", "layout", "order", "stage"), GRID, ids=ids)
def test_dp_shard_training_on_every_layout_has_the_gradients_of_plain_transformers(
    case, precision, layout, order, stage, root, ranks
):
    test_dp_shard_training_has_the_losses_and_gradients_of_plain_transformers(
        case, precision, layout, order, stage, root, ranks
    )


@pytest.mark.slow  # eight ranks, as threads
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("order", "precision"), [("1f1b", "bf16"), ("interleaved_1f1b", "fp32"), ("zbv", "bf16")])  # fmt: skip
@pytest.mark.parametrize("case", [GPT2, BERT, T5, LLAMA], ids=ids)
def test_dp_shard_training_with_tp_and_pp_has_the_gradients_of_plain_transformers(
    case, order, precision, stage, root
):
    folder, mesh = checkpoint(case, root), (2, 2, 2)
    found = emulate(train, case, folder, mesh, order, stage, precision, mesh=mesh, timeout_s=120)
    if precision == "fp32":
        truth, plains = references(case, folder)
        parity.compare(found[0][0], plains, truth)
    else:
        compare(found[0][0], case, folder, precision)


def steps(folder, layout, options, first, count, saved=None, resumed=None):
    """Return losses of some steps, and the optimizer's state in elements per parameter."""
    tp, pp, dp = layout
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp, dp=dp, **options).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if resumed:
        load_checkpoint(model, resumed, optimizer)
    rows = 4 // dp
    part = slice(model.mesh.coord("dp") * rows, (model.mesh.coord("dp") + 1) * rows)
    losses = []
    for step in range(first, first + count):
        loss = model.train_step({k: v[part] for k, v in batch_of(GPT2, step).items()})
        losses.append((float(loss), float(model.clip_grad_norm_(1.0))))
        optimizer.step()
        optimizer.zero_grad()
    if saved:
        save_checkpoint(model, saved, optimizer)
    states = sum(v.numel() for s in optimizer.state.values() for v in s.values() if v.ndim)
    return losses, states, sum(p.numel() for p in model.parameters())


SHARDED = {"dp_shard": 2}
PAIRS = [((1, 1, 2), SHARDED, (1, 1, 1), {}), ((1, 1, 1), {}, (1, 1, 2), SHARDED),
         ((1, 2, 2), SHARDED, (2, 1, 2), SHARDED)]  # fmt: skip


MORE_PAIRS = [
    ((1, 1, 4), SHARDED | {"zero_stage": 2}, (1, 1, 4), {"dp_shard": 4}),
    ((1, 2, 2), SHARDED | {"pipeline_order": "zbv"}, (1, 1, 2), SHARDED | {"zero_stage": 1}),
    ((2, 1, 2), SHARDED | {"zero_stage": 1}, (1, 2, 1), {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("wrote", "with_", "reads", "then"),
    PAIRS + [pytest.param(*pair, marks=pytest.mark.slow) for pair in MORE_PAIRS],
    ids=str,
)
def test_training_with_dp_shard_resumed_on_another_layout_equals_an_uninterrupted_run(
    wrote, with_, reads, then, root, ranks, tmp_path
):
    folder, worlds = checkpoint(GPT2, root), [a * b * c for a, b, c in (wrote, reads)]
    (whole,) = ranks.run(steps, 1, folder, (1, 1, 1), {}, 0, 2)
    first = ranks.run(steps, worlds[0], folder, wrote, with_, 0, 1, tmp_path / "saved")
    second = ranks.run(steps, worlds[1], folder, reads, then, 1, 1, None, tmp_path / "saved")
    found = first[0][0] + second[0][0]
    for mine, one in zip(found, whole[0], strict=True):
        assert mine == pytest.approx(one, rel=1e-4)
    if wrote == (1, 1, 2):
        assert sum(states for _, states, _ in first) == whole[1]
        assert sum(held for _, _, held in first) == whole[2]


def read_parts(folder, tp, map_weights):
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, dp_shard=2, map_weights=map_weights)
    held = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    return model.ledger.bytes_read, model.ledger.shard_bytes, held, model.consolidated_state_dict()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("map_weights", [True, False])
@pytest.mark.parametrize(("cls", "tp"), [("GPT2LMHeadModel", 2), ("MixtralForCausalLM", 1)])
def test_load_with_dp_shard_reads_only_the_file_bytes_of_the_shard_of_the_rank(
    cls, tp, map_weights, root, ranks
):
    case = Case(cls, ("tokens",))
    folder = checkpoint(case, root)
    plain = getattr(transformers, cls).from_pretrained(folder).state_dict()
    whole = sum(p.nbytes for p in {x.data_ptr(): x for x in plain.values()}.values())
    found = ranks.run(read_parts, 2 * tp, folder, tp, map_weights)
    for read, shard, held, _ in found:
        assert (
            read <= shard <= held <= 1.2 * whole / 2 / tp + 10_000
        )  # norms are whole on each tp rank
    for name, tensor in found[0][3].items():
        assert torch.equal(tensor, plain[name]), name


def saved_by_rows(folder, layout, saved, size):
    """Save, resume and stream: gathers of a save; most bytes made in it, in times of all
    parts, and in a stream, in times of the largest whole tensor; whether what was streamed came back.
    """
    from slapo_zoo.model.dp.gathered import Shards

    tp, pp, dp = layout
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp, dp=dp, dp_shard=size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    gathers, begin = [], Shards.begin
    Shards.begin = lambda *args: gathers.append(args) or begin(*args)
    try:
        with LiveBytes() as alive:
            save_checkpoint(model, saved / "all", optimizer)
        load_checkpoint(model, saved / "all", optimizer)
        model.save_pretrained(saved / "narrow", dtype="bfloat16")
    finally:
        Shards.begin = begin
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with LiveBytes() as streaming:
        pairs = list(model.stream_weights(ranks=(0,)))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model.load_stream(pairs if model.mesh.rank == 0 else None)
    same = all(torch.equal(before[name], p) for name, p in model.named_parameters())
    parts = [p.nbytes for p in model.parameters()]
    sent = streaming.peak / size / max(parts) if model.mesh.rank else 0  # rank 0 keeps all
    return len(gathers), alive.peak / sum(parts), sent, same


@pytest.mark.parametrize(
    ("cls", "sizes", "layout", "size"),
    [("GPT2LMHeadModel", {"n_embd": 240}, (2, 1, 2), 2),
     ("MixtralForCausalLM", {"intermediate_size": 1024}, (1, 1, 2), 2)],
)  # fmt: skip
def test_save_with_dp_shard_runs_no_gather_and_writes_the_files_of_one_rank(
    cls, sizes, layout, size, root, ranks, tmp_path
):
    case = Case(cls, ("tokens",), tuple(sizes.items()))
    folder = checkpoint(case, root)
    found = ranks.run(saved_by_rows, layout[0] * layout[2], folder, layout, tmp_path / "rows", size)
    ranks.run(saved_by_rows, 1, folder, (1, 1, 1), tmp_path / "one", 1)
    for gathers, peak, sent, same in found:
        assert gathers == 0
        assert peak < 0.5  # with unsharded parameters and states it would be 6
        assert sent < 6  # 2.8, and 4.7 while gloo holds the last gather; of a whole stage >= 8
        assert same
    for name in ("narrow/model.safetensors", "all/model.safetensors", "all/optimizer.safetensors"):
        one, rows = (load_file(tmp_path / n / name) for n in ("one", "rows"))
        assert one.keys() == rows.keys()
        assert all(torch.equal(rows[key], tensor) for key, tensor in one.items())


HSDP = [((1, 1, 4), {})]
MORE_HSDP = [
    ((1, 2, 4), {"zero_stage": 2, "pipeline_order": "1f1b"}),
    ((1, 2, 4), {"pipeline_order": "zbv"}), ((2, 1, 4), {"zero_stage": 1}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "options"), HSDP + [pytest.param(*c, marks=pytest.mark.slow) for c in MORE_HSDP]
)
def test_dp_4_as_two_replicas_of_two_shards_has_the_losses_of_one_process(
    layout, options, root, ranks
):
    """dp=4 with dp_shard=2 is two replicas, each sharded over two ranks."""
    folder, world = checkpoint(GPT2, root), layout[0] * layout[1] * layout[2]
    (whole,) = ranks.run(steps, 1, folder, (1, 1, 1), {}, 0, 2)
    for found, *_ in ranks.run(steps, world, folder, layout, options | SHARDED, 0, 2):
        for mine, one in zip(found, whole[0], strict=True):
            assert mine == pytest.approx(one, rel=1e-4)


def refused(folder):
    model = AutoScheduledModel.from_pretrained(folder, dp_shard=2).train()
    said = []
    try:
        torch.optim.Adafactor(model.parameters()).step()
    except SlapoError as error:
        said.append(str(error))
    with torch.no_grad():
        return said, model.eval()(**batch_of(GPT2)).loss.item()


def copied(folder, stage):
    """Return the next gradients of a model with a frozen weight, and of its copy."""
    model = AutoScheduledModel.from_pretrained(folder, dp_shard=2, zero_stage=stage).train()
    model.transformer.wpe.weight.requires_grad_(False)
    average = copy.deepcopy(model)
    rows = slice(2 * model.mesh.rank, 2 * model.mesh.rank + 2)
    for one in (average, model):
        one.train_step({k: v[rows] for k, v in batch_of(GPT2).items()}, 2)
    return [{n: p.grad for n, p in one.named_parameters()} for one in (model, average)]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepcopy_of_a_dp_shard_model_with_a_frozen_weight_has_the_gradients_of_the_original(
    stage, root, ranks
):
    for mine, average in ranks.run(copied, 2, checkpoint(GPT2, root), stage):
        assert mine.pop("transformer.wpe.weight") is average.pop("transformer.wpe.weight") is None
        assert all(torch.equal(grad, average[name]) for name, grad in mine.items())


DEEP = Case("GPT2LMHeadModel", ("tokens",), (("n_layer", 8), ("n_embd", 60)))
RECOMPUTED = {
    "nothing": {}, "blocks": {"checkpoint_ratio": 1.0},
    "all but products": {"checkpoint_ratio": 1.0, "checkpoint_policy": "save_matmuls"},
    "nothing, on the host": {"checkpoint_ratio": 1.0, "checkpoint_policy": "offload"},
    "a part of a block": {"schedule": extend(lambda sch: sch["transformer.h.*.mlp"].checkpoint())},
}  # fmt: skip


def stages_of_zero(folder, recomputed, order):
    """Return gradients, an evaluation and the peak bytes within a step, of ZeRO stages 2 and 3."""
    found, pp = [], 2 if order else 1
    more = {"pipeline_order": order} if order else {}
    for stage in (2, 3):
        options = {**RECOMPUTED[recomputed], **more, "pp": pp, "precision": "bf16"}
        model = AutoScheduledModel.from_pretrained(folder, dp_shard=2, zero_stage=stage, **options)
        rows = slice(2 * model.mesh.coord("dp"), 2 * model.mesh.coord("dp") + 2)
        batch = {k: v[rows] for k, v in batch_of(DEEP).items()}
        with LiveBytes() as bytes_:
            loss = model.train().train_step(batch, 2)
        grads = {name: p.grad for name, p in model.named_parameters()}
        with torch.no_grad():
            again = model.eval()(**batch).loss
        found.append((loss, grads, again, bytes_.peak, sum(g.nbytes for g in grads.values())))
        assert not any("weight" in m.__dict__ for m in model.modules())
    return found


IN_STAGES = [pytest.param(name, "interleaved_1f1b", marks=[pytest.mark.slow] * (name != "blocks"))
             for name in RECOMPUTED]  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("recomputed", "order"), [(name, "") for name in RECOMPUTED] + IN_STAGES)
def test_zero3_has_the_gradients_of_zero2_with_a_smaller_memory_peak(
    recomputed, order, root, ranks
):
    for two, three in ranks.run(stages_of_zero, 4 if order else 2, checkpoint(DEEP, root), recomputed, order):  # fmt: skip
        assert torch.equal(two[0], three[0])
        assert torch.equal(two[2], three[2])
        assert all(torch.equal(grad, three[1][name]) for name, grad in two[1].items())
        parts = two[4]  # a rank's rows in fp32 are as large as whole 16-bit tensors of the stage
        assert three[3] < two[3] - 0.4 * parts


def adapted(folder, layout, saved, **options):
    """Return losses of three steps of an adapter alone, and its gradients."""
    import peft

    tp, pp, dp = layout
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp, dp=dp, **options).train()
    model.add_adapter(peft.LoraConfig(r=3, target_modules=["c_attn", "c_fc", "c_proj"], init_lora_weights=False, fan_in_fan_out=True))  # fmt: skip
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    rows, first = 4 // dp, model.mesh.coord("dp")
    losses = []
    for step in range(3):
        batch = {k: v[first * rows : (first + 1) * rows] for k, v in batch_of(GPT2, step).items()}
        optimizer.zero_grad()
        losses.append((float(model.train_step(batch)), float(model.clip_grad_norm_(1.0))))
        optimizer.step()
    model.save_adapter(saved)
    return losses, model.get_adapter_state_dict(grads=True)


def shared_adapter(folder, layout, saved, stage):
    return adapted(folder, layout, saved, dp_shard=2, zero_stage=stage)


@pytest.mark.parametrize(("layout", "stage"), [((1, 1, 2), 3), ((1, 2, 2), 2)], ids=str)
def test_lora_adapter_with_dp_shard_has_the_gradients_of_one_process(
    layout, stage, root, ranks, tmp_path
):
    folder = checkpoint(GPT2, root)
    ((want, wanted),) = ranks.run(adapted, 1, folder, (1, 1, 1), tmp_path / "one")
    world = layout[1] * layout[2]
    found = ranks.run(shared_adapter, world, folder, layout, tmp_path / "shared", stage)
    for losses, _ in found:
        for mine, one in zip(losses, want, strict=True):
            assert mine == pytest.approx(one, rel=1e-4)
    for name, grad in wanted.items():
        torch.testing.assert_close(found[0][1][name], grad, atol=1e-6, rtol=1e-4)
    one, shared = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("one", "shared"))
    for name, tensor in one.items():
        torch.testing.assert_close(shared[name], tensor, atol=1e-5, rtol=1e-4)


def adapted_by_hand(folder, **options):
    """Return gradients of an adapter after two backwards of a hand-written loop."""
    import peft

    model = AutoScheduledModel.from_pretrained(folder, dp=2, **options).train()
    model.add_adapter(peft.LoraConfig(r=3, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True))  # fmt: skip
    rows = slice(2 * model.mesh.rank, 2 * model.mesh.rank + 2)
    for step in range(2):
        model(**{k: v[rows] for k, v in batch_of(GPT2, step).items()}).loss.backward()
    return model.get_adapter_state_dict(grads=True)


@pytest.mark.parametrize("stage", [1, 3])
def test_lora_gradients_with_dp_shard_in_a_hand_written_loop_equal_those_without_dp_shard(
    stage, root, ranks
):
    folder = checkpoint(GPT2, root)
    want = ranks.run(adapted_by_hand, 2, folder)
    for mine, other in zip(ranks.run(by_hand_over_shards, 2, folder, stage), want, strict=True):
        assert mine.keys() == other.keys()
        for name, grad in mine.items():
            torch.testing.assert_close(grad, other[name], atol=1e-6, rtol=1e-4)


def by_hand_over_shards(folder, stage):
    return adapted_by_hand(folder, dp_shard=2, zero_stage=stage)


def test_dp_shard_with_an_unsupported_size_engine_or_optimizer_is_refused(root, ranks):
    with pytest.raises(MeshError, match=r"does not divide dp=4[\s\S]*nearest is 2"):
        check_dp_shard(Mesh(dp=4), 3, 3)
    with pytest.raises(MeshError, match=r"zero_stage=2: with dp_shard=1[\s\S]*also pass dp_shard="):
        check_dp_shard(Mesh(dp=4), 1, 2)
    with pytest.raises(MeshError, match="engine shards parameters itself"):
        check_dp_shard(Mesh(dp=4), 2, 3, "deepspeed")
    said, loss = ranks.run(refused, 2, checkpoint(GPT2, root))[0]
    assert "element by element" in said[0]
    assert loss > 0
