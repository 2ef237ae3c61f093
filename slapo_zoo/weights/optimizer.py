"""Convert an optimizer's state to JSON and tensors; a state tensor of its parameter's shape is sharded like the parameter.

rewrite: state[p] = {step, exp_avg [as p], ...} <--> "<name of p>.exp_avg" in a file, step in JSON
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.errors import WeightsError
from slapo_zoo.parallel.local_tensors import marked_as, rows_of
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.placement import TensorSpec
from slapo_zoo.weights.encode import decode, encode
from slapo_zoo.weights.load_memory import Target

# Options about this process, not the result: the optimizer keeps its own.
OWN_OPTIONS = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
# Megatron's own options in a group, unknown to other engines
OF_MEGATRON = {"is_expert_parallel", "default_config", "wd_mult", "lr_mult", "is_decoupled_lr"}
OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum")
FACTORED = "Adafactor"  # of each matrix it keeps sums of rows and of columns, which every tp rank holds unsharded
SAVE, LOAD = "save_checkpoint", "load_checkpoint"
SAME_GROUPS = "make the optimizer with the parameter groups that it had when saving"
Record = dict[str, Any]


class Several:
    """Optimizers (e.g. Muon for matrices, AdamW for the rest), or schedulers; a checkpoint saves `each` as one."""

    def __init__(self, each: Sequence[Any]):
        self.each = list(each)
        self.param_groups = [g for one in self.each for g in getattr(one, "param_groups", ())]
        self.state = {p: s for one in self.each for p, s in getattr(one, "state", {}).items()}

    def give_state(self) -> None:
        """Replace each optimizer's state by the entries of its parameters in `self.state` ({parameter: its state})."""
        for one in self.each:
            own = {p for group in one.param_groups for p in group["params"]}
            one.state.clear()
            one.state.update({p: kept for p, kept in self.state.items() if p in own})

    def state_dict(self) -> dict[str, Any]:
        """Return {index as text: state_dict} of the schedulers; optimizers' state is saved by `collect` instead."""
        return {str(i): one.state_dict() for i, one in enumerate(self.each)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load `state[str(i)]`, from `state_dict`, into scheduler i; optimizers' state is set by `give_state`."""
        for i, one in enumerate(self.each):
            one.load_state_dict(state[str(i)])


def as_one(given: Any) -> Any:
    """Return a list or tuple of optimizers, or of schedulers, as one `Several`, and any other value unchanged."""
    return Several(given) if isinstance(given, list | tuple) else given


def _class_of(optimizer: Any) -> str:
    return "+".join(type(one).__name__ for one in getattr(optimizer, "each", [optimizer]))


def collect(optimizer: Any, names: Mapping[int, str]) -> tuple[Record, dict[str, Tensor]]:
    """Return this rank's optimizer as (record for JSON, {"<parameter>.<key>": state tensor}); no communication. The
    record is {"class": text, "groups": [{"names": [...], "options": {"lr": ...}}], "state": {parameter: {key: value}}}.

    Args:
        optimizer: a torch optimizer, or `Several`, a list of them that is saved as one.
        names: `id(parameter)` --> its name in the checkpoint.
    """
    groups, state, tensors = [], {}, {}
    kind = _class_of(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        options = {k: v for k, v in group.items() if k not in OWN_OPTIONS | OF_MEGATRON}
        held = [_name_of(p, names, SAVE) for p in group["params"]]
        groups.append({"names": held, "options": encode(options, f"group {number}")})
        for p, name in zip(group["params"], held, strict=True):
            if remembered := optimizer.state.get(p):
                state[name] = _state_json(name, p, remembered, tensors, kind)
    return {"class": kind, "groups": groups, "state": state}, tensors


def _name_of(parameter: Tensor, names: Mapping[int, str], step: str) -> str:
    if id(parameter) not in names:
        problem = f"the optimizer holds a parameter of shape {list(parameter.shape)} that is not in the model"
        raise WeightsError(step, "optimizer", problem, "make the optimizer from model.parameters()")
    return names[id(parameter)]


def _state_json(
    name: str, p: Tensor, remembered: Mapping[str, Any], tensors: dict[str, Tensor], kind: str
) -> Any:
    """Return {key: JSON form of the value} for the optimizer state `remembered` of parameter p, called `name`. A tensor
    of p's shape, or any of several elements if `kind`, the optimizer's class, is Adafactor, is added to `tensors` under
    "<name>.<key>", and its JSON form is {"$like": dtype}, with "shape" if that differs. Others raise WeightsError.
    """
    record = {}
    for key, value in remembered.items():
        is_like = isinstance(value, Tensor) and value.shape == p.shape
        if is_like or (isinstance(value, Tensor) and value.numel() > 1 and kind == FACTORED):
            tensors[f"{name}.{key}"] = marked_as(value.detach(), p) if is_like else value.detach()
            shape = {} if is_like else {"shape": [*value.shape]}
            record[key] = {"$like": str(value.dtype).removeprefix("torch.")} | shape
        elif isinstance(value, Tensor) and value.numel() > 1:
            problem = f"found a tensor of {list(value.shape)}, expected {list(p.shape)} or a number"
            hint = "use an optimizer whose state has the shape of the parameter, such as AdamW"
            raise WeightsError(SAVE, f"{name}.{key}", problem, hint)
        else:
            record[key] = encode(value, f"{name}.{key}")
    return record


def merge(records: Sequence[Record]) -> Record:
    """Merge the JSON records of all pipeline stages' optimizers; WeightsError if class or options (lr, ...) differ."""
    first = records[0]
    for record in records[1:]:
        kinds = [(r["class"], [g["options"] for g in r["groups"]]) for r in (first, record)]
        if kinds[0] != kinds[1]:
            problem = f"pipeline stages have different optimizers: {kinds[0]!r:.200} and {kinds[1]!r:.200}"
            hint = "make the same optimizer on every rank: class, options, and groups, also those that are empty there"
            raise WeightsError(SAVE, "optimizer", problem, hint)
    each = [[name for r in records for name in r["groups"][i]["names"]] for i in range(len(first["groups"]))]  # fmt: skip
    groups = [{"names": list(dict.fromkeys(names)), "options": group["options"]}
              for names, group in zip(each, first["groups"], strict=True)]  # fmt: skip
    state = {name: kept for record in records for name, kept in record["state"].items()}
    return {"class": first["class"], "groups": groups, "state": state}


def optimizer_specs(record: Record, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Return specs (name, shape, placement) of an optimizer's state tensors: sharded like the parameter if they have its
    shape, else unsharded. `record` is the JSON record that `merge` made, `specs` are those of the parameters.
    """
    return [TensorSpec(f"{spec.name}.{key}", *_form(spec, kept), spec.stage) for spec in specs
            for key, kept in record["state"].get(spec.name, {}).items() if _is_tensor(kept)]  # fmt: skip


def _form(spec: TensorSpec, kept: Mapping[str, Any]) -> tuple[tuple[int, ...], str, Any]:
    """Return (unsharded shape, dtype, placement) of a state tensor of the parameter `spec`. `kept`, its JSON form, is
    {"$like": dtype}, and "shape" if the tensor's differs from the parameter's; then its placement is None (replicated).
    """
    like = "shape" not in kept
    return tuple(kept.get("shape", spec.shape)), kept["$like"], spec.placement if like else None


def tensor_names(record: Record) -> set[str]:
    """Return the keys in the files of all state tensors of an optimizer, whose JSON record `merge` made."""
    return {f"{name}.{key}" for name, state in record["state"].items()
            for key, kept in state.items() if _is_tensor(kept)}  # fmt: skip


def _is_tensor(kept: Any) -> bool:
    return isinstance(kept, dict) and "$like" in kept


def check_record(record: Any) -> str:
    """Return why `record`, from a JSON file, is no optimizer's dict (class, groups, state) as from `merge`, or ""."""
    if not isinstance(record, dict) or set(record) != {"class", "groups", "state"}:
        return f"found {record!r:.60}, expected class, groups and state"
    groups, state = record["groups"], record["state"]
    if not isinstance(record["class"], str) or not isinstance(groups, list):
        return f"found class {record['class']!r:.40} and groups {groups!r:.40}, expected a name and a list"
    if not isinstance(state, dict) or not all(isinstance(kept, dict) for kept in state.values()):
        return f"found the state {state!r:.60}, expected a dictionary for each parameter"
    for number, group in enumerate(groups):
        if problem := _group_problem(group):
            return f"group {number}: found {problem}"
    kept = {f"{name}.{key}": value for name, own in state.items() for key, value in own.items()}
    wrong = [name for name, one in kept.items() if _is_tensor(one) and not _is_dtype(one)]
    return f"{wrong[0]}: found {kept[wrong[0]]!r:.60}, expected a dtype" if wrong else ""


def _group_problem(group: Any) -> str:
    if not isinstance(group, dict) or set(group) != {"names", "options"}:
        return f"{group!r:.60}, expected names and options"
    names, options = group["names"], group["options"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return f"names {names!r:.60}, expected texts"
    if not isinstance(options, dict) or OWN_OPTIONS & options.keys():
        return f"options {options!r:.60}, expected those that a save writes"
    return ""


def _is_dtype(kept: Mapping[str, Any]) -> bool:
    sizes = kept.get("shape", [1])
    is_shape = isinstance(sizes, list) and all(type(n) is int and n > 0 for n in sizes)
    known = isinstance(getattr(torch, str(kept["$like"]), None), torch.dtype)
    return known and is_shape and set(kept) <= {"$like", "shape"}


class Restored:
    """Saved optimizer state for this rank's optimizer: the caller reads `targets` from the files, then calls `apply`.

    Args:
        optimizer: optimizer of the same class and groups as the saved one.
        record: JSON record of all pipeline stages' optimizers, made by `merge`.
        names: `id(parameter)` --> its name in the checkpoint.
        specs: name in the checkpoint --> shape and placement of this parameter of the model.
        mesh: mesh with the coordinates of this rank.
        stored: name of a parameter in the checkpoint --> its dtype there. State of that dtype gets the dtype that the
            parameter has now, as torch's optimizers need.

    Attributes:
        targets: name in the files --> state tensor, empty until it is read.
    """

    def __init__(
        self, optimizer: Any, record: Record, names: Mapping[int, str],
        specs: Mapping[str, TensorSpec], mesh: Mesh, stored: Callable[[str], torch.dtype],
    ):  # fmt: skip
        self.optimizer, self.record, self._mesh, self._stored = optimizer, record, mesh, stored
        self.targets: dict[str, Target] = {}
        self._state: dict[Tensor, dict[str, Any]] = {}
        _check_kind(optimizer, record)
        unused = set(names.values()) & {n for one in record["groups"] for n in one["names"]}
        for group, saved in zip(optimizer.param_groups, record["groups"], strict=True):
            _check_options(decode(saved["options"]), group)
            allowed = set(saved["names"])
            for p in group["params"]:
                name = _name_of(p, names, LOAD)
                unused.discard(name)
                if name not in allowed:
                    problem = "the save has this parameter in another group, or not at all"
                    raise WeightsError(LOAD, name, problem, SAME_GROUPS)
                if name in record["state"]:
                    on_device = group.get("fused") or group.get("capturable")
                    self._state[p] = self._prepare(name, p, specs[name], bool(on_device))
        if unused:
            problem = "the saved optimizer has this parameter, the one that you passed has not"
            raise WeightsError(LOAD, min(unused), problem, SAME_GROUPS)

    def _prepare(self, name: str, p: Tensor, spec: TensorSpec, on_device: bool) -> dict[str, Any]:
        """Return {key: value}, the saved state of `p`; its tensors are empty and added to `targets` as "<name>.<key>".
        `spec` has the shape of `p`. If `on_device`, a saved step moves to the device of `p`, as fused optimizers need.
        """
        state = {}
        for key, kept in self.record["state"][name].items():
            state[key] = decode(kept)
            if on_device and isinstance(state[key], Tensor):
                state[key] = state[key].to(p.device)
            if _is_tensor(kept):
                dtype = getattr(torch, kept["$like"])
                dtype = p.dtype if key != "step" and dtype == self._stored(name) else dtype
                shape, _, placement = _form(spec, kept)
                if math.prod(shape) > math.prod(spec.shape):
                    problem = f"found the shape {list(shape)}, larger than that of the parameter, {list(spec.shape)}"
                    hint = "copy the checkpoint again: its file may be damaged"
                    raise WeightsError(LOAD, f"{name}.{key}", problem, hint)
                like = p if "shape" not in kept else p.new_empty(shape)
                state[key] = torch.empty_like(like, dtype=dtype).detach()
                target = Target(state[key], shape, placement, rows_of(like))
                self.targets[f"{name}.{key}"] = target
        return state

    def apply(self) -> None:
        """Put the saved options (lr, ...) and state into the optimizer, after `targets` were read from the files."""
        for group, saved in zip(self.optimizer.param_groups, self.record["groups"], strict=True):
            for name, value in decode(saved["options"]).items():
                own = group.get(name)  # a tensor stays: a captured or compiled step reads it
                group[name] = own.copy_(torch.as_tensor(value)) if torch.is_tensor(own) else value
        self.optimizer.state.clear()
        self.optimizer.state.update(self._state)


def _check_options(options: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Raise WeightsError unless saved `options` (lr, ...) of a parameter group fit `group`, a group of the optimizer.
    Each saved option, except a scheduler's (initial_lr), must be in `group` with the same kind of value, and be finite.
    """
    for name, value in options.items():
        if name not in group and name not in OF_SCHEDULERS:
            problem = f"the saved parameter group has an option {name!r}, which that of the given optimizer lacks"
            raise WeightsError(LOAD, "optimizer", problem, "make the same optimizer as when saving")
        ours = group.get(name)
        numbers = value if isinstance(value, tuple | list) else [value]
        finite = all(math.isfinite(one) for one in numbers if isinstance(one, int | float))
        if not finite or (None not in (value, ours) and kinds(value) != kinds(ours)):
            problem = f"the checkpoint has {value!r:.60}, expected a finite value like {ours!r:.60}"
            hint = "make the same optimizer as when saving; if you did, copy the checkpoint again: it may be damaged"
            raise WeightsError(LOAD, f"optimizer option {name}", problem, hint)


def kinds(value: Any) -> Any:
    """Return an option value's type, for comparison: "number" for float, int and Tensor, a list of types for a list.
    For a dict, the state of a scheduler within another, return {key: types within its value, False for a scalar}.
    """
    if isinstance(value, tuple | list):
        return [kinds(one) for one in value]
    if type(value) is dict:
        return {k: isinstance(v, tuple | list | dict) and kinds(v) for k, v in value.items()}
    return bool if isinstance(value, bool) else "number" if isinstance(value, int | float | Tensor) else type(value)  # fmt: skip


def _check_kind(optimizer: Any, record: Record) -> None:
    found = _class_of(optimizer), len(optimizer.param_groups)
    expected = record["class"], len(record["groups"])
    if found != expected:
        problem = "found {} with {} parameter groups, the saved one is {} with {}".format(*found, *expected)  # fmt: skip
        hint = "make the same optimizer as when saving, with the groups that are empty on this rank too"
        raise WeightsError(LOAD, "optimizer", problem, hint)


def disagreement(digests: Sequence[str], mesh: Mesh) -> list[int]:
    """Return ranks whose digest of optimizer options and steps (`digests`) is not that of their stage's first rank."""
    firsts = {rank: mesh.seen_by(rank).at(tp=0, loss=0) for rank in range(mesh.world_size)}
    return [rank for rank, first in firsts.items() if digests[rank] != digests[first]]
