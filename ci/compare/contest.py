"""Runs of several libraries ("contenders"), each in processes of its own, that take turns: A, B, C, A, B, C, ...

Slow phases of the machine then affect all of them. A contender that waits for its turn computes nothing.
"""

import gc
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from compare.peers import CONTENDERS, Contender
from compare.shapes import Work
from slapo_zoo.errors import RankError
from slapo_zoo.parallel.ranks.launch import (
    LocalRank,
    prepare_rank,
    rank_environment,
    start_rank,
    stop,
)
from slapo_zoo.parallel.ranks.process_group import init_distributed
from slapo_zoo.weights.ledger import AnonymousPeak

TURN_S = 150.0  # a turn that takes longer is an error
CHECKED_STEPS = 3  # steps whose losses are compared; the first two are not timed


class Team:
    """The processes (ranks) of one contender, with their results; `failure` says why it failed, or ""."""

    def __init__(self, name: str, work: Work) -> None:
        self.name, self.failure = name, ""
        self.start: dict[str, Any] = {}  # results of the first steps
        self.seconds: list[float] = []  # per timed step: seconds of the slowest rank
        self.losses: list[float] = []
        size = work.tp if CONTENDERS[name].divides else 1
        threads = work.tp // size  # every contender may use as many cores
        context = multiprocessing.get_context("fork")
        self._ranks: list[LocalRank] = [
            start_rank(context, rank, _serve, (rank, size, threads, name, work))
            for rank in range(size)
        ]

    def meet(self) -> None:
        """Make the store through which the ranks form a process group; call this after all forks."""
        self._store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
        self._ask(self._store.port)

    def begin(self) -> None:
        """Let the ranks load the model and run the first steps; record time, memory and losses."""
        found = self._ask("begin")
        if found:
            self.losses += found[0]["losses"]
            self.start = {name: most(rank[name] for rank in found) for name in found[0] if name != "losses"}  # fmt: skip

    def step(self) -> None:
        """Let the ranks run one step; record the slowest rank's seconds, and the loss."""
        found = self._ask("step")
        if found:
            self.seconds.append(max(rank[0] for rank in found))
            self.losses.append(found[0][1])

    def save(self) -> None:
        """Time one save to a temporary folder; a contender that cannot save keeps its step times."""
        if self.failure:
            return
        with tempfile.TemporaryDirectory() as folder:
            found = self._ask(("save", str(Path(folder) / "saved")))
        self.start["save s"] = most(found) if found else "fails"
        self.failure = ""

    def _ask(self, what: Any) -> list[Any]:
        """Send a command to every rank and return their answers; [] if the contender has failed."""
        if self.failure:
            return []
        found = []
        with suppress(OSError):
            for local in self._ranks:
                local.pipe.send(what)
        for local in self._ranks:
            try:
                answer = local.pipe.recv() if local.pipe.poll(TURN_S) else "took too long"
            except (EOFError, OSError):
                answer = "a rank ended"
            if isinstance(answer, str):
                self.failure = answer
                self.close()
                return []
            found.append(answer)
        return found

    def close(self) -> None:
        """End the processes of the contender."""
        stop(self._ranks)
        self._ranks = []


def most(values: Iterable[Any]) -> Any:
    """Return the largest of `values`; None if one of them is None."""
    found = list(values)
    return None if None in found else max(found)


def compete(names: Sequence[str], work: Work, rounds: int) -> list[Team]:
    """Let the contenders load the model, run `rounds` steps and save, taking turns; return their teams.

    Raises:
        RankError: one of the first two contenders failed, with which all others are compared.
    """
    torch.set_num_threads(1)  # OpenMP's threads would not survive the forks
    _import_all()
    gc.collect()
    teams = []
    try:
        teams += [Team(name, work) for name in (names[0], *names)]
        # the first to run pays for memory and files that were not touched before
        warm_up, *teams = teams
        warm_up.meet()
        warm_up.begin()
        warm_up.close()
        for turn in (Team.meet, Team.begin, *[Team.step] * rounds, Team.save):
            for team in teams:
                turn(team)
    finally:
        for team in teams:
            team.close()
    for team in teams:
        if team.failure and team.name in names[:2]:
            raise RankError("bench", team.name, team.failure, "without it there is no comparison")
    return teams


def _import_all() -> None:
    """Import everything before the fork, so that no contender's load time contains imports."""
    import torch.distributed.tensor.parallel  # noqa: F401
    import transformers.models.bert.modeling_bert  # noqa: F401
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    from slapo_zoo.model.load.auto import AutoScheduledModel  # noqa: F401
    from slapo_zoo.zoo.table import families

    families()


def _serve(pipe: Any, rank: int, size: int, threads: int, name: str, work: Work) -> None:
    """Run one rank (of `size`) of the contender `name`: answer the commands that come through `pipe` until it closes."""
    prepare_rank(threads)
    contender: Any = None
    with suppress(EOFError):
        while True:
            what = pipe.recv()
            try:
                if isinstance(what, int):
                    if size > 1:
                        os.environ.update(rank_environment(rank, size, what))
                    _prepare(name, size)
                    pipe.send(True)
                elif what == "begin":
                    contender, answer = _begin(CONTENDERS[name], work)
                    pipe.send(answer)
                elif what != "step":
                    pipe.send(_save(contender, what[1]))
                else:
                    pipe.send(_step(contender))
            except Exception as error:
                pipe.send(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")


def _prepare(name: str, size: int) -> None:
    import warnings

    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if size > 1:
        init_distributed(device="cpu")
    if name == "DeepSpeed AutoTP":
        import logging

        from slapo_zoo.model.integrations.dialects.deepspeed import import_deepspeed

        import_deepspeed()
        logging.disable(logging.WARNING)


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _begin(cls: type[Contender], work: Work) -> tuple[Contender, dict[str, Any]]:
    found: dict[str, Any] = {}
    _barrier()
    with AnonymousPeak() as peak:
        begin = time.perf_counter()
        contender = cls(work)
        found["load s"] = time.perf_counter() - begin

        def between() -> None:
            found["first gradients s"] = time.perf_counter() - begin
            found["norm"] = contender.norm()

        found["losses"] = [contender.step(between)]
        found["losses"] += [contender.step() for _ in range(CHECKED_STEPS - 2)]
    found["peak bytes"] = peak.growth
    found["parameter bytes"], found["read"] = contender.parameter_bytes(), contender.bytes_read()
    found["plan lines"] = contender.plan_lines(contender.model.config)
    return contender, found


def _save(contender: Contender, folder: str) -> float | None:
    """Return the seconds until all ranks have saved; None if the library has no single call for it."""
    _barrier()
    begin = time.perf_counter()
    done = contender.save(folder)
    _barrier()
    return time.perf_counter() - begin if done else None


def _step(contender: Contender) -> tuple[float, float]:
    _barrier()
    begin = time.perf_counter()
    loss = contender.step()
    return time.perf_counter() - begin, loss
