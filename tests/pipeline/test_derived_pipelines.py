"""Pipelines of models with different stages: each receives the tensors that the other sends."""

import pytest
import torch
import transformers
from type_coverage import default_config

from slapo_zoo.hf.models import dtype_of
from slapo_zoo.verify.derive import Search
from slapo_zoo.verify.tiny_case import tiny_case
from slapo_zoo.zoo.tiny_config import Sizes

# the first parameter of DeBERTa's second stage is in fp32, whatever the others are (q_bias); names of
# MobileBERT's blocks on one stage hold all words of names on the other (layer.1 and ffn.1)
KINDS = [("DebertaForMaskedLM", (1, 2, 1)), ("MobileBertForMaskedLM", (2, 2, 1))]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("cls", "mesh"), KINDS, ids=[cls for cls, _ in KINDS])
def test_schedule_derived_by_schedule_auto_passes_verification_on_a_pipeline(cls, mesh, tmp_path):
    known = getattr(transformers, cls)
    config = default_config(known.config_class.model_type, known)
    case = tiny_case(config, known, tmp_path, Sizes())
    assert case.dtype == torch.float64
    assert Search(case.config, case, mesh, {}).run().sizes == mesh


def test_dtype_of_a_mixed_precision_model_is_the_dtype_of_most_elements():
    wide, narrow = torch.nn.Linear(2, 2), torch.nn.Linear(8, 8, dtype=torch.bfloat16)
    assert dtype_of(torch.nn.Sequential(wide, narrow)) == torch.bfloat16
