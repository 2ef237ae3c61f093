"""Ranks that are killed or fail: how their peers notice it, and raise the error of the rank that failed first.

A killed process closes its connections, so a collective of its peers raises; the heartbeats tell which rank is silent.
Without this, peers would wait for a timeout, or see gloo's "Connection closed by peer". A rank that raises first writes
its error into the store of the process group, and `rank_guard` raises that error on a peer that lost the connection.
"""

import json
import os
import re
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist

from slapo_zoo.errors import RankError, SlapoError, is_agreed
from slapo_zoo.parallel.begun import EXPLAIN
from slapo_zoo.parallel.ranks import heartbeat
from slapo_zoo.parallel.ranks.heartbeat import ERROR_KEY

VARIABLE = "SLAPO_ZOO_TIMEOUT_S"
ERROR_WAIT_S = 5.0  # a rank that lost a peer waits so long for a published error
SILENT_S = 4.0  # after a lost connection, a rank without a heartbeat for so long is named
LINGER_S = 10.0  # a failed rank 0 that holds the store lets peers read the error for so long
_LOST_PEER = re.compile(
    r"gloo|nccl|closed by peer|connection (closed|reset|refused)|broken pipe|timed out waiting",
    re.IGNORECASE,
)
_TIMED_OUT = re.compile(r"[Tt]imed out waiting (\d+) ?ms")

_WITHIN: ContextVar[str] = ContextVar("within", default="a collective")  # default in a new thread


class State:
    """State of this process: `failed` is True once a step has failed or a peer was lost."""

    failed = False  # after a failure the peers may be gone: leave without a barrier


def rank_error(rank: int, exc: BaseException, what: str) -> RankError:
    """Return the RankError that other ranks and the parent process raise because `rank` raised `exc` in step `what`."""
    if isinstance(exc, RankError):
        return exc
    problem, hint = (
        f"{type(exc).__name__}: {exc}",
        "see the traceback of this rank, which failed first; the others were stopped",
    )
    if isinstance(exc, SlapoError):
        parts = [str(part) for part in (exc.where, exc.what, exc.problem) if str(part)]
        problem, hint = f"{type(exc).__name__}: {': '.join(parts)}", exc.hint
    error = RankError(f"rank {rank}", what, problem, hint)
    error.traceback_text = "".join(traceback.format_exception(exc))
    return error


def publish_error(exc: BaseException, what: str = "") -> None:
    """Write this rank's error `exc`, raised in the call `what` ("forward"), to the job's store, unless it has one."""
    store = default_store()
    if store is None:
        return
    error = rank_error(dist.get_rank(), exc, what)
    parts = [error.where, str(error.what), error.problem, error.hint, error.traceback_text]
    with suppress(RuntimeError):  # the store may have died with rank 0
        store.compare_set(ERROR_KEY, "", json.dumps(parts))
    _linger()


def peer_error() -> RankError | None:
    """Return the first error that a rank of this process group wrote into the store (`publish_error`), or None."""
    store, heart = default_store(), heartbeat.current()
    text = heart.error if heart is not None else ""
    with suppress(RuntimeError):
        if not text and store is not None and store.check([ERROR_KEY]):
            text = store.get(ERROR_KEY)
    return heartbeat.parse_error(text) if text else None


@contextmanager
def rank_guard(what: str) -> Iterator[None]:
    """Context of the call named `what` ("forward"): an error raised in it is written to the process group's key-value
    store, so that peers raise it too. If it only says that a peer was lost, a RankError with that peer's own error, or
    without one the peer's name, is raised instead.
    """
    token = _WITHIN.set(what)
    try:
        yield
    except Exception as exc:
        if isinstance(exc, RankError) or is_agreed(exc) or not dist.is_initialized():
            raise  # published by an inner guard, or raised by every rank in this step
        explain_lost_peer(exc)
        State.failed = True
        publish_error(exc, what)
        raise
    finally:
        _WITHIN.reset(token)


def explain_lost_peer(exc: Exception) -> None:
    """If `exc` was raised because a peer was lost, raise the RankError of that peer; otherwise return."""
    if not (dist.is_initialized() and is_lost_peer(exc)):
        return
    State.failed, what = True, _WITHIN.get()
    error = _await_peer_error()
    if error is None:
        error = lost_peer(exc, what)
        publish_error(error, what)  # so that all remaining ranks raise the same error
    else:
        _linger()
    raise error from exc


EXPLAIN.append(explain_lost_peer)


def is_lost_peer(exc: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, comes from a collective that lost a peer."""
    seen: set[int] = set()  # causes may form a circle
    while exc is not None and id(exc) not in seen:
        seen.add(id(exc))
        if isinstance(exc, dist.DistError) or (
            isinstance(exc, RuntimeError) and _LOST_PEER.search(str(exc))
        ):
            return True
        exc = exc.__cause__ or exc.__context__
    return False


def lost_peer(exc: BaseException, what: str) -> RankError:
    """Return a RankError that names the ranks without a heartbeat ("another rank" if there are none), after a connection
    broke or timed out. `exc` is the error of the collective, `what` the step in which it ran.
    """
    silent, heart = heartbeat.silent_ranks(SILENT_S), heartbeat.current()
    text, who = (
        str(exc).partition("\n")[0],
        heartbeat.names_of(silent) if silent else "another rank",
    )
    problem = f"lost contact with {who}, which left no message ({text})"
    if found := _TIMED_OUT.search(text):
        seconds = int(found[1]) / 1000
        problem = f"timed out after {seconds:g} s waiting for {who} at {what}"
        problem += f" ({lines})" if (lines := heart.lines() if heart else "") else ""
    if silent:
        problem += f"; {who} is not heard of any more"
    hint = f"see the output of the other ranks; {VARIABLE} or timeout_s= allow more time"
    return RankError(f"rank {dist.get_rank()}", what, problem, hint)


def _await_peer_error() -> RankError | None:
    deadline = time.monotonic() + ERROR_WAIT_S
    while (error := peer_error()) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return error


def _linger() -> None:
    """Keep rank 0 alive, if it holds the store, until its peers have read the first error, at most LINGER_S seconds. If
    torchrun or run_local holds the store, or the ranks are threads of one process, do not wait.
    """
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if dist.get_rank() != 0 or kept or _of_one_process(default_store()):
        return
    heart, deadline = heartbeat.current(), time.monotonic() + LINGER_S
    if heart is None:
        time.sleep(2.0)
        return
    while heart.not_told() and time.monotonic() < deadline:
        time.sleep(0.1)


def _of_one_process(store: Any) -> bool:
    """Return True if `store`, of a process group, is a HashStore: then the ranks are threads of this process."""
    while isinstance(store, dist.PrefixStore):  # pyright: ignore[reportPrivateImportUsage]
        store = store.underlying_store
    return isinstance(store, dist.HashStore)  # pyright: ignore[reportPrivateImportUsage]


def default_store() -> Any | None:
    """Return the store of the default process group, or None; torch has no public name for it."""
    if not dist.is_initialized():
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
