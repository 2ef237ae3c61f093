"""The unmodified client of the Hub against a server on the loopback interface."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from hub_server import Hub, Repository

HERE = Path(__file__).parent
REPO = "me/gpt2-tiny"


@pytest.fixture(scope="module")
def hub():
    with Hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hub")


@contextmanager
def client(hub, folder, offline="0"):
    """Context that yields a function that runs a step in a fork of one process of the client: (result, what it says)."""
    env = {
        **os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "HF_TOKEN": "hf_test",
        "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": offline, "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }  # fmt: skip
    command, pipe = [sys.executable, str(HERE / "hub_scenarios.py")], subprocess.PIPE
    with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True) as process:

        def run(name):
            process.stdin.write(f"{name} {folder}\n")
            process.stdin.flush()
            ended = next((line for line in process.stdout if line.startswith("ended")), "")
            said = (folder / f"{name}.err").read_text()
            assert ended == "ended 0\n", said[-3000:]
            return json.loads((folder / f"{name}.json").read_text()), said

        yield run


@pytest.fixture(scope="module")
def run(hub, folder):
    with client(hub, folder) as run:
        yield run


@pytest.fixture(scope="module")
def published(hub, folder, run):
    known, _ = run("publish")
    shutil.rmtree(folder / "home", ignore_errors=True)  # the cache of who loads is empty
    code = f"def schedule(sch):\n    open({str(folder / 'ran')!r}, 'w').close()\n    sch['transformer.h.0'].checkpoint()\n"
    hub.repositories["me/weights"], hub.repositories["me/python"] = Repository(), Repository()
    weights, python = hub.repositories["me/weights"], hub.repositories["me/python"]
    weights.branches["main"] = weights.add({"config.json": b"{}"})
    python.branches["main"] = python.add({"schedule.py": code.encode()})
    known["python"] = f"me/python@{python.branches['main']}"
    (folder / "published.json").write_text(json.dumps(known))
    return known


@pytest.fixture(scope="module")
def loaded(run, published):
    return run("load")


def test_push_schedule_to_hub_commits_all_files_at_once_and_refuses_concurrent_changes(
    hub, published
):
    repository = hub.repositories[REPO]
    first = repository.commits[published["first"].partition("@")[2]]
    assert set(first) == {"README.md", "schedule.json", "verify.json", "bench.json", "tuning.json"}
    assert "published meanwhile" in published["late"]
    assert "TagExists" in published["twice"]
    assert len({published[name] for name in ("first", "second", "live")}) == 3


def test_large_files_of_a_schedule_card_are_uploaded_by_git_lfs(hub, published):
    stored = hub.repositories["me/picture"]
    files = stored.commits[stored.branches["main"]]
    assert len(files["plot.png"]) == 5004
    assert len(files["schedule.json"]) > 1000
    assert any(path.startswith("/lfs/") for _, path in hub.requests)


@pytest.mark.slow
def test_new_process_loads_a_schedule_card_from_the_hub_by_commit_sha_and_by_tag(loaded, published):
    found, said = loaded
    assert found["same"]
    assert published["first"].partition("@")[2] in said, "a tag is resolved to a sha and shown"
    assert "checkpoint()" in found["program"]
    assert found["loss"] > 1
    assert found["any_size"] > 10
    assert "plot.png" not in found["pictures"], "only the files that a card needs are fetched"


def test_push_to_hub_uploads_the_weights_together_with_their_schedule(loaded, hub):
    stored = hub.repositories["me/model"]
    files = stored.commits[stored.branches["main"]]
    assert {"model.safetensors", "config.json", "schedule.json", "README.md"} <= set(files)
    assert loaded[0]["weights"]
    assert loaded[0]["both"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("none", "check its name"),
        ("tag", "no such branch or tag"),
        ("sha", "check the sha or tag"),
        ("structure", "made for a model with other modules or tensor shapes"),
        ("no card", "schedule.json is missing"),
    ],
)
def test_missing_or_mismatched_schedule_card_on_the_hub_is_refused_with_the_reason(
    loaded, case, words
):
    assert words in loaded[0][case]


def test_schedule_card_is_refused_when_its_tag_moved_or_a_file_was_changed(
    hub, run, loaded, published
):
    repository = hub.repositories[REPO]
    first = published["first"].partition("@")[2]
    repository.tags["v1"] = published["second"].partition("@")[2]
    tampered = hub.repositories["me/tampered"] = Repository()
    files = dict(repository.commits[first])
    files["schedule.json"] = files["schedule.json"].replace(b'"axis": 0', b'"axis": 1', 1)
    tampered.branches["main"] = tampered.add(files)
    found, _ = run("moved")
    assert "it was moved" in found["moved"]
    assert found["by sha"] == found["read"] == loaded[0]["hash"]
    assert "changed after the card was made" in found["tampered"]


def test_offline_mode_loads_a_cached_schedule_card_and_refuses_an_uncached_one(
    hub, folder, loaded, published
):
    with client(hub, folder, offline="1") as run_offline:
        found, _ = run_offline("offline")
    assert found["by sha"] == found["by tag"] == loaded[0]["hash"]
    assert "was not fetched before" in found["not there"]
    assert "that was downloaded before" in found["no sha"]


def test_python_file_of_a_schedule_card_runs_only_with_trust_remote_code_and_a_pinned_sha(loaded):
    found, said = loaded[0]["python"], loaded[1]
    assert "trust_remote_code=True" in found["main"]
    assert "schedule.json is missing" in found["untrusted"]
    assert found["ran"]
    assert not found["before"]
    assert "checkpoint()" in found["program"]
    assert "it was trusted" in said
