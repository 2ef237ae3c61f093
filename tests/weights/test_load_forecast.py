"""Load plans: they list the bytes that a load reads, without reading weights."""

from types import SimpleNamespace

import huggingface_hub
import pytest
import torch.distributed as dist
import transformers

from slapo_zoo import AutoScheduledModel
from slapo_zoo.cli.main import main
from slapo_zoo.errors import WeightsError
from slapo_zoo.weights.file_layout import CODES
from slapo_zoo.zoo.load_forecast import plan_weights, read_sources

TINY = {
    "GPT2LMHeadModel": {"n_layer": 3, "n_embd": 20, "n_head": 5, "vocab_size": 97, "n_positions": 8},
    "BertForMaskedLM": {
        "num_hidden_layers": 3, "hidden_size": 20, "num_attention_heads": 5, "vocab_size": 97,
        "intermediate_size": 30, "max_position_embeddings": 8,
    },
}  # fmt: skip
OTHER_IDS = {"bos_token_id": 1, "eos_token_id": 2}
MESHES = [(1, 1, 1), (2, 2, 1), (4, 1, 1), (1, 2, 2)]


@pytest.fixture(scope="module", params=TINY)
def folder(request, tmp_path_factory):
    cls = getattr(transformers, request.param)
    ids = OTHER_IDS if "GPT2" in request.param else {}
    path = tmp_path_factory.mktemp(request.param)
    cls(cls.config_class(**TINY[request.param], **ids)).save_pretrained(path, max_shard_size="20KB")
    return path


def load(folder, tp, pp, dp):
    ledger = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp, dp=dp).ledger
    return ledger.bytes_read, ledger.tensors


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_load_plan_predicts_the_bytes_that_each_rank_reads(threads, folder, sizes):
    found = threads.run(load, sizes[0] * sizes[1] * sizes[2], folder, *sizes)
    plan = plan_weights(folder, *sizes)
    tp, _, dp = sizes
    for planned in plan.ranks:
        for copy in range(dp):
            rank = (planned.stage * dp + copy) * tp + planned.tp_coord
            assert found[rank] == (planned.bytes_read, planned.tensors)
    assert plan.assigned_bytes == plan.model_bytes
    assert plan.missing == plan.unexpected == []


def test_load_plan_is_made_without_reading_weights(folder, monkeypatch):
    def refuse(*args):
        raise AssertionError("a weight was read")

    monkeypatch.setattr("slapo_zoo.weights.safetensors_file.SafetensorsFile.view", refuse)
    assert plan_weights(folder, 2, 3, 64).mesh.world_size == 384


def test_load_plan_of_a_hub_model_reads_only_file_headers(folder, monkeypatch):
    """The Hub's answer is simulated: tests use no network."""
    tensors = {
        key: SimpleNamespace(dtype=CODES[source.dtype], shape=list(source.shape))
        for key, source in read_sources(folder).items()
    }
    answer = SimpleNamespace(files_metadata={"x": SimpleNamespace(tensors=tensors)})
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda *a, **k: answer)
    config = transformers.AutoConfig.from_pretrained(folder)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *a, **k: config)
    local, remote = plan_weights(folder, 2, 2), plan_weights("org/name", 2, 2)
    assert [r.bytes_read for r in remote.ranks] == [r.bytes_read for r in local.ranks]
    assert remote.ranks[0].files == {"x"}


def test_load_plan_of_an_unknown_model_is_refused(monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", offline)
    with pytest.raises(WeightsError, match="no answer of the Hub: offline"):
        plan_weights("org/name")


def test_load_plan_raises_when_a_file_has_another_shape_than_the_config(folder, tmp_path):
    config = transformers.AutoConfig.from_pretrained(folder)
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    config.vocab_size = 98
    config.save_pretrained(tmp_path)
    for file in folder.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).unlink()
            (tmp_path / file.name).hardlink_to(file)
    with pytest.raises(WeightsError, match=r"found shape \[97.*expected \[98"):
        plan_weights(tmp_path)


def test_load_plan_command_prints_the_bytes_of_every_rank(folder, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["plan", str(folder), "--weights", "--tp", "2", "--pp", "2", "--dp", "8"])
    assert caught.value.code == 0
    out = " ".join(capsys.readouterr().out.split())  # a long path breaks the line
    assert "32 ranks" in out
    assert "0 tensors are in no file" in out
    assert "micro-batch" not in out  # asked for by name, it is planned alone
    assert not dist.is_initialized()
