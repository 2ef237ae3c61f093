"""Every command of the project, for people and for CI: `python3 ci/run.py COMMAND [arguments]`.

A checkout, Python >= 3.11 and a package index are enough. `.venv` is made on the first run, and again only when
pyproject.toml, ci/constraints.txt, ci/hashes.txt, the Python or the path of the checkout changed. SLAPO_ZOO_PYTHON
names an interpreter to use as it is, e.g. one that has a CUDA build of torch.
"""

from __future__ import annotations  # an older Python must get as far as the message below

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / "slapo_zoo.stamp"
PYPROJECT = ROOT / "pyproject.toml"
CONSTRAINTS = ROOT / "ci" / "constraints.txt"
HASHES = ROOT / "ci" / "hashes.txt"
HASHED_FOR = ("Linux", "x86_64", "CPython", "3.11")  # platform of the files in HASHES
OLDEST = (3, 11)


class CommandError(Exception):
    """Error of a command; its text says what went wrong and what to do."""


def say(text: str) -> None:
    """Print a line of progress at once, also when the output is a file."""
    print(f"ci/run.py: {text}", flush=True)


def wanted_stamp() -> str:
    """Return a digest that changes whenever `.venv` must be made again; it is compared with the file STAMP."""
    parts = [PYPROJECT.read_bytes(), CONSTRAINTS.read_bytes(), HASHES.read_bytes()]
    # the path counts: the editable install of a copied .venv points at the old checkout
    parts += [sys.version.encode(), str(ROOT).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def is_ready() -> bool:
    """Return whether `.venv` was finished by this script and nothing changed since."""
    return VENV_PYTHON.exists() and STAMP.exists() and STAMP.read_text() == wanted_stamp()


def is_usable() -> bool:
    """Return whether `.venv` is a working environment of this very Python, with pip."""
    probe = [str(VENV_PYTHON), "-c", "import pip, sys; sys.stdout.write(sys.version)"]
    try:
        answer = subprocess.run(probe, capture_output=True, text=True, check=False)
    except OSError:
        return False
    return answer.returncode == 0 and answer.stdout == sys.version


def pinned_torch() -> str:
    """Return the line `torch==...` of ci/constraints.txt."""
    found = re.search(r"^torch==\S+", CONSTRAINTS.read_text(), flags=re.MULTILINE)
    if not found:
        raise CommandError("ci/constraints.txt has no line torch==VERSION; add it.")
    return found[0]


def make_venv() -> None:
    """Make an empty `.venv`, in place of an older one."""
    say("making .venv")
    # the base interpreter: a venv cannot be cleared by the Python that runs from it
    python = getattr(sys, "_base_executable", None) or sys.executable
    result = subprocess.run([python, "-m", "venv", "--clear", str(VENV)], check=False)
    if result.returncode:
        raise CommandError(
            f"`{python} -m venv` failed. Its words are above. On Debian and Ubuntu install the "
            "package python3-venv; on a full disk make room (about 2 GB)."
        )


def call(*command: str) -> int:
    """Run a command in the root of the checkout and return its exit status; SIGTERM to this process also ends the
    command.
    """
    child = subprocess.Popen(command, cwd=ROOT, env=environment())
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    while True:
        try:
            status = child.wait()
            return status if status >= 0 else 128 - status  # ended by a signal: as in a shell
        except KeyboardInterrupt:
            continue  # the terminal sent Ctrl-C to the child too, which ends by itself


def pip_install(*arguments: str) -> None:
    """Run pip in `.venv` with the pinned versions; with --require-hashes the requirements file pins them itself."""
    start = time.monotonic()
    pinned = [] if "--require-hashes" in arguments else ["-c", str(CONSTRAINTS)]
    say(f"installing {arguments[-1]}")
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    pip = [str(VENV_PYTHON), "-m", "pip", "--no-input", "--disable-pip-version-check", *quiet]
    command = [*pip, "install", *pinned, *arguments]
    if call(*command):
        raise CommandError(
            f"pip could not install {arguments[-1]}. Its words are above. Check the network and "
            "the package index, then run the same command again; it goes on from here."
        )
    say(f"installed {arguments[-1]} in {time.monotonic() - start:.0f} s")


def prepare() -> str:
    """Return the interpreter for commands: SLAPO_ZOO_PYTHON, or that of `.venv`, which is made if missing or stale."""
    chosen = os.environ.get("SLAPO_ZOO_PYTHON")
    if chosen:
        python = shutil.which(chosen)
        if not python:
            raise CommandError(
                f"SLAPO_ZOO_PYTHON={chosen} is not an executable file; name a Python."
            )
        return python
    if not is_ready():
        STAMP.unlink(missing_ok=True)  # from here on, a stopped install looks unfinished
        if not is_usable():
            make_venv()
        machine = (platform.system(), platform.machine(), platform.python_implementation())
        if (*machine, ".".join(platform.python_version_tuple()[:2])) == HASHED_FOR:
            # pip refuses a file whose hash is not that of the tested one
            pip_install("--require-hashes", "--no-deps", "-r", str(HASHES.relative_to(ROOT)))
        # torch alone: pip then chooses a CPU build where there is one
        pip_install(pinned_torch())
        pip_install("-e", ".[dev]")
        STAMP.write_text(wanted_stamp())
    return str(VENV_PYTHON)


def environment() -> dict[str, str]:
    """Return the environment variables of every command: no download, one thread per rank, Triton not interpreted."""
    env = dict(os.environ)
    for name in ("TRITON_INTERPRET", "PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE"):
        env.pop(name, None)  # these paths would change which packages are found
    if env.get("SLAPO_ZOO_PYTHON"):
        env["PYTHONPATH"] = str(ROOT)  # nothing is installed into a borrowed interpreter
    return env | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def demo(python: str, rest: list[str]) -> int:
    """Train GPT-2 on four processes and on one, and compare every loss."""
    return call(python, "ci/demo.py", *rest)


def beside(python: str, rest: list[str]) -> int:
    """MODEL REPORT [--tp 2]: compare training steps of a checkpoint with other libraries that shard it."""
    return call(python, "ci/beside.py", *rest)


def coverage(python: str, rest: list[str]) -> int:
    """Train every model type of transformers, tiny, and compare with the plain model; --page writes docs/coverage.md."""
    return call(python, "ci/type_coverage.py", *rest)


def lint(python: str, rest: list[str]) -> int:
    """Run ruff: rules and formatting."""
    rest = rest or ["."]
    return call(python, "-m", "ruff", "check", *rest) or call(
        python, "-m", "ruff", "format", "--check", *rest
    )


QUICK = [
    "tests/house/test_house.py", "tests/house/test_layers.py", "tests/house/test_lean_import.py",
    "tests/house/test_security.py", "tests/zoo/test_golden.py", "tests/language/test_schedule.py",
    "tests/language/primitives/test_every_primitive.py", *(f"tests/zoo/test_zoo.py::test_every_model_family_has_the_losses_and_gradients_of_plain_transformers[GPT2LMHeadModel-tokens-{mesh}]" for mesh in ("2x1x1", "1x2x1")),
    "--deselect=tests/zoo/test_golden.py::test_schedule_table_shards_every_head_class_and_config_variant_without_error",  # takes half of the time
]  # fmt: skip


def quick(python: str, rest: list[str]) -> int:
    """Run a first selection of tests in a minute: house rules, golden files, directives, one family on tp=2 and pp=2."""
    return call(python, "-m", "pytest", *QUICK, *rest)


def several_at_once() -> list[str]:
    """Return pytest's arguments for parallel files: three on two cores, since some tests wait for a timeout or a
    disk.
    """
    cores = len(os.sched_getaffinity(0))
    return ["-n", str(max(3, cores // 2)), "--dist", "loadfile"] if cores > 1 else []


def test(python: str, rest: list[str]) -> int:
    """Run lint, site and pytest; with arguments of pytest, no site. --changed [REV]: only tests that a change
    affects.
    """
    if rest[:1] == ["--changed"]:
        base = rest[1] if len(rest) > 1 and not rest[1].startswith("-") else "HEAD"
        more = rest[1 + (base in rest[1:]) :]
        command = [python, str(ROOT / "ci" / "changed.py"), base]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode:
            raise CommandError(answer.stderr.strip())
        rest = [*answer.stdout.split(), *more]
        say(f"{len(rest)} files are reached")
    borrowed = bool(os.environ.get("SLAPO_ZOO_PYTHON"))
    if borrowed:
        say("SLAPO_ZOO_PYTHON is taken as it is: the site is not built")
    for check in (
        (lint,) if rest or borrowed else (lint, docs)
    ):  # the site takes five seconds of CPU time
        if status := check(python, []):
            return status
    return call(python, "-m", "pytest", *several_at_once(), *rest)


def types(python: str, rest: list[str]) -> int:
    """Check types with pyright, for minutes: of all files, or of those named."""
    return call(python, "-m", "pyright", "--pythonpath", python, *rest)


def bench(python: str, rest: list[str]) -> int:
    """Run a benchmark; arguments go to ci/bench.py."""
    return call(python, "ci/bench.py", *rest)


def hashes(python: str, rest: list[str]) -> int:
    """Renew ci/hashes.txt: the SHA-256 of every file that pip installs for ci/constraints.txt, except torch."""
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if line[:1] not in ("#", "")]
    pip = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
    ]
    names = [line for line in lines if not line.startswith("torch==")]  # differs by index
    done = subprocess.run(
        [*pip, "--report", "-", *rest, *names], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CommandError(f"pip found no file for one of the constraints:\n{done.stderr.strip()}")
    found = []
    for item in json.loads(done.stdout)["install"]:
        data, archive = item["metadata"], item["download_info"]["archive_info"]
        digest = archive["hashes"]["sha256"]
        found.append(f"{data['name']}=={data['version']} --hash=sha256:{digest}\n")
    head = [line for line in HASHES.read_text().splitlines(keepends=True) if line[0] == "#"]
    HASHES.write_text("".join(head + sorted(found, key=str.lower)))
    return 0


def export_kernels(python: str, rest: list[str]) -> int:
    """Write the kernels in the layout of the HuggingFace `kernels` package; a folder may follow."""
    return call(python, "ci/export_kernels.py", *rest)


def gpu(python: str, rest: list[str]) -> int:
    """Run the tests that need a CUDA device; other test files are skipped, as they may import what a GPU machine
    lacks.
    """
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    files = [str(file.relative_to(ROOT)) for file in tests if "mark.gpu" in file.read_text()]
    return call(python, "-m", "pytest", "-m", "gpu and not soak", *files, *rest)


def gpu_day(python: str, rest: list[str]) -> int:
    """Run every check and measurement that needs a GPU, resumable; see ci/gpu_day.py."""
    return call(python, "ci/gpu_day.py", *rest)


def grid(python: str, rest: list[str]) -> int:
    """Run all families on all meshes, and the other slow tests, for minutes; arguments go to pytest."""
    return call(python, "-m", "pytest", "-m", "(slow or grid) and not gpu and not soak", *rest)


def soak(python: str, rest: list[str]) -> int:
    """Run the tests that look for leaks and hangs; with --minutes N kill and stop trainings at random instead."""
    if any(argument.startswith("--minutes") for argument in rest):
        return call(python, "ci/soak.py", *rest)
    return call(python, "-m", "pytest", "-m", "soak", *rest)


def cards(python: str, rest: list[str]) -> int:
    """Write the cards of hub_cards/ again, one per family; --verify also verifies those that are not verified yet."""
    return call(python, "ci/card_collection.py", *rest)


def corpus(python: str, rest: list[str]) -> int:
    """Measure the published bugs of tests/corpus, and write their table into docs/verification.md."""
    return call(python, "ci/corpus_page.py", *rest)


def docs(python: str, rest: list[str]) -> int:
    """Build the documentation as a site in runs/site; arguments go to zensical build."""
    probe = subprocess.run([python, "-c", "import zensical, mkdocstrings"], capture_output=True)
    if probe.returncode and not os.environ.get("SLAPO_ZOO_PYTHON"):
        pip_install("-e", ".[docs]")
    return call(python, "-m", "zensical", "build", "--strict", *rest)


def pictures(python: str, rest: list[str]) -> int:
    """Draw the pictures of the documentation again, from the code."""
    return call(python, "ci/pictures.py", *rest)


def everything(python: str, rest: list[str]) -> int:
    """Run the commands test, types and demo; stop at the first that fails."""
    return test(python, rest) or types(python, []) or demo(python, [])


COMMANDS = {
    "demo": demo,
    "quick": quick,
    "test": test,
    "lint": lint,
    "types": types,
    "hashes": hashes,
    "bench": bench,
    "beside": beside,
    "coverage": coverage,
    "export-kernels": export_kernels,
    "gpu": gpu,
    "gpu-day": gpu_day,
    "grid": grid,
    "soak": soak,
    "cards": cards,
    "corpus": corpus,
    "docs": docs,
    "pictures": pictures,
    "all": everything,
}


SCRIPTS = ("bench", "beside", "coverage", "demo", "gpu-day")  # scripts with a -h of their own


def parse(argv: list[str]) -> tuple[str, list[str]]:
    """Return (name of the command, arguments for it) from the command line."""
    parser = argparse.ArgumentParser(prog="ci/run.py", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, function in COMMANDS.items():
        text = function.__doc__ or ""
        commands.add_parser(name, help=text, description=text, add_help=name not in SCRIPTS)
    known, rest = parser.parse_known_args(argv)
    return known.command, rest


def main(argv: list[str]) -> int:
    """Prepare the interpreter and run a command; return its exit status, or 2 after an error."""
    try:
        if sys.version_info < OLDEST:
            found = ".".join(map(str, sys.version_info[:3]))
            raise CommandError(f"this is Python {found}; run it with Python 3.11 or newer.")
        command, rest = parse(argv)
        return COMMANDS[command](prepare(), rest)
    except CommandError as problem:
        print(f"ci/run.py: {problem}", file=sys.stderr)
    except OSError as problem:
        print(f"ci/run.py: the system refused: {problem}", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
