"""One fork server for all pytest processes of a run by pytest-xdist: each would import torch and transformers for ten seconds."""

import multiprocessing.forkserver as forkserver
import os
import tempfile
from multiprocessing import get_context, resource_tracker
from pathlib import Path
from unittest.mock import patch

PRELOADED = ["warm_saves", "warm"]
VARIABLE = "SLAPO_ZOO_FORKSERVER"  # folder of the run; once the server has started, `address` there names its socket


def start():
    """Start the server of this process, unless it runs."""
    get_context("forkserver").set_forkserver_preload(PRELOADED)
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(path)):
        forkserver.ensure_running()  # the server knows our PYTHONPATH, not our sys.path


def announce():
    """Return a folder for the address of a server that pytest's first process may start; its later processes look there."""
    folder = tempfile.TemporaryDirectory()
    os.environ[VARIABLE] = folder.name
    return folder


def start_for_all(folder):
    """Start the server in pytest's first process; what ranks print goes nowhere."""
    kept = [(fd, os.dup(fd)) for fd in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for fd, _ in kept:
            os.dup2(nowhere, fd)
        start()
    finally:
        for fd, before in kept:
            os.dup2(before, fd)
            os.close(before)
        os.close(nowhere)
    part = Path(folder.name, "part")
    part.write_text(forkserver._forkserver._forkserver_address)
    part.rename(part.with_name("address"))


def use():
    """Use the server of pytest's first process if there is one, else one of our own."""
    file = Path(os.environ.get(VARIABLE, ""), "address")
    server = forkserver._forkserver
    if VARIABLE not in os.environ or not file.exists():
        start()
    elif server._forkserver_address is None:
        server._forkserver_address = file.read_text()
        server._forkserver_alive_fd = os.open(
            os.devnull, os.O_WRONLY
        )  # the first process keeps it alive
        server.ensure_running = resource_tracker.ensure_running
