"""Many loops of one family on one mesh, in one process whose threads are the ranks: a loop takes 0.2 s."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from loop_runs import (
    Trained,
    class_of,
    first_difference,
    first_drift,
    folder_for,
    plain,
    trained,
    weights_before,
)
from loops import CELL_LAYOUTS, LOOPS
from ranks import forkserver, seed_all
from slapo_zoo import OptimizerWarning, RankError, SlapoError, emulate
from slapo_zoo.parallel.ranks.killed_rank import peer_error

WAIT_S, SILENCE_S = 20.0, 150.0


@dataclass(frozen=True)
class Outcome:
    """Outcome of a loop on a layout: "equal", "refused", "WRONG", "traceback" or "hang", and its text."""

    kind: str
    said: str = ""


class Columns:
    """Worker process that runs all loops, since ranks whose collectives do not match may crash their process."""

    def __init__(self) -> None:
        self._context = forkserver()
        self._worker: Any = None

    def run(self, names: list[str], family: str, layout: str, root: Any) -> dict[str, Outcome]:
        """Run each loop on a new model; a loop that ends the process makes the others run again."""
        outcomes: dict[str, Outcome] = {}
        while left := [name for name in names if name not in outcomes]:
            begun = left[0]
            for name, outcome in self._told_by_worker(left, family, layout, root):
                begun = name
                if outcome is not None:
                    outcomes[name] = outcome
            if any(name not in outcomes for name in left):
                outcomes[begun] = Outcome(
                    "traceback", "the process of the ranks ended, or is silent"
                )
        return outcomes

    def close(self) -> None:
        """End the process."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.join()
            self._worker = None

    def _told_by_worker(self, *job: Any) -> Iterator[tuple[str, Outcome | None]]:
        if self._worker is None:
            self._pipe, theirs = self._context.Pipe()
            self._worker = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            self._worker.start()
            theirs.close()
        self._pipe.send(job)
        try:
            while self._pipe.poll(SILENCE_S):
                told = self._pipe.recv()
                if told is None:
                    return
                yield told
        except EOFError:
            pass
        self.close()


def _serve(pipe: Any) -> None:
    torch.set_num_threads(1)
    while True:
        job = pipe.recv()
        for name, outcome in run_column(*job, lambda name: pipe.send((name, None))).items():
            pipe.send((name, outcome))
        pipe.send(None)


def run_column(
    names: list[str], family: str, layout: str, root: Any, begin: Callable[[str], None]
) -> dict[str, Outcome]:
    """Run each loop on ranks that are threads; a loop that fails ends them, and new ranks run the rest."""
    outcomes: dict[str, Outcome] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", OptimizerWarning)  # warnings before the first step
        for around, some in groupby(names, lambda name: LOOPS[name].around):
            left = list(some)
            while left:
                with around():
                    done = _until_one_fails(left, family, layout, root, begin)
                reached = [name for name in left if done[name]] or left[:1]
                for name in reached:
                    outcomes[name] = _outcome(done[name], name, family, layout, root)
                left = left[len(reached) :]
    return outcomes


def _until_one_fails(
    names: list[str], family: str, layout: str, root: Any, begin: Callable[[str], None]
) -> dict[str, list]:
    """Return each rank's result of each loop, a Trained or its error, up to the first loop that desynchronises the ranks."""
    sizes = CELL_LAYOUTS[layout]
    mesh = tuple(sizes.get(dim, 1) for dim in ("tp", "pp", "dp"))
    meet = threading.Barrier(mesh[0] * mesh[1] * mesh[2], action=seed_all)
    folders = {name: folder_for(name, family, root) for name in names}
    done: dict[str, list[Any]] = {name: [] for name in names}

    def on_a_rank() -> None:
        for name in names:
            if meet.wait(WAIT_S) == 0:
                begin(name)
            try:
                done[name].append(trained(name, family, folders[name], sizes))
            except Exception as error:
                done[name].append(error)
            _go_on_together(meet, done[name])

    with suppress(Exception):  # it is in `done`, or a rank was late
        emulate(on_a_rank, mesh=mesh, timeout_s=WAIT_S) if meet.parties > 1 else on_a_rank()
    return done


def _go_on_together(meet: threading.Barrier, found: list[Any]) -> None:
    """Wait until all ranks end a loop; where only some fail, end all."""
    failed = isinstance(found[-1], Exception)
    try:
        meet.wait(2.0 if failed else WAIT_S + 2)
    except threading.BrokenBarrierError:
        raise next((x for x in found if isinstance(x, Exception)), RuntimeError("late")) from None
    alike = all(
        type(x) is type(found[0]) and isinstance(x, Trained | SlapoError | OptimizerWarning)
        for x in found
    )
    if not alike or (failed and torch.distributed.is_initialized() and peer_error()):
        raise RuntimeError("the ranks have parted")


def _cause(ranks: list[Any]) -> BaseException | None:
    """Return the error that ended a loop, rather than a peer's error about the lost rank."""
    errors = [x for x in ranks if isinstance(x, Exception)]
    return next((x for x in errors if not isinstance(x, RankError)), (errors or [None])[0])


def _outcome(ranks: list[Any], name: str, family: str, layout: str, root: Any) -> Outcome:
    error, sizes = _cause(ranks), CELL_LAYOUTS[layout]
    parties = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("dp", 1)
    if error is None:
        late = len(ranks) < parties
        return (
            Outcome("hang", "a rank is late")
            if late
            else _compared(ranks, name, family, layout, root)
        )
    words = f"{type(error).__name__}: {error}"
    if "imed out" in words:
        return Outcome("hang", words)
    if isinstance(error, OptimizerWarning) or (isinstance(error, SlapoError) and error.hint):
        return Outcome("refused", words)
    return Outcome("traceback", words)


def _compared(ranks: list[Trained], name: str, family: str, layout: str, root: Any) -> Outcome:
    folder, dp = folder_for(name, family, root), CELL_LAYOUTS[layout].get("dp", 1)
    truth, own = (
        plain(name, family, folder, dtype, dp) for dtype in (torch.float64, torch.float32)
    )
    before = weights_before(class_of(name, family), folder)
    differences = (first_difference(found, truth, own, before) for found in ranks)
    said = next((x for x in differences if x), None) or first_drift(ranks)
    return Outcome("WRONG" if said else "equal", said or "")
