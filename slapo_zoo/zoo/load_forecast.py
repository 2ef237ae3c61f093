"""Forecast of the bytes that every rank of a mesh would read from a checkpoint, from file headers alone."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slapo_zoo.errors import WeightsError
from slapo_zoo.hf import models as hf
from slapo_zoo.hf.configs import read_config
from slapo_zoo.hf.hub_errors import hub_errors
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.placement import Placement, Run
from slapo_zoo.parallel.rank_plan import TensorPlan
from slapo_zoo.weights.folder import open_checkpoint
from slapo_zoo.weights.names import match_names
from slapo_zoo.weights.safetensors_file import DTYPES
from slapo_zoo.zoo.outline import Outline


@dataclass(frozen=True)
class Source:
    """Location of a checkpoint tensor: the file, and the dtype and shape in the file's header."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the unsharded tensor in the dtype of the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class RankRead:
    """Number of tensors and bytes that one rank reads from a checkpoint; its data-parallel replicas read the same.

    Args:
        stage: pp coordinate of the rank.
        tp_coord: tp coordinate of the rank.
        tensors: number of tensors of which the rank reads at least one element.
        bytes_read: bytes in the dtype of the files.
        files: names of the files that the rank opens.
    """

    stage: int
    tp_coord: int
    tensors: int
    bytes_read: int
    files: set[str]


@dataclass(frozen=True)
class WeightsPlan:
    """Forecast of the bytes and files that every rank would read from a checkpoint.

    Args:
        mesh: sizes of the mesh dims.
        ranks: one entry per (stage, tp coordinate), in this order.
        model_bytes: bytes of all tensors that the model takes from the files, each counted once.
        assigned_bytes: bytes of `model_bytes` that at least one rank reads.
        missing: names of the model's tensors that no key of the files fills.
        unexpected: keys of the files that fill no tensor of the model.
    """

    mesh: Mesh
    ranks: list[RankRead]
    model_bytes: int
    assigned_bytes: int
    missing: list[str]
    unexpected: list[str]


def plan_weights(
    name_or_path: str | Path, tp: int = 1, pp: int = 1, dp: int = 1, auto_class: Any = None,
    revision: str | None = None,
) -> WeightsPlan:  # fmt: skip
    """Forecast what every rank of a mesh reads from a checkpoint, from the config and the file headers.

    Args:
        name_or_path: a folder, or a Hub id, for which only headers are fetched.
        tp: ranks that shard each layer.
        pp: ranks that shard the layers into stages.
        dp: data-parallel replicas.
        auto_class: auto class or model class, which selects the head; None takes the class that the config names.
        revision: branch, tag or commit of the Hub.
    """
    sources = read_sources(name_or_path, revision)
    hf.register_models()
    config = read_config(name_or_path, revision=revision)
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    outline = Outline(config, auto_class, Mesh(tp, pp, dp), dtype)
    model, key_of = outline.model, {outline.keys.to_model(key): key for key in sources}
    specs = {spec.name: spec for spec in outline.keys.read_specs(outline.specs, key_of)}
    names = match_names(
        specs, key_of, model.base_model_prefix, hf.ignored_keys(model),
        hf.tied_names(model),
    )  # fmt: skip
    found = {name: sources[key_of[key]] for name, key in names.source.items()}
    _check_shapes(str(name_or_path), specs, found)
    ranks = [RankRead(stage, r, 0, 0, set()) for stage in range(pp) for r in range(tp)]
    assigned = 0
    for name, source in found.items():
        assigned += _assign(ranks, specs[name], source, outline.mesh)
    total = sum(source.nbytes for source in found.values())
    unexpected = [key_of[name] for name in names.unexpected]
    return WeightsPlan(outline.mesh, ranks, total, assigned, names.missing, unexpected)


def read_sources(name_or_path: str | Path, revision: str | None = None) -> dict[str, Source]:
    """Return {key: file, dtype and shape} of all tensors of a folder or Hub model, from the headers of its files."""
    if Path(name_or_path).exists():
        with open_checkpoint(name_or_path) as folder:
            return {
                key: Source(file, folder.dtype(key), folder.shape(key))
                for key, file in folder.key_to_file.items()
            }
    import huggingface_hub

    name = str(name_or_path)
    hint = "check the path or id; for a family without weights use --gpus, e.g. slapo-zoo plan gpt2 --gpus 8"
    with hub_errors(lambda said, _: WeightsError("plan", repr(name), f"no such folder, and {said}", hint)):  # fmt: skip
        repo = huggingface_hub.get_safetensors_metadata(name, revision=revision)
    return {
        key: Source(file, DTYPES[tensor.dtype], tuple(tensor.shape))
        for file, found in repo.files_metadata.items()
        for key, tensor in found.tensors.items()
    }


def _check_shapes(place: str, specs: dict[str, TensorPlan], found: dict[str, Source]) -> None:
    wrong = [name for name, source in found.items() if source.shape != specs[name].shape]
    if wrong:
        name = wrong[0]
        problem = f"found shape {list(found[name].shape)}, expected {list(specs[name].shape)}"
        hint = f"{len(wrong)} tensors do not fit config.json beside them: repair that file, or pass another checkpoint"
        raise WeightsError(place, name, problem, hint)


def _assign(ranks: list[RankRead], spec: TensorPlan, source: Source, mesh: Mesh) -> int:
    """Add a tensor to the counts in `ranks` of each rank that reads some of it. Return how many of its bytes are read;
    bytes that several ranks read count once. `source` tells its file and size, `spec` its sharding and stages.
    """
    placement = spec.placement or Placement(0)
    size = spec.shape[placement.axis] if spec.placement else 1
    inner = source.nbytes // size if size else 0
    shares = [placement.runs(size, mesh.tp, r) if spec.placement else [Run(0, 1)]
              for r in range(mesh.tp)]  # fmt: skip
    for stage in spec.stages:
        for r, runs in enumerate(shares):
            rank = ranks[stage * mesh.tp + r]
            rank.tensors += bool(runs)
            rank.bytes_read += inner * sum(run.stop - run.start for run in runs)
            if runs:
                rank.files.add(source.file)
    covered = end = 0
    for start, stop in sorted(run for runs in shares for run in runs):
        covered += max(0, stop - max(start, end))
        end = max(end, stop)
    return inner * covered
