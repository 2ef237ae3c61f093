"""Submodules called alone equal the plain model's, whatever ran before, and leave no state."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers

from parity import Case, batch_of, checkpoint
from slapo_zoo import AutoScheduledModel
from slapo_zoo.errors import SlapoError
from slapo_zoo.parallel.ranks.emulation import emulate

TEXT = ("input_ids", "attention_mask")
KV1 = (("num_key_value_heads", 1),)
FAMILIES = {  # the whole model's class, and its parts
    "bert": (Case("BertForMaskedLM", ("tokens",)), {"bert": lambda m, **b: m.bert(**b)[0]}),
    "roberta": (Case("RobertaForMaskedLM", ("tokens",)), {"roberta": lambda m, **b: m.roberta(**b)[0]}),
    "albert": (Case("AlbertForMaskedLM", ("tokens",)), {"albert": lambda m, **b: m.albert(**b)[0]}),
    "gpt2": (Case("GPT2LMHeadModel", ("tokens",)), {"transformer": lambda m, **b: m.transformer(**b)[0]}),
    "llama": (Case("LlamaForCausalLM", ("tokens",), KV1), {"model": lambda m, **b: m.model(**b)[0]}),
    "opt": (Case("OPTForCausalLM", ("tokens",)), {"decoder": lambda m, **b: m.model.decoder(**b)[0]}),
    "t5": (Case("T5ForConditionalGeneration", ("tokens",)), {"encoder": lambda m, **b: m.encoder(**b)[0]}),
    "vit": (Case("ViTForImageClassification", ("class",), (("num_labels", 3),)), {"vit": lambda m, **b: m.vit(**b)[0]}),
    "clip": (
        Case("CLIPModel", ("pairs",)),
        {"images": lambda m, pixel_values: _tensor(m.get_image_features(pixel_values=pixel_values)),
         "texts": lambda m, **b: _tensor(m.get_text_features(**b))},
    ),
}  # fmt: skip
LAYOUTS = {
    "1": {}, "tp2": {"tp": 2}, "tp2-sp": {"tp": 2, "sequence_parallel": True}, "dp2": {"dp": 2},
    "dp2-shard": {"dp": 2, "dp_shard": 2}, "tp2-dp2": {"tp": 2, "dp": 2},
}  # fmt: skip
ALWAYS = {("bert", "1"), ("llama", "tp2"), ("gpt2", "tp2-sp"), ("t5", "dp2"), ("clip", "dp2"),
          ("bert", "dp2-shard")}  # fmt: skip
GRID = [pytest.param(family, layout, marks=() if (family, layout) in ALWAYS else pytest.mark.slow)
        for family in FAMILIES for layout in LAYOUTS]  # fmt: skip


def _tensor(found):
    return getattr(found, "pooler_output", found)


def on(layout, work, *args):
    """Return the results of the ranks of a layout, in their order."""
    options = LAYOUTS.get(layout, {"pp": 2})
    sizes = tuple(options.get(name, 1) for name in ("tp", "pp", "dp"))
    if sizes == (1, 1, 1):
        return [work(options, *args)]
    return emulate(work, options, *args, mesh=sizes)


@cache
def folder_of(family, root, dropout=0.0):
    return checkpoint(replace(FAMILIES[family][0], dropout=dropout), root)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("parts")


def inputs(family, name, step):
    """Return the inputs of a submodule: rows of other lengths than those of the full model's batch."""
    batch = batch_of(FAMILIES[family][0], step)
    if family == "vit" or name == "images":
        return {"pixel_values": batch["pixel_values"]}
    return {k: batch[k][:, : -1 if step else None] for k in TEXT}


def rows_of(model, batch):
    """This dp rank's rows."""
    mesh = getattr(model, "mesh", None)
    n, r = (mesh.dp, mesh.coord("dp")) if mesh else (1, 0)
    return {k: x.tensor_split(n)[r] if torch.is_tensor(x) else x for k, x in batch.items()}


def trained_by(model, part, batch):
    """Return loss and gradients of a hand-written head on a submodule."""
    out = part(model, **rows_of(model, batch))
    loss = out.mul(torch.linspace(-1, 1, out.shape[-1])).square().mean()
    loss.backward()
    return float(loss.detach())


def gradients(model):
    if hasattr(model, "mesh"):
        return model.consolidated_state_dict(grads=True)
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def life(model, family):
    """Return gradients of submodules before and after full forwards, and their outputs in evaluation."""
    found, seen = [], []
    case, parts = FAMILIES[family]
    for name, part in parts.items():
        model.train().zero_grad()
        trained_by(model, part, inputs(family, name, 0))
        found.append(gradients(model))
    model.zero_grad()
    model(**rows_of(model, batch_of(case))).loss.backward()
    for name, part in parts.items():
        with torch.no_grad():
            seen.append(part(model.eval(), **rows_of(model, inputs(family, name, 1))))
        model.train().zero_grad()
        trained_by(model, part, inputs(family, name, 1))
        found.append(gradients(model))
    return found, seen


def scheduled_life(options, family, folder):
    model = AutoScheduledModel.from_pretrained(
        folder, auto_class=FAMILIES[family][0].cls, **options
    )
    return life(model, family)


def plain_life(family, folder):
    cls = getattr(transformers, FAMILIES[family][0].cls)
    return life(cls.from_pretrained(folder), family)


def assert_alike(found, wanted, name):
    scale = float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, atol=1e-4 * scale + 1e-6, rtol=1e-3, msg=name)


@pytest.mark.parametrize("family, layout", GRID)
def test_submodule_called_directly_has_the_output_and_gradients_of_plain_transformers(
    family, layout, root
):
    folder = folder_of(family, root)
    wanted, outputs = plain_life(family, folder)
    ranks = on(layout, scheduled_life, family, folder)
    copies = LAYOUTS[layout].get("dp", 1)
    tp = LAYOUTS[layout].get("tp", 1)
    for rank, (_, seen) in enumerate(ranks):
        for mine, whole in zip(seen, outputs, strict=True):
            assert_alike(mine, whole.tensor_split(copies)[rank // tp], "output")
    for mine, plain in zip(ranks[0][0], wanted, strict=True):
        largest = max(float(g.abs().max()) for g in plain.values())
        for name, grad in plain.items():
            assert float((mine[name] - grad).abs().max()) <= 1e-4 * largest + 1e-6, name


def refused(options, family, folder):
    model = AutoScheduledModel.from_pretrained(
        folder, auto_class=FAMILIES[family][0].cls, **options
    )
    said = []
    for name, part in FAMILIES[family][1].items():
        try:
            part(model.train(), **inputs(family, name, 0))
        except SlapoError as error:
            said.append(str(error))
    return said


def test_submodule_called_directly_is_refused_with_several_pipeline_stages(root):
    for said in on("pp2", refused, "bert", folder_of("bert", root)):
        assert said
        assert all("outside the model" in words for words in said)


class StopError(Exception):
    """Error of a forward that fails midway."""


def fails(options, folder, what):
    """Return the output of a submodule after a call that failed midway."""
    model = AutoScheduledModel.from_pretrained(folder, auto_class="BertForMaskedLM", **options)
    case, stop = FAMILIES["bert"][0], [True]

    def fail(*_):
        if stop:
            raise StopError

    model.bert.encoder.layer[1].register_forward_pre_hook(fail)
    call = {"whole": model, "part": model.bert, "step": model.train_step}[what]
    batch = batch_of(case) if what != "part" else inputs("bert", "", 0)
    model.train()
    with pytest.raises(StopError):
        call(batch) if what == "step" else call(**batch)
    stop.clear()
    state = model.schedule.state
    assert not (state.forward.is_call)
    assert not (state.forward.tokens_divided)
    assert not (state.random.is_open)
    return model.eval().bert(**inputs("bert", "", 1))[0].detach()


@pytest.mark.parametrize("what", ["whole", "part", "step"])
@pytest.mark.parametrize("layout", ["1", pytest.param("tp2-sp", marks=pytest.mark.slow)])
def test_forward_after_a_failed_call_of_a_submodule_equals_plain_transformers(what, layout, root):
    folder = folder_of("bert", root)
    plain = transformers.BertForMaskedLM.from_pretrained(folder).eval()
    wanted = plain.bert(**inputs("bert", "", 1))[0].detach()
    for found in on(layout, fails, folder, what):
        assert_alike(found, wanted, what)
