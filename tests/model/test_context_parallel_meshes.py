"""Context parallelism beside pipelines, sharded parameters, sequence parallelism and 16 bits: as one process."""

import pytest
import torch

from cut_rows import case_of, require_equal, rows_of, trained
from parity import tiny_config
from slapo_zoo import AutoScheduledModel, emulate

FAMILIES = ("GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration", "LlamaForCausalLM")
# name --> kind of rows, sizes of the mesh, options of the loader
LAYOUTS = {
    "pp2": ("padded", {"pp": 2}, {"micro_batches": 2}),
    "sp": ("padded", {"tp": 2}, {"sequence_parallel": True}),
    "dp_shard2": ("padded", {"dp": 2}, {"dp_shard": 2}),
    "pp2-gpipe": ("left", {"pp": 2}, {"pipeline_order": "gpipe", "micro_batches": 4}),
    "dp_shard4": ("bare", {"dp": 2}, {"dp_shard": 4, "checkpoint_ratio": 1.0}),
    "pp2-dp_shard2": ("padded", {"pp": 2}, {"dp_shard": 2, "micro_batches": 2}),
    "zero1-tp2": ("padded", {"tp": 2}, {"dp_shard": 2, "zero_stage": 1, "micro_batches": 2}),
    "pp2-interleaved": ("padded", {"pp": 2}, {"pipeline_order": "interleaved_1f1b", "stages_per_rank": 2, "micro_batches": 4}),
    "pp2-zbv": ("left", {"pp": 2}, {"pipeline_order": "zbv", "micro_batches": 4}),
    "pp2-sp": ("padded", {"tp": 2, "pp": 2}, {"sequence_parallel": True, "checkpoint_ratio": 1.0}),
    "pp2-dp2": ("padded", {"pp": 2, "dp": 2}, {"micro_batches": 2}),
}  # fmt: skip
ALWAYS = {("GPT2LMHeadModel", "pp2"), ("BertForMaskedLM", "dp_shard2"), ("LlamaForCausalLM", "sp")}
BLOCKS = {"pp2-interleaved": 4, "pp2-zbv": 4}  # one for each virtual stage
CLOSE = {"LlamaForCausalLM": {"atol": 1e-6}}  # its norms compute in fp32


def layouts():
    for cls in (*FAMILIES, "BartForConditionalGeneration", "OPTForCausalLM"):
        for name in LAYOUTS if cls in FAMILIES else ("pp2", "sp"):
            always = (cls, name) in ALWAYS
            yield pytest.param(cls, name, marks=() if always else pytest.mark.slow)


def on_mesh(case, mask, sizes, options):
    mesh = sizes.get("tp", 1), sizes.get("pp", 1), sizes.get("dp", 1) * 2
    return emulate(trained, case, mask, mesh=mesh, cp=2, **sizes, **options)


@pytest.mark.parametrize(("cls", "name"), list(layouts()))
def test_context_parallel_with_tp_pp_or_dp_has_the_losses_and_gradients_of_one_process(cls, name):
    """Losses, every gradient, the norm, and weights after two steps, with dropout, on every rank."""
    mask, sizes, options = LAYOUTS[name]
    case = case_of(cls, **({"num_hidden_layers": BLOCKS[name]} if name in BLOCKS else {}))
    found = on_mesh(case, mask, sizes, options)
    require_equal(found[0], trained(case, mask), **CLOSE.get(cls, {}))
    assert all(each[0] == found[0][0] for each in found)


PRECISE = [
    ("GPT2LMHeadModel", "bf16", {"tp": 2}, {"sequence_parallel": True}),
    ("BertForMaskedLM", "fp16", {}, {"checkpoint_ratio": 1.0}),
    ("T5ForConditionalGeneration", "bf16", {"pp": 2}, {"micro_batches": 2}),
    ("LlamaForCausalLM", "fp16", {"dp": 2}, {"dp_shard": 4}),
    ("GPT2LMHeadModel", "fp16", {"pp": 2}, {"micro_batches": 4}),
    ("BertForMaskedLM", "bf16", {"dp": 2}, {"dp_shard": 2}),
    ("T5ForConditionalGeneration", "fp16", {"tp": 2}, {}),
    ("LlamaForCausalLM", "bf16", {}, {"micro_batches": 2}),
]


def error_of(found, truth):
    """Largest differences of (losses, gradients, weights) from those of fp64."""
    tensors = [max(float((ours[n].double() - x).abs().max()) for n, x in want.items())
               for ours, want in ((found[1], truth[1]), (found[3], truth[3]))]  # fmt: skip
    return [max(abs(a - b) for a, b in zip(found[0], truth[0], strict=True)), *tensors]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("cls", "precision", "sizes", "options"), PRECISE)
def test_context_parallel_16_bit_results_are_as_close_to_fp64_as_those_of_one_process(
    cls, precision, sizes, options
):
    """With fp32 parameters: at most twice the error of one process, with the same dropout."""
    case, narrow = case_of(cls), {"dtype": torch.float32, "precision": precision}
    truth, own = trained(case, "padded"), trained(case, "padded", **narrow)
    found = on_mesh(case, "padded", sizes, {**options, **narrow})
    assert all(each[0] == found[0][0] for each in found)
    assert {x.dtype for x in found[0][1].values()} == {torch.float32}
    largest = [
        max(truth[0]),
        *(max(float(x.abs().max()) for x in truth[i].values()) for i in (1, 3)),
    ]
    eps = torch.finfo(getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[precision])).eps
    errors = zip(error_of(found[0], truth), error_of(own, truth), largest, strict=True)
    for what, (error, allowed, size) in zip(("loss", "gradient", "weight"), errors, strict=True):
        assert error <= 2 * allowed + eps * size / 8, what


def overflown(case):
    """Loss scales before and after a step in which one rank's gradient is infinite; whether gradients are left."""
    layout = {"cp": 2, "precision": "fp16", "dtype": torch.float32, "seed": 3}
    model = AutoScheduledModel.from_config(tiny_config(case)[0], auto_class=case.cls, **layout)
    p = next(model.train().parameters())
    p.register_hook(lambda grad: grad * torch.inf if model.mesh.rank else grad)
    before = model._slapo.precision.scale
    model.train_step(rows_of(case, "padded"))
    return (
        before,
        model._slapo.precision.scale,
        [p for p in model.parameters() if p.grad is not None],
    )


def test_fp16_overflow_on_one_cp_rank_drops_the_gradients_on_all_ranks_and_halves_the_loss_scale():
    for before, after, left in emulate(overflown, case_of("GPT2LMHeadModel"), mesh=(1, 1, 2)):
        assert after == before / 2
        assert not left
