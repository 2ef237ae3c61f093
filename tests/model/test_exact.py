"""`exact=`: training has the same bits on every mesh whose sizes divide those of the virtual mesh."""

import os
import signal
from itertools import product
from math import prod

import pytest
import torch
import transformers

from parity import Case, batch_of, checkpoint
from slapo_zoo import AutoScheduledModel, emulate, load_checkpoint, save_checkpoint
from slapo_zoo.errors import MeshError, RankError
from slapo_zoo.parallel.ranks.launch import run_local

GPT2 = Case("GPT2LMHeadModel", ("tokens",), dropout=0.1, rows=8)
BERT = Case("BertForMaskedLM", ("tokens",), dropout=0.1, rows=8)
T5 = Case("T5ForConditionalGeneration", ("tokens",), dropout=0.1, rows=8)
LLAMA = Case("LlamaForCausalLM", ("tokens",), (("num_key_value_heads", 1),), dropout=0.1, rows=8)
OPT = Case("OPTForCausalLM", ("tokens",), dropout=0.1, rows=8)
VIT = Case("ViTForImageClassification", ("class",), (("num_labels", 3),), dropout=0.1, rows=8)
FAMILIES = (GPT2, BERT, T5, LLAMA, OPT, VIT)
SP, ZERO = {"sequence_parallel": True}, {"dp_shard": 2}
# Each row: case, options, and the virtual mesh as tp, pp, dp. ViT shards n * n + 1 tokens, which 4 never divides, so it
# shards them (10 here) with tp 2 only.
RUNS = [
    *((case, {} if case is VIT else SP, (4, 2, 2)) for case in FAMILIES), (VIT, SP, (2, 2, 2)),
    *((case, SP | {"precision": "bf16"}, (4, 2, 2)) for case in (GPT2, BERT, T5)),
    (GPT2, SP | ZERO, (2, 2, 2)), (BERT, SP | ZERO, (2, 1, 2)),
]  # fmt: skip
PATIENCE = 600.0  # seconds that a slow run of 16 ranks may take on two cores
SEVERAL = [(T5, SP, (2, 2, 1), (2, 1, 1)), (BERT, ZERO, (2, 1, 2), (1, 1, 2))]


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("exact")


def divisors(virtual):
    """All real meshes (tp, pp, dp) of at most 8 processes whose sizes divide those of a virtual mesh."""
    every = product(*([n for n in range(1, size + 1) if size % n == 0] for size in virtual))
    return [real for real in every if prod(real) <= 8]


def load(folder, case, real, virtual, options):
    cls = getattr(transformers, case.cls)
    sizes, exact = (dict(zip(("tp", "pp", "dp"), mesh, strict=True)) for mesh in (real, virtual))
    model = AutoScheduledModel.from_pretrained(
        folder, **sizes, auto_class=cls, seed=3, exact=exact, **options
    )
    model.train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def own_rows(case, step, mesh):
    """This process's rows of the batch of all."""
    batch = batch_of(case, step)
    rows = case.rows // mesh.dp
    first = mesh.coord("dp") * rows
    return {name: value[first : first + rows] for name, value in batch.items()}


def steps(model, optimizer, case, numbers):
    """(loss, norm, digest) of each step of AdamW."""
    found = []
    for number in numbers:
        loss = model.train_step(own_rows(case, number, model.mesh), micro_batches=2)
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss), float(norm), model.step_digest()))
    return found


def train(folder, case, real, virtual, options, count):
    model, optimizer = load(folder, case, real, virtual, options)
    try:
        return steps(model, optimizer, case, range(count))
    finally:
        model.close()


def train_rank(folder, case, virtual, options, count):
    """The same loop by the model of one rank, which is not `exact`: (loss, norm) of each step."""
    model = AutoScheduledModel.from_pretrained(
        folder, tp=virtual[0], pp=virtual[1], dp=virtual[2], seed=3,
        auto_class=getattr(transformers, case.cls), **options,
    )  # fmt: skip
    model.train()
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for number in range(count):
        loss = model.train_step(own_rows(case, number, model.mesh), micro_batches=2)
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss), float(norm)))
    return found


@pytest.mark.parametrize(("case", "options", "virtual", "real"), SEVERAL)
def test_bit_exact_mode_training_on_several_ranks_is_bit_equal_to_one_rank(
    case, options, virtual, real, root, ranks
):
    folder = checkpoint(case, root)
    (one,) = ranks.run(train, 1, folder, case, (1, 1, 1), virtual, options, 2)
    found = ranks.run(train, prod(real), folder, case, real, virtual, options, 2)
    assert found == [one] * prod(real)
    assert len({digest for *_, digest in one}) == 2
    ranked = emulate(train_rank, folder, case, virtual, options, 2, mesh=virtual)
    assert ranked[0] == [(loss, norm) for loss, norm, _ in one]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("case", "options", "virtual"), RUNS)
def test_ten_training_steps_in_bit_exact_mode_are_bit_equal_on_all_meshes(
    case, options, virtual, root, ranks
):
    folder = checkpoint(case, root)
    (one,) = ranks.run(train, 1, folder, case, (1, 1, 1), virtual, options, 10, timeout=PATIENCE)
    for real in divisors(virtual):
        found = ranks.run(
            train, prod(real), folder, case, real, virtual, options, 10, timeout=PATIENCE
        )
        assert found == [one] * prod(real), real


def loop(folder, case, real, virtual, exact):
    """A loop of one's own: the model's loss, then a loss of the logits; (digests | norms) of the steps."""
    sizes = dict(zip(("tp", "pp", "dp"), real, strict=True))
    exact = {"exact": dict(zip(("tp", "pp", "dp"), virtual, strict=True))} if exact else {}
    model = AutoScheduledModel.from_pretrained(folder, **sizes, seed=3, **exact)
    model.train()
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(2):
        batch = own_rows(case, step, model.mesh)
        if step % 2 and virtual[2] == 1:
            logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
            loss = logits.float().log_softmax(-1).square().mean()
        else:
            loss = model(**batch).loss
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(norm), model.step_digest() if exact else ""))
    with torch.no_grad():
        model.eval()
        shape = tuple(model(**own_rows(case, 9, model.mesh)).logits.shape)
    if exact:
        model.close()
    return found, shape


def load_again(folder):
    """Return the losses of one step of three models, each closed before the next is loaded."""
    losses = []
    for virtual in ((2, 1, 2), (2, 1, 2), (2, 2, 1)):
        losses.append(train(folder, GPT2, (2, 1, 1), virtual, {}, 1)[0][0])
    return losses


def test_bit_exact_model_is_loaded_again_after_close_by_the_same_processes(root, ranks):
    first, other = ranks.run(load_again, 2, checkpoint(GPT2, root), timeout=60.0)
    assert first == other
    assert first[0] == first[1] == pytest.approx(first[2], rel=1e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", [GPT2, BERT], ids=lambda case: case.cls)
def test_hand_written_loop_in_bit_exact_mode_is_bit_equal_on_several_meshes(case, root, ranks):
    folder, virtual = checkpoint(case, root), (2, 1, 2) if case is GPT2 else (4, 1, 1)
    ((one, shape),) = ranks.run(loop, 1, folder, case, (1, 1, 1), virtual, True)
    assert shape[0] == case.rows
    for real in ((2, 1, 1), (1, 1, 2) if virtual[2] > 1 else (4, 1, 1)):
        for found, _ in ranks.run(loop, prod(real), folder, case, real, virtual, True):
            assert found == one, real
    ranked, _ = emulate(loop, folder, case, virtual, virtual, False, mesh=virtual)[0]
    assert [norm for norm, _ in ranked] == [norm for norm, _ in one]


class OwnAdamW(torch.optim.AdamW):
    """An optimizer that is not torch's own: the caller's thread steps the parameters of all ranks."""


def loop_with_a_head(folder, cls):
    """Train one process with two hosted ranks and a head beside the model; (digests, head, gradients that a hook saw)."""
    model = AutoScheduledModel.from_pretrained(folder, exact={"tp": 2}, seed=3)
    torch.manual_seed(0)
    head = torch.nn.Linear(4, 1)
    optimizer = cls([{"params": list(model.parameters())}, {"params": head.parameters(), "lr": 0.1}], lr=1e-3)  # fmt: skip
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 2)
    seen, found = [], []
    optimizer.register_step_pre_hook(
        lambda own, *_: seen.append(sum(p.grad is not None for g in own.param_groups for p in g["params"]))
    )  # fmt: skip
    for step in range(2):
        model.train_step(batch_of(GPT2, step))
        head(torch.ones(4)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found.append(model.step_digest())
    steps = {float(state["step"]) for state in optimizer.state.values()}
    model.close()
    return found, head.weight.tolist(), seen, steps, len(optimizer.state)


def test_torch_adamw_and_a_user_subclass_of_it_train_equally_in_bit_exact_mode(root, ranks):
    folder = checkpoint(GPT2, root)
    ((found, *rest),) = ranks.run(loop_with_a_head, 1, folder, torch.optim.AdamW)
    ((plain, *same),) = ranks.run(loop_with_a_head, 1, folder, OwnAdamW)
    assert found == plain
    assert rest == same
    assert len(set(found)) == 2


def train_on(folder, case, real, virtual, saved, first, last, kill):
    """Resume from `saved` if it is there, train to step `last`, saving each; `kill`: rank 0 dies at the end."""
    model, optimizer = load(folder, case, real, virtual, {})
    if first:
        load_checkpoint(model, saved, optimizer)
    found = []
    for number in range(first, last):
        found += steps(model, optimizer, case, [number])
        if kill:
            save_checkpoint(model, saved, optimizer, step=number + 1)
    if kill and model.mesh.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    model.close()
    return found


def test_bit_exact_mode_training_killed_and_resumed_on_another_mesh_is_bit_equal_to_one_run(
    root, tmp_path, ranks
):
    folder, virtual = checkpoint(GPT2, root), (2, 2, 1)
    (whole,) = ranks.run(train, 1, folder, GPT2, (1, 1, 1), virtual, {}, 2)
    saved = tmp_path / "saved"
    with pytest.raises(RankError, match="SIGKILL"):
        run_local(train_on, 2, (folder, GPT2, (2, 1, 1), virtual, saved, 0, 1, True), threads=1)
    then = ranks.run(train_on, 2, folder, GPT2, (1, 2, 1), virtual, saved, 1, 2, False)
    assert then == [whole[1:]] * 2


def test_bit_exact_mode_for_tp_3_refuses_to_run_on_tp_2(root, ranks):
    with pytest.raises(
        (MeshError, RankError), match="virtual tp=3 is not a multiple of the real tp=2"
    ):
        ranks.run(train, 2, checkpoint(GPT2, root), GPT2, (2, 1, 1), (3, 1, 1), {}, 1)
