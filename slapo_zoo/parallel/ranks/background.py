"""Saving of checkpoints in a background thread, one save at a time, while training continues.

The collectives of a save use a separate process group, since those of the training must keep their order.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

from slapo_zoo.parallel import compat
from slapo_zoo.parallel.ranks.patience import LIMIT_S, over_group


class Saving(Future):
    """Future of a save in the background, like that of `torch.distributed.checkpoint.async_save`.

    `result()` waits and raises the error of the save. If nobody has called `result()` or `exception()`, the next
    save or load raises the error, and so does the shutdown of the process group.
    """

    def __init__(self) -> None:
        super().__init__()
        self.told = False

    def result(self, timeout: float | None = None) -> None:
        """Wait for the save, and raise its error if it failed; TimeoutError after `timeout` seconds (None: never)."""
        self.exception(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the save, at most `timeout` seconds (None: for ever); return its error, or None."""
        found = super().exception(timeout)
        self.told = True
        return found


class _Pending:
    saving: Saving | None = None
    of_thread = threading.local()  # its `saving` is that of a rank which is a thread
    group: Any = None
    world: Any = None


def start(write: Callable[[], None]) -> Saving:
    """Run `write`, which saves files and calls collectives, in a background thread; return the
    future of the save. All ranks must call this function, which first waits for the previous save.

    If ranks are threads (in `emulate`, or of a model loaded with `exact=`), the save ends before this call returns.
    """
    join()
    saving, at_once = Saving(), compat.ranks_are_threads()
    group = None if at_once else _group()

    def work() -> None:
        try:
            with nullcontext() if at_once else over_group(group):
                write()
        except BaseException as error:
            saving.set_exception(error)
        else:
            saving.set_result(None)

    if at_once:
        work()
        _Pending.of_thread.saving = saving
        return saving
    _Pending.saving = saving
    # No daemon: Python waits for it at exit.
    threading.Thread(target=work, name="save-checkpoint", daemon=False).start()
    return saving


def join() -> None:
    """Wait for the running save, if there is one; raise its error unless the user has already got it from `Saving`."""
    place: Any = _Pending.of_thread if compat.ranks_are_threads() else _Pending
    saving, place.saving = getattr(place, "saving", None), None
    if saving is None:
        return
    told, error = saving.told, saving.exception()
    if error is not None and not told:
        raise error


def _group() -> Any:
    """Return a gloo group of all ranks for saves, created once per default process group; None in a single process."""
    if not dist.is_initialized():
        return None
    if _Pending.world is not dist.group.WORLD:
        _Pending.world = dist.group.WORLD
        _Pending.group = compat.patient_group(LIMIT_S)
    return _Pending.group
