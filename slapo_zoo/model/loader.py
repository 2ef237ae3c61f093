"""Build a scheduled model and fill it, with weights from files or with new ones."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slapo_zoo.hf import models as hf
from slapo_zoo.model.assemble import Assembly
from slapo_zoo.model.context_parallel import check_cp
from slapo_zoo.model.dp.dp_shard import check_dp_shard
from slapo_zoo.model.same_on_all import facts_of, require_same_facts
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks.lost_rank import rank_guard
from slapo_zoo.weights.folder import CheckpointFolder, open_checkpoint
from slapo_zoo.weights.load import LoadOptions
from slapo_zoo.weights.snapshot import read_by_all
from slapo_zoo.zoo.argument_values import (
    changed_config,
    checkpoint_dtype,
    local_folder,
    make_mesh,
    pick_device,
    to_dtype,
)
from slapo_zoo.zoo.hf_arguments import HubArguments
from slapo_zoo.zoo.options import MESH, LoaderOptions, check_knobs, check_precision

Prepare = Callable[[LoaderOptions, Any, Mesh, torch.dtype], LoaderOptions]


@dataclass(frozen=True)
class Source:
    """Checkpoint to load from: its location, and how it is read.

    Args:
        name: a folder, or a model id of the Hub.
        revision: branch, tag or commit of the Hub.
        allow_pickle: True reads `.bin` files too, which are pickles.
        changes: fields of the config to override.
        hub: arguments of `from_pretrained` that say where files are and how they are read: token, subfolder, ...
        load: memory limit and checks of the load.
    """

    name: str
    revision: str | None = None
    allow_pickle: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)
    hub: HubArguments = field(default_factory=HubArguments)
    load: LoadOptions = field(default_factory=LoadOptions)

    def find(self) -> Path:
        """Return the folder of the checkpoint; a Hub model is downloaded first."""
        return local_folder(self.name, self.revision, self.allow_pickle, self.hub)

    @contextmanager
    def open(self, step: str, mesh: Mesh, folder: Path) -> Iterator[tuple[Any, CheckpointFolder]]:
        """Context with (config, opened files) of the checkpoint in `folder`, the same on all ranks;
        a collective call. `step` names the load in errors.
        """

        def read() -> tuple[Any, CheckpointFolder]:
            config = changed_config(folder, dict(self.changes), self.hub)
            return config, open_checkpoint(folder, self.allow_pickle, self.hub.stem).open_all()

        config, checkpoint = read_by_all(
            mesh,
            step,
            folder,
            read,
            lambda found: found[1].digest(),
            lambda found: found[1].close(),
        )
        with checkpoint:
            yield config, checkpoint


@contextmanager
def checked(step: str, options: LoaderOptions) -> Iterator[tuple[Mesh, LoaderOptions]]:
    """Context that first checks the options, as far as no file is needed, and yields (mesh, options with a device).

    An error within the context is sent to the other ranks, which raise it too.

    Args:
        step: name of the running step for error messages.
        options: options of the model.
    """
    mesh = make_mesh(**{name: getattr(options, name) for name in MESH})
    with rank_guard(step):
        check_knobs(step, options)
        options = replace(options, device=pick_device(options.device))
        check_precision(options.precision, options.dtype, options.device, options.target)
        asked = options.target, options.target_options, options.zero_stage
        check_dp_shard(mesh, options.dp_shard, *asked)
        yield mesh, check_cp(step, mesh, options)


def load_checkpoint(
    step: str, options: LoaderOptions, source: Source, prepare: Prepare | None = None
) -> Any:
    """Load a checkpoint as a scheduled model; every rank reads only its own bytes.

    Args:
        step: name of the running step for error messages.
        options: options of the model.
        source: the checkpoint.
        prepare: (options, config, mesh, dtype) --> options to build with, e.g. with a card replaced by its
            directives; None leaves the options unchanged.
    """
    with checked(step, options) as (mesh, options):
        folder = source.find()
        hf.register_models()
        with source.open(step, mesh, folder) as (config, checkpoint):

            def fill(build: Assembly) -> Any:
                build.keys = build.keys.as_in(checkpoint.keys())
                return build.weights_of(checkpoint, source.load)

            stored = partial(checkpoint_dtype, config, checkpoint)
            return _build(step, options, mesh, config, stored, fill, folder, prepare)


def new_model(
    step: str, options: LoaderOptions, config: Any, prepare: Prepare | None = None
) -> Any:
    """Make a scheduled model with new weights, the same for every (tp, pp, dp).

    Args:
        step: name of the running step for error messages.
        options: options of the model.
        config: config of `transformers`.
        prepare: as in `load_checkpoint`.
    """
    with checked(step, options) as (mesh, options):
        fill = Assembly.new_weights
        return _build(step, options, mesh, config, lambda: torch.float32, fill, None, prepare)


def _build(
    step: str, options: LoaderOptions, mesh: Mesh, config: Any,
    stored: Callable[[], torch.dtype], fill: Callable[[Assembly], Any], folder: Path | None,
    prepare: Prepare | None,
) -> Any:  # fmt: skip
    """Build the model of a config and fill its parameters.

    Args:
        step: name of the running step for error messages.
        options: checked options.
        mesh: mesh of all ranks.
        config: config of `transformers`.
        stored: returns the dtype of the parameters for dtype="auto" without a precision.
        fill: gives the parameters their values; returns a record of the load.
        folder: folder of the checkpoint, or None.
        prepare: as in `load_checkpoint`.
    """
    require_same_facts(step, mesh, facts_of(config, mesh, options))
    asked = stored() if options.dtype == "auto" else options.dtype
    dtype = to_dtype(options.parameter_dtype(asked))
    options = prepare(options, config, mesh, dtype) if prepare else options
    build = Assembly(config, options.auto_class, mesh, dtype, options)
    build.require_attention()
    model = build.finish(fill(build), options.micro_batches, folder)
    build.require_same_weights(step)
    build.shard_and_hook(model)
    return model
