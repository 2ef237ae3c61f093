"""Bytes that a step with dropout moves, against plain transformers with fused attention, counted on meta."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
import transformers

CI = str(Path(__file__).parents[2] / "ci")
CASES = {
    "GPT2LMHeadModel": {"n_layer": 1, "vocab_size": 2000},
    "BertForMaskedLM": {"num_hidden_layers": 1, "vocab_size": 2000},
    "T5ForConditionalGeneration": {"num_layers": 1, "num_decoder_layers": 1, "d_model": 512, "vocab_size": 2000,
                                   "decoder_start_token_id": 0},
}  # fmt: skip
MOST = {"T5ForConditionalGeneration": 1.0}


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, CI)
    try:
        yield importlib.import_module("benchmarks.bytes")
    finally:
        sys.path.remove(CI)


@pytest.mark.parametrize("cls", CASES)
def test_training_step_with_kernels_and_dropout_moves_no_more_bytes_than_torch_operations(
    bench, cls
):
    config = getattr(transformers, cls).config_class(**CASES[cls])
    config.architectures = [cls]
    ids = torch.zeros(4, 512, dtype=torch.int64, device="meta")
    row = bench.row("", config, {"input_ids": ids, "labels": ids}, MOST.get(cls, 1.05))
    assert "beyond" not in row, row
    assert "bitwise" not in row["largest"]
