"""`slapo-zoo verify --exact`: training on a mesh of processes has the bits of one process, or the operation is named."""

import json

import pytest
import torch
import transformers

from cli_runs import run
from slapo_zoo.language.primitives import bias_after_sum
from slapo_zoo.model.load import exact_check

CONV = bias_after_sum._conv1d


def product_in_two_pieces(module, x):
    half = x.shape[-1] // 2
    first, second = module.weight[:half], module.weight[half:]
    return torch.matmul(x[..., :half], first) + torch.matmul(x[..., half:], second)


def train_another_way_on_a_mesh(case, real, *args):
    """Train as `--exact` does, but on several processes with row-parallel products in two pieces."""
    product = CONV if real == (1, 1, 1) else product_in_two_pieces
    bias_after_sum.WITHOUT_BIAS["Conv1D"] = (product, 0)
    return TRAIN(case, real, *args)


TRAIN = exact_check._train


def test_verify_exact_command_reports_equal_digests_of_each_step_on_tp_2_and_one_rank(capsys):
    run("verify", "bert", "--tp", "2", "--exact", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "verified"
    assert found["digests"] == found["of_one"]
    assert len(set(found["digests"])) == exact_check.STEPS


@pytest.mark.slow
def test_bit_exact_verification_names_the_operation_that_differs_between_meshes(monkeypatch):
    monkeypatch.setattr(exact_check, "_train", train_another_way_on_a_mesh)
    config, cls = transformers.GPT2Config(), transformers.GPT2LMHeadModel
    found = exact_check.compare_meshes(config, cls, (2, 1, 1), {"kernels": "reference"})
    assert found.document()["verdict"] == "different"
    assert "step 0 has other bits" in str(found)
    assert "attn.c_proj" in found.difference
