"""The tuning database: a kill loses no committed result, and incomplete lines are ignored."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slapo_zoo import Database
from slapo_zoo.tune.database import Scope


def test_tuning_database_reloads_the_last_committed_result_of_each_key(tmp_path):
    path = tmp_path / "runs" / "db.jsonl"
    one = Database(path)
    one.commit("a", {"throughput": 1.5})
    one.commit("a", {"throughput": 2.5})
    one.commit("b", [1, 2])
    two = Database(str(path)).load()
    assert two.db == one.db == {"a": {"throughput": 2.5}, "b": [1, 2]}
    assert "a" in two
    assert len(two) == 2
    memory = Database()
    memory.commit("a", 1)
    assert memory.load()["a"] == 1


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 200))
def test_truncated_tuning_database_keeps_every_complete_line(cut, tmp_path_factory):
    path = tmp_path_factory.mktemp("db") / "db.jsonl"
    whole = Database(path)
    ends = []
    for i in range(4):
        whole.commit(f"key {i}", {"value": i, "text": "line\nbreak"})
        ends.append(path.stat().st_size)
    data = path.read_bytes()[:cut]
    path.write_bytes(data)
    kept = sum(end - 1 <= len(data) for end in ends)  # a line is whole without its line break
    again = Database(path).load()
    assert len(again) == kept
    again.commit("new", 1)
    assert Database(path).load().db == {**again.db}
    assert len(Database(path).load()) == kept + 1


WRITER = """
import sys
from slapo_zoo.tune.database import Database
db = Database(sys.argv[1])
for i in range(100000):
    db.commit(f"{sys.argv[2]} {i}", {"i": i, "padding": "x" * 500})
    print(i, flush=True)
"""


def test_tuning_database_keeps_results_committed_by_killed_writers(tmp_path):
    """Two processes write to one file and are killed in the middle of it."""
    path = tmp_path / "db.jsonl"
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, name], stdout=subprocess.PIPE) for name in "ab"]
    said = []
    for writer in writers:
        for _ in range(20):
            said.append(int(writer.stdout.readline()))
    for writer in writers:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    found = Database(path).load()
    assert max(said) >= 19
    assert all(f"{name} {i}" in found for name in "ab" for i in range(20))
    found.commit("after", 1)
    assert "after" in Database(path).load()


def test_tuning_database_on_a_full_disk_raises(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    db = Database(tmp_path / "db.jsonl")
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        db.commit("a", 1)


def test_tuning_database_key_changes_with_device_configuration_and_number_of_steps():
    scope = Scope("cpu x2", "gpt2 1a2b", versions={"torch": "2.13"}, setting={"seq_len": 128})
    key = scope.key({"b": 1, "a": 2}, 5)
    assert key == scope.key({"a": 2, "b": 1}, 5)
    others = [scope.key({"a": 2, "b": 1}, 10), scope.key({"a": 2, "b": 2}, 5),
              Scope("cpu x4", "gpt2 1a2b").key({"a": 2, "b": 1}, 5)]  # fmt: skip
    assert len({key, *others}) == 4
