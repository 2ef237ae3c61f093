"""Disturb a training at random for minutes, and compare its result with that of an undisturbed one.

    python ci/soak.py --minutes 30 [--seed 0]

Half of the trainings keep their layout and must end with the same bits; the others change the layout at every start
and must end within 1e-6. Meanwhile processes are killed, also in the middle of a save, stopped for a while, or asked
to end. As root, the checkpoints are on a small file system of their own, which is filled up, and blocked for seconds;
--no-disk leaves that out. One JSON line of figures is printed. The exit code is 1 if steps were lost, weights differ,
or a traceback was shown.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from slapo_zoo.weights.history import latest
from slapo_zoo.weights.training_folder import damages_of

ROOT = Path(__file__).resolve().parents[1]
LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)]  # tp, pp, dp
TOLERANCE = 1e-6
STEPS = 200  # steps of one training; over thousands rounding alone exceeds the tolerance
DISK_BYTES = 64 << 20
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "the",
    "mat",
    "and",
    "the",
    "dog",
    "ran",
    "away",
    "from",
    "a",
    "red",
    "house",
    "in",
    "the",
    "rain",
]


def make_job(folder: Path) -> list[str]:
    """Write a tiny checkpoint with a tokenizer of words and a text; return the command that trains on them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = {word: i for i, word in enumerate(["<end>", "<unknown>", *sorted(set(WORDS))])}
    words = Tokenizer(models.WordLevel(names, unk_token="<unknown>"))  # noqa: S106 - no secret
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = {"eos_token": "<end>", "unk_token": "<unknown>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **marks).save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=32, n_head=4, n_layer=2, n_positions=32, vocab_size=len(names), bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder / "model")
    draw = random.Random(0)  # noqa: S311 - no secret
    (folder / "text.txt").write_text(" ".join(draw.choice(WORDS) for _ in range(120000)))
    command = [sys.executable, "-m", "slapo_zoo.cli.main", "train", str(folder / "model")]
    return [*command, "--data", str(folder / "text.txt"), "--seq-len", "32", "--batch-size", "256",
            "--device", "cpu", "--learning-rate", "1e-4"]  # fmt: skip


def start(job: list[str], layout: tuple[int, int, int], out: Path) -> subprocess.Popen:
    """Start the training `job` (a command) on a layout (tp, pp, dp), in a process group of its own; checkpoints go to
    `out`.
    """
    names = [f"--{name}={size}" for name, size in zip(("tp", "pp", "dp"), layout, strict=True)]
    more = [
        "--checkpoint",
        str(out),
        "--save-steps",
        "2",
        "--save-total-limit",
        "2",
        "--max-steps",
        str(STEPS),
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [*job, *names, *more], env=env, start_new_session=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def children_of(pid: int) -> list[int]:
    """Return the process ids of the children of `pid`: the ranks of a training."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(one) for one in text.split()]


class Disk:
    """Small ext4 file system in an image file, mounted at `folder`, which can be filled up and frozen."""

    def __init__(self, image: Path, folder: Path):
        self.folder, self._image = folder, image
        folder.mkdir()

    def __enter__(self) -> "Disk":
        with self._image.open("wb") as file:
            file.truncate(DISK_BYTES)
        run("mkfs.ext4", "-q", "-F", str(self._image))
        run("mount", "-o", "loop", str(self._image), str(self.folder))
        return self

    def __exit__(self, *_: object) -> None:
        run("umount", "-l", str(self.folder))

    def fill(self, seconds: float) -> None:
        """Keep the file system full for `seconds`, including the blocks reserved for root."""
        ballast = self.folder / "ballast"
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 12))
        time.sleep(seconds)
        ballast.unlink()

    def freeze(self, seconds: float) -> None:
        """Block every write to the file system for `seconds`."""
        run("fsfreeze", "-f", str(self.folder))
        try:
            time.sleep(seconds)
        finally:
            run("fsfreeze", "-u", str(self.folder))


def run(*command: str) -> None:
    """Run a system command, and raise an error if it fails."""
    subprocess.run(command, check=True, capture_output=True)


def kill_in_a_save(child: subprocess.Popen, out: Path) -> str:
    """Kill all ranks while a checkpoint is being saved; wait up to 20 s for a save. Return the name of what happened."""
    until = time.monotonic() + 20.0
    while child.poll() is None and time.monotonic() < until:
        if any(out.parent.glob(".*partial-*")) or any(out.glob(".*partial-*")):
            os.killpg(child.pid, signal.SIGKILL)
            return "kill in a save"
    return "no save to kill in"


def disturb(child: subprocess.Popen, draw: random.Random, out: Path, disk: Disk | None) -> str:
    """Disturb the training once, in a way that `draw` selects; return the name of the disturbance."""
    ranks = children_of(child.pid) or [child.pid]
    kinds = ["kill all", "kill one", "end", "stop a rank", "kill in a save"]
    kind = draw.choice(kinds + (["full disk", "slow disk"] if disk else []))
    try:
        if kind == "kill in a save":
            return kill_in_a_save(child, out)
        if disk and kind == "full disk":
            disk.fill(draw.uniform(3.0, 10.0))
            return kind
        if disk and kind == "slow disk":
            disk.freeze(draw.uniform(2.0, 20.0))
            return kind
        if kind == "kill all":
            os.killpg(child.pid, signal.SIGKILL)
        elif kind == "kill one":
            os.kill(draw.choice(ranks), signal.SIGKILL)
        elif kind == "end":
            child.send_signal(signal.SIGTERM)
        else:
            one = draw.choice(ranks)
            os.kill(one, signal.SIGSTOP)
            time.sleep(draw.uniform(0.5, 3.0))
            os.kill(one, signal.SIGCONT)
    except ProcessLookupError:
        return "too late"
    return kind


def step_of(out: Path) -> int:
    """Return the step from which the next start resumes, 0 without a checkpoint; RuntimeError if one is damaged."""
    found = latest(out) if out.exists() else None
    if found is None:
        return 0
    if damages := damages_of(found)[1]:
        raise RuntimeError(f"{found} is damaged: {damages[0]}")
    return json.loads((found / "training_state.json").read_text())["step"]


def disturbed(job: list[str], out: Path, mixed: bool, draw: random.Random, disk: Disk | None) -> Counter:  # fmt: skip
    """Run one training of STEPS steps, disturbed and restarted until it is done; return counts of all events by name.

    `mixed`: every start has another layout.
    """
    found, before = Counter(), 0
    while before < STEPS:
        child = start(job, draw.choice(LAYOUTS) if mixed else LAYOUTS[1], out)
        begun, until = time.monotonic(), time.monotonic() + draw.uniform(8.0, 25.0)
        while child.poll() is None and time.monotonic() < until:
            time.sleep(0.2)
        while child.poll() is None:
            found[disturb(child, draw, out, disk)] += 1
            time.sleep(draw.uniform(1.0, 5.0))
        _, error = child.communicate()
        if b"Traceback" in error:
            found["tracebacks"] += 1
            sys.stderr.write(error.decode(errors="replace"))
        now = step_of(out)
        found["starts"] += 1
        found["steps back"] += now < before
        found["seconds"] += int(time.monotonic() - begun)
        before = now
    return found


def soak(job: list[str], folder: Path, mixed: bool, minutes: float, draw: random.Random, disk: Disk | None) -> dict:  # fmt: skip
    """Run disturbed trainings until the time is up, and compare each with one undisturbed training; return the
    figures.
    """
    alone = folder / f"alone-{mixed}"
    start(job, LAYOUTS[0 if mixed else 1], alone).communicate()
    expected, found, worst = weights_of(alone), Counter(), 0.0
    out = (disk.folder if disk else folder) / "out"
    deadline = time.monotonic() + 60 * minutes
    while time.monotonic() < deadline:
        found += disturbed(job, out, mixed, draw, disk)
        found["trainings"] += 1
        worst = max(worst, difference(weights_of(out), expected))
        shutil.rmtree(out)
    return {**found, "steps": STEPS, "largest difference": worst}


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    """Return {name: tensor} of the newest checkpoint in `out`; {} without one."""
    found = latest(out)
    return load_file(found / "model.safetensors") if found is not None else {}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference between two sets of weights."""
    return max(float((one[n] - other[n]).abs().max()) for n in one)


def main() -> int:
    """Disturb trainings with a fixed layout, then with changing ones; print the figures, and return 1 if something
    was lost.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-disk", action="store_true", help="no file system of its own")
    options = parser.parse_args()
    draw, report, failed = random.Random(options.seed), {}, False  # noqa: S311
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        job, disk = make_job(Path(name)), None
        if not options.no_disk:
            if os.geteuid() or not shutil.which("fsfreeze"):
                parser.error("a disk of its own needs root, mkfs.ext4 and fsfreeze: or --no-disk")
            disk = stack.enter_context(Disk(Path(name) / "image", Path(name) / "disk"))
        for kind, limit in (("same layout", 0.0), ("mixed layouts", TOLERANCE)):
            mixed, half = kind != "same layout", options.minutes / 2
            report[kind] = found = soak(job, Path(name), mixed, half, draw, disk) | {
                "allowed": limit
            }
            lost = found.get("steps back", 0) + found.get("tracebacks", 0)
            failed |= found["largest difference"] > limit or bool(lost)
    sys.stdout.write(json.dumps(report) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
