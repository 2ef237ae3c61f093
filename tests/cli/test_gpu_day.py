"""`ci/run.py gpu-day --fake`: the driver, its saved state, and the cases that a second call skips."""

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import gpu_day
import pytest

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


def test_ci_run_passes_the_help_option_on_to_the_script_of_gpu_measurements():
    """`ci/run.py gpu-day -h` has to print the options of ci/gpu_day.py."""
    code = "import sys; sys.path.insert(0, 'ci'); import run; print(run.parse(['gpu-day', '-h']))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "('gpu-day', ['-h'])", done.stderr


@pytest.mark.slow
def test_script_of_gpu_measurements_resumes_after_its_time_budget_ran_out(tmp_path):
    """No case fits a budget of one second; a later call runs the case, and a third has none left."""
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


def of_this_day(folder):
    """Return the processes with the folder on their command line, except the driver."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (place / "cmdline").read_bytes().decode().split("\0")
            if str(folder) in words and any(word.endswith("gpu_cases.py") for word in words):
                found.append(int(place.name))
    return found


def until(condition, seconds=60.0):
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="processes are read from /proc")
def test_killed_script_of_gpu_measurements_leaves_no_process_and_resumes(tmp_path):
    """A truncated last line of the results is ignored: the next call, into another folder, runs that case."""
    command = [sys.executable, str(ROOT / "ci" / "gpu_day.py"), "--fake", "--out", str(tmp_path)]
    driver = subprocess.Popen([*command, "--stage", "masks"], stdout=subprocess.DEVNULL)
    until(lambda: of_this_day(tmp_path))
    driver.kill()
    driver.wait()
    until(lambda: not of_this_day(tmp_path), 20.0)
    (tmp_path / "cache" / "kernels").mkdir(parents=True)
    (tmp_path / "cache" / "kernels" / "fake.json").write_text("{}")
    (tmp_path / "results.jsonl").write_text('{"case": "env:device", "status": "ok"}\n{"case": "ma')
    later = tmp_path / "later"
    after = day(later, "--stage", "masks", "--resume", str(tmp_path))
    assert after.returncode == 0, after.stdout + after.stderr
    lines = [json.loads(line) for line in (later / "results.jsonl").read_text().splitlines()]
    assert [line["case"] for line in lines] == ["env:device", "masks:bits"]
    assert (later / "cache" / "kernels" / "fake.json").exists()


def test_script_of_gpu_measurements_retries_a_failed_case_exactly_once(tmp_path, monkeypatch):
    """A case that failed once, for example on a full device, may pass later; one that failed twice is skipped."""
    ends = iter(["timeout", "failed", "never asked"])
    monkeypatch.setattr(gpu_day.Day, "one", lambda *_: (next(ends), {"seconds": 0.0}))
    for tries, status in ((1, "timeout"), (2, "failed"), (2, "failed")):
        one_day = gpu_day.Day(tmp_path, None, True, 540.0)
        assert one_day.run(["masks:bits"])
        state = json.loads((tmp_path / "state.json").read_text())
        assert (state["tries"], state["done"]) == ({"masks:bits": tries}, {"masks:bits": status})
    assert next(ends) == "never asked"
