"""Ranks with different inputs are refused before the first step, with the first difference."""

import json
import shutil
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import GPT2Config

from parity import Case, checkpoint
from slapo_zoo import AutoScheduledModel
from slapo_zoo.errors import SlapoError
from slapo_zoo.model.same_on_all import _samples
from slapo_zoo.parallel.compat import software

CASE = Case("GPT2LMHeadModel", ("tokens",))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return checkpoint(CASE, tmp_path_factory.mktemp("source"))


def outcome(folders, mesh, each):
    """Return this rank's error; the arguments of rank 1 differ."""
    rank = dist.get_rank()
    try:
        AutoScheduledModel.from_pretrained(folders[rank], **mesh, **each[rank])
    except SlapoError as error:
        return str(error)
    return "accepted"


def stale(source, folder, factor=1.5):
    """Return a checkpoint with other weights."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor * factor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def other_config(source, folder, **changes):
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}], ids=str)
def test_from_pretrained_with_different_weight_values_on_ranks_is_refused(
    ranks, source, tmp_path, mesh
):
    folders = [source, stale(source, tmp_path / "stale")]
    found = ranks.run(outcome, 2, folders, mesh, [{}, {}])
    for text in found:
        assert "rank 1 has other values" in text
        assert "than rank 0" in text


def test_from_pretrained_with_different_weight_files_on_ranks_is_refused(ranks, source, tmp_path):
    made = AutoScheduledModel.from_config(GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=50))
    made.save_pretrained(tmp_path / "three")
    found = ranks.run(outcome, 2, [source, tmp_path / "three"], {"tp": 2}, [{}, {}])
    assert all("ranks [1] read other files than rank 0" in text for text in found)


def test_from_pretrained_with_different_configs_on_ranks_is_refused(ranks, source, tmp_path):
    folders = [source, other_config(source, tmp_path / "other", resid_pdrop=0.3)]
    found = ranks.run(outcome, 2, folders, {"tp": 2}, [{}, {}])
    assert all("config.resid_pdrop: rank 1 has 0.3, rank 0 has" in text for text in found)


GIVEN = {
    "seed": ({"seed": 1}, {"seed": 2}, "seed: rank 1 has 2, rank 0 has 1"),
    "kernels": ({}, {"kernels": "reference"}, "kernels: rank 1 has 'reference', rank 0 has 'auto'"),
    "ratio": ({}, {"checkpoint_ratio": 1.0}, "checkpoint_ratio: rank 1 has 1.0, rank 0 has 0.0"),
    "dtype": ({"dtype": "float32"}, {"dtype": "float64"}, "dtype: rank 1 has 'float64'"),
    "layout": ({"tp": 2}, {"pp": 2}, "tp: rank 1 has 1, rank 0 has 2"),
    "micro": ({}, {"micro_batches": 2}, "micro_batches: rank 1 has 2, rank 0 has None"),
}


@pytest.mark.parametrize("case", GIVEN)
def test_from_pretrained_with_different_arguments_on_ranks_is_refused(ranks, source, case):
    one, other, problem = GIVEN[case]
    mesh = {} if case == "layout" else {"tp": 2}
    found = ranks.run(outcome, 2, [source, source], mesh, [one, other])
    assert all(problem in text for text in found), found


def other_schedule(source):
    def first(sch):
        sch["transformer.h.0"].checkpoint()

    def second(sch):
        sch["transformer.h.1"].checkpoint()

    try:
        AutoScheduledModel.from_pretrained(source, dp=2, schedule=[first, second][dist.get_rank()])
    except SlapoError as error:
        return str(error)
    return "accepted"


def test_from_pretrained_with_different_schedules_on_ranks_is_refused(ranks, source):
    found = ranks.run(other_schedule, 2, source)
    assert all("the schedule of ranks [1] differs from rank 0's" in text for text in found), found


def from_other_config():
    config = GPT2Config(n_layer=2 + dist.get_rank(), n_embd=32, n_head=2, vocab_size=50)
    try:
        AutoScheduledModel.from_config(config, dp=2)
    except SlapoError as error:
        return str(error)
    return "accepted"


def test_from_config_with_different_configs_on_ranks_is_refused(ranks):
    found = ranks.run(from_other_config, 2)
    assert all("config.n_layer: rank 1 has 3, rank 0 has 2" in text for text in found), found


def different_devices(source):
    model = AutoScheduledModel.from_pretrained(source, dp=2, device=torch.device("cpu"))
    return model.mesh.rank


def test_load_with_different_devices_and_paths_on_ranks_is_accepted(ranks, source, tmp_path):
    copy = shutil.copytree(source, tmp_path / "copy")  # a node's own copy
    assert ranks.run(outcome, 2, [source, copy], {"tp": 2}, [{}, {}]) == ["accepted"] * 2
    assert ranks.run(different_devices, 2, source) == [0, 1]


@pytest.mark.parametrize("count", [1, 2, 19_299_072])
def test_elements_sampled_from_huge_weights_for_comparison_have_valid_indices(count):
    assert set(_samples({"w": torch.ones(1).expand(count)})["w"]) == {1.0}


def test_ranks_read_the_slapo_zoo_version_from_pyproject_when_the_package_is_not_installed(
    source, monkeypatch
):
    """A bare machine runs it by its path: no package metadata says which version it is."""
    installed = metadata.distribution

    def distribution(name):
        if name == "slapo-zoo":
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    AutoScheduledModel.from_pretrained(source)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert software()["slapo-zoo"] == project["version"]
