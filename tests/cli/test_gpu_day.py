"""`ci/run.py gpu-day --fake`: the driver, its state, and what a second call leaves alone."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def day(out, *arguments):
    command = [
        sys.executable,
        str(ROOT / "ci" / "gpu_day.py"),
        "--fake",
        "--out",
        str(out),
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_day_that_ran_out_of_time_goes_on_where_it_stopped(tmp_path):
    """Nothing fits a budget of a second; a later call runs it, and a third has nothing left."""
    first = day(tmp_path, "--stage", "correct", "--only", "rms_norm", "--budget", "1")
    assert "go on with --resume" in first.stdout
    assert not (tmp_path / "results.jsonl").exists()
    second = day(
        tmp_path / "next", "--stage", "correct", "--only", "rms_norm", "--resume", str(tmp_path)
    )
    assert second.returncode == 0, second.stdout + second.stderr
    (line,) = (tmp_path / "next" / "results.jsonl").read_text().splitlines()
    assert json.loads(line)["status"] == "ok"
    third = day(tmp_path / "next", "--stage", "correct", "--only", "rms_norm")
    assert third.returncode == 0
    assert len((tmp_path / "next" / "results.jsonl").read_text().splitlines()) == 1
    merged = day(tmp_path, "--merge", str(tmp_path / "next"))
    assert merged.returncode == 1
    assert "nothing to merge" in merged.stdout
