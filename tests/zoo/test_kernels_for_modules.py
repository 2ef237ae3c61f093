"""The option `kernels=`: the choice and its reason; every choice computes the plain model's results."""

import json
from dataclasses import replace

import pytest
import torch

from heads import HEADS
from parity import LAYOUTS, Case, batch_of, checkpoint, compare, references, scheduled, tiny_config
from refusals import refused
from slapo_zoo import AutoScheduledModel, Mesh, SlapoError
from slapo_zoo.dispatch import choose_kernel, tables
from slapo_zoo.dispatch.benchmark import SHAPES
from slapo_zoo.zoo import kernels_for_modules
from slapo_zoo.zoo.kernels_for_modules import choose
from slapo_zoo.zoo.outline import Outline

GPT2, BERT = HEADS["gpt2"][0], Case("BertForMaskedLM", ("tokens",))
CASES = {family: cases[0] for family, cases in HEADS.items()}
PARALLEL = ("gpt2", "bert", "roberta", "albert", "gpt_neo", "opt", "t5", "llama", "mt5")
QUICK = {("2x1x1-sp", f) for f in ("gpt2", "bert", "albert", "t5")} | {
    ("2x1x1", "gpt_neo"), ("2x1x1", "opt"), ("1x2x1", "t5"), ("2x2x1-sp", "roberta"),
}  # fmt: skip


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


def applicable(case):
    """Every kernel that serves some module of a case's model."""
    config, cls = tiny_config(case)
    sch = Outline(config, cls, Mesh(), torch.float32).schedule
    return list(dict.fromkeys(choice.kernel for choice in choose(sch, "auto", "cpu")))


def cells():
    for family in CASES:
        for layout in ("1x1x1", "2x1x1", "2x1x1-sp", "1x2x1", "2x2x1-sp"):
            if layout == "1x1x1" or family in PARALLEL:
                quick = layout == "1x1x1" or (layout, family) in QUICK
                yield pytest.param(
                    family,
                    layout,
                    marks=[] if quick else [pytest.mark.slow],
                    id=f"{family}-{layout}",
                )


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize(("family", "layout"), [*cells()])
def test_model_with_all_kernels_has_the_losses_and_gradients_of_plain_transformers(
    family, layout, root, threads
):
    """Outputs, loss, gradients and three steps are equal with all applicable kernels enabled."""
    case, sizes = CASES[family], LAYOUTS[layout]
    folder = checkpoint(case, root)
    truth, plains = references(case, folder)
    world = sizes[0] * sizes[1] * sizes[2]
    results = threads.run(with_kernels, world, case, folder, sizes, applicable(case))
    found = results[0][0]
    if family == "gpt_neo":  # queries that see padding alone have no meaning: not compared
        real = batch_of(case)["attention_mask"][..., None]
        truth, found, *plains = (masked(result, real) for result in (truth, found, *plains))
    compare(found, plains, truth)


def masked(result, real):
    return replace(result, outputs=result.outputs | {"logits": result.outputs["logits"] * real})


def with_kernels(case, folder, sizes, names):
    return scheduled(case, folder, sizes, kernels=names)


def test_kernels_option_with_one_name_enables_only_the_named_kernel(root):
    """Only the requested kernel is enabled; the others give "not asked for" as the reason."""
    model = AutoScheduledModel.from_pretrained(checkpoint(GPT2, root), kernels="bias_gelu")
    verdicts = {choice.kernel: choice for choice in model.schedule.kernels}
    assert verdicts["bias_gelu"].accepted
    assert verdicts["bias_gelu"].reason == "asked for"
    assert verdicts["linear_cross_entropy"].reason == "not asked for"
    steps = [str(directive) for _, directive in model.schedule.history]
    assert steps.count("replace(new='bias_gelu')") == 1
    assert not any("linear_cross_entropy" in step for step in steps)


def test_kernels_option_reference_disables_all_kernels(root):
    model = AutoScheduledModel.from_pretrained(checkpoint(GPT2, root), kernels="reference").train()
    assert not model.schedule.kernels
    assert not any("replace" in str(directive) for _, directive in model.schedule.history)
    assert type(model(**batch_of(GPT2)).logits) is torch.Tensor


@pytest.mark.parametrize(
    ("case", "asked", "said"),
    [
        (
            GPT2,
            "bias_gleu",
            "no such kernel, there are auto, reference, measure, batch_norm_relu_add, bias",
        ),
        (GPT2, ["bias_gelu", "gelu"], "kernels='gelu'"),
        (GPT2, "t5_attention", "no module that this kernel serves (MT5Attention, T5Attention)"),
        (GPT2, 3, "expected auto, reference, the name of a kernel or a list of them"),
    ],
)
def test_kernels_option_with_an_unknown_or_unsupported_kernel_is_refused(case, asked, said, root):
    assert said in refused(SlapoError, checkpoint(case, root), kernels=asked)


def test_kernels_option_auto_enables_only_kernels_measured_faster_on_the_device(
    root, monkeypatch, tmp_path
):
    """Kernels that are slower or unmeasured on the device are disabled."""
    table = {"bias_gelu:float32:64": "ours", "linear_cross_entropy:float32:32": "torch"}
    ratios = {"bias_gelu:float32:64": 3.0, "linear_cross_entropy:float32:32": 0.5}
    (tmp_path / "cpu.json").write_text(json.dumps({"dispatch": table, "ratios": ratios}))
    for name, value in (("MEASURED", tmp_path), ("_kept", {})):
        monkeypatch.setattr(tables, name, value)
    model = AutoScheduledModel.from_pretrained(checkpoint(GPT2, root), kernels="auto")
    found = {choice.kernel: (choice.accepted, choice.reason) for choice in model.schedule.kernels}
    assert found["bias_gelu"][0]
    assert found["linear_cross_entropy"] == (
        False, "the best alternative takes 0.50 times as long (linear_cross_entropy:float32:32 on cpu)",
    )  # fmt: skip
    assert found["layer_norm"] == (False, "unmeasured on cpu in float32")


@pytest.mark.parametrize("case, least", [
    (BERT, {"sparse_mlm_head_loss", "unpadded_encoder"}),
    *((CASES[family], {"linear_cross_entropy"}) for family in ("gpt2", "t5", "gpt_neo", "llama")),
])  # fmt: skip
def test_kernels_option_auto_on_an_unmeasured_gpu_enables_kernels_estimated_to_be_faster(
    case, least, monkeypatch, tmp_path
):
    for name, value in (("MEASURED", tmp_path), ("_kept", {})):
        monkeypatch.setattr(tables, name, value)
    config, cls = tiny_config(case)
    sch = Outline(config, cls, Mesh(), torch.bfloat16).schedule
    found = {c.kernel: c for c in choose(sch, "auto", "NVIDIA H100 80GB HBM3") if c.accepted}
    assert found.keys() >= least
    assert all(c.reason.startswith("estimated: ") for c in found.values())
    assert not any(c.accepted for c in choose(sch, "auto", "Some device of 1999"))


@pytest.mark.parametrize(
    ("case", "kernel", "dtype", "sizes", "said"),
    [
        (BERT, "bias_gelu", torch.float64, {}, "float64 has no Triton kernel"),
        (CASES["t5"], "t5_attention", torch.bfloat16, {"d_kv": 512}, "heads of 512 columns spill"),
        (CASES["t5"], "t5_attention", torch.float32, {}, "float32 has no products on tensor cores"),
        (CASES["t5"], "t5_attention", torch.bfloat16, {}, ""),
        (BERT, "bias_gelu", torch.bfloat16, {"without": True}, "Triton is not installed"),
    ],
)
def test_kernel_that_the_device_does_not_support_runs_as_torch_operations_with_a_reason(
    case, kernel, dtype, sizes, said, monkeypatch
):
    """A requested kernel runs as torch operations and gives the reason; "auto" leaves it out."""
    sizes = dict(sizes)
    monkeypatch.setattr(choose_kernel, "HAS_TRITON", not sizes.pop("without", False))
    config, cls = tiny_config(case)
    config.update(sizes)
    sch = Outline(config, cls, Mesh(), dtype).schedule
    on = "NVIDIA H100 80GB HBM3"
    asked = next(c for c in choose(sch, kernel, on) if c.kernel == kernel)
    assert asked.accepted
    assert asked.reason.startswith(
        f"asked for, but torch operations run: {said}" if said else "asked for"
    )
    assert bool(said) == ("torch operations" in asked.reason)
    assert "torch operations" not in str(choose(sch, kernel, "cpu"))
    monkeypatch.setattr(
        kernels_for_modules, "decide", lambda *key: choose_kernel.Decision(True, "measured")
    )
    auto = next(c for c in choose(sch, "auto", on) if c.kernel == kernel)
    assert (auto.accepted, said in auto.reason) == (not said, True)


def measured_by_rank_0(folder, cache):
    import os

    os.environ["SLAPO_ZOO_CACHE"] = str(cache)
    tables.forget()
    try:
        model = AutoScheduledModel.from_pretrained(folder, tp=2, kernels="measure")
    finally:
        del os.environ["SLAPO_ZOO_CACHE"]
        tables.forget()
    return [str(choice) for choice in model.schedule.kernels]


def test_kernels_option_measure_times_each_kernel_once_for_all_ranks(
    root, ranks, tmp_path, monkeypatch
):
    kept = [{"what": name, "shape": "1", "dtype": "float32", "bucket": f"{name}:float32:32",
             "eager / ours": 0.25} for name in SHAPES if name != "bias_gelu"]  # fmt: skip
    content = {"device": "cpu", "rows": kept, "dispatch": {}, "ratios": {}}
    (tmp_path / "kernels").mkdir()
    file = tmp_path / "kernels" / "cpu.json"
    file.write_text(json.dumps(content))
    case = Case("BertForMaskedLM", ("tokens",), config=(("hidden_act", "gelu_new"),))
    first, second = ranks.run(measured_by_rank_0, 2, checkpoint(case, root), tmp_path)
    assert first == second
    rows = json.loads(file.read_text())["rows"]
    measured = [row for row in rows if row not in kept]  # existing measurements are not repeated
    assert {row["what"] for row in measured} == {"bias_gelu"}
    assert any(
        line.startswith("bias_gelu at ") and "as long (bias_gelu:" in line for line in first
    ), first


def of(case, root, kernels):
    torch.manual_seed(0)
    return AutoScheduledModel.from_pretrained(
        checkpoint(case, root), auto_class=case.cls, kernels=kernels
    ).train()


@pytest.mark.parametrize(("case", "name"), [(GPT2, "linear_cross_entropy"), (BERT, "sparse_mlm_head_loss")])  # fmt: skip
def test_lazy_logits_are_computed_when_read_and_have_the_gradients_of_eager_logits(
    case, name, root
):
    """In a plain forward the loss computes no logits; they are right when read and usable in a user's loss."""
    plain, model = of(case, root, "reference"), of(case, root, name)
    batch = batch_of(case)
    want, found = plain(**batch), model(**batch)
    torch.testing.assert_close(found.loss, want.loss)
    assert found.logits.untouched()
    assert found.logits.shape == want.logits.shape
    (found.loss + found.logits.square().mean()).backward()
    (want.loss + want.logits.square().mean()).backward()
    for (path, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), path
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, atol=2e-6, rtol=1e-4, msg=path)
    torch.testing.assert_close(found.logits.detach(), want.logits.detach())
    assert type(model.eval()(**batch).logits) is torch.Tensor


def test_lazy_logits_read_after_a_weight_change_raise(root):
    """After a weight change reading raises, because the logits would be those of other weights."""
    model = of(GPT2, root, "linear_cross_entropy")
    output = model(**batch_of(GPT2))
    output.loss.backward()
    torch.optim.AdamW(model.parameters()).step()
    with pytest.raises(SlapoError, match="after the weights have changed"):
        output.logits.argmax(-1)


def test_train_step_returns_equal_logits_with_and_without_the_loss_kernel(root):
    """`return_logits=True` with micro-batches gives the logits of a step without the kernel."""
    outputs = []
    for kernels in ("reference", "linear_cross_entropy"):
        model = of(GPT2, root, kernels)
        outputs.append(model.train_step(batch_of(GPT2), micro_batches=2, return_logits=True))
    torch.testing.assert_close(outputs[1].loss, outputs[0].loss)
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits)


def test_model_loaded_from_recorded_kernel_directives_has_the_same_schedule_history(root):
    """Replay finds kernels in the registry, even if their files were not imported yet."""
    model = of(GPT2, root, ["bias_gelu", "linear_cross_entropy"])
    steps = [step for step in model.schedule.history if step[1].name == "replace"]
    again = AutoScheduledModel.from_pretrained(checkpoint(GPT2, root), schedule=steps)
    assert again.schedule.history == steps


def unpadding(folder, kernels, options, sizes=(1, 1, 1)):
    """Return loss and gradients of a padded batch in training, and True if padding was left out."""
    model = AutoScheduledModel.from_pretrained(
        folder, tp=sizes[0], auto_class=BERT.cls, kernels=kernels, seed=3, dtype="float64"
    ).train()
    batch = batch_of(BERT)
    seen = []

    def see(_module, args):
        seen.append(tuple(args[0].shape[:2]))

    see.__module__ = "slapo_zoo.of_tests"  # for a hook of others padding would stay
    model.bert.encoder.layer[0].register_forward_pre_hook(see)
    batch |= options
    loss = model.train_step(batch, micro_batches=2)
    return loss, model.consolidated_state_dict(grads=True), seen


@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1)])
def test_unpadded_encoder_has_the_loss_and_gradients_of_the_padded_run(p, sizes, root, threads):
    """Loss, dropout masks and gradients equal those of the padded run."""
    names = ["unpadded_encoder", "sparse_mlm_head_loss", "bias_dropout_residual_layer_norm"]
    folder = checkpoint(
        replace(BERT, dropout=p), root
    )  # once: ranks that all save it disturb each other
    want, want_grads, whole = threads.run(unpadding, sizes[0], folder, "reference", {}, sizes)[0]
    loss, grads, seen = threads.run(unpadding, sizes[0], folder, names, {}, sizes)[0]
    assert [shape[0] for shape in seen] == [1, 1]
    assert whole == [(2, 12), (2, 12)]
    torch.testing.assert_close(loss, want)
    assert grads.keys() == want_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, want_grads[name], msg=name)


def test_unpadded_encoder_keeps_padding_when_labels_or_hidden_states_need_padded_positions(root):
    """With a label at padding, or with requested hidden states, no padding is left out."""
    labels, folder = torch.randint(3, 99, (4, 12)), checkpoint(replace(BERT, dropout=0.0), root)
    for options in ({"labels": labels}, {"output_hidden_states": True}):
        _, _, seen = unpadding(folder, "unpadded_encoder", options)
        assert seen == [(2, 12), (2, 12)]


def test_schedule_takes_the_kernel_unpadded_encoder_and_kernels_of_its_layers_together():
    """The unpadded encoder calls the layers with their kernels; ALBERT's shared activation is among them."""
    config, cls = tiny_config(Case("AlbertForMaskedLM", ("tokens",)))
    sch = Outline(
        config, cls, Mesh(), torch.float32, kernels=["unpadded_encoder", "bias_gelu"]
    ).schedule
    assert {c.kernel for c in sch.kernels if c.accepted} == {"unpadded_encoder", "bias_gelu"}


def test_kernels_that_a_search_found_fastest_are_taken_for_auto_and_not_for_measure():
    """Let "measure" follow what it has just measured: `from_pretrained` looks a search up for "auto" alone."""
    config, cls = tiny_config(GPT2)
    sch = Outline(config, cls, Mesh(), torch.float32).schedule
    found = choose(sch, "auto", "cpu", tuned="layer_norm")
    assert {c.kernel for c in found if c.accepted} == {"layer_norm"}
    measured = choose(sch, "measure", "cpu", tuned="layer_norm")
    assert measured == choose(sch, "measure", "cpu")
    assert not any("a search found" in choice.reason for choice in measured)
