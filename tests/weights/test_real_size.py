"""A checkpoint of 70B parameters, planned and built for 64 ranks from its headers alone."""

import json
import struct
from math import prod

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slapo_zoo.model.loader import Assembly
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.weights.ledger import AnonymousPeak
from slapo_zoo.zoo.load_forecast import plan_weights
from slapo_zoo.zoo.options import BuildOptions

FILES, GIB = 30, 2**30


@pytest.fixture(scope="module")
def config():
    found = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256, dtype=torch.bfloat16,
    )  # fmt: skip
    found.architectures = ["LlamaForCausalLM"]
    return found


@pytest.fixture(scope="module")
def folder(config, tmp_path_factory):
    """Return a folder of headers and sparse files: 141 GB that take no disk space."""
    path = tmp_path_factory.mktemp("large")
    config.save_pretrained(path)
    with torch.device("meta"):
        shapes = {k: tuple(v.shape) for k, v in LlamaForCausalLM(config).state_dict().items()}
    file_of = {}
    for i in range(FILES):
        name, header, at = f"model-{i + 1:05d}-of-{FILES:05d}.safetensors", {}, 0
        for key in list(shapes)[i::FILES]:
            end = at + 2 * prod(shapes[key])
            header[key] = {"dtype": "BF16", "shape": shapes[key], "data_offsets": [at, end]}
            at, file_of[key] = end, name
        text = json.dumps(header).encode()
        with (path / name).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + at)
    index = {"metadata": {"total_size": 0}, "weight_map": file_of}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


@pytest.mark.parametrize("sizes", [(8, 8, 1), (8, 4, 2)], ids=str)
def test_load_plan_of_a_70b_model_for_64_ranks_assigns_every_byte_to_a_rank(folder, sizes):
    with AnonymousPeak() as peak:
        plan = plan_weights(folder, *sizes)
    assert plan.assigned_bytes == plan.model_bytes > 141e9
    assert (
        max(rank.bytes_read for rank in plan.ranks) < 1.2 * plan.model_bytes / sizes[0] / sizes[1]
    )
    assert peak.growth < GIB


@pytest.mark.parametrize("rank", [0, 63])
def test_model_of_one_of_64_ranks_of_a_70b_model_is_built_on_meta_within_1_gib(config, rank):
    with AnonymousPeak() as peak:
        mesh = Mesh(8, 8, 1, rank)
        built = Assembly(config, None, mesh, torch.float32, BuildOptions(precision="bf16"))
    assert all(p.is_meta for p in built.model.parameters())
    assert sum(p.numel() for p in built.model.parameters()) < 1.2 * 70.6e9 / 64
    assert peak.growth < GIB
