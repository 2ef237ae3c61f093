"""Leak probe: check of a model whose tokens are sharded over cp, which must compute what plain `transformers` does.

A tiny model runs on one rank, and on two emulated cp ranks. One token after the other is changed: the set of positions
whose output changes, the outputs, the loss and every gradient have to be those of plain `transformers`. A module that
mixes tokens in another way than by attention (a convolution, a state space, a Fourier transform) is named.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.hf.cut_attention import counts_by_place
from slapo_zoo.hf.example_inputs import accepts
from slapo_zoo.model.step.cut_batch import POSITIONS, cut_batch
from slapo_zoo.model.step.of_all_tokens import cut_of
from slapo_zoo.model.step.own_loss import whole_output
from slapo_zoo.parallel.losses.heads import head_of
from slapo_zoo.parallel.token_cut import WAYS, cutting
from slapo_zoo.verify.case import Case, Trial
from slapo_zoo.verify.compare import Comparison, largest_of
from slapo_zoo.verify.cut_classes import refusal, with_positions
from slapo_zoo.verify.judge import compare_dropout, load, on_mesh
from slapo_zoo.verify.safe import silence
from slapo_zoo.zoo.table import Table
from slapo_zoo.zoo.tiny_config import TOKENS

EQUAL, CHANGED, SAME = 1e-4, 1e-4, 1e-7  # shares of the largest output
CUT = {"cp": 2}


@dataclass(frozen=True)
class Seen:
    """Results of the plain model, or of one cp rank of a sharded model; S: tokens of a row, on a cp rank its own ones.

    Args:
        logits: output [rows, S, ..] for copies of one row that differ in one token each (`Rows.perturbed`).
        modules: path of a module --> its first output [rows, S, ..], in the order in which modules end.
        losses: kind of batch (a key of `Rows.trained`) --> loss of a training step; empty where logits were wrong.
        grads: kind of batch --> {parameter: its unsharded gradient, summed over cp}; empty where logits were wrong.
    """

    logits: Tensor
    modules: dict[str, Tensor]
    losses: dict[str, float] = field(default_factory=dict)
    grads: dict[str, dict[str, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Rows:
    """Batches to probe a model class: perturbed rows for a forward, and several kinds of rows for training steps.

    Args:
        perturbed: a row, then copies of the row with one token changed in each.
        trained: kind of rows ("padded", "bare": without a mask, "uneven": of a length that cp does not divide,
            "packed": two sequences each) --> batch of training steps.
    """

    perturbed: dict[str, Tensor]
    trained: dict[str, dict[str, Tensor]]


def find_positions(case: Case, table: Table, tp: int = 1, way: str = WAYS[0]) -> str:
    """Return how a cp rank has to get its tokens' positions in the row so that the tiny model of `case`, sharded by the
    rules of `table`, computes what the plain model does; a value for `Table.cut_tokens`. "counted" makes position_ids
    0, 1, ...; "counted by mask" and "counted real" do so without padding; with "placed" an embedding gets the offset,
    with "relative" a bias does, with "none" nothing does. `way` is the loader's cp_attention, e.g. "gather".

    Raises:
        ArchitectureError: no value is right; the error tells why the value that passed most checks failed.
    """
    rows = Rows(_perturbed(case), _kinds_of_rows(case))
    plain, problems = _plain(case, rows), []
    for positions in _candidates(case):
        table = with_positions(table, case.cls, positions)
        trial = Trial(case, (tp, 1, 1), table, {**CUT, "cp_attention": way})
        depth, problem = _problem(trial, rows, plain)
        if not problem:
            return positions
        problems.append((depth, problem))
    raise refusal(max(problems, key=lambda found: found[0])[1])


def _problem(trial: Trial, rows: Rows, plain: Seen) -> tuple[int, str]:
    """Run a trial (a schedule on a mesh) on `rows` with cp = 2; return (number of passed checks, first difference from
    `plain` or ""), where `plain` holds the results of the plain model.
    """
    try:
        ranks = on_mesh(_run_sharded, trial, rows, plain.logits)[:: trial.sizes[0]]
    except Exception as error:
        return 0, (str(error).strip() or type(error).__name__).splitlines()[0]
    if problem := leaks(plain, ranks):
        return 1, problem
    if problem := _training_difference(trial.case, plain, ranks[0]):
        return 2, problem
    compare_dropout(into := Comparison(), trial)
    return 3, into.words()


def _candidates(case: Case) -> list[str]:
    """Return the ways that the model class allows to give a cp rank's tokens their positions in the whole row:
    "counted", "counted by mask" and "counted real" if its forward takes `position_ids`, "placed" if an embedding counts
    the tokens itself, only "relative" if a bias depends on distances, only "none" if it has no positions.
    """
    with torch.device("meta"):
        modules = dict(case.cls(copy.deepcopy(case.config)).named_modules())
    if any(hasattr(module, "compute_bias") for module in modules.values()):
        return ["relative"]
    takes = accepts(case.cls, "position_ids")
    given = [name for name, count in POSITIONS.items() if takes and count is not None]
    placed = any(counts_by_place(path, module) for path, module in modules.items())
    return [*given, *(["placed"] if placed else []), *([] if given or placed else ["none"])]


def _kinds_of_rows(case: Case) -> dict[str, dict[str, Tensor]]:
    """Return {kind: batch}: "padded", "bare" (without a mask), "uneven" (of a length that cp does not divide) and, if
    the class shifts labels and takes position_ids, "packed" (two sequences per row, position_ids restart).
    """
    uneven = {name: x[:, :-1].contiguous() for name, x in case.batch.items()}
    found = {"padded": case.batch, "bare": _bare(case.batch), "uneven": _bare(uneven)}
    if accepts(case.cls, "position_ids") and head_of(case.cls.__name__).shifts:
        told = getattr(case.config, "is_decoder", True)  # an encoder refuses uneven packed rows
        found["packed"] = _packed(uneven if told else case.batch)
    return found


def _training_difference(case: Case, plain: Seen, found: Seen) -> str:
    """Return, as text, the first loss that differs by > 1e-4 of it, or gradient by > 1e-4 of the largest one; "": none."""
    tied = case.truth.tied if case.truth else {}
    for kind, want in plain.losses.items():
        loss, grads = found.losses[kind], plain.grads[kind]
        if not abs(loss - want) <= EQUAL * abs(want):
            return f"the loss of {kind} rows is {loss:.6f}, expected {want:.6f}"
        ours = {tied.get(name, name): grad for name, grad in found.grads[kind].items()}
        largest = largest_of(grads)
        for name, grad in grads.items():
            if name not in ours or not float((ours[name] - grad).abs().max()) <= EQUAL * largest:
                return f"the gradient of {name} differs for {kind} rows"
    return ""


def _bare(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in batch.items() if name != "attention_mask"}


def _packed(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch as rows of two packed sequences each: position_ids restart at the second one,
    whose first token is not the first of a cp rank.
    """
    rows, tokens = batch["input_ids"].shape
    places = torch.arange(tokens) - torch.tensor([[5], [11]]).repeat(rows, 1)[:rows]
    places = torch.where(places < 0, torch.arange(tokens), places)
    return {**_bare(batch), "position_ids": places}


def _perturbed(case: Case) -> dict[str, Tensor]:
    """Return a batch of one row, then of this row with one token changed, for each token of each text input."""
    row = {name: x[:1] for name, x in case.batch.items() if x.ndim == 2 and name != "labels"}
    if case.config.is_encoder_decoder:
        labels = case.batch["labels"][:1]
        row["decoder_input_ids"] = labels.masked_fill(labels < 0, 5)
    rows = [row]
    for name in ("input_ids", "decoder_input_ids"):
        for place in range(row[name].shape[1] if name in row else 0):
            ids = row[name].clone()
            ids[0, place] = 5 if ids[0, place] != 5 else 6
            rows.append({**row, name: ids})
    return {name: torch.cat([each[name] for each in rows]) for name in row}


def _plain(case: Case, rows: Rows) -> Seen:
    model = case.cls.from_pretrained(case.folder, dtype=case.dtype, **case.changes())
    silence(model)
    uncached = {"use_cache": False} if accepts(case.cls, "use_cache") else {}
    seen = _with_module_outputs(model, model, {**rows.perturbed, **uncached})
    for kind, batch in rows.trained.items():
        model.zero_grad()
        loss = model.train()(**batch, **uncached).loss
        loss.backward()
        seen.losses[kind] = float(loss.detach())
        seen.grads[kind] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return seen


def _run_sharded(trial: Trial, rows: Rows, plain: Tensor) -> Seen:
    """Run a forward on `rows.perturbed` (copies of a row, each with one token changed) on this cp rank, then a training
    step on each batch of `rows.trained`; return all results. No step is run if, on any cp rank, the logits differ from
    `plain`, the plain model's on `rows.perturbed`, by more than rounding.
    """
    model = load(trial, trial.case.changes(), trial.case.dtype)
    silence(model)
    cut: Any = cut_of(model)
    uncached = {"use_cache": False} if accepts(model.unscheduled_class, "use_cache") else {}
    tensors, _ = cut_batch(model, cut, rows.perturbed, {})
    with cutting(model._slapo.schedule.state.random, cut):
        forward = partial(model._slapo.own_forward, model)
        seen = _with_module_outputs(model, forward, {**tensors, **uncached})
    wrong = cut.whole_of_numbers(torch.tensor([[not _equal(seen.logits, cut.part(plain, 1))]]), 1)
    for kind, batch in {} if wrong.any() else rows.trained.items():
        model.zero_grad()
        seen.losses[kind] = float(model.train().train_step(batch, micro_batches=1))
        seen.grads[kind] = model.consolidated_state_dict(grads=True)
    return seen


def _with_module_outputs(model: nn.Module, forward: Any, batch: Mapping[str, Any]) -> Seen:
    """Run `forward(**batch)` of `model`, set to eval mode; return its logits and {path of a module: first output}."""
    seen: dict[str, Tensor] = {}

    def note(path: str, output: Any) -> None:
        x = output[0] if isinstance(output, tuple) and output else output
        if type(x) is Tensor and x.ndim > 1:  # logits that tp shards are no plain Tensor
            seen.setdefault(path, x.detach())

    hooks = [
        module.register_forward_hook(lambda _m, _i, output, path=path: note(path, output))
        for path, module in model.named_modules() if path
    ]  # fmt: skip
    try:
        with torch.no_grad():
            model.eval()
            output = whole_output(forward(**batch))
    finally:
        for hook in hooks:
            hook.remove()
    return Seen(output.logits, seen)


def leaks(plain: Seen, ranks: Sequence[Seen]) -> str:
    """Compare the logits of all cp ranks with the plain model's for rows that differ in one token: the positions that
    this token alters, then the values up to rounding. Return the first difference as text, or "" for none.
    """
    found = torch.cat([seen.logits for seen in ranks], 1)
    if found.shape != plain.logits.shape:
        return f"its output has the shape {list(plain.logits.shape)}, with cp=2 {list(found.shape)}"
    name = first_unlike(plain.modules, [seen.modules for seen in ranks])
    for number, (want, ours) in enumerate(zip(reached(plain.logits), reached(found), strict=True)):
        if (want * ours == -1).any():
            before, now = (int((x == 1).sum()) for x in (want, ours))
            return (
                f"changing token {number % TOKENS} changes {before} positions of the plain model and "
                f"{now} of the sharded one; the first module that differs is {name}"
            )
    return "" if _equal(found, plain.logits) else f"the output of {name} differs"


def _equal(found: Tensor, want: Tensor) -> bool:
    if found.shape != want.shape:
        return False
    return bool((found - want).abs().max() <= EQUAL * want.abs().max())


def reached(logits: Tensor) -> Tensor:
    """Return [changes, S]: 1 where a changed token alters the logits of a position, -1 if not, 0 if rounding hides it.
    `logits` [1 + changes, S, ..] are those of a row, then of its copies with one changed token each.
    """
    apart = (logits[1:] - logits[:1]).abs().flatten(2).amax(-1) / logits.abs().max()
    return (apart > CHANGED).long() - (apart < SAME).long()


def first_unlike(plain: Mapping[str, Tensor], ranks: list[dict[str, Tensor]]) -> str:
    """Return the path of the first module whose output on the cp ranks, concatenated over tokens, is not the plain one;
    "the head" if there is none. `plain` and each rank's item of `ranks` are {path: output}.
    """
    for path, want in plain.items():
        parts = [seen[path] for seen in ranks if path in seen]
        if len(parts) != len(ranks) or any(x.ndim != want.ndim for x in parts):
            continue
        if parts[0].shape[1] * len(parts) != want.shape[1]:
            continue
        found = torch.cat(parts, 1)  # positions may be given for each row, or once for all
        comparable = want.shape[1:] == found.shape[1:] and len(want) in (1, len(found))
        if comparable and not _equal(found, want.expand_as(found)):
            return path
    return "the head"
