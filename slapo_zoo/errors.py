"""Exceptions that slapo_zoo raises on purpose; each message has four parts: where, what, problem, hint."""

import errno


class SlapoError(Exception):
    """Base of every error that slapo_zoo raises on purpose.

    Args:
        where: module path, file, argument or rank at which the error happened.
        what: the argument, or the primitive of the schedule (such as `shard`), that cannot be honoured.
        problem: what was found against what was expected.
        hint: what to do about it.
    """

    def __init__(self, where: str, what: object, problem: str, hint: str = ""):
        self.where, self.what, self.problem, self.hint = where, what, problem, hint
        text = f"{where}: {what}: {problem}" if str(what) else f"{where}: {problem}"
        super().__init__(text + (f"\n  hint: {hint}" if hint else ""))

    def __reduce__(self):
        """Pickle the error by its where, what, problem and hint, so that it can be sent to other ranks."""
        return type(self), (self.where, self.what, self.problem, self.hint)


class ScheduleError(SlapoError, ValueError):
    """Error of a change (by a primitive such as `shard`) that a schedule cannot make to a module of the model."""


class MeshError(SlapoError, ValueError):
    """Error of a mesh (tp, pp, dp, cp) that does not fit the processes, model or options, or of ranks whose data or arguments differ."""


class ArchitectureError(SlapoError, ValueError):
    """Error of a model class that no table of sharding rules in slapo_zoo.zoo supports."""


class WeightsError(SlapoError, ValueError):
    """Error of a checkpoint that cannot be read or written, or that does not fit the model."""


class CardError(SlapoError, ValueError):
    """Error of a card (folder of a published schedule) that is malformed or altered, or does not fit model or mesh."""


class StageError(SlapoError, RuntimeError):
    """Error raised by the model's own code in one stage of a pipeline."""


class RankError(SlapoError, RuntimeError):
    """Error raised on this rank because another rank failed.

    Attributes:
        traceback_text: traceback of the error on the other rank, or the empty string.
    """

    traceback_text: str = ""


_AGREED = "_slapo_raised_on_all_ranks"


def agreed(exc: Exception) -> Exception:
    """Mark an error that all ranks raise at the same place of the program; return the error.

    No rank then waits in a collective, so code that catches the error on all ranks may continue.
    """
    exc.__dict__[_AGREED] = True
    return exc


def is_agreed(exc: BaseException) -> bool:
    """Return whether `agreed` marked the error `exc`: True if all ranks raise the error at the same place."""
    return _AGREED in exc.__dict__


def is_full(error: OSError) -> bool:
    """Return whether an OSError says that the disk is full or the user's quota is used up."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
