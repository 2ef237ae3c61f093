"""Resume of training from a checkpoint: the files are checked on all ranks before model or optimizer is changed."""

import os
from pathlib import Path
from typing import Any

import torch

from slapo_zoo.errors import WeightsError
from slapo_zoo.model.checkpoints.current_specs import refresh_specs
from slapo_zoo.model.checkpoints.training_checkpoint import (
    LOAD,
    Resumed,
    device_of,
    names_of,
    refuse_adapters,
    weights_of,
)
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks import background
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.parallel.ranks.emulation import on_each_rank
from slapo_zoo.parallel.ranks.killed_rank import rank_guard
from slapo_zoo.weights import optimizer as optimizers
from slapo_zoo.weights.encode import decode
from slapo_zoo.weights.load_memory import Target
from slapo_zoo.weights.load_rank_slices import check_targets, load_tensors
from slapo_zoo.weights.random_state import restore_states
from slapo_zoo.weights.snapshot import read_by_all
from slapo_zoo.weights.staging import resolved
from slapo_zoo.weights.training_folder import TrainingFolder, open_training
from slapo_zoo.weights.training_state import FILE, OF_COPY, of_dp_ranks


@on_each_rank
def load_checkpoint(
    model: Any, folder: str | os.PathLike[str], optimizer: Any = None, scheduler: Any = None
) -> Resumed:
    """Load a checkpoint that `save_checkpoint` wrote, to continue that training on the same or any other (tp, pp, dp).

    Weights, optimizer, scheduler and random generators are overwritten, after all files were parsed
    and compared with their checksums on all ranks. A collective call. Returns the saved step, the data positions of the
    dp ranks, and the user's extra data.

    Args:
        model: a scheduled model of the saved architecture and size.
        folder: folder that `save_checkpoint` wrote.
        optimizer: optimizer of the saved class and parameter groups, over this rank's parameters; or the list of several.
        scheduler: learning-rate scheduler of the saved class, or the list of several.
    """
    refuse_adapters(model, LOAD)
    background.join()
    load = _Load(model, resolved(folder), optimizer, scheduler)
    with rank_guard(LOAD):
        refresh_specs(model, LOAD)
        load.opened = read_by_all(
            model.mesh, LOAD, load.path, load.open, TrainingFolder.identity, TrainingFolder.close
        )
        with load.opened:
            together(model.mesh, LOAD, load.prepare)
            together(model.mesh, LOAD, load.finish)
    state, mesh = load.opened.state, model.mesh
    positions, extras = (tuple(of_dp_ranks(state, name)) for name in OF_COPY)
    copy = mesh.coord("batch") if state["mesh"]["dp"] == mesh.size("batch") else None
    return Resumed(state["step"], positions, extras, copy)


class _Load:
    """Load of a training checkpoint on one rank: `open`, then `prepare`, then `finish`, which alone changes the model."""

    opened: TrainingFolder

    def __init__(self, model: Any, path: Path, optimizer: Any, scheduler: Any):
        self.model, self.path, self.scheduler = model, path, optimizers.as_one(scheduler)
        self.given = optimizers.as_one(optimizer)
        self.whole = model._slapo.data_parallel.whole(model, self.given)
        self.optimizer = self.whole.optimizer
        self.restored: optimizers.Restored | None = None
        self.targets: dict[str, Target] = {}
        self.source: dict[str, str] = {}

    def open(self) -> TrainingFolder:
        """Open the files of the checkpoint's folder (weights, optimizer, training state), and return them."""
        return open_training(self.path, with_optimizer=self.optimizer is not None)

    def prepare(self) -> None:
        """Raise WeightsError unless the checkpoint fits model, optimizer and scheduler; read the optimizer's tensors."""
        state, opened, mesh = self.opened.state, self.opened, self.model.mesh
        for name in ("optimizer", "scheduler"):
            if getattr(self, name) is not None and state[name] is None:
                problem = f"you passed {name}=, but the checkpoint was saved without {name}"
                hint = f"leave {name}= out, or start without this checkpoint"
                raise WeightsError(str(self.path / FILE), name, problem, hint)
        if self.scheduler is not None:
            _check_scheduler(self.path, decode(state["scheduler"]), self.scheduler.state_dict())
        opened.check_values(mesh.rank, mesh.world_size)
        self.targets, self.source = weights_of(self.model, self.whole)
        check_targets(self.targets, opened.model, self.source, mesh)
        if self.optimizer is not None:
            self._prepare_optimizer()

    def _prepare_optimizer(self) -> None:
        runtime, record, opened = self.model._slapo, self.opened.state["optimizer"], self.opened
        specs = {spec.name: spec for spec in runtime.keys.renamed(runtime.specs)}
        names = names_of(self.model, self.whole)
        keys = opened.model.key_to_file

        def stored(name: str) -> torch.dtype:
            return opened.model.dtype(name if name in keys else next(iter(keys)))

        self.restored = optimizers.Restored(
            self.optimizer, record, names, specs, self.model.mesh, stored
        )
        found = set(opened.optimizer.key_to_file) if opened.optimizer else set()
        if wrong := found ^ optimizers.tensor_names(record):
            where = str(self.path / FILE)
            problem = f"{len(wrong)} optimizer tensors are in {FILE} but not in optimizer*.safetensors, or the reverse"
            hint = "copy the folder again: one of its files may be damaged"
            raise WeightsError(where, min(wrong), problem, hint)
        if (targets := self.restored.targets) and opened.optimizer is not None:
            source = {key: key for key in targets}
            load_tensors(targets, opened.optimizer, source, self.model.mesh)

    def finish(self) -> None:
        """Read the weights from the checkpoint into the model; set optimizer, scheduler, random states and loss scale."""
        model, state = self.model, self.opened.state
        load_tensors(self.targets, self.opened.model, self.source, model.mesh)
        if self.restored is not None:
            self.restored.apply()
        self.whole.put_back()
        if isinstance(self.given, optimizers.Several):
            self.given.give_state()
        if self.scheduler is not None:
            self.scheduler.load_state_dict(decode(state["scheduler"]))
        model.schedule.state.random.resume(state["random"])
        model._slapo.precision.restore(state.get("loss_scale"))
        restore_states(state["torch_random"], Mesh(**state["mesh"]), model.mesh, device_of(model))


def _check_scheduler(path: Path, saved: Any, own: dict[str, Any]) -> None:
    """Raise WeightsError unless the state dicts `saved` (in the checkpoint) and `own` (of the user's scheduler) have
    the same fields of the same types. `path` is the folder of the checkpoint, for the error.
    """
    hint = "pass a scheduler of the saved class, made with the saved arguments"
    for name in sorted(saved.keys() ^ own.keys(), key=str):
        problem = f"the {'scheduler that you passed' if name in saved else 'saved scheduler'} lacks this attribute"
        raise WeightsError(str(path / FILE), f"scheduler.{name}", problem, hint)
    for name, value in saved.items():
        if None not in (value, own[name]) and optimizers.kinds(value) != optimizers.kinds(
            own[name]
        ):
            problem = f"the checkpoint has {value!r:.60}, your scheduler has {own[name]!r:.60}: another type"
            raise WeightsError(str(path / FILE), f"scheduler.{name}", problem, hint)
