"""Result of a layout search: the layouts that fit, with their forecasts, and why others do not."""

from dataclasses import dataclass

from slapo_zoo.errors import MeshError
from slapo_zoo.tune.planner.hardware import Hardware
from slapo_zoo.tune.planner.layout import Layout
from slapo_zoo.tune.planner.stage_memory import RankMemory
from slapo_zoo.tune.planner.timing import StepTime


@dataclass(frozen=True)
class Forecasted:
    """Layout with its predicted time and memory.

    Args:
        layout: sizes of the mesh, micro-batches, pipeline order, ZeRO and recomputation.
        step: times and bytes sent of a step.
        ranks: memory of every pipeline rank.
        fullest: index of the pipeline rank that needs most memory.
    """

    layout: Layout
    step: StepTime
    ranks: list[RankMemory]
    fullest: int

    @property
    def memory(self) -> float:
        """Return the bytes of the fullest rank, without the memory that libraries reserve."""
        return self.ranks[self.fullest].total


@dataclass(frozen=True)
class Found:
    """Result of a layout search: layouts that fit, and why others do not.

    Args:
        feasible: layouts that fit, the fastest first.
        refused: pairs (layout or tp size as text, why it is impossible), the nearest to fitting first.
        looked_at: number of layouts that were tried, those that do not fit included.
        hardware: hardware profile of the search.
        rows: rows of a step over all replicas.
        seq_len: tokens of a row.
        parameters: number of parameters of the model.
    """

    feasible: list[Forecasted]
    refused: list[tuple[str, str]]
    looked_at: int
    hardware: Hardware
    rows: int
    seq_len: int
    parameters: int

    def tokens_per_s(self, found: Forecasted) -> float:
        """Return the tokens per second of the whole cluster under the layout of the forecast `found`."""
        return self.rows * self.seq_len / found.step.seconds


def no_layout(gpus: int, batch: int, refused: list[tuple[str, str]]) -> MeshError:
    """Return the error of a layout search that had no layout to forecast.

    `refused` are (tp size, reason) pairs. If the first is for tp=1, every size was refused, and the error has its reason;
    else it says that no layout splits `gpus` devices and `batch` rows evenly.
    """
    near = -(-batch // gpus) * gpus
    problem = f"no layout of {gpus} devices divides {batch} rows"
    hint = f"choose a batch that is a multiple of {gpus}, e.g. {near}"
    if refused and refused[0][0] == "tp=1":
        problem = f"every tp size was refused; {': '.join(refused[0])}"
        hint = "remove this cause; a model can be planned if its config names a head with a loss (architectures)"
    return MeshError("plan", f"--gpus {gpus} --batch {batch}", problem, hint)


def require_feasible(found: Found, what: str) -> Forecasted:
    """Return the forecast of the fastest layout that fits, from `found`, the result of a layout search.

    Raises:
        MeshError: no layout fits; the error names `what`, an option of the user, and the layout nearest to fitting.
    """
    if found.feasible:
        return found.feasible[0]
    name, reason = found.refused[0]
    hint = "try more devices, a smaller batch or shorter rows; --explain lists every layout"
    raise MeshError("plan", what, f"no layout fits; the nearest is {name}: {reason}", hint)
