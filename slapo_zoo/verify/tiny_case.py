"""Test case to derive sharding rules from: the smallest model of a config that plain `transformers` trains."""

import copy
import math
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from slapo_zoo.errors import SlapoError
from slapo_zoo.hf import models as hf
from slapo_zoo.parallel.rng.layout_independent_random import drawn_from
from slapo_zoo.verify.case import Case, changes_for_comparison, expressive_config, noisy_model
from slapo_zoo.verify.compare import Result
from slapo_zoo.verify.cut_classes import NEAR, nearer, refusal
from slapo_zoo.verify.judge import plain
from slapo_zoo.zoo.derivation.observe import Observation, observe
from slapo_zoo.zoo.derivation.spelling import find_spelling
from slapo_zoo.zoo.derivation.stacks import star
from slapo_zoo.zoo.tiny_config import ALL, TOKENS, Sizes, sizes_in_turn, tiny, without_dropout

MOST = 2e7  # parameters that a tiny model may have
MICRO_ROWS = 2  # two micro-batches at least show whether a loss is the sum of its parts'


def tiny_case(
    config: Any, cls: Any, folder: Path, sizes: Sizes | None = None, rows: int = 4
) -> Case:
    """Train ever larger tiny models of a config with plain `transformers` until one runs; return its Case.

    Args:
        config: a config of `transformers`; it is not changed.
        cls: class of the model.
        folder: folder to which the weights are written.
        sizes: bounds of the first, smallest model; None: only the model of `config` itself is tried.
        rows: rows of the batch.

    Returns:
        the test case, with the plain run's result; `drops` has the names of the config's dropout rates, now 0.

    Raises:
        Exception: if no size trains: what the first one raised, or ArithmeticError for a value that is not finite.
    """
    problems: list[Exception] = []
    for chosen in sizes_in_turn(_with_all_kinds(config, cls, sizes)) if sizes else [None]:
        small = tiny(config, chosen) if chosen else copy.deepcopy(config)
        for padded in (True, False):
            try:
                found = _case_of(small, cls, folder, rows, padded)
            except Exception as error:
                problems.append(error)
                break
            if problem := _not_finite(found.truth):
                not_finite = ArithmeticError(problem)
            else:
                return found
        else:
            raise not_finite  # a larger model gives no finite values either
    raise problems[0]


def near_case(config: Any, cls: Any, folder: Path, tp: int = 1) -> Case:
    """Write a tiny model (heads divisible by `tp`, attention windows <= 6 tokens) to `folder`; return it as a Case."""
    small, problem = Sizes(heads=max(4, 2 * tp), window=NEAR), None
    near, whole = nearer(config), Sizes(heads=ALL, window=NEAR)
    for like, sizes in ((near, small), (config, small), (config, whole)):
        try:
            return tiny_case(like, cls, folder, sizes)
        except Exception as error:
            problem = problem or error
    said = (str(problem).strip() or type(problem).__name__).splitlines()[0]
    raise refusal(f"plain transformers cannot train a tiny {cls.__name__}, on which cp would be tried: {said}") from problem  # fmt: skip


def _with_all_kinds(config: Any, cls: Any, sizes: Sizes) -> Sizes:
    """Return `sizes` with enough layers for a tiny model to have each kind of module, also one that only later layers have."""
    kinds, least = _kinds(config, cls), sizes.layers
    tried = [replace(sizes, layers=n * least) for n in (1, 2, 3, 4)]
    return min(tried, key=lambda one: len(kinds - _kinds(tiny(config, one), cls)))


def _kinds(config: Any, cls: Any) -> set[tuple[str, type]]:
    with suppress(SlapoError):  # some sizes make no model
        model = hf.build_on_meta(cls, copy.deepcopy(config), torch.float32, False)
        return {(star(path), type(module)) for path, module in model.named_modules()}
    return set()


def _case_of(given: Any, cls: Any, folder: Path, rows: int, padded: bool) -> Case:
    """Make the test case of the small config `given` for class `cls`, with a batch of `rows` rows: write random weights
    to `folder`, record module calls of a forward with the config's dropout (`seen`), and run a training step without
    dropout (`truth`), with which sharded runs are compared. With `padded` the rows of text have different lengths.
    """
    small = copy.deepcopy(given)
    zeroed = (name for name in without_dropout(small) if hasattr(small, name))
    drops = tuple(name for name in zeroed if "drop" in name and "layerdrop" not in name)
    with torch.device("meta"):
        count = sum(p.numel() for p in cls(copy.deepcopy(small)).parameters())
    if count > MOST:
        found = f"a small model of this config has {count:.0f} parameters"
        raise MemoryError(f"{found}, expected at most {MOST:.0f}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = expressive_config(small)
        model = noisy_model(small, cls)
        model.save_pretrained(folder)
        case = Case(small, cls, folder, rows, TOKENS, MICRO_ROWS, padded=padded, drops=drops)
        seen = _observed(given, case)
        files = {k: x for file in folder.glob("*.safetensors") for k, x in load_file(file).items()}
        seen.spelling = find_spelling(files, model.state_dict())
        case = replace(case, seen=seen, draws=bool(seen.draws), thorough=False)
        for dtype in (torch.float64, torch.float32):
            try:
                case = replace(case, dtype=dtype, truth_dtype=dtype)
                return replace(case, truth=plain(case, dtype))
            except RuntimeError:
                if dtype == torch.float32:
                    raise
    raise AssertionError


def _observed(config: Any, case: Case) -> Observation:
    """Run a training-mode forward of a new model of `config`; return the module calls and random draws that happened."""
    with drawn_from(0):
        config = copy.deepcopy(config)
        if "experts_implementation" in changes_for_comparison(config):
            config._experts_implementation = "eager"  # the default implementation supports no fp64
        return observe(case.cls(config).train(), case.batch)


def _not_finite(truth: Result) -> str:
    """Return a text on the first value of `truth` that is not finite (some classes give NaN for padding), or ""."""
    if not math.isfinite(truth.loss):
        return f"its loss is {truth.loss}"
    wrong = [name for name, grad in truth.grads.items() if not grad.isfinite().all()]
    wrong += [name for name, x in truth.outputs.items() if x.isnan().any()]
    return f"{wrong[0]} is not finite" if wrong else ""
