"""Untrusted config.json files: no attribute of transformers is called that is no model class."""

import json
import pickle
import random

import pytest
import torch

from parity import Case, checkpoint
from slapo_zoo import AutoScheduledModel
from slapo_zoo.errors import SlapoError, WeightsError
from slapo_zoo.hf.configs import read_config
from slapo_zoo.weights.folder import PickleFile
from slapo_zoo.weights.safetensors_file import SafetensorsFile

CASE = Case("GPT2LMHeadModel", ("tokens",))
CHANGES = {
    "a function": {"architectures": ["pipeline"]},
    "a module": {"architectures": ["logging"]},
    "a trainer": {"architectures": ["Trainer"]},
    "a tokenizer": {"architectures": ["AutoTokenizer"]},
    "a number": {"architectures": [5]},
    "a text": {"architectures": "GPT2LMHeadModel"},
    "a config": {"architectures": ["GPT2Config"]},
    "no heads": {"n_head": 0},
    "negative": {"n_embd": -1},
    "huge": {"n_embd": 10**9},
    "a huge vocabulary": {"vocab_size": 10**12},
    "a billion layers": {"n_layer": 10**9},
    "a dtype": {"dtype": "load"},
    "an activation": {"activation_function": "system"},
    "text for a number": {"n_head": "2"},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return checkpoint(CASE, tmp_path_factory.mktemp("source"))


@pytest.mark.parametrize("case", CHANGES)
def test_invalid_value_in_config_json_raises_slapo_error(source, tmp_path, case):
    config = json.loads((source / "config.json").read_text())
    for item in source.iterdir():
        (tmp_path / item.name).write_bytes(item.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | CHANGES[case]))
    with pytest.raises(SlapoError):
        AutoScheduledModel.from_pretrained(tmp_path)


def test_remote_code_named_by_a_config_is_refused_and_never_runs(tmp_path, monkeypatch):
    config = {"model_type": "unknown_family", "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ran = tmp_path / "ran"
    (tmp_path / "code.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Config: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for read in (read_config, AutoScheduledModel.from_pretrained):
        with pytest.raises((SlapoError, ValueError, OSError)):
            read(tmp_path)
    assert not ran.exists()


def test_damaged_pickle_checkpoint_raises_slapo_error(tmp_path):
    path, draw = tmp_path / "pytorch_model.bin", random.Random(4)
    torch.save({"a": torch.ones(3), "b": torch.zeros(2, 2)}, path)
    new = path.read_bytes()
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    old = path.read_bytes()
    for data in (new, old):
        for _ in range(150):
            broken = bytearray(data)
            for _ in range(draw.randint(1, 6)):
                broken[draw.randrange(len(broken))] = draw.randrange(256)
            path.write_bytes(broken[: draw.randrange(1, len(broken) + 1)])
            try:
                PickleFile(path).close()
            except WeightsError:
                continue


def test_pickle_checkpoint_that_calls_a_function_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("ran",)

    (tmp_path / "x.bin").write_bytes(pickle.dumps({"a": Evil()}))
    with pytest.raises(WeightsError, match="no plain state dict"):
        PickleFile(tmp_path / "x.bin")


def test_checkpoint_with_a_lone_surrogate_in_a_tensor_name_is_refused(tmp_path):
    header = b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(WeightsError, match="not a complete safetensors file"):
        SafetensorsFile(path)
