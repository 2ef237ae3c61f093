"""Training checkpoints, from which training resumes on the same or another mesh.

The folder holds the model as `save_pretrained` writes it, which plain `transformers` loads, the optimizer's tensors
(`optimizer*.safetensors`), and step, scheduler and random states (`training_state.json`). The complete folder appears
by one rename; no file in the folder is a pickle.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.errors import WeightsError
from slapo_zoo.model.checkpoints.current_specs import configs_of, refresh_specs
from slapo_zoo.model.dp.data_parallel import Whole
from slapo_zoo.parallel import gather as consolidate
from slapo_zoo.parallel.digests import digest, unlike
from slapo_zoo.parallel.local_tensors import Rows, marked_as, rows_of
from slapo_zoo.parallel.ranks import background
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.parallel.ranks.emulation import on_each_rank
from slapo_zoo.parallel.ranks.killed_rank import rank_guard
from slapo_zoo.weights import optimizer as optimizers
from slapo_zoo.weights.encode import encode
from slapo_zoo.weights.load_memory import Target
from slapo_zoo.weights.random_state import pack_states, sizes_of, states_here
from slapo_zoo.weights.save import save_folder
from slapo_zoo.weights.staging import resolved
from slapo_zoo.weights.training_state import OF_COPY, by_dp_rank, write_state

SAVE, LOAD = "save_checkpoint", "load_checkpoint"


@dataclass(frozen=True)
class Resumed:
    """Step, data position and extras of a checkpoint that was loaded.

    Args:
        step: number of finished optimizer steps.
        data_positions: the `data_position` that each dp rank passed to `save_checkpoint`, by dp rank.
        extras: the `extra` that each dp rank passed, by dp rank; a tuple of one value if all were equal.
        copy: this rank's dp rank, for `data_position` and `extra`; None if the save had another number of dp ranks.
    """

    step: int = 0
    data_positions: tuple[Any, ...] = (None,)
    extras: tuple[Any, ...] = (None,)
    copy: int | None = 0

    @property
    def data_position(self) -> Any:
        """Return the `data_position` that this dp rank passed to `save_checkpoint`.

        Raises WeightsError if dp was larger than 1 in the save, and has changed, even if all ranks passed equal values.
        """
        return self._own("data_position", self.data_positions)

    @property
    def extra(self) -> Any:
        """Return the `extra` that this dp rank passed to `save_checkpoint`; if all were equal, that one value.

        Raises WeightsError if the checkpoint has a value for each dp rank, and dp has changed.
        """
        return self._own("extra", self.extras)

    def _own(self, name: str, values: tuple[Any, ...]) -> Any:
        if len(values) == 1:
            return values[0]
        if self.copy is None:
            problem = f"the checkpoint has a value for each of {len(values)} dp ranks, but dp has changed"  # fmt: skip
            hint = f"compute this rank's value from all, in resumed.{name}s; or resume with dp={len(values)}"
            raise WeightsError(LOAD, name, problem, hint)
        return values[self.copy]


@on_each_rank
def save_checkpoint(
    model: Any,
    folder: str | os.PathLike[str],
    optimizer: Any = None,
    scheduler: Any = None,
    step: int = 0,
    data_position: Any = None,
    extra: Any = None,
    max_shard_size: int | str = "5GB",
    texts: Mapping[str, str] | None = None,
    check_finite: bool = True,
) -> None:
    """Write all that is needed to resume training (weights, optimizer, random states) to a folder; a collective call.

    If the save fails on one rank, the call raises on all ranks, and an older folder stays as it was.

    Args:
        model: a scheduled model.
        folder: folder on a file system that all ranks share.
        optimizer: torch optimizer over this rank's parameters, or a list of several; their state tensors
            must have the size of the parameters, or be scalars, but for Adafactor.
        scheduler: scheduler of torch.optim.lr_scheduler, the same on every rank; or a list of several.
        step: number of finished optimizer steps.
        data_position: position of this dp rank's data loader: numbers, texts, lists,
            dictionaries; ranks that differ only in tp or pp pass the same.
        extra: further data of this dp rank to keep: numbers, texts, lists, dictionaries.
        max_shard_size: largest size of a file, as text ("5GB") or in bytes.
        texts: file name --> content of small files to add to the folder.
        check_finite: refuse to replace an older checkpoint by weights with NaN or infinity.
    """
    mine = {"step": step, "data_position": data_position, "extra": extra}
    with rank_guard(SAVE):
        save = _prepared(model, folder, optimizer, scheduler, mine)
        save.texts, save.check_finite = texts or {}, check_finite
        save.write(max_shard_size)


def async_save_checkpoint(
    model: Any,
    folder: str | os.PathLike[str],
    optimizer: Any = None,
    scheduler: Any = None,
    step: int = 0,
    data_position: Any = None,
    extra: Any = None,
    max_shard_size: int | str = "5GB",
) -> background.Saving:
    """Save the current state of training as `save_checkpoint` does, in a thread, while training continues.

    Until the files are written, each rank holds a copy of its tensors in host memory. The next save or load, and the
    end of the process group, wait for the thread. The arguments are those of `save_checkpoint`.

    Returns:
        a Future like that of `torch.distributed.checkpoint.async_save`; `result()` waits, and
        raises the error of any rank. An error that was not read is raised by the next save.
    """
    mine = {"step": step, "data_position": data_position, "extra": extra}
    with rank_guard(SAVE):
        save = _prepared(model, folder, optimizer, scheduler, mine)
        together(model.mesh, SAVE, save.copy)
        return background.start(lambda: save.write(max_shard_size))


def _prepared(
    model: Any, folder: Any, optimizer: Any, scheduler: Any, mine: dict[str, Any]
) -> "_Save":
    """Refuse a model with adapters, wait for a running save, and collect what is saved; a collective call of all ranks.
    Arguments are those of `save_checkpoint` on this rank; `mine` is {"step": ..., "data_position": ..., "extra": ...}.
    """
    refuse_adapters(model, SAVE)
    background.join()
    refresh_specs(model, SAVE)
    save = _Save(model, folder, optimizer, scheduler, mine)
    save.merge(together(model.mesh, SAVE, save.describe))
    return save


def refuse_adapters(model: Any, step: str) -> None:
    """Raise WeightsError if the model has adapters, which training checkpoints do not support. `step` names the call."""
    if model._slapo.adapters:
        hint = "save the adapter by model.save_adapter, the optimizer by torch.save"
        problem = "the model has adapters, which training checkpoints do not support"
        raise WeightsError(step, "model", problem, hint)


class _Save:
    """Save of a checkpoint on one rank, by calls in order: `describe`, `merge`, `copy` (for a thread), `write`."""

    def __init__(
        self, model: Any, folder: Any, optimizer: Any, scheduler: Any, mine: dict[str, Any]
    ):  # fmt: skip
        self.folder = resolved(folder)  # a save in the background may see another cwd
        self.check_finite = True
        self.model, self.scheduler, self.mine = model, optimizers.as_one(scheduler), mine
        self.whole = model._slapo.data_parallel.whole(model, optimizers.as_one(optimizer))
        self.optimizer = self.whole.optimizer
        self.write_configs = configs_of(model, self.folder)
        self.tensors: dict[str, Tensor] = {}
        self.rows: dict[str, Rows | None] = {}
        self.state: dict[str, Any] = {}
        self.texts: Mapping[str, str] = {}

    def describe(self) -> tuple[str, Any, dict[str, str], dict[str, Any]]:
        """Collect this rank's tensors and state for a save; return the report that this rank sends to all ranks.

        The report is (digest of the optimizer's record: class, groups, state without tensors; the record on one rank of
        each stage, else None; {kind of random generator: state}; {"step": ..., "data_position": ..., "extra": ...}).
        """
        mesh, record, keys = self.model.mesh, None, self.model._slapo.keys
        specs = self.model._slapo.specs
        local = consolidate.local_tensors(self.model, specs, mesh, rows=True)
        if self.optimizer is not None:
            names = names_of(self.model, self.whole)
            record, self.tensors = optimizers.collect(self.optimizer, names)
        self.tensors |= keys.to_files(local, specs, mesh)
        self.rows = {name: rows_of(tensor) for name, tensor in self.tensors.items()}
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        self.state = {
            "mesh": sizes_of(mesh),
            "random": self.model.schedule.state.random.saved(),
            "loss_scale": self.model._slapo.precision.state(),
            "scheduler": encode(scheduler, "scheduler"),
        }
        own = {name: encode(value, name) for name, value in self.mine.items()}
        is_first = mesh.coord("tp") == mesh.coord("loss") == 0
        states = states_here(device_of(self.model))
        return digest(json.dumps(record)), record if is_first else None, states, own

    def merge(self, found: Sequence[tuple[str, Any, dict[str, str], dict[str, Any]]]) -> None:
        """Put `found`, the tuple that `describe` returned on each rank, into `self.state`, which `write` saves: stages'
        optimizers, random states, step, data. Raise WeightsError if optimizers or steps differ between ranks.
        """
        mesh = self.model.mesh
        if differ := optimizers.disagreement([record for record, *_ in found], mesh):
            problem = f"the optimizer on ranks {differ} differs from the one on the first rank of their pipeline stage"
            hint = "make the optimizer in the same way on every rank"
            raise WeightsError(SAVE, "optimizer", problem, hint)
        records = [record for _, record, *_ in found if record is not None]
        if records and len(records) != mesh.pp:
            problem = f"optimizer= was passed on {len(records)} of {mesh.pp} pipeline stages only"
            raise WeightsError(SAVE, "optimizer", problem, "pass the optimizer on all ranks")
        self.state["optimizer"] = optimizers.merge(records) if records else None
        self.state["torch_random"] = pack_states([states for _, _, states, _ in found])
        own = [mine for *_, mine in found]
        if differ := unlike([mine["step"] for mine in own]):
            problem = f"rank {differ[0]} passed {own[differ[0]]['step']}, rank 0 {own[0]['step']}"
            raise WeightsError(SAVE, "step", problem, "pass the same step= on all ranks")
        self.state["step"] = own[0]["step"]
        for name in OF_COPY:
            self.state[name] = by_dp_rank(name, [mine[name] for mine in own], mesh, SAVE)

    def copy(self) -> None:
        """Copy this rank's tensors to host memory, since training goes on and changes the originals before `write`."""
        self.tensors = {name: tensor.to("cpu", copy=True) for name, tensor in self.tensors.items()}

    def write(self, max_shard_size: int | str) -> None:
        """Write weights, optimizer and training state as one folder, in files of at most `max_shard_size`."""
        runtime, mesh, record = self.model._slapo, self.model.mesh, self.state["optimizer"]
        specs, keys, beside = runtime.specs, runtime.keys, []
        if record is not None:
            beside = optimizers.optimizer_specs(record, keys.renamed(specs))
        save_folder(
            self.folder, keys.file_specs(specs), self.tensors, mesh, write_extras=self._write_extras, max_shard_size=max_shard_size, rows=self.rows,
            beside={"optimizer": beside} if beside else None, check_finite=self.check_finite,
            stamp=json.dumps({k: v for k, v in self.state.items() if k != "mesh"}),
        )  # fmt: skip

    def _write_extras(self, folder: Path, save: str) -> None:
        self.write_configs(folder)
        write_state(folder, {"save": save, **self.state})
        for name, text in self.texts.items():
            (folder / name).write_text(text, encoding="utf-8")


def weights_of(model: Any, whole: Whole) -> tuple[dict[str, Target], dict[str, str]]:
    """Return ({name: Target}, {name: key in files}); a Target is a tensor to fill from a checkpoint, with its sharding.

    `whole` has the tensors to fill, from `DataParallel.whole`: this tp and pp rank's parameters and buffers; under ZeRO
    (`dp_shard=`) only this dp rank's rows of each parameter. Names are the model's.
    """
    runtime = model._slapo
    tensors, names = _held(model, whole)
    own = {names[name]: marked_as(tensor.detach(), tensor) for name, tensor in tensors.items()}
    views = runtime.keys.split(own, runtime.specs, model.mesh)
    known = {spec.name: spec for spec in runtime.keys.read_specs(runtime.specs)}
    targets = {name: Target(view, known[name].shape, known[name].placement, rows_of(view))
               for name, view in views.items() if view.numel()}  # fmt: skip
    return targets, {name: runtime.keys.to_file(name) for name in targets}


def _held(model: Any, whole: Whole) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return ({name: parameter or persistent buffer in `whole.tensors`}, {name: name under which the tensor is saved}).

    Tied parameters are saved under one name. `whole.tensors` has this tp and pp rank's tensors, unsharded over dp, but
    under ZeRO (`dp_shard=`) this dp rank's rows of each parameter.
    """
    runtime = model._slapo
    saved = {spec.name for spec in runtime.specs}
    parameters = {name for name, _ in model.named_parameters()}
    tensors = {n: t for n, t in whole.tensors.items() if n in saved or n in parameters}
    return tensors, {name: runtime.plan.saved_as(name) for name in tensors}


def names_of(model: Any, whole: Whole) -> dict[int, str]:
    """Return {id(p) of each parameter in `whole`: name of the parameter in the files of optimizer state}.

    `whole` has the model's tensors by name, the same objects that its optimizer has.
    """
    tensors, names = _held(model, whole)
    return {id(tensor): model._slapo.keys.to_file(names[n]) for n, tensor in tensors.items()}


def device_of(model: Any) -> torch.device:
    """Return the device of this rank's parameters."""
    return next(model.parameters()).device
