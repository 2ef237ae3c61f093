"""Scripts that run as `python script` does, each in a process forked from the server that has imported torch and transformers.

A new interpreter would import them, and register torch's rules of fake tensors, for longer than most scripts run.
"""

import atexit
import os
import runpy
import signal
import sys
import threading
from pathlib import Path

from ranks import forkserver

LIMIT_S = 300
TESTS = Path(__file__).resolve().parents[1]


def run_script(script, folder, env, *arguments):
    """Run a script in a folder with these environment variables and no others; return (exit status, stdout, stderr)."""
    said = [folder / f"{script.stem}.{name}" for name in ("out", "err")]
    given = script, folder, env, arguments, said
    process = forkserver().Process(target=_run, args=given)
    process.start()
    process.join(LIMIT_S + 30)
    process.kill()
    return process.exitcode, *(path.read_text(encoding="utf-8") for path in said)


def _run(script, folder, env, arguments, said):
    signal.alarm(LIMIT_S)
    os.chdir(folder)
    for standard, path in zip((1, 2), said, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), standard)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = [str(script.parent), *(p for p in sys.path if p and TESTS not in Path(p).parents)]
    sys.argv[:] = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")
    threading._shutdown()  # as at the end of any interpreter
    atexit._run_exitfuncs()
