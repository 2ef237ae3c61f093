"""Server that runs the scripts whose paths come on standard input, each in its folder and in its own process.

The processes are forked from this one, which has imported `warm` and took it off the path again: twelve pages would
each import torch, transformers and the loader, and register torch's rules of fake tensors. What a script says goes
beside it, into <script>.said; its exit code is a line of standard output.
"""

import gc
import os
import runpy
import signal
import sys
from pathlib import Path

SUPPORT = str(Path(__file__).resolve().parents[1] / "support")
sys.path.insert(0, SUPPORT)

import warm  # noqa: E402, F401

sys.path.remove(SUPPORT)
gc.freeze()  # the scripts' own collections skip what is imported
LIMIT_S = 300


def run(script):
    """Run a script as `python script` does."""
    signal.alarm(LIMIT_S)
    os.chdir(script.parent)
    said = os.open(script.with_suffix(".said"), os.O_WRONLY | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(said, standard)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv, sys.path[0] = [str(script)], str(script.parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(Path(line.strip()))
            break  # to the end of the interpreter, as after any script
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
