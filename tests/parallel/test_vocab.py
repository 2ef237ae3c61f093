"""Vocabulary sharded over tp: the logits, their loss, and ties across stages.

The embedding, with every id on every rank: tests/house/test_known_defects.py.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from parity import EPS, LEARNING_RATE, ROWS, Case, batch_of, checkpoint, tiny_config
from sharded_logits import wrapped
from slapo_zoo import AutoScheduledModel, Mesh
from slapo_zoo.errors import RankError
from slapo_zoo.kernels.loss.vocab_logits import VocabLogits
from slapo_zoo.parallel.placement import Placement

VOCAB = Placement(0, pad=True)


def world():
    return Mesh(tp=dist.get_world_size(), rank=dist.get_rank())


# --- the logits ---------------------------------------------------------------------------------


BEHAVIOURS = {
    "shape": lambda x: tuple(x.shape),
    "size": lambda x: (tuple(x.size()), x.size(-1), x.size(0), x.size(dim=-1)),
    "dim": lambda x: (x.dim(), x.ndim, x.dtype, x.device, x.is_floating_point()),
    "numel": lambda x: x.numel(),
    "len": len,
    "rows": lambda x: x[0],
    "shifted": lambda x: x[:, :-1, :],
    "shifted_dots": lambda x: x[..., :-1, :].contiguous(),
    "newaxis": lambda x: x[None],
    "last_token": lambda x: x[:, -1],
    "picked": lambda x: x[torch.arange(2), torch.tensor([1, 0])],
    "mask": lambda x: x[torch.ones(2, 3, dtype=torch.bool)],
    "column": lambda x: x[..., 4],
    "columns": lambda x: x[:, :, 1:4],
    "dots_columns": lambda x: x[..., 3:],
    "element": lambda x: x[0, 1, 2],
    "full_mask": lambda x: x[x > 0].numel(),
    "view": lambda x: x.view(-1, x.size(-1)),
    "view_shape": lambda x: x.view(-1, x.shape[-1]).shape,
    "reshape": lambda x: x.reshape((6, x.shape[-1])),
    "flat": lambda x: x.reshape(-1),
    "split_vocab": lambda x: x.reshape(2, 3, x.shape[-1], 1),
    "view_dtype": lambda x: x.detach().view(torch.int32),
    "double": lambda x: x.double(),
    "type": lambda x: (x.type(), x.type(torch.float64)),
    "to": lambda x: x.to(torch.float64).float(),
    "transposed": lambda x: x.transpose(1, 2),
    "permuted": lambda x: x.permute(2, 0, 1),
    "argmax": lambda x: x.argmax(-1),
    "argmax_all": lambda x: x.argmax(),
    "max": lambda x: x.max(dim=-1).values,
    "topk": lambda x: x.topk(2, dim=-1).indices,
    "sum": lambda x: x.sum(-1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: functional.log_softmax(x, dim=-1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "gather": lambda x: x.gather(-1, torch.tensor([[[0], [4], [2]]] * 2)),
    "arithmetic": lambda x: (x * 2 + 1 - x / 3).exp(),
    "scaled": lambda x: (2 * x, x * torch.tensor(2.0), x / torch.full((2, 3, 1), 3.0), x.mul(3)),
    "capped": lambda x: torch.tanh(x / 30.0) * 30.0,
    "biased": lambda x: (x + torch.arange(x.shape[-1]), torch.add(x, torch.ones(1, x.shape[-1]))),
    "biased_and_learned": lambda x: x + torch.ones(x.shape[-1], requires_grad=True),
    "more_rows": lambda x: x - torch.ones(2, 1, 1, x.shape[-1]),
    "alpha": lambda x: x.add(1.0, alpha=2.0),
    "reversed": lambda x: 1 - x,
    "two": lambda x: x + x,
    "cat": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x]),
    "where": lambda x: torch.where(torch.ones(2, 3, 1, dtype=torch.bool), x, torch.zeros(())),
    "unbind": lambda x: list(x.unbind(1)),
    "numpy": lambda x: x.detach().numpy().tolist(),
    "tolist": lambda x: x.tolist(),
    "clone": lambda x: x.clone().detach(),
    "equal": lambda x: torch.equal(x, x.clone()),
}


def plain(value):
    """Return the full logits, as a user sees them."""
    if isinstance(value, VocabLogits):
        return value.gathered().detach()
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(plain(v) for v in value)
    return value.detach() if isinstance(value, torch.Tensor) else value


def behave(full):
    _, logits = wrapped(full)
    return {name: plain(of(logits)) for name, of in BEHAVIOURS.items()}


def same(name, found, want):
    assert type(found) is type(want), name
    if isinstance(want, torch.Tensor):
        assert found.shape == want.shape, name
        assert found.dtype == want.dtype, name
        torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6, msg=name)  # sums
    elif isinstance(want, list | tuple) and any(isinstance(v, torch.Tensor) for v in want):
        for a, b in zip(found, want, strict=True):
            same(name, a, b)
    else:
        assert found == want, name


@pytest.mark.one_in(2)
@pytest.mark.parametrize("size", [5, 11])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_tensor_operations_on_sharded_logits_give_the_results_of_full_logits(n, size, ranks):
    """Sizes include V=5 on 4 ranks, of which the last holds only padding."""
    full = torch.randn(2, 3, size)
    want = {name: plain(of(full)) for name, of in BEHAVIOURS.items()}
    for found in ranks.run(behave, n, full):
        for name in BEHAVIOURS:
            same(name, found[name], want[name])


# --- the loss -----------------------------------------------------------------------------------

LOSSES = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignore": {"ignore_index": 3},
    "smooth": {"label_smoothing": 0.1},
    "smooth-sum": {"label_smoothing": 0.3, "reduction": "sum"},
    "smooth-none": {"label_smoothing": 1.0, "reduction": "none", "ignore_index": 0},
    "weight": {"weight": torch.linspace(0.5, 2.0, 11)},
}
TARGETS = torch.tensor([[0, 3, -100, 10], [10, 5, 6, -100]])


def labels_for(targets, options):
    """Return labels of which some have the ignored number."""
    return targets.flatten().masked_fill(
        targets.flatten() == -100, options.get("ignore_index", -100)
    )


def parallel_losses(full, targets):
    """name -> (loss, the local gradient), for flat logits; and the form with [N, V, S]."""
    found = {}
    for name, options in LOSSES.items():
        local, logits = wrapped(full.clone())
        flat = logits[:, :-1].reshape(-1, logits.shape[-1])
        labels = labels_for(targets, options)
        loss = functional.cross_entropy(flat, labels, **options)
        loss.sum().backward()
        found[name] = loss.detach(), local.grad
    local, logits = wrapped(full.clone())
    loss = functional.cross_entropy(logits[:, :-1].transpose(1, 2), targets)
    loss.backward()
    return found | {"classes-inside": (loss.detach(), local.grad)}


def plain_losses(full, targets):
    found = {}
    for name, options in [*LOSSES.items(), ("classes-inside", {})]:
        logits = full.clone().requires_grad_()
        flat = logits[:, :-1].reshape(-1, full.shape[-1])
        loss = functional.cross_entropy(flat, labels_for(targets, options), **options)
        loss.sum().backward()
        found[name] = loss.detach(), logits.grad
    return found


def compare_losses(full, targets, n, r, found):
    share = -(-full.shape[-1] // n)
    for name, (want, grad) in plain_losses(full, targets).items():
        loss, local = found[name]
        torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-6, equal_nan=True, msg=name)
        part = grad[..., r * share : (r + 1) * share]
        padding = local[..., part.shape[-1] :]
        torch.testing.assert_close(
            local[..., : part.shape[-1]], part, rtol=1e-5, atol=1e-7, equal_nan=True, msg=name
        )
        if not want.isnan().any():
            assert padding.eq(0).all(), name


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_vocab_parallel_loss_and_gradient_equal_torch_cross_entropy(n, scale, ranks):
    """Huge logits do not overflow, and padded columns that hold 1e9 do not enter the loss."""
    full = torch.randn(2, 5, 11) * scale
    for r, found in enumerate(ranks.run(parallel_losses, n, full, TARGETS)):
        compare_losses(full, TARGETS, n, r, found)


@pytest.mark.parametrize("n", [2, 4])
def test_vocab_parallel_loss_with_all_labels_ignored_is_nan(n, ranks):
    full, ignored = torch.randn(2, 5, 11), torch.full((2, 4), -100)
    assert plain_losses(full, ignored)["mean"][0].isnan()
    for r, found in enumerate(ranks.run(parallel_losses, n, full, ignored)):
        compare_losses(full, ignored, n, r, found)


def backward_twice(full, targets):
    local, logits = wrapped(full)
    loss = functional.cross_entropy(logits.view(-1, full.shape[-1]), targets)
    loss.backward(retain_graph=True)
    once = local.grad.clone()
    loss.backward()
    assert torch.equal(local.grad, 2 * once)


def test_vocab_parallel_loss_backward_runs_twice_with_retain_graph(ranks):
    ranks.run(backward_twice, 2, torch.randn(6, 11), torch.arange(6))


def gathered_gradient(full, upstream):
    """Return this rank's gradient through an operation that needs all columns."""
    local, logits = wrapped(full)
    (logits.softmax(-1) * upstream).sum().backward()
    return local.grad


@pytest.mark.parametrize("n", [2, 4])
def test_logits_gathered_from_vocabulary_shards_have_the_gradient_of_full_logits(n, ranks):
    full, upstream = torch.randn(3, 11), torch.randn(3, 11)
    leaf = full.clone().requires_grad_()
    (leaf.softmax(-1) * upstream).sum().backward()
    share = -(-11 // n)
    want = functional.pad(leaf.grad, (0, share * n - 11)).split(share, -1)
    for r, grad in enumerate(ranks.run(gathered_gradient, n, full, upstream)):
        torch.testing.assert_close(grad, want[r])


# --- a whole model ------------------------------------------------------------------------------

HUGE = 1e6


def with_huge_padding(folder, batch):
    """Put huge values into the padded rows of the head (and bias), then predict and train."""
    model = AutoScheduledModel.from_pretrained(folder, tp=4)
    runs = VOCAB.runs(99, 4, model.mesh.rank)
    real = sum(stop - start for start, stop in runs)
    with torch.no_grad():
        for parameter in model.get_output_embeddings().parameters():
            parameter[real:] = HUGE
    output = model(**batch)
    loss = model.train_step(batch)
    grads = [p.grad[real:].abs().max() for p in model.get_output_embeddings().parameters()
             if len(p) > real]  # fmt: skip
    return output.logits.detach(), loss, grads


@pytest.mark.parametrize("cls", ["GPT2LMHeadModel", "BertForMaskedLM"])
def test_argmax_of_sharded_logits_never_selects_padding_rows_of_the_vocabulary(
    cls, threads, tmp_path
):
    case = Case(cls, ("tokens",))
    folder, batch = checkpoint(case, tmp_path), batch_of(case)
    model = tiny_config(case)[1].from_pretrained(folder).eval()
    with torch.no_grad():
        want = model(**batch)
    seen = 0
    for logits, loss, grads in threads.run(with_huge_padding, 4, folder, batch):
        assert logits.shape[-1] == 99
        assert torch.equal(logits.argmax(-1), want.logits.argmax(-1))
        torch.testing.assert_close(logits, want.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(loss, want.loss, rtol=1e-5, atol=1e-5)
        assert all(grad == 0 for grad in grads)
        seen += len(grads)
    assert seen > 0  # 99 rows on 4 ranks: one is padding


def tied_training(folder, case, tp, pp):
    """Each step: this rank's copies of the tied tensor and their gradients, by stage."""
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS)
    model.train()
    group, seen = model.mesh.group("pp"), []
    for step in range(2):
        optimizer.zero_grad()
        model.train_step(batch_of(case, step))
        (mine,) = tied_copies(model)
        both = partial(gather_equal, group)
        grads = both(mine.grad)
        model.clip_grad_norm_(1.0)
        clipped = both(mine.grad)
        optimizer.step()
        seen.append((grads, clipped, both(mine.detach()), mine.abs().sum().item()))
    return seen


def tied_copies(model):
    """The parameters of this stage that are the embedding or the head."""
    names = ("wte.weight", "lm_head.weight", "word_embeddings.weight", "decoder.weight")
    return list({id(p): p for n, p in model.named_parameters() if n.endswith(names)}.values())


def gather_equal(group, x):
    each = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(each, x.detach().contiguous(), group=group)
    return bool(x.abs().sum() > 0) and all(torch.equal(x.detach(), other) for other in each)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 2), (1, 3)])
@pytest.mark.parametrize("cls", ["GPT2LMHeadModel", "BertForMaskedLM"])
def test_weight_tied_over_first_and_last_stage_is_bit_equal_after_every_step(
    cls, tp, pp, threads, tmp_path
):
    """The embedding is on the first stage, the tied head on the last: equal bits after every step.

    With three stages the middle one holds neither.
    """
    case = Case(cls, ("tokens",))
    folder = checkpoint(case, tmp_path)
    if pp == 3:
        first, middle, last = threads.run(tied_of_three, 3, folder, case)
        assert middle == []
        assert torch.equal(*first, *last)
        return
    for seen in threads.run(tied_training, tp * pp, folder, case, tp, pp):
        assert [flags for *flags, _ in seen] == [[True, True, True]] * 2
        assert len({total for *_, total in seen}) == 2  # they did change


def tied_of_three(folder, case):
    model = AutoScheduledModel.from_pretrained(folder, pp=3).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS)
    for step in range(2):
        optimizer.zero_grad()
        model.train_step(batch_of(case, step), micro_batches=ROWS)
        model.clip_grad_norm_(1.0)
        optimizer.step()
    return [p.detach() for p in tied_copies(model)]


def out_of_range(folder, batch):
    model = AutoScheduledModel.from_pretrained(folder, tp=2).train()
    with pytest.raises((RuntimeError, RankError)) as caught:
        model.train_step(batch)
    return str(caught.value), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("bad", [99, 1000, -1])
@pytest.mark.parametrize("name", ["input_ids", "labels"])
def test_vocab_parallel_embedding_with_ids_beyond_the_vocabulary_raises(name, bad, ranks, tmp_path):
    """nn.Embedding raises too; a row of zeros for an unknown id would be a silent error."""
    case = Case("GPT2LMHeadModel", ("tokens",))
    batch = batch_of(case)
    batch[name][1, 2] = bad
    what = {"input_ids": "transformer.wte: ids", "labels": "labels"}[name]
    for text, grads in ranks.run(out_of_range, 2, checkpoint(case, tmp_path), batch):
        assert f"{what}: found one beyond 0..98" in text
        assert "tokenizer of this model" in text
        assert grads == []
