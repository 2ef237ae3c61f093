"""Derivation of a table of sharding rules: candidates are made, and compared with plain `transformers`."""

import copy
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slapo_zoo.errors import SlapoError
from slapo_zoo.hf import models as hf
from slapo_zoo.language.primitives import Shard
from slapo_zoo.parallel.compat import software
from slapo_zoo.parallel.paths import select_paths
from slapo_zoo.parallel.token_cut import WAYS
from slapo_zoo.verify.case import Case, Trial
from slapo_zoo.verify.cut_classes import class_by_token, nearer, require_token_loss, with_positions
from slapo_zoo.verify.judge import judge
from slapo_zoo.verify.leak_probe import find_positions
from slapo_zoo.verify.tiny_case import near_case, tiny_case
from slapo_zoo.zoo.derivation.from_tp_plan import plan_of, table_of_plan
from slapo_zoo.zoo.derivation.stacks import find_stacks
from slapo_zoo.zoo.derivation.table_document import freeze, to_document
from slapo_zoo.zoo.derivation.table_rows import Modules, derive_table, find_groups, with_seams
from slapo_zoo.zoo.schedule_source import refusal
from slapo_zoo.zoo.table import Table
from slapo_zoo.zoo.tiny_config import Sizes

Make = Callable[[Any, Any], Table]  # config, model on meta --> a candidate


@dataclass
class Proof:
    """A derived table of sharding rules, and the result of its proof (a comparison with plain `transformers`).

    Args:
        table: sharding rules with the numbers of the given config.
        left_whole: name of a group of modules that stays unsharded --> the reason, "" if unknown.
        sizes: sizes of tp, pp and dp.
        open_table: the same rules for any config of the family, with names of config fields instead of numbers.
        per_rank: pattern of module paths --> shape of the weight on tp rank 0.
        share: share of the model's parameters that are sharded over tp, 0 to 1.
        seconds: wall time of derivation and proof.
    """

    table: Table
    left_whole: dict[str, str]
    sizes: tuple[int, int, int]
    open_table: Table
    per_rank: dict[str, str]
    share: float = 0.0
    seconds: float = 0.0

    def words(self) -> list[str]:
        """Return lines of text: on which mesh outputs, loss and gradients agree, and why modules stay unsharded."""
        tp, pp, dp = self.sizes
        divided = f", tp shards {self.share:.0%} of the parameters" if tp > 1 else ""
        found = [f"proven on tp={tp}, pp={pp}, dp={dp}: outputs, loss and every gradient{divided}"]
        return found + [f"{n} stays unsharded: {why}" for n, why in self.left_whole.items() if why]

    def document(self) -> dict[str, Any]:
        """Return table, left_whole, share, sizes and seconds as JSON data, for the cache of derived tables."""
        return {
            "table": to_document(self.table), "left_whole": self.left_whole, "share": self.share,
            "sizes": self.sizes, "seconds": self.seconds, "software": software(),
        }  # fmt: skip


def derive(config: Any, cls: Any, sizes: tuple[int, int, int], **knobs: Any) -> Proof:
    """Derive a table of sharding rules by which a tiny model has the plain one's outputs, loss and gradients;
    among such tables it shards most. The tiny model runs on a mesh of `sizes` (tp, pp, dp) with the loader arguments
    `knobs`, such as sequence_parallel.

    Raises:
        ArchitectureError: no table passes, nothing can be sharded, or plain `transformers` cannot train the model.
    """
    tp, pp, dp = sizes
    if knobs.get("cp", 1) > 1:
        require_token_loss(cls)
    with tempfile.TemporaryDirectory(prefix="slapo_zoo-derive-") as scratch:
        small = Sizes(heads=max(4, 2 * tp), layers=max(2, pp))
        given = nearer(config) if knobs.get("cp", 1) > 1 else config
        try:
            case = tiny_case(given, cls, Path(scratch), small, rows=2 * dp * max(2, pp))
        except Exception as error:
            said = (str(error).strip() or "no message").splitlines()[0]
            problem = f"found no batch on which plain transformers can train a tiny model of this family: {type(error).__name__}: {said}"
            hint = "write a table for it (docs/adding_an_architecture.md), or use tp=1, pp=1"
            raise refusal(config, problem, hint) from error
        dp = dp if "loss" in case.truth.outputs else 1  # outputs may depend on all rows
        return Search(config, case, (tp, pp, dp), knobs).run()


class Search:
    """Search for sharding rules by which a tiny model computes what the plain one does; it tries first those that shard
    most.
    """

    def __init__(self, config: Any, case: Case, sizes: tuple[int, int, int], knobs: Any):
        self.config, self.case, self.sizes, self.knobs = config, case, sizes, dict(knobs)
        self.is_cut, self.way = self.knobs.pop("cp", 1) > 1, self.knobs.pop("cp_attention", WAYS[0])
        self.left_whole: dict[str, str] = {}
        self.begin, self.undivided = time.perf_counter(), False
        self.proven: set[str] | None = None
        self.stack = ""
        self.small = _on_meta(case.config, case.cls)
        groups = find_groups(Modules(self.small, case.seen), chains=False)
        self.groups = [group.name for group in groups]

    def run(self) -> Proof:
        """Return a Proof of the first table by which a tiny model has the plain one's outputs, loss and gradients up to
        rounding; raise ArchitectureError if there is none.
        """
        if unknown := self.case.seen.spelling.unknown:
            problem = f"its files hold {unknown[0]}, which is neither a renamed nor a split tensor of the model"
            raise refusal(self.config, problem, "load it with plain transformers")
        problem = ""
        for make in self._attempts():
            problem = self._probe(make, self.sizes)
            if not problem:
                return self._found(make)
        problem = f"no table of sharding rules that was tried is right; the last one: {problem}"
        hint = "use other sizes of tp, pp and cp, or write a table (docs/adding_an_architecture.md)"
        raise refusal(self.config, problem, hint)

    def _attempts(self) -> Iterator[Make]:
        """Yield functions (config, model on meta) --> table of sharding rules, those that shard more first. If one is
        wrong, the caller asks for the next; later ones leave more modules unsharded, or cut only one list of blocks.
        """
        for undivided in self._undivided_values():
            self.undivided, self.left_whole = undivided, {}
            yield from self.candidates()
            self.left_whole = dict.fromkeys(self.groups, "")
            if self.sizes[0] > 1 and not self._probe(self._gathered, self.sizes):  # right unsharded
                self._drop_wrong_groups()
                yield self._gathered
        for stack in self._single_stacks():
            self.stack, self.left_whole = stack, {}
            yield from self.candidates()

    def _single_stacks(self) -> list[str]:
        """Return patterns of the block lists (encoder, decoder), if pp > 1 and there are several; else []. Each is then
        tried as the only list that pipeline stages divide.
        """
        stacks = find_stacks(self.small, self.case.seen) if self.sizes[1] > 1 else []
        return stacks if len(stacks) > 1 else []

    def _undivided_values(self) -> tuple[bool, ...]:
        """Return the values of the table field `undivided` to try. True means that the loss is no mean over rows: a
        batch cannot be split, and only pp=1 and dp=1 are tried.
        """
        return (False, True) if self.sizes[1:] == (1, 1) else (False,)

    def candidates(self) -> list[Make]:
        """Return functions (config, model on meta) --> table of sharding rules; those that shard more come first."""
        plan = [self._planned] if self._has_plan() else []
        structural = [self._structural] if self.sizes[0] > 1 else []
        makes = [*plan, *structural, self._gathered]
        seamed = lambda make: lambda config, model: with_seams(make(config, model), model)  # noqa: E731
        return [*map(seamed, makes), *makes] if self.is_cut else makes

    def _has_plan(self) -> bool:
        """Return whether the config's tp plan in `transformers` can be made a table of sharding rules (with dropout it
        cannot). If tp is 1, a tiny model with these rules must also compute on two tp ranks what the plain one does.
        """
        if not plan_of(self.case.config):
            return False
        with suppress(SlapoError):
            serves = bool(self._planned(self.config, self.small))
            # used on one rank only if right on two: its dropout masks of attention differ from other tables'
            return serves and (self.sizes[0] > 1 or not self._probe(self._planned, (2, 1, 1)))
        return False

    def _planned(self, config: Any, model: Any) -> Table:
        return table_of_plan(config, model, self.case.seen)

    def _structural(self, config: Any, model: Any) -> Table:
        return self._table(config, model, True)

    def _gathered(self, config: Any, model: Any) -> Table:
        """Make a table of sharding rules for a model on meta; each sharded layer gathers its output. Nothing is run."""
        return self._table(config, model, False)

    def _table(self, config: Any, model: Any, chains: bool) -> Table:
        seen = self.case.seen
        tokens = bool(self.knobs.get("sequence_parallel"))
        kept, proven = self.left_whole, self.proven
        return derive_table(config, model, seen, kept, chains, proven, self.stack, tokens)

    def _probe(self, make: Make, sizes: tuple[int, int, int]) -> str:
        try:
            table = replace(make(self.case.config, self.small), undivided=self.undivided)
        except Exception as error:
            return str(error).splitlines()[0]
        return problem_of(Trial(self.case, sizes, table, self.knobs))

    def _drop_wrong_groups(self) -> None:
        """Find by bisection the groups of modules that tp cannot shard without wrong results; write them to `left_whole`."""
        tp_only = (self.sizes[0], 1, 1)

        def fine(some: list[str]) -> list[str]:
            self.left_whole = {name: "" for name in self.groups if name not in some}
            if not some or not (problem := self._probe(self._gathered, tp_only)):
                return some
            if len(some) == 1:
                reasons[some[0]] = problem
                return []
            half = len(some) // 2
            return fine(some[:half]) + fine(some[half:])

        reasons: dict[str, str] = {}
        kept = fine(self.groups)
        self.left_whole = {name: reasons.get(name, "") for name in self.groups if name not in kept}

    def _found(self, make: Make) -> Proof:
        model = _on_meta(self.config, self.case.cls)
        small = Modules(self.small, self.case.seen)
        self.proven = {group.name for way in (True, False) for group in find_groups(small, way)}
        table = replace(make(self.config, model), undivided=self.undivided)
        if self.is_cut:
            own = replace(make(self.case.config, self.small), undivided=self.undivided)
            positions = find_positions(self.case, own, self.sizes[0], self.way)
            table = with_positions(table, self.case.cls, positions)
        frozen = freeze(table, model)
        share = divided_share(frozen, model)
        if self.sizes[0] > 1 and not share:
            reasons = (*self.left_whole.values(), "it has no module with a known rule")
            reason = next(filter(None, reasons))
            problem = f"nothing can be sharded over tp: {reason}"
            raise refusal(self.config, problem, "use tp=1, with pp or dp instead")
        took = round(time.perf_counter() - self.begin, 2)
        shapes = shapes_per_rank(table, frozen, model, self.sizes[0])
        return Proof(frozen, self.left_whole, self.sizes, table, shapes, round(share, 3), took)


def problem_of(trial: Trial) -> str:
    """Run a trial (schedule and mesh) and the plain model; return the first difference or exception as text, or ""."""
    try:
        return judge(trial).words()
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        return text if isinstance(error, SlapoError) else f"{type(error).__name__}: {text}"


def shapes_per_rank(table: Table, frozen: Table, model: Any, tp: int) -> dict[str, str]:
    """Return {pattern of module paths in `table`: shape of these modules' weight on tp rank 0, e.g. "[96, 32]"}.
    `frozen` is `freeze(table, model)`: all its patterns begin at the root of `model`, which is on the meta device.
    """
    modules, found = dict(model.named_modules()), {}
    for (short, _), (pattern, rule) in zip([*table.body, *table.heads], frozen.heads, strict=True):
        paths = select_paths(pattern, modules)
        weight = getattr(modules[paths[0]], "weight", None) if paths else None
        if isinstance(weight, torch.Tensor):
            shards = (d for d in rule if isinstance(d, Shard))
            placed = [d.placement for d in shards if d.param_name == "weight"]
            shape = tuple(weight.shape)
            found[short] = str(list(placed[0].local_shape(shape, tp, 0) if placed else shape))
    return found


def divided_share(table: Table, model: Any) -> float:
    """Return the share (0 to 1) of the model's parameters that the table shards over tp."""
    parameters = dict(model.named_parameters())
    modules = dict(model.named_modules())
    found: set[str] = set()
    for pattern, rule in table.heads:
        for directive in rule:
            if isinstance(directive, Shard):
                paths = select_paths(pattern, modules)
                found |= {f"{path}.{directive.param_name}" for path in paths}
    total = sum(p.numel() for p in parameters.values()) or 1
    return sum(p.numel() for name, p in parameters.items() if name in found) / total


def _on_meta(config: Any, cls: Any) -> Any:
    return hf.build_on_meta(cls, copy.deepcopy(config), torch.float32, False)


def cut_table(config: Any, cls: Any, table: Table, tp: int = 1, way: str = WAYS[0]) -> Table:
    """Return a copy of `table` whose field `cut_tokens` says how a cp rank gets its tokens' positions, e.g. "counted":
    the first value by which a tiny model on two cp ranks has the outputs, loss and gradients of the plain one.

    Args:
        config: a config of `transformers`; it is made tiny.
        cls: class of the model; if its loss is no mean over tokens, one with the same blocks is tried.
        table: sharding rules of the family, for any config.
        tp: number of tp ranks of the tiny model.
        way: cp_attention of the loader: "gather" (all keys), "ulysses" (all tokens, some heads), "ring" (keys in turn).

    Raises:
        ArchitectureError: no value gives the plain model's results, or plain `transformers` fails on the tiny model.
    """
    cls = class_by_token(cls)
    with tempfile.TemporaryDirectory(prefix="slapo_zoo-leaks-") as scratch:
        case = near_case(config, cls, Path(scratch), tp)
        found = find_positions(case, table, tp, way)
    return with_positions(table, cls, found)
