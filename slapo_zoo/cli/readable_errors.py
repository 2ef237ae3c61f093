"""Printing of expected errors on stderr: no traceback, exit code 2."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

from slapo_zoo.errors import SlapoError, is_full
from slapo_zoo.parallel.ranks.slurm import is_first


@contextmanager
def readable_errors(state: SimpleNamespace | None = None) -> Iterator[None]:
    """Context that prints an expected error without a traceback and exits with code 2.

    Expected are SlapoErrors and file errors. If `state.debug` (--debug) is true, they are raised.
    """
    try:
        yield
    except SlapoError as error:
        if getattr(state, "debug", False):
            sys.stderr.write(getattr(error, "traceback_text", ""))  # that of the rank that failed
            raise
        report(error)
        sys.exit(2)
    except SystemExit as stop:
        if type(stop) is not SystemExit and is_first():  # a StoppedError says how to resume
            sys.stderr.write(f"{stop}\n")
        raise
    except OSError as error:  # a full disk, a missing folder, an unreadable file of the user
        if getattr(state, "debug", False) or (error.filename is None and not is_full(error)):
            raise
        report(_of_the_disk(error))
        sys.exit(2)


def _of_the_disk(error: OSError) -> SlapoError:
    """Return a SlapoError that names the path and the cause of `error`, e.g. a full disk, and says what to do."""
    hint = "check the path, the rights and the space there"
    if is_full(error):
        hint = "make room there; the same command resumes a run that has a checkpoint"
    return SlapoError(str(error.filename or "disk"), "", error.strerror or str(error), hint)


def check_new_file(path: Path | None, option: str) -> None:
    """Raise SlapoError if `path`, the value of the flag `option`, cannot be written as a file; None passes."""
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise SlapoError(str(path), option, f"found no folder {folder}", "create this folder first")
    if path.is_dir():
        problem = "found a folder, expected a file"
        raise SlapoError(str(path), option, problem, "name a file in this folder")
    if not os.access(path if path.exists() else folder, os.W_OK):
        problem = f"no permission to write {'this file' if path.exists() else f'into {folder}'}"
        raise SlapoError(str(path), option, problem, "name another file")


@contextmanager
def stdout_for_json(as_json: bool) -> Iterator[None]:
    """Context that sends all output to stderr if `as_json`, so that stdout holds only the JSON printed afterwards.

    This includes output of child processes and of DeepSpeed, which logs to stdout when `transformers` imports it.
    """
    if not as_json:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def report(error: SlapoError) -> None:
    """Print an error on stderr: as a panel on a terminal, else as a line that names the launcher's rank."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        rank = os.environ.get("RANK")
        console.out(f"error: {error}" if rank is None else f"[rank {rank}] error: {error}")
        return
    text = Text(f"{error.what}: " if str(error.what) else "", style="bold")
    text.append(error.problem, style="not bold")
    text.append(f"\n{error.hint}" if error.hint else "", style="not bold green")
    console.print(Panel(text, title=Text(error.where), title_align="left", border_style="red"))
