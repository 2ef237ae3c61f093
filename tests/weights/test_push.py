"""push_to_hub: the requests to the Hub, recorded by a fake client (no network in tests)."""

from types import SimpleNamespace
from typing import ClassVar

import huggingface_hub
import pytest
from transformers import GPT2Config

from slapo_zoo import AutoScheduledModel
from slapo_zoo.errors import SlapoError, WeightsError

CONFIG = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=20, n_positions=4, bos_token_id=1, eos_token_id=2)  # fmt: skip


class Api:
    calls: ClassVar = []

    def __init__(self, token=None):
        self.token = token

    def create_repo(self, repo_id, **options):
        self.calls.append(("create", repo_id, self.token, options))
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def upload_folder(self, **options):
        self.calls.append(("upload", options))


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(Api, "calls", [])
    return Api


@pytest.fixture(scope="module")
def model():
    return AutoScheduledModel.from_config(CONFIG, auto_class="GPT2LMHeadModel")


def test_push_to_hub_creates_a_repository_saves_and_uploads_with_the_given_options(
    hub, model, tmp_path
):
    out = tmp_path / "name"
    model.save_pretrained(out, push_to_hub=True, token="t", private=True, commit_message="first")
    (_, repo, token, options), (_, upload) = hub.calls
    assert (repo, token, options) == ("name", "t", {"private": True, "exist_ok": True})
    assert upload["repo_id"] == "me/name"
    assert upload["folder_path"] == out
    assert upload["commit_message"] == "first"
    assert (out / "model.safetensors").exists()


def test_push_to_hub_without_write_access_saves_nothing(hub, model, tmp_path, monkeypatch):
    def refuse(self, repo_id, **options):
        raise OSError("no token")

    monkeypatch.setattr(hub, "create_repo", refuse)
    with pytest.raises(WeightsError, match=r"no token[\s\S]*nothing was saved"):
        model.save_pretrained(tmp_path / "out", push_to_hub=True)
    assert not (tmp_path / "out").exists()


def test_failed_upload_to_the_hub_keeps_the_model_saved_locally(hub, model, tmp_path, monkeypatch):
    def fail(self, **options):
        raise OSError("broken line")

    monkeypatch.setattr(hub, "upload_folder", fail)
    with pytest.raises(WeightsError, match=r"broken line[\s\S]*is saved in"):
        model.save_pretrained(tmp_path / "out", push_to_hub=True)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_save_pretrained_refuses_unknown_or_unused_hub_arguments(model, tmp_path):
    with pytest.raises(SlapoError, match="private: no such argument"):
        model.save_pretrained(tmp_path / "out", private=True)
    with pytest.raises(SlapoError, match="flavour: no such argument"):
        model.save_pretrained(tmp_path / "out", push_to_hub=True, flavour="fp16")
