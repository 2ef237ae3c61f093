"""Published silent bugs of parallel training, expressed as faults of a schedule, a loop or a file of this package."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from corpus_training import Training

SCHEDULE, LOOP, FILE = "schedule", "loop", "file"
CHECKERS = {
    "build": "warnings and errors while a schedule is built",
    "load": "what `from_pretrained` and `load_checkpoint` refuse",
    "guard": "what is looked at in each training step",
    "verify": "`slapo-zoo verify`",
    "Verify": "`with Verify(sch, inputs)` around the steps",
    "watch": "`NumericsWatch`, where a loop asks for it",
}  # in the order in which a user meets them
LAYOUTS = {
    "tp2": ((2, 1, 1), {}), "sp2": ((2, 1, 1), {"sequence_parallel": True}), "tp4": ((4, 1, 1), {}),
    "pp2": ((1, 2, 1), {}), "dp2": ((1, 1, 2), {}), "tp2-pp2": ((2, 2, 1), {}),
    "tp2-dp2": ((2, 1, 2), {}), "pp2-dp2": ((1, 2, 2), {}), "sp2-dp2": ((2, 1, 2), {"sequence_parallel": True}),
}  # fmt: skip
Edit = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class Fault:
    """Fault that a bug puts into a training.

    Args:
        edits: of the right steps of a schedule.
        patch: puts something else in the place of a function of ours.
        training: a loop of a user's own.
        is_file: it shows in what is saved or read.
    """

    edits: tuple[Edit, ...] = ()
    patch: Callable[[], AbstractContextManager[Any]] = nullcontext
    training: type[Training] = Training
    is_file: bool = False

    @property
    def kind(self) -> str:
        """Return the kind of thing that the fault changes."""
        if self.is_file:
            return FILE
        return SCHEDULE if self.edits else LOOP


@dataclass(frozen=True)
class Bug:
    """Published bug.

    Args:
        name: what is wrong, in a few words.
        threads: where it was published: repository and number, or a paper and what it calls the bug.
        met: the tool and the settings under which users had it.
        wrong: what went wrong there, in a sentence.
        cls: class of the model that shows it here.
        fault: what is done to our schedule, loop or file.
        checker: the first of CHECKERS that finds it; empty: none does.
        named: what the finding names: the path of a module with its number left out, or an argument.
        layout: of LAYOUTS.
        config: changes to that of the family.
        dropout: probability of every dropout.
        always: whether it runs in each test run.
    """

    name: str
    threads: tuple[str, ...]
    met: str
    wrong: str
    cls: str
    fault: Fault
    checker: str
    named: str
    layout: str = "tp2"
    config: tuple[tuple[str, Any], ...] = ()
    dropout: float = 0.0
    always: bool = False
