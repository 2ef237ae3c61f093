"""Stores through which ranks connect: a part of torchrun's store for each start of the job, or a local one.

torchrun keeps one store over all restarts (issue 135712 of pytorch), so a rank that restarts might
read the address of a dead peer, or an error of an earlier start. Restart counts do not distinguish the
starts, as every node has its own count.
"""

import os
import socket
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

ROUND = "slapo_zoo/round"
POLL_S = 0.02


def is_restartable() -> bool:
    """Return whether torchrun, which can restart ranks, started this process and keeps the store in its own process."""
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return kept and "TORCHELASTIC_RUN_ID" in os.environ


def fresh_store(rank: int, world_size: int, timeout_s: float) -> Any:
    """Return a part of torchrun's key-value store that only this start of the job uses; a collective call of all ranks.

    Raises:
        torch.distributed.DistError: a rank did not arrive within `timeout_s` seconds.
    """
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(*address, is_master=False, timeout=timeout, wait_for_workers=False)
    return PrefixStore(agree_on_round(store, rank, world_size, timeout_s), store)


def open_store(rank: int, world_size: int, timeout_s: float) -> Any:
    """Return the key-value store at MASTER_ADDR:MASTER_PORT (in rank 0 or the launcher); connect in `timeout_s` seconds."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        *address, is_master=rank == 0 and not kept, timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False, multi_tenant=True,
    )  # fmt: skip


def meet(store: Any, rank: int, world_size: int, timeout_s: float) -> None:
    """Wait until every process of the job has written its rank to `store`, for at most `timeout_s` seconds.

    Raises:
        torch.distributed.DistError: some processes did not start in time; the error names their ranks.
    """
    store.set(f"slapo_zoo/here/{rank}", "1")
    deadline = time.monotonic() + timeout_s
    late = [other for other in range(world_size) if other != rank]
    while late := [other for other in late if not store.check([f"slapo_zoo/here/{other}"])]:
        if time.monotonic() > deadline:
            names = ", ".join(map(str, late))
            problem = f"timed out after {timeout_s:g} s waiting for rank {names} to start"
            raise dist.DistStoreError(problem)
        time.sleep(POLL_S)


def local_store() -> Any:
    """Return a key-value store for the ranks of this machine that listens on the loopback interface only. A TCPStore
    listens on all interfaces by default, and anyone who can connect to it can forge addresses.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port, fileno = listener.getsockname()[1], listener.detach()  # the store closes it
    return TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=fileno
    )


def agree_on_round(store: Any, rank: int, world_size: int, timeout_s: float) -> str:
    """Return a token that is the same on all ranks of this start of the job, and that no earlier start has used. Rank 0
    writes a random token to `store`, where others may first read an earlier start's. Each other rank writes a random
    text for the token that it read. Rank 0 lists the texts for its own token; who finds its text there returns the
    token. DistStoreError after `timeout_s`.
    """
    mine = uuid.uuid4().hex
    if rank == 0:
        store.set(ROUND, mine)
        answers = [store.get(f"{mine}/{other}").decode() for other in range(1, world_size)]
        store.set(f"{mine}/answers", " ".join(answers))
        return mine
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if store.check([ROUND]):
            found = store.get(ROUND).decode()
            store.set(f"{found}/{rank}", mine)
            listed = f"{found}/answers"
            if store.check([listed]) and mine in store.get(listed).decode().split():
                return found
        time.sleep(POLL_S)
    raise dist.DistStoreError(f"rank 0 did not answer rank {rank} within {timeout_s:g} s")
