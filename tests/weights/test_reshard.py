"""The reshard command: the same tensors in other files."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shards import assert_same, single
from slapo_zoo.cli.main import main
from slapo_zoo.errors import WeightsError
from slapo_zoo.weights.folder import open_checkpoint
from slapo_zoo.weights.ledger import AnonymousPeak, anonymous_bytes
from slapo_zoo.weights.random_state import pack_states, states_here
from slapo_zoo.weights.reshard import reshard
from slapo_zoo.weights.save import save_folder
from slapo_zoo.weights.training_state import read_state, write_state

MIB = 2**20


@pytest.fixture
def source(tmp_path):
    one, path = single(), tmp_path / "source"
    save_folder(path, one.specs, one.full, one.mesh)
    (path / "config.json").write_text('{"model_type": "gpt2", "torch_dtype": "float32"}')
    (path / "tokenizer.json").write_text("{}")
    (path / "pytorch_model.bin").write_text("stale")
    (path / "onnx").mkdir()
    (path / "onnx" / "notes.txt").write_text("mine")
    return path


def read(folder, stem="model"):
    with open_checkpoint(folder, stem=stem) as opened:
        return {key: opened.view(key).clone() for key in opened.key_to_file}


def test_checkpoint_resharded_into_many_files_and_back_is_bit_equal(source, tmp_path):
    reshard(source, tmp_path / "many", max_shard_size=150)
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2
    assert_same(read(tmp_path / "many"), single().full)
    assert (tmp_path / "many" / "onnx" / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "many" / "pytorch_model.bin").exists()
    (tmp_path / "many" / "tokenizer.json").write_text("changed")
    assert (source / "tokenizer.json").read_text() == "{}"  # a copy, not a link
    reshard(tmp_path / "many", tmp_path / "many")  # in place
    assert [path.name for path in (tmp_path / "many").glob("model*")] == ["model.safetensors"]
    assert_same(load_file(tmp_path / "many" / "model.safetensors"), single().full)


def test_reshard_command_casts_to_another_dtype(source, tmp_path):
    main_ok(["reshard", str(source), str(tmp_path / "half"), "--dtype", "bfloat16"])
    for name, tensor in single().full.items():
        found = read(tmp_path / "half")[name]
        assert torch.equal(found, tensor.bfloat16() if tensor.is_floating_point() else tensor)
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert config == {"model_type": "gpt2", "dtype": "bfloat16"}


def main_ok(arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0


def test_checkpoint_reshard_to_float16_keeps_optimizer_states_in_float32(source, tmp_path):
    with safe_open(next(source.glob("model*.safetensors")), "pt") as file:
        metadata = file.metadata()  # the id of the save: files of another are refused
    save_file({"a.exp_avg": torch.ones(3)}, source / "optimizer.safetensors", metadata)
    states = pack_states([states_here(torch.device("cpu"))])
    left_out = dict.fromkeys(("optimizer", "scheduler", "data_position", "extra"))
    random = {"random": {"seed": 0, "step": 0}, "torch_random": states}
    write_state(source, {"step": 3, "mesh": {"tp": 1, "pp": 1, "dp": 1}, **random, **left_out})
    (source / "checksums.json").unlink()  # which knows no such tensor
    reshard(source, tmp_path / "out", dtype=torch.float16)
    assert read(tmp_path / "out", "optimizer")["a.exp_avg"].dtype == torch.float32
    assert read_state(tmp_path / "out")["step"] == 3


def test_checkpoint_reshard_with_invalid_arguments_is_refused(source, tmp_path):
    with pytest.raises(WeightsError, match=r"dtype=torch.int8: not a floating torch dtype"):
        reshard(source, tmp_path / "out", dtype=torch.int8)
    with pytest.raises(WeightsError, match="max_shard_size: found '-5GB': expected a size above 0"):
        reshard(source, tmp_path / "out", "-5GB")
    with pytest.raises(WeightsError, match="no such folder"):
        reshard(tmp_path / "none", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_checkpoint_reshard_holds_at_most_one_tensor_in_memory(source, tmp_path):
    """The bound is one tensor wide: imports of a first call and the counter's delay are smaller."""
    if not anonymous_bytes():
        pytest.skip("this kernel does not tell anonymous memory")
    reshard(source, tmp_path / "first", dtype=torch.bfloat16)  # the first call imports modules
    full = {f"w{i}": torch.ones(18 * MIB) for i in range(3)}  # large: freed memory goes back
    (tmp_path / "large").mkdir()
    save_file(full, tmp_path / "large" / "model.safetensors")
    del full
    with AnonymousPeak() as peak:
        reshard(tmp_path / "large", tmp_path / "out", max_shard_size="80MB", dtype=torch.bfloat16)
    assert peak.growth < 2 * 36 * MIB
    with AnonymousPeak() as peak:
        reshard(tmp_path / "out", tmp_path / "again")
    assert peak.growth < 36 * MIB
