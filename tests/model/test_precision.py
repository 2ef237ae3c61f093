"""Mixed precision: fp32 master weights and 16-bit compute, equal on every layout."""

import pytest
import torch
import transformers
from torch.nn import functional

from mixed_precision import BERT, CASES, COMPUTE, GPT2, LLAMA, T5, compare
from parity import Case, batch_of, checkpoint, scheduled
from slapo_zoo import AutoScheduledModel
from slapo_zoo.errors import SlapoError


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("precision")


@pytest.mark.parametrize(("case", "precision"), [(T5, "bf16"), (GPT2, "fp16")], ids=str)
def test_mixed_precision_in_one_process_has_the_gradients_of_plain_transformers(
    case, precision, root
):
    folder = checkpoint(case, root)
    result, _ = scheduled(case, folder, (1, 1, 1), precision=precision)
    compare(result, case, folder, precision)


SWIN = Case("SwinForImageClassification", ("class",), (("num_labels", 3),))
LAYOUTS = {  # (tp, pp, dp) and the order
    "one": ((1, 1, 1), {}),
    "tp2": ((2, 1, 1), {}),
    "pp2": ((1, 2, 1), {}),
    "zbv": ((1, 2, 1), {"pipeline_order": "zbv"}),
    "interleaved": ((1, 2, 1), {"pipeline_order": "interleaved_1f1b"}),
    "tp2-pp2": ((2, 2, 1), {}),
    "tp2-zbv": ((2, 2, 1), {"pipeline_order": "zbv"}),
    "tp2-interleaved": ((2, 2, 1), {"pipeline_order": "interleaved_1f1b"}),
    "dp2": ((1, 1, 2), {"checkpoint_ratio": 1.0}),
}  # fmt: skip
DIAGONAL = [
    (GPT2, "bf16", "tp2"),
    (T5, "bf16", "zbv"),
    (BERT, "fp16", "dp2"),
    (LLAMA, "fp16", "pp2"),
    (SWIN, "bf16", "pp2"),  # its embedding does not cast the images
]
GRID = [(c, p, k) for c in CASES for p in COMPUTE for k in LAYOUTS if (c, p, k) not in DIAGONAL]


def on_mesh(case, folder, name, precision):
    layout, options = LAYOUTS[name]
    count = 4 // layout[2] if layout[1] > 1 else None
    return scheduled(case, folder, layout, count, precision=precision, **options)


def ids(value):
    return getattr(value, "cls", value)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("case", "precision", "name"), DIAGONAL, ids=ids)
def test_mixed_precision_on_a_few_layouts_has_the_gradients_of_plain_transformers(
    case, precision, name, root, threads
):
    folder, (tp, pp, dp) = checkpoint(case, root), LAYOUTS[name][0]
    results = threads.run(on_mesh, tp * pp * dp, case, folder, name, precision)
    compare(results[0][0], case, folder, precision)


@pytest.mark.slow  # 60 runs
@pytest.mark.parametrize(("case", "precision", "name"), GRID, ids=ids)
def test_mixed_precision_on_every_layout_has_the_gradients_of_plain_transformers(
    case, precision, name, root, ranks
):
    test_mixed_precision_on_a_few_layouts_has_the_gradients_of_plain_transformers(
        case, precision, name, root, ranks
    )


def by_hand(folder, precision):
    """Return gradients of a hand-written loop whose blocks are recomputed."""
    model = AutoScheduledModel.from_pretrained(folder, precision=precision, checkpoint_ratio=1.0)
    model.train()(**batch_of(GPT2)).loss.backward()
    assert not any("weight" in module.__dict__ for module in model.modules())
    return {n: p.grad for n, p in model.named_parameters()}


def test_mixed_precision_in_a_hand_written_loop_has_the_gradients_of_train_step(root):
    """The parameter is the fp32 master for everyone; the recomputation reads the same casts."""
    folder = checkpoint(GPT2, root)
    found, model = (
        by_hand(folder, "bf16"),
        AutoScheduledModel.from_pretrained(folder, precision="bf16"),
    )
    model.train().train_step(batch_of(GPT2))
    for name, p in model.named_parameters():
        assert p.dtype == p.grad.dtype == torch.float32
        assert torch.equal(p.grad, found[name]), name
    assert model(**batch_of(GPT2)).logits.dtype == torch.bfloat16
    assert model.generate(batch_of(GPT2)["input_ids"], max_new_tokens=2).shape[1] == 14


def of_logits(output, batch):
    return functional.cross_entropy(output.logits.float().flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize("case", [GPT2, BERT, T5], ids=ids)
def test_logits_computed_after_a_weight_change_use_the_bf16_weights_of_their_forward(case, root):
    """Logits that are computed on demand use the cast weights of their forward, also after the weights have changed."""
    folder, batch = checkpoint(case, root), batch_of(case)
    grads = {}
    for precision, by_hand in (("fp32", False), ("bf16", False), ("bf16", True)):
        model = AutoScheduledModel.from_pretrained(folder, precision=precision).train()
        if by_hand:
            output = model(**batch)
            with torch.no_grad():
                model.get_input_embeddings().weight.mul_(1.0)  # a new version of a tied weight
            of_logits(output, batch).backward()
        else:
            model.train_step(batch, loss_fn=of_logits)
        grads[precision, by_hand] = {n: p.grad for n, p in model.named_parameters()}
    for name, truth in grads["fp32", False].items():
        mine, own = ((grads["bf16", k][name] - truth).norm() for k in (True, False))
        assert mine <= 1.5 * own + 1e-3 * truth.norm(), name


def overflow(folder):
    """Run a step with an infinite gradient on one rank; return the scales before and after, and True if gradients stayed."""
    model = AutoScheduledModel.from_pretrained(folder, tp=2, precision="fp16").train()
    before, step = model._slapo.precision.scale, model.train_step
    step(batch_of(GPT2))
    kept = {n: p.grad.clone() for n, p in model.named_parameters()}
    whole = (p for n, p in model.named_parameters() if model.plan.of(n).placement is None)
    p = next(whole)  # on a sharded one all ranks must have the hook
    if model.mesh.rank == 1:
        hook = p.register_hook(lambda grad: grad * torch.inf)
    step(batch_of(GPT2))
    same = all(torch.equal(p.grad, kept[n]) for n, p in model.named_parameters())
    if model.mesh.rank == 1:
        hook.remove()
    return before, model._slapo.precision.scale, same


def test_fp16_overflow_on_one_rank_skips_the_optimizer_step_on_all_ranks(root, ranks):
    """After an overflow all ranks keep the gradients of before it and halve the loss scale."""
    for before, after, same in ranks.run(overflow, 2, checkpoint(GPT2, root)):
        assert same
        assert after == before / 2


def resumed(folder, out):
    from slapo_zoo import load_checkpoint, save_checkpoint

    model = AutoScheduledModel.from_pretrained(folder, precision="fp16")
    model._slapo.precision.scale, model._slapo.precision.good_steps = 64.0, 7
    save_checkpoint(model, out)
    again = AutoScheduledModel.from_pretrained(out, precision="fp16")
    load_checkpoint(again, out)
    return again._slapo.precision.scale, again._slapo.precision.good_steps


def test_fp16_t5_keeps_in_fp32_what_plain_transformers_keeps(root):
    folder, out = checkpoint(T5, root), root / "half"
    plain = transformers.T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float16)
    model = AutoScheduledModel.from_pretrained(folder, dtype=torch.float16)
    model.save_pretrained(out)
    again = transformers.T5ForConditionalGeneration.from_pretrained(out)
    assert {p.dtype for p in plain.parameters()} == {torch.float16, torch.float32}
    for name, p in plain.named_parameters():
        for one in (model, again):
            found = one.get_parameter(name)
            assert (found.dtype, torch.equal(found, p)) == (p.dtype, True), name


def test_save_under_mixed_precision_writes_the_fp32_master_weights(root):
    """The fp32 masters are saved, or another dtype on request; the loss scale is resumed."""
    folder, out = checkpoint(GPT2, root), root / "files"
    assert resumed(folder, out) == (64.0, 7)
    model = AutoScheduledModel.from_pretrained(folder, precision="bf16")
    model.save_pretrained(root / "narrow", dtype=torch.bfloat16)
    masters = transformers.GPT2LMHeadModel.from_pretrained(out, dtype="auto").state_dict()
    narrow = transformers.GPT2LMHeadModel.from_pretrained(
        root / "narrow", dtype="auto"
    ).state_dict()
    for name, p in model.state_dict().items():
        assert torch.equal(masters[name], p)
        assert torch.equal(narrow[name], p.bfloat16()), name


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"precision": "int8"}, "choose one of fp32, bf16, bf16-pure, fp16"),
        ({"precision": "bf16", "dtype": "bfloat16"}, "keeps parameters in float32"),
        (
            {"precision": "bf16", "target": "deepspeed", "target_options": {"config": {}}},
            "deepspeed keeps fp32 master weights of its own",
        ),
    ],
)
def test_unsupported_precision_options_are_refused(options, problem, root):
    with pytest.raises(SlapoError, match=problem):
        AutoScheduledModel.from_pretrained(checkpoint(GPT2, root), **options)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "fp32"), ("bf16-pure", "bf16")])
def test_precision_accepts_the_short_name_of_its_own_dtype(precision, dtype, root):
    folder = checkpoint(GPT2, root)
    model = AutoScheduledModel.from_pretrained(folder, precision=precision, dtype=dtype)
    assert model.dtype == AutoScheduledModel.from_pretrained(folder, precision=precision).dtype
    with pytest.raises(SlapoError, match="found dtype='fp16'"):
        AutoScheduledModel.from_pretrained(folder, precision=precision, dtype="fp16")
