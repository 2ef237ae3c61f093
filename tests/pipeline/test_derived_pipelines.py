"""Pipelines of models with different stages: each receives the tensors that the other sends."""

import pytest
import torch
import transformers
from type_coverage import default_config

from slapo_zoo import AutoScheduledModel, emulate
from slapo_zoo.hf.models import dtype_of
from slapo_zoo.verify.derive import Search
from slapo_zoo.verify.tiny_case import tiny_case
from slapo_zoo.zoo.tiny_config import Sizes

# the first parameter of DeBERTa's second stage is in fp32, whatever the others are (q_bias); names of
# MobileBERT's blocks on one stage hold all words of names on the other (layer.1 and ffn.1); routers of Switch convert
# their own weights in the forward; BLIP takes images with texts
KINDS = [("DebertaForMaskedLM", (1, 2, 1)), ("MobileBertForMaskedLM", (2, 2, 1)),
         ("SwitchTransformersForConditionalGeneration", (1, 2, 1)), ("BlipForConditionalGeneration", (1, 2, 1))]  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("cls", "mesh"), KINDS, ids=[cls for cls, _ in KINDS])
def test_model_sharded_by_schedule_auto_over_a_pipeline_equals_plain_transformers(
    cls, mesh, tmp_path
):
    known = getattr(transformers, cls)
    config = default_config(known.config_class.model_type, known)
    case = tiny_case(config, known, tmp_path, Sizes())
    assert case.dtype == torch.float64
    assert Search(case.config, case, mesh, {}).run().sizes == mesh


def step_of_two_towers(pp, micro_batches):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    text = {
        **sizes,
        "num_hidden_layers": 3,
        "vocab_size": 99,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
    }
    vision = {**sizes, "num_hidden_layers": 1, "image_size": 8, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    model = AutoScheduledModel.from_config(
        config, pp=pp, auto_class=transformers.CLIPModel, seed=0, kernels="reference"
    )
    assert pp == 1 or model.schedule.state.cuts[0][0].startswith("text_model")
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 99, (2, 6), generator=g)
    batch = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8, generator=g)}
    seen = lambda output, _: sum(  # noqa: E731
        x.pow(2).mean() for x in (output.vision_model_output.last_hidden_state, output.image_embeds - output.text_embeds)
    )  # fmt: skip
    own = float(model.train_step(batch, loss_fn=seen, micro_batches=micro_batches))
    return (
        own,
        float(model(**batch, return_loss=True).loss.detach()),
        model.consolidated_state_dict(grads=True),
    )


def test_clip_image_outputs_on_an_earlier_pipeline_stage_reach_the_loss():
    found = emulate(step_of_two_towers, 2, 2, mesh=(1, 2, 1))[0]
    *losses, grads = step_of_two_towers(1, 1)
    assert found[:2] == pytest.approx(losses, rel=1e-5)
    for name, grad in grads.items():
        torch.testing.assert_close(found[2][name], grad, rtol=1e-4, atol=1e-6, msg=name)


def test_dtype_of_a_mixed_precision_model_is_the_dtype_of_most_elements():
    wide, narrow = torch.nn.Linear(2, 2), torch.nn.Linear(8, 8, dtype=torch.bfloat16)
    assert dtype_of(torch.nn.Sequential(wide, narrow)) == torch.bfloat16
