"""Pages of the documentation, followed as a reader does: code is copied, typed and run."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def page(name):
    """The text of a page."""
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(language, text):
    """(line number, text) of each fenced block of one language."""
    for match in re.finditer(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield text[: match.start(1)].count("\n"), match[1]


def commands(text):
    """Every command line of the bash blocks, without comments and blank lines."""
    for _, block in blocks("bash", text):
        split = (shlex.split(line, comments=True) for line in block.splitlines())
        yield from (words for words in split if words)


def clean_environment():
    """Return an environment for child processes: offline, one thread, no launcher variables."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in ranks}
    return env | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class Desk:
    """Folder with a shell in which the project's environment is active."""

    def __init__(self, folder):
        self.folder = folder
        bin_folder = str(Path(sys.executable).parent)
        self.env = clean_environment() | {
            "PATH": bin_folder + os.pathsep + os.environ["PATH"],
            "HF_DATASETS_CACHE": str(folder / "cache"), "HF_HOME": str(folder / "hf"),
        }  # fmt: skip

    def start(self, line):
        """Start a command line; return the process."""
        return subprocess.Popen(
            ["bash", "-c", f"exec {line}"], cwd=self.folder, env=self.env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def type(self, line, code=0):
        """Run a command line that must exit with `code`; return stdout, or stderr where it must fail."""
        process = self.start(line)
        out, err = process.communicate(timeout=400)
        assert process.returncode == code, f"{line}\n{out}\n{err}"
        assert "Traceback" not in err, f"{line}\n{err}"
        return err if code else out
