"""Memory-mapped weights: which stay mapped, when they are copied, and that neither side changes the other."""

import io
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from slapo_zoo import AutoScheduledModel
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.placement import Placement
from slapo_zoo.weights.folder import open_checkpoint
from slapo_zoo.weights.load_memory import LARGE_PAGE, LEAST_MAPPED, Target, fresh_like
from slapo_zoo.weights.load_rank_slices import load_tensors

SIDE = 512  # a matrix of a MiB: half of it is large enough to stay mapped


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        hidden_size=SIDE, intermediate_size=SIDE, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=SIDE, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def load(folder, **options):
    return AutoScheduledModel.from_pretrained(folder, **options)


def on_a_rank(folder):
    """Return the names that stay mapped, and True if `train()` keeps every parameter and value."""
    model = load(folder, tp=2)
    mapped, before = list(model.ledger.mapped), dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in before.items()}
    same_loads = all(
        torch.equal(p, values[name]) for name, p in load(folder, tp=2, map_weights=False).named_parameters()
    )  # fmt: skip
    model.train()
    after = dict(model.named_parameters())
    kept = all(after[name] is p and torch.equal(p, values[name]) for name, p in before.items())
    return mapped, same_loads, kept, model.ledger.mapped, model.ledger.bytes_read


def test_weights_sharded_by_rows_stay_memory_mapped_and_column_shards_are_copied(ranks, source):
    sizes = {
        name: tensor.nbytes for name, tensor in load_file(source / "model.safetensors").items()
    }
    for mapped, same_loads, kept, left, read in ranks.run(on_a_rank, 2, source):
        names = {name.split(".")[-2] for name in mapped}
        assert names == {
            "q_proj",
            "k_proj",
            "v_proj",
            "gate_proj",
            "up_proj",
            "embed_tokens",
            "lm_head",
        }
        assert same_loads
        assert kept
        assert left == []
        norms = sum(size for name, size in sizes.items() if "norm" in name)
        assert read == (sum(sizes.values()) - norms) // 2 + norms  # mapped bytes count as read


def test_memory_mapped_weights_and_their_file_are_independent_of_later_changes(source, tmp_path):
    folder = shutil.copytree(source, tmp_path / "model")
    before = (folder / "model.safetensors").read_bytes()
    model = load(folder)
    name = model.ledger.mapped[0]
    expected = model.get_parameter(name).detach().clone()
    other = {key: torch.zeros_like(t) for key, t in load_file(folder / "model.safetensors").items()}
    save_file(other, tmp_path / "new")
    os.replace(tmp_path / "new", folder / "model.safetensors")  # as every save does
    assert torch.equal(model.get_parameter(name), expected)
    shutil.copy(source / "model.safetensors", folder)
    model = load(folder)
    model.get_parameter(name).detach().zero_()  # in evaluation mode: still pages of the file
    assert (folder / "model.safetensors").read_bytes() == before
    model.save_pretrained(folder)  # over the very files that its weights are
    assert load_file(folder / "model.safetensors")[name].abs().max() == 0


def test_map_weights_false_maps_no_file_and_reads_all_weights_at_load(source):
    assert load(source, map_weights=False).ledger.mapped == []
    assert load(source, dtype="bfloat16").ledger.mapped == []  # another dtype is a copy anyway


def test_memory_mapped_tensor_has_a_storage_of_the_size_of_the_tensor(source):
    model = load(source)
    tensor = model.get_parameter(model.ledger.mapped[-1])
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    torch.save(tensor, file := io.BytesIO())
    assert len(file.getvalue()) < tensor.nbytes + 4096


CASES = {  # placement, shape of the target, dtype: whether it may stay in the file
    "whole": (None, (SIDE, SIDE), torch.float32, True),
    "rows": (Placement(0), (SIDE // 2, SIDE), torch.float32, True),
    "columns": (Placement(1), (SIDE, SIDE // 2), torch.float32, False),
    "two groups": (Placement(0, groups=(SIDE // 2,) * 2), (SIDE // 2, SIDE), torch.float32, False),
    "cast": (None, (SIDE, SIDE), torch.float16, False),
    "not asked": (None, (SIDE, SIDE), torch.float32, False),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("odd", [0, 1])
def test_tensors_stay_memory_mapped_only_if_contiguous_uncast_and_mapping_was_requested(
    tmp_path, case, odd
):
    placement, shape, dtype, expected = CASES[case]
    full = {"a": torch.ones(odd, dtype=torch.int8), "w": torch.randn(SIDE, SIDE)}
    save_file(full, tmp_path / "model.safetensors")
    local = torch.nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    target = Target(local, (SIDE, SIDE), placement, may_map=case != "not asked")
    with open_checkpoint(tmp_path) as folder:
        loaded = load_tensors({"w": target}, folder, {"w": "w"}, Mesh(tp=2, rank=1))
        assert folder.position("w")[1] % 4 == 0  # writers put wide dtypes in front
    assert loaded.mapped == (["w"] if expected else [])
    want = full["w"]
    if placement is not None:
        parts = [want.narrow(placement.axis, *run) for run in
                 [(a, b - a) for a, b in placement.runs(SIDE, 2, 1)]]  # fmt: skip
        want = torch.cat(parts, placement.axis)
    assert torch.equal(local, want.to(dtype))


@pytest.mark.parametrize("count", [0, 1, LEAST_MAPPED, LARGE_PAGE, LARGE_PAGE + 2])
def test_newly_allocated_parameter_memory_is_writable(count):
    tensor = fresh_like(
        torch.empty(count // 2, dtype=torch.bfloat16, device="meta"), torch.device("cpu")
    )
    tensor.fill_(1)
    assert tensor.sum(dtype=torch.float64) == count // 2
    assert not tensor.requires_grad


def test_allocation_of_large_tensors_succeeds_on_a_system_without_huge_pages(monkeypatch):
    monkeypatch.delattr("mmap.MADV_HUGEPAGE")
    assert fresh_like(torch.ones(3, LARGE_PAGE)).shape == (3, LARGE_PAGE)
