"""The demo: it prints what it promises, and fails where the losses of its columns differ."""

import os
from pathlib import Path

import demo
import pytest
import typer

from forked_script import run_script
from slapo_zoo.data.tasks import DataError

ROOT = Path(__file__).parents[2]


def test_demo_script_prints_equal_losses_for_one_process_and_several_ranks(tmp_path):
    script = ROOT / "ci" / "demo.py"
    code, said, err = run_script(script, tmp_path, os.environ | {"COLUMNS": "80"}, "--steps", "2")
    assert code == 0, said + err
    assert err == ""
    rows = [line.split() for line in said.splitlines() if line.startswith("    ")]
    steps = [row for row in rows if len(row) == 4 and row[0].isdigit()]
    assert [row[0] for row in steps] == ["1", "2"]
    assert all(float(row[1]) == pytest.approx(float(row[2]), rel=1e-5) for row in steps)
    assert "4099 tokens" in said
    assert "The two columns agree" in said
    assert "return self." in said
    # DeepSpeed logs to stdout when transformers looks whether it is there
    ours = [line for line in said.splitlines() if "[WARNING]" not in line]
    assert max(map(len, ours)) <= 80


@pytest.mark.parametrize("beside", [[5.0, 4.2], [5.0, float("nan")]])
def test_demo_script_prints_a_message_when_losses_differ_from_one_process(beside, capsys):
    assert demo.verdict([5.0, 4.0], [5.0, 4.0])
    assert not demo.verdict([5.0, 4.0], beside)
    assert "The two columns differ" in capsys.readouterr().out


def test_demo_script_exits_with_1_when_losses_differ_from_one_process(monkeypatch):
    monkeypatch.setattr(demo, "make_inputs", lambda folder: (demo, None))
    monkeypatch.setattr(demo, "save_pretrained", lambda folder: None, raising=False)
    monkeypatch.setattr(demo, "write_code", lambda folder: None)
    columns = iter([[[5.0]], [[6.0]] * 4])
    monkeypatch.setattr(demo, "run_local", lambda *args, **options: next(columns))
    with pytest.raises(typer.Exit) as caught:
        demo.demo(1)
    assert caught.value.exit_code == 1


def test_demo_script_raises_when_the_standard_library_has_no_source_files(monkeypatch, tmp_path):
    monkeypatch.setattr(demo.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="no source"):
        demo.stdlib_sources()
