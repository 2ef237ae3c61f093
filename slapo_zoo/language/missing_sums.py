"""Find partial sums over tp that no directive of a schedule sums."""

import warnings
from collections.abc import Iterator

from slapo_zoo.language.directive import Site
from slapo_zoo.language.primitives import Replace, Sync
from slapo_zoo.language.primitives.sharded_linear import output_of
from slapo_zoo.language.schedule import Schedule

FORWARD = 'its output is a part of a sum on each rank, and nothing sums it: sync("fwd_post", "all_reduce") there'
BACKWARD = 'the gradient of its input is a part of a sum on each rank, and nothing sums it: sync("bwd_post", "all_reduce") there'


class ScheduleWarning(UserWarning):
    """A schedule whose numbers are most likely wrong."""


def missing_sums(sch: Schedule) -> list[str]:
    """Sharded modules whose output, or gradient of the input, nothing sums over tp, one line for each kind.

    A sum may stand at the module, or at any module around it. What was replaced is left out: its
    code may sum by itself.
    """
    if sch.mesh.tp == 1:
        return []
    synced: dict[str, set[str]] = {"fwd_post": set(), "bwd_post": set()}
    replaced: set[str] = set()
    for paths, (_, directive) in zip(sch.landed, sch.history, strict=True):
        if isinstance(directive, Sync):
            for mode in [half.mode for half in directive._halves()] or [directive.mode]:
                synced.get(mode, replaced).update(paths if mode in synced else _parents(paths))
        elif isinstance(directive, Replace):
            replaced.update(paths)
    found = []
    for kind, mode, problem in (
        ("partial", "fwd_post", FORWARD),
        ("divided", "bwd_post", BACKWARD),
    ):
        bad = [path for path, module in sch.state.modules.items()
               if output_of(Site(path, module, sch.state)) == kind
               and not (mode == "bwd_post" and hasattr(module, "num_embeddings"))
               and not any(at in synced[mode] or at in replaced for at in _around(path))]  # fmt: skip
        if bad:
            more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            found.append(f"{bad[0]}{more}: {problem}, or around it")
    return found


def warn_of_missing_sums(sch: Schedule) -> None:
    """A ScheduleWarning for each kind of sum that a schedule forgot."""
    for problem in missing_sums(sch):
        warnings.warn(problem, ScheduleWarning, stacklevel=3)


def _around(path: str) -> Iterator[str]:
    """The path, and those of the modules around it, the root last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _parents(paths: tuple[str, ...]) -> set[str]:
    """Where a sum before a module may complete what one beside it made."""
    return {path.rpartition(".")[0] for path in paths}
