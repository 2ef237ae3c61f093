"""Run every check and measurement that needs a GPU, resumable: `python3 ci/run.py gpu-day`.

    gpu-day --out DIR [--resume STATE] [--budget 540] [--stage NAMES] [--only NAME] [--workers 8] [--fake]
    gpu-day --merge FOLDER

Every case runs in a process of its own with a timeout, so a hang, an illegal access or a lack of memory costs one
case. Checks run several at once (`--workers`); what is timed runs alone, after them. After each case a line is added to `results.jsonl`, and `state.json` is rewritten; a later call with `--resume`
skips finished cases, unless the kernels changed, and tries a failed case once more. `--fake` runs without a GPU:
kernels in Triton's interpreter, tiny sizes, and without the packages that a bare GPU machine lacks. `--merge` copies
results from FOLDER into the checkout. A case ends when this process does, even if it is killed.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "ci" / "gpu_cases.py"
EXPECTED = {"env": 20, "compile": 60, "correct": 30, "masks": 20, "families": 30, "loops": 30, "ranks": 60,
            "warm": 60, "kernels": 20, "steps": 45, "load": 40, "compiled": 90, "pictures": 20}  # fmt: skip
STAGES = tuple(EXPECTED)
TIMED = ("kernels", "steps", "load", "compiled")  # stages whose cases take turns on the device
TRIES = 2  # tries of a case that fails
LINES = 60  # lines of the table that is printed last


def digest() -> str:
    """Return a digest of all kernel sources; when it changes, earlier measurements of kernels are repeated."""
    files = sorted((ROOT / "kernels").rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


class Day:
    """State of all cases of a run, and the files of its results.

    Args:
        out: folder for the files.
        resume: folder or state file of an earlier call, or None.
        fake: run without a GPU, in tiny sizes.
        budget: seconds that this call may take.
        workers: number of checks that run at the same time.
    """

    def __init__(self, out: Path, resume: Path | None, fake: bool, budget: float, workers: int = 1):
        self.out, self.fake, self.budget, self.begin = out, fake, budget, time.monotonic()
        self.workers, self.writes = workers, threading.Lock()
        out.mkdir(parents=True, exist_ok=True)
        self.file, self.results = out / "state.json", out / "results.jsonl"
        state = self._before(resume)
        self._whole_lines()
        self.tries: dict[str, int] = state.get("tries", {})
        same = state.get("kernels") == digest()
        self.done: dict[str, str] = {
            case: status for case, status in state.get("done", {}).items()
            if same or not case.startswith(("compile", "correct", "kernels"))
        }  # fmt: skip

    def _before(self, resume: Path | None) -> dict[str, Any]:
        """Return the saved state of an earlier call, {} without one; copy its files to `out` if they lie elsewhere."""
        folder = self.out if resume is None else resume if resume.is_dir() else resume.parent
        if folder != self.out:
            shutil.copytree(folder, self.out, dirs_exist_ok=True)
        return json.loads(self.file.read_text("utf-8")) if self.file.exists() else {}

    def _whole_lines(self) -> None:
        """Remove an incomplete last line of the results, which a kill may have left; its case is then repeated."""
        if not self.results.exists():
            return
        *lines, torn = self.results.read_text("utf-8").split("\n")
        if torn:
            self.results.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def left(self) -> float:
        """Return the seconds that remain of this call's budget."""
        return self.budget - (time.monotonic() - self.begin)

    def run(self, cases: list[str]) -> bool:
        """Run the cases that are not finished; return False if the budget ended before all have run."""

        def of(stages: tuple[str, ...]) -> list[str]:
            return [case for case in cases if case.partition(":")[0] in stages]

        first, timed, last = of(("env",)), of(TIMED), of(("pictures",))
        checks = [case for case in cases if case not in (*first, *timed, *last)]
        ended = [self._try(case) for case in first]
        for workers, some in ((self.workers, checks), (min(3, self.workers), timed)):
            with ThreadPoolExecutor(
                workers
            ) as pool:  # timed cases import while another one is timed
                ended += pool.map(self._try, some)
        return all([*ended, *[self._try(case) for case in last]])

    def _try(self, case: str) -> bool:
        """Run a case unless it has ended; return False if the rest of the budget is too short for it."""
        expected = EXPECTED[case.partition(":")[0]] / (4 if self.fake else 1)
        if self.done.get(case) == "ok" or self.tries.get(case, 0) >= TRIES:
            return True
        if expected > self.left():
            return False
        status, result = self.one(case, max(4 * expected, 120))
        with self.writes:
            self.keep(case, status, result)
        return True

    def one(self, case: str, timeout_s: float) -> tuple[str, dict[str, Any]]:
        """Run a case in a process of its own; return ("ok", "failed" or "timeout", its result or error, with its
        seconds).
        """
        command = [
            sys.executable,
            str(CASES),
            case,
            str(self.out),
            *(["--fake"] if self.fake else []),
        ]
        env = os.environ | {"SLAPO_ZOO_CACHE": str(self.out / "cache"), "PYTHONPATH": str(ROOT)}
        env = {"TORCHINDUCTOR_CACHE_DIR": str(self.out / "cache" / "inductor"),
               "TORCHINDUCTOR_COMPILE_THREADS": "2"} | env  # fmt: skip
        env |= {"TRITON_INTERPRET": "1"} if self.fake else {}
        begin = time.monotonic()
        code, stdout, stderr = ended(command, env, timeout_s)
        if code is None:
            return "timeout", {"seconds": time.monotonic() - begin}
        lines = [line for line in stdout.splitlines() if line.startswith("{")]
        found = json.loads(lines[-1]) if lines and not code else {}
        status = "ok" if found else "failed"
        if not found:
            found = {"error": (stderr or stdout)[-2000:]}
        return status, found | {"seconds": time.monotonic() - begin}

    def keep(self, case: str, status: str, result: dict[str, Any]) -> None:
        """Append a case's result to the results, then save the state; after a kill between the two the case is
        repeated.
        """
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"case": case, "status": status, **result}) + "\n")
        self.done[case], self.tries[case] = status, self.tries.get(case, 0) + 1
        new = self.file.with_suffix(".new")
        state = {"kernels": digest(), "fake": self.fake, "done": self.done, "tries": self.tries}
        new.write_text(json.dumps(state, indent=1), encoding="utf-8")
        new.replace(self.file)
        print(f"{status:8} {result['seconds']:6.1f} s  {case}", flush=True)


def ended(command: list[str], env: dict[str, str], timeout_s: float) -> tuple[int | None, str, str]:
    """Run a command; return (exit code, stdout, stderr), or (None, "", "") after `timeout_s` seconds.

    The command leads a process group, which is killed at the end. It holds one end of a pipe that closes when this
    process ends in any way (environment GPU_DAY_LIFELINE).
    """
    theirs, ours = os.pipe()
    env = env | {"GPU_DAY_LIFELINE": str(theirs)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        pass_fds=[theirs], start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
        return process.returncode, stdout, stderr
    except subprocess.TimeoutExpired:
        return None, "", ""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(ours)


def cases(fake: bool, stages: list[str], only: str) -> list[str]:
    """Return the names of the cases of some stages whose names contain `only`, in order."""
    command = [sys.executable, str(CASES), "list", ".", *(["--fake"] if fake else [])]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    found = json.loads(answer.stdout.splitlines()[-1])["cases"]
    return [case for case in found
            if case.partition(":")[0] in stages and only in case]  # fmt: skip


def table(day: Day, names: list[str]) -> str:
    """Return a text table: how many cases of each stage passed, failed or are left, and the names of those that
    failed.
    """
    lines = []
    for stage in STAGES:
        of_stage = [name for name in names if name.partition(":")[0] == stage]
        ended = [day.done[name] for name in of_stage if name in day.done]
        if of_stage:
            lines.append(f"{stage:9} {ended.count('ok')} ok, {len(ended) - ended.count('ok')} failed, "
                         f"{len(of_stage) - len(ended)} left")  # fmt: skip
    lines += [f"  {status}: {name}" for name, status in day.done.items() if status != "ok"]
    return "\n".join(lines[:LINES])


def merge(folder: Path) -> int:
    """Copy tables from `folder` into hub_cards/bench, and results and pictures into docs/benchmarks; return the exit
    status.
    """
    state = json.loads((folder / "state.json").read_text("utf-8"))
    if state.get("fake"):
        print("the run was a fake one: nothing to merge")
        return 1
    for file in sorted((folder / "cache" / "kernels").glob("*.json")):
        shutil.copy(file, ROOT / "hub_cards" / "bench" / file.name)
        print(f"hub_cards/bench/{file.name}")
    for file in (*folder.glob("*.png"), folder / "results.jsonl"):
        target = ROOT / "docs" / "benchmarks" / f"gpu-{file.name}"
        shutil.copy(file, target)
        print(target.relative_to(ROOT))
    return 0


def main() -> int:
    """Run the cases that the command line selects, or merge; return 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="gpu-day", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu-day")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--budget", type=float, default=540.0)
    parser.add_argument("--stage", default=",".join(STAGES))
    parser.add_argument("--only", default="")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--merge", type=Path)
    given = parser.parse_args()
    if given.merge:
        return merge(given.merge)
    unknown = set(given.stage.split(",")) - set(STAGES)
    if unknown:
        parser.error(f"no such stage: {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    day = Day(given.out, given.resume, given.fake, given.budget, given.workers)
    names = cases(given.fake, given.stage.split(","), given.only)
    all_done = day.run(names)
    print(table(day, names))
    if not all_done:
        print(f"the budget is spent: go on with --resume {given.out}")
    return 0 if all(day.done.get(name, "ok") == "ok" for name in names) else 1


if __name__ == "__main__":
    sys.exit(main())
