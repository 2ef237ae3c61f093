"""Dropout masks equal one device's on every layout, micro-batch and recomputation.

The reference is plain `transformers` in one process with eager attention, into which the masks of
the random stream are put by hand; so losses, gradients and weights are held to the tolerance of
docs/decisions/0003-relative-tolerance.md, and the masks themselves are compared bit for bit.
"""

import math
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from parity import (
    EPS,
    LEARNING_RATE,
    ROWS,
    STEPS,
    Case,
    Result,
    batch_of,
    cast,
    checkpoint,
    compare,
)
from slapo_zoo import AutoScheduledModel
from slapo_zoo.parallel.rng.device_seeds import drawn_cells, hashed_cells
from slapo_zoo.parallel.rng.layout_independent_random import RandomStream, dropout

P, SEED = 0.1, 7
CASES = {
    "gpt2": Case("GPT2LMHeadModel", ("tokens",), dropout=P),
    "bert": Case("BertForMaskedLM", ("tokens",), dropout=P),
}
MASKS_OF_ALL = {"bert": {"kernels": "reference"}}  # unpadded_encoder draws for real tokens alone
UNPADDED = {"kernels": ["unpadded_encoder", "sparse_mlm_head_loss"]}
# (tp, pp, dp), options of from_pretrained
RUNS = {
    "one": ((1, 1, 1), {}),
    "tp2": ((2, 1, 1), {}),
    "tp4": ((4, 1, 1), {}),
    "pp2": ((1, 2, 1), {}),
    "dp2": ((1, 1, 2), {}),
    "tp2-pp2": ((2, 2, 1), {}),
    "tp2-dp2": ((2, 1, 2), {}),
    "micro2": ((1, 1, 1), {"micro_batches": 2}),
    "recompute": ((1, 1, 1), {"checkpoint_ratio": 1.0}),
    "recompute-half": ((1, 1, 1), {"checkpoint_ratio": 0.5}),
    "recompute-micro2-tp2": ((2, 1, 1), {"checkpoint_ratio": 1.0, "micro_batches": 2}),
    "recompute-pp2": ((1, 2, 1), {"checkpoint_ratio": 0.5, "micro_batches": 4}),
}


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("dropout")


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, eps=EPS)


class MaskedPlain:
    """Plain model whose dropouts take their masks from the random stream.

    Args:
        model: of transformers, with eager attention.
        stream: at the position of the whole batch.
    """

    def __init__(self, model, stream):
        self.model, self.stream, self.site = model, stream, ""
        for path, module in model.named_modules():
            if isinstance(module, nn.Dropout):
                module.forward = partial(self.drop, site=path)
            elif path.endswith((".attn", ".attention.self")):
                module.register_forward_pre_hook(partial(self.enter, path))

    def enter(self, path, module, args):
        self.site = f"{path}.core_attn"

    def drop(self, x, site, heads=()):
        kept = self.stream.keep_mask(x.float(), P, site, heads) > 0
        return x * kept.to(x.dtype) / (1 - P)

    def of_attention(self, weights, p, training):
        assert (p, training) == (P, True)
        return self.drop(weights, self.site, range(weights.shape[1]))

    def loss(self, batch):
        before = nn.functional.dropout
        nn.functional.dropout = self.of_attention
        try:
            return self.model(**batch).loss
        finally:
            nn.functional.dropout = before


@cache
def plain(case, folder, dtype):
    """Run the reference with dropout; parity.plain has none."""
    cls = getattr(transformers, case.cls)
    model = cls.from_pretrained(folder, dtype=dtype, attn_implementation="eager").train()
    stream = RandomStream(SEED, num_rows=ROWS, is_open=True)
    masked, optimizer, losses, norms, grads = MaskedPlain(model, stream), adamw(model), [], [], {}
    for step in range(STEPS):
        stream.step += 1
        loss = masked.loss(cast(batch_of(case, step), dtype))
        optimizer.zero_grad()
        loss.backward()
        grads = grads or {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for n, p in model.named_parameters()
        }
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        losses.append(loss.detach())
    weights = {n: p.detach() for n, p in model.named_parameters()}
    losses_ = [float(loss) for loss in losses]
    return Result(losses[0], {"loss": losses[0]}, grads, norms[0], losses_, weights)


def record_masks(stream):
    """Record every mask that the stream draws from now on: (module, step, first row, heads, kept)."""
    drawn, draw = [], stream.keep_mask

    def keep_mask(x, p, site, heads=(), *first):
        mask = draw(x, p, site, heads, *first)
        assert p == P
        assert set(mask.unique().tolist()) <= {0.0, float(torch.tensor(1.0).div_(1 - P))}
        drawn.append((str(site), stream.step, stream.first_row, tuple(heads), mask > 0))
        return mask

    stream.keep_mask = keep_mask
    return drawn


def peers_hold_the_same(model):
    """Return True where replicated weights are the same bits on all tp ranks."""
    placed = model.schedule.state.placed
    whole = [p.detach().flatten() for n, p in model.named_parameters() if n not in placed]
    mine, group = torch.cat(whole), model.mesh.group("tp")
    if group is None:
        return True
    each = [torch.empty_like(mine) for _ in range(model.mesh.tp)]
    dist.all_gather(each, mine, group=group)
    return all(torch.equal(mine, other) for other in each)


def train(case, folder, layout, options):
    """Run the scheduled model on this rank; return Result (full on rank 0), masks, equality of tp peers."""
    tp, pp, dp = layout
    model = AutoScheduledModel.from_pretrained(folder, tp, pp, dp, seed=SEED, **options).train()
    optimizer, drawn, same = adamw(model), record_masks(model.schedule.state.random), []
    rows = ROWS // dp
    part = slice(model.mesh.coord("dp") * rows, (model.mesh.coord("dp") + 1) * rows)
    losses, grads, norm = [], {}, None
    for step in range(STEPS):
        batch = {k: v[part] for k, v in batch_of(case, step).items()}
        optimizer.zero_grad()
        losses.append(model.train_step(batch))
        if step == 0:
            grads = model.consolidated_state_dict(grads=True)
        new_norm = model.clip_grad_norm_(1.0)
        norm = new_norm if norm is None else norm
        optimizer.step()
        same.append(peers_hold_the_same(model))
    weights = model.consolidated_state_dict()
    losses_ = [float(loss) for loss in losses]
    result = Result(losses[0], {"loss": losses[0]}, grads, norm, losses_, weights)
    return result, drawn, same


@cache
def run(name, run_name, folder, ranks):
    layout, options = RUNS[run_name]
    options = options | MASKS_OF_ALL.get(name, {})
    return ranks.run(train, math.prod(layout), CASES[name], folder, layout, options)


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize("run_name", RUNS)
@pytest.mark.parametrize("name", CASES)
def test_training_with_dropout_on_several_ranks_equals_one_process_with_the_same_masks(
    name, run_name, root, ranks
):
    case = CASES[name]
    folder = checkpoint(case, root)
    truth, plains = plain(case, folder, torch.float64), [plain(case, folder, torch.float32)]
    results = run(name, run_name, folder, ranks)
    compare(results[0][0], plains, truth)
    for result, _, same in results:
        assert same == [True] * STEPS
        assert result.losses == results[0][0].losses  # on every rank
    _masks_are_slices(results, run(name, "one", folder, ranks)[0][1])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("run_name", ["one", "tp2", "dp2", "tp2-dp2"])
def test_dropout_in_an_unpadded_encoder_draws_the_masks_of_the_padded_run(run_name, root, ranks):
    """Real tokens have the same dropout masks with and without padding."""
    case, (layout, options) = CASES["bert"], RUNS[run_name]
    folder = checkpoint(case, root)
    truth, plains = plain(case, folder, torch.float64), [plain(case, folder, torch.float32)]
    options = options | UNPADDED
    results = ranks.run(train, math.prod(layout), case, folder, layout, options)
    compare(results[0][0], plains, truth)
    whole = run("bert", run_name, folder, ranks)
    assert of_attention(results) < of_attention(whole)  # it took no mask of [B, H, S, S]


def of_attention(results):
    return sum(site.endswith("core_attn") for _, drawn, _ in results for site, *_ in drawn)


def _masks_are_slices(results, whole):
    """Fail unless each mask is a slice of a single device's, by batch rows and heads."""
    full = {(site, step): kept for site, step, _, _, kept in whole}
    assert len(full) == len(whole)
    seen = set()
    for _, drawn, _ in results:
        for site, step, first, heads, kept in drawn:
            want = full[site, step][first : first + len(kept)]
            want = want[:, list(heads)] if heads else want
            assert torch.equal(kept, want), (site, step)
            cells = heads or (0,)
            seen |= {(site, step, first + i, head) for i in range(len(kept)) for head in cells}
    assert seen == {  # and together they are all of it
        (site, step, row, head)
        for site, step, _, heads, _ in whole
        for row in range(ROWS)
        for head in heads or (0,)
    }


@pytest.mark.parametrize("name", CASES)
def test_dropout_masks_differ_between_heads_rows_train_steps_layers_and_seeds(name, root, ranks):
    """Heads on two tp ranks, two rows, two steps, two dropouts and two seeds never have the same mask."""
    first, second = (r[1] for r in run(name, "tp2", checkpoint(CASES[name], root), ranks))
    attention = [
        (a[4], b[4]) for a, b in zip(first, second, strict=True) if a[0].endswith("core_attn")
    ]
    others = [
        (a[4], b[4]) for a, b in zip(first, second, strict=True) if not a[0].endswith("core_attn")
    ]
    assert len(attention) == 3 * STEPS
    for mine, other in attention:  # 3 and 2 of 5 heads
        assert (mine.shape[1], other.shape[1]) == (3, 2)
        assert not torch.equal(mine[:, :2], other)
        assert not torch.equal(mine[:, 0], mine[:, 1])
        assert not torch.equal(mine[0], mine[1])
    assert others
    assert all(torch.equal(mine, other) for mine, other in others)
    by_site = {(site, step): kept for site, step, _, _, kept in first}
    sites = {site for site, _ in by_site}
    assert all(not torch.equal(by_site[site, 1], by_site[site, 2]) for site in sites)
    drawn = [kept for (_, step), kept in by_site.items() if step == 1]
    assert not any(
        a.shape == b.shape and torch.equal(a, b)
        for i, a in enumerate(drawn)
        for b in drawn[:i]
    )  # fmt: skip


def evaluate(case, folder, tp, pp):
    """Return logits of eval() before and after training forwards, and the masks drawn for them."""
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp, seed=SEED)
    batch = batch_of(case)
    before = model(**batch).logits.detach()
    drawn = record_masks(model.schedule.state.random)
    model.train()
    trained = [model(**batch).logits.detach() for _ in range(2)]
    count = len(drawn)
    model.eval()
    after = model(**batch).logits.detach()
    return before, trained, after, count, len(drawn)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("name", CASES)
def test_model_in_eval_mode_draws_no_dropout_mask(name, tp, pp, root, ranks):
    case = CASES[name]
    folder = checkpoint(case, root)
    model = getattr(transformers, case.cls).from_pretrained(folder).eval()
    with torch.no_grad():
        want = model(**batch_of(case)).logits
    for before, trained, after, count, last in ranks.run(evaluate, tp * pp, case, folder, tp, pp):
        torch.testing.assert_close(before, want, rtol=1e-4, atol=1e-4)
        assert torch.equal(before, after)
        assert last == count > 0
        assert not torch.equal(trained[0], trained[1])  # two steps, two masks
        assert not torch.allclose(trained[0], before, atol=1e-2)


def of_seeds(case, folder):
    """Return one loss per seed, each computed twice."""
    models = [AutoScheduledModel.from_pretrained(folder, seed=seed).train() for seed in (1, 1, 2)]
    return [float(model.train_step(batch_of(case))) for model in models]


def test_training_losses_with_dropout_repeat_for_a_seed_and_differ_between_seeds(root):
    case = CASES["gpt2"]
    first, again, other = of_seeds(case, checkpoint(case, root))
    assert first == again != other


CELLS = {"native": drawn_cells, "hashed": hashed_cells}


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("draw", CELLS)
def test_dropout_masks_drop_the_requested_rate_within_5_standard_deviations(draw, p):
    """The rate over all, per row and per column is within 5 standard deviations of p."""
    cells, size = 200, 2000
    kept = CELLS[draw](torch.empty(cells, size), p, list(range(cells)))
    assert set(kept.unique().tolist()) <= {0.0, 1.0}
    sigma = (p * (1 - p)) ** 0.5
    for axis, count in ((None, cells * size), (0, cells), (1, size)):
        rate = 1 - (kept.mean() if axis is None else kept.mean(axis))
        assert float((rate - p).abs().max()) <= 5 * sigma / count**0.5


@pytest.mark.parametrize("draw", CELLS)
def test_dropout_mask_elements_at_nearby_positions_or_seeds_are_uncorrelated(draw):
    """Neighbouring elements of a mask, and masks of consecutive seeds, are uncorrelated."""
    kept = CELLS[draw](torch.empty(400, 1000), 0.5, list(range(400))) - 0.5
    for shift in (1, 2, 8, 64):
        for axis in (0, 1):
            other = kept.narrow(axis, shift, kept.shape[axis] - shift)
            here = kept.narrow(axis, 0, kept.shape[axis] - shift)
            assert abs(float((here * other).mean())) <= 5 * 0.25 / here.numel() ** 0.5
    again = CELLS[draw](torch.empty(400, 1000), 0.5, list(range(400))) - 0.5
    assert torch.equal(kept, again)


def test_dropout_keeps_the_mean_of_its_input():
    x = torch.ones(8, 50_000)
    y = dropout(x, P, RandomStream(SEED), "site")
    assert float(y.mean()) == pytest.approx(1.0, abs=5 * (P / (1 - P) / x.numel()) ** 0.5)
    assert torch.equal(dropout(x, 1.0, RandomStream(SEED), "site"), torch.zeros_like(x))
    assert dropout(x, 0.0, RandomStream(SEED), "site") is x


def test_dropout_with_p_0_draws_no_mask(monkeypatch):
    """At p = 0 no mask is made, as in torch: a mask of ones costs a pass over the activations each way."""

    def drawn(*args, **kwargs):
        raise AssertionError("a mask was drawn")

    sizes = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
    }
    dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**sizes, **dropped, vocab_size=30, architectures=["BertForMaskedLM"])  # fmt: skip
    monkeypatch.setattr(RandomStream, "keep_mask", drawn)
    model = AutoScheduledModel.from_config(config, seed=0).train()
    ids = torch.arange(8).view(2, 4)
    assert model.train_step({"input_ids": ids, "labels": ids}).isfinite()
    model.bert.embeddings.dropout.p = 0.1
    with pytest.raises(Exception, match="a mask was drawn"):
        model.train_step({"input_ids": ids, "labels": ids})
