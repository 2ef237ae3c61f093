"""The exceptions a user sees; each says where, what, found against expected, and what to do."""


class SlapoError(Exception):
    """Base of every error that slapo_zoo raises on purpose.

    Args:
        where: module path, file, argument or rank at which it happened.
        what: the directive or argument that cannot be honoured.
        problem: what was found against what was expected.
        hint: what to do about it.
    """

    def __init__(self, where: str, what: object, problem: str, hint: str = ""):
        self.where, self.what, self.problem, self.hint = where, what, problem, hint
        text = f"{where}: {what}: {problem}" if str(what) else f"{where}: {problem}"
        super().__init__(text + (f"\n  hint: {hint}" if hint else ""))

    def __reduce__(self):
        """Errors travel between ranks, so they must survive pickling with their four parts."""
        return type(self), (self.where, self.what, self.problem, self.hint)


class ScheduleError(SlapoError, ValueError):
    """A directive cannot be applied to a module."""


class MeshError(SlapoError, ValueError):
    """The mesh does not fit the processes or the model."""


class ArchitectureError(SlapoError, ValueError):
    """The zoo has no table for a model, or not for the class that was asked for."""


class WeightsError(SlapoError, ValueError):
    """A checkpoint cannot be read, written, or does not belong to the model."""


class CardError(SlapoError, ValueError):
    """A schedule card is malformed, tampered with, or does not fit the model or the mesh."""


class StageError(SlapoError, RuntimeError):
    """Code of the model failed in one stage of a pipeline."""


class RankError(SlapoError, RuntimeError):
    """Another rank failed; this rank stops with that rank's error.

    Attributes:
        traceback_text: where it happened there, or the empty string.
    """

    traceback_text: str = ""


_AGREED = "_slapo_raised_on_all_ranks"


def agreed(exc: Exception) -> Exception:
    """Mark an error that every rank raises, in one form or another, in the same step.

    Nobody waits for anybody then: a caller who catches it on all ranks can go on.
    """
    exc.__dict__[_AGREED] = True
    return exc


def is_agreed(exc: BaseException) -> bool:
    """Return whether every rank raised with this error."""
    return _AGREED in exc.__dict__
