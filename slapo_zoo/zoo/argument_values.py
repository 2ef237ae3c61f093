"""Resolve arguments of `AutoScheduledModel.from_pretrained`: mesh, checkpoint folder, dtype, device and config."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slapo_zoo.errors import MeshError, SlapoError, WeightsError
from slapo_zoo.hf import models as hf
from slapo_zoo.hf.configs import read_config
from slapo_zoo.hf.hub_errors import hub_errors
from slapo_zoo.parallel.compat import is_for_gpus
from slapo_zoo.parallel.losses.heads import head_of
from slapo_zoo.parallel.mesh import ALWAYS, Mesh
from slapo_zoo.parallel.paths import nearest
from slapo_zoo.parallel.ranks.process_group import init_distributed, is_distributed_launch
from slapo_zoo.weights.folder import CheckpointFolder
from slapo_zoo.weights.snapshot import is_missing
from slapo_zoo.zoo.hf_arguments import HubArguments
from slapo_zoo.zoo.options import INSTEAD, KNOBS, unknown_knob
from slapo_zoo.zoo.table import families, table_for


def make_mesh(**sizes: int | None) -> Mesh:
    """Return the mesh of this process in the process group of its launcher (torchrun, srun). Raises MeshError if the
    sizes do not match the number of processes.

    Args:
        **sizes: size of each mesh dim by name; None: the number of processes / the product of the other sizes.
    """
    if not dist.is_initialized() and is_distributed_launch():
        init_distributed()
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    return replace(Mesh(), **mesh_sizes(world, sizes), rank=rank)


def mesh_sizes(world: int, sizes: Mapping[str, int | None]) -> dict[str, int]:
    """Return mesh dim --> size for `world` processes; a size of None becomes `world` / product of the other sizes.
    MeshError is raised if the product of the sizes is not `world`.
    """
    given = {name: 1 if size is None else size for name, size in sizes.items()}
    fixed = replace(Mesh(), **given).world_size
    found = {n: max(world // fixed, 1) if size is None else size for n, size in sizes.items()}
    if prod(found.values()) != world:
        used = {name: size for name, size in found.items() if name in ALWAYS or size > 1}
        names, product = " * ".join(used), " * ".join(map(str, used.values()))
        processes = f"{world} process{'es' if world > 1 else ''}"
        problem = f"found {processes}, expected {names} = {product}"
        hint = f"torchrun --nproc-per-node {prod(found.values())} ..., or change {', '.join(used)}"
        raise MeshError("mesh", "world size", problem, hint)
    return found


def local_folder(
    name_or_path: str, revision: str | None, allow_pickle: bool, hub: HubArguments = HubArguments()  # noqa: B008 - frozen
) -> Path:  # fmt: skip
    """Return the folder `name_or_path`, or download the Hub model of that name (at `revision`) and return its folder;
    SlapoError if there is neither. `allow_pickle` downloads `.bin` files too; `hub` has the token and subfolder.
    """
    if Path(name_or_path).exists() or not is_missing(Path(name_or_path)):
        return _without_adapter(Path(name_or_path) / (hub.subfolder or ""))
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.spm", "*.codes"]
    patterns += ["pytorch_model*.bin"] if allow_pickle else []
    if hub.subfolder:
        patterns = [f"{hub.subfolder}/{pattern}" for pattern in patterns]
    hint = "check the path or model id; HF_HUB_OFFLINE=1 allows cached models only"
    what = "from_pretrained", repr(name_or_path)
    with hub_errors(lambda said, _: SlapoError(*what, f"no such folder, and {said}", hint)):
        fetched = snapshot_download(
            name_or_path, revision=revision, allow_patterns=patterns, **hub.fetching
        )
    return _without_adapter(Path(fetched) / (hub.subfolder or ""))


def _without_adapter(folder: Path) -> Path:
    """Return `folder` unchanged; SlapoError if it holds an adapter, which `transformers` would load with its base model."""
    if not os.path.exists(folder / "adapter_config.json"):
        return folder
    problem = "found adapter_config.json: this folder holds an adapter of peft"
    hint = "load the base model that this file names, then call model.load_adapter(folder)"
    hint += "; to load weights beside it alone, move the adapter to another folder"
    raise SlapoError("from_pretrained", str(folder), problem, hint)


def checkpoint_dtype(config: Any, checkpoint: CheckpointFolder) -> torch.dtype:
    """Return the dtype that the config names, else the dtype of the first floating tensor in the checkpoint's files."""
    if config.dtype is not None:
        return config.dtype
    dtypes = (checkpoint.dtype(key) for key in checkpoint.key_to_file)
    return next((d for d in dtypes if d.is_floating_point), torch.float32)


def pick_device(device: str | torch.device | None) -> torch.device:
    """Return a model's device; None becomes this rank's GPU, or the CPU without a GPU or with a gloo process group."""
    takes_gpu = torch.cuda.is_available() and is_for_gpus()
    if takes_gpu and dist.is_initialized():
        _use_own_gpu()
    if device is not None:
        return _named_device(device)
    return torch.empty(0, device="cuda").device if takes_gpu else torch.device("cpu")


def check_shared_gpu(step: str, mesh: Mesh, device: str | torch.device) -> None:
    """Raise MeshError at `step` if pipeline stages are on GPUs, but ranks use gloo, as ranks that share a GPU do."""
    on_gpu = torch.device(device).type == "cuda"
    if mesh.pp > 1 and on_gpu and not is_for_gpus():
        problem = f"found device={str(device)!r} with gloo, which cannot send CUDA tensors from stage to stage"
        hint = 'give each rank a GPU of its own (then nccl is used), or pass device="cpu" or pp=1'
        raise MeshError(step, f"pp={mesh.pp}", problem, hint)


def _use_own_gpu() -> None:
    """Make this rank's GPU the current CUDA device, which init_process_group("nccl") does not: the GPU that the process
    group is bound to or, if there is none and CUDA was not used yet, GPU number LOCAL_RANK.
    """
    world: Any = dist.group.WORLD
    local, own = os.environ.get("LOCAL_RANK"), world.bound_device_id
    if own is None and local is not None and not torch.cuda.is_initialized():
        own = torch.device("cuda", int(local) % torch.cuda.device_count())
    if own is not None and own.type == "cuda":
        torch.cuda.set_device(own)


def _named_device(device: str | torch.device) -> torch.device:
    """Return the torch device of a name; SlapoError if this machine has no such device."""
    try:
        found = torch.device(device)
        is_there = found.type != "cuda" or (found.index or 0) < torch.cuda.device_count()
    except (RuntimeError, TypeError) as error:
        problem = f"found no such device: {str(error).splitlines()[0]}"
        hint = 'pass device="cpu" or "cuda"'
        raise SlapoError("from_pretrained", f"device={device!r}", problem, hint) from None
    if not is_there:
        problem = f"this torch can use {torch.cuda.device_count()} CUDA devices"
        hint = 'leave device= out, or pass device="cpu"'
        raise SlapoError("from_pretrained", f"device={device!r}", problem, hint)
    return found


def changed_config(
    folder: Path, changes: dict[str, Any], hub: HubArguments = HubArguments()  # noqa: B008 - frozen
) -> Any:  # fmt: skip
    """Return the config of a checkpoint, or `hub.config` if the user passed one, with the fields of `changes` set.

    Raises:
        SlapoError: a name in `changes` is no field of the config (for an argument of `transformers`, e.g. `device_map`,
            the error says what to pass to slapo_zoo instead); the checkpoint has no config, or is quantized.
    """
    if instead := [name for name in changes if name in INSTEAD]:
        raise unknown_knob("from_pretrained", instead[0], ())
    config: Any = hub.own_config(changes)
    if config is not None:
        if not config.architectures and (folder / "config.json").exists():
            config.architectures = read_config(folder).architectures
        return _without_quantization(folder, config)
    source = folder if hub.config is None else hub.config
    try:
        config, unused = read_config(source, return_unused_kwargs=True, **changes)
    except (OSError, ValueError) as error:
        problem = f"no config can be read: {' '.join(str(error).split()):.300}"
        hint = "pass a folder with config.json, as save_pretrained writes it"
        raise SlapoError("from_pretrained", str(folder), problem, hint) from None
    if unused:
        known = [*KNOBS, *config.to_dict()]
        raise unknown_knob("from_pretrained", next(iter(unused)), known)
    return _without_quantization(folder, config)


def _without_quantization(folder: Path, config: Any) -> Any:
    """Return `config`, or raise SlapoError, which names `folder`, if the config has a `quantization_config`."""
    if (found := getattr(config, "quantization_config", None)) is None:
        return config
    method = found.get("quant_method") if isinstance(found, dict) else None
    problem = f"this checkpoint is quantized ({method or type(found).__name__}); quantized weights cannot be trained"
    hint = "load the original checkpoint, from before the quantization, or a dequantized one"
    raise SlapoError("from_pretrained", str(folder), problem, hint)


def config_of(name: str) -> tuple[Any, str | None]:
    """Return (config, name of an auto class or None) of a folder, a Hub id or a family such as "gpt2".

    A family's config has default sizes; the auto class is one whose model of that family computes a loss. For a folder
    or a Hub id, whose config names the class, the second item is None.
    """
    from transformers import CONFIG_MAPPING

    hf.register_models()
    if name in CONFIG_MAPPING and not Path(name).exists():
        given = table_for(name).defaults if name in families() else {}
        config = CONFIG_MAPPING[name](**given)
        return config, usual_head(config, heads=OF_FAMILIES)
    if problem := _why_no_folder(name):
        hint = "name a folder with config.json, a Hub id, or a family (slapo-zoo list)"
        raise SlapoError("config", repr(name), problem, hint)
    near = nearest(name, families())
    hint = "pass a family (slapo-zoo list), a folder or a model id"
    hint += f"; nearest families: {', '.join(near)}" if near else ""
    return _read_config(name, hint), None


def checkpoint_config(name: str) -> Any:
    """Return the config of a checkpoint folder or Hub id; ArchitectureError if slapo_zoo has no rules for its family."""
    if problem := _why_no_folder(name):
        raise WeightsError(name, "model", problem, "pass a checkpoint folder with config.json")
    config = _read_config(name, "name a checkpoint folder, or the id of a model on the Hub")
    table_for(config.model_type)
    return config


def _why_no_folder(name: str) -> str:
    """Return why a name that looks like a path is no folder with a config; "" for a good folder or a Hub id."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return "" if (folder / "config.json").exists() else "found no config.json"
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    return "found no such folder" if is_path and not folder.exists() else ""


def _read_config(name: str, hint: str) -> Any:
    """Return the config of a folder or Hub id, without running its code; SlapoError with `hint` on failure."""
    try:
        if not Path(name).exists():
            with hub_errors(lambda said, _: SlapoError("config", repr(name), said, hint)):
                _ask_the_hub(name)
        return read_config(name)
    except (OSError, ValueError) as error:
        problem = str(error).strip().splitlines()[0]
        raise SlapoError("config", repr(name), problem, hint) from None


def _ask_the_hub(name: str) -> None:
    """Request config.json of a Hub model unless it is cached, to raise an error of the network without retries."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HfHubHTTPError

    if HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    with suppress(HfHubHTTPError):  # the Hub answered: transformers has a better message
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=10)


HEADS = (
    "PreTraining", "ImageClassification", "SpeechSeq2Seq", "Seq2SeqLM", "CausalLM", "MaskedLM",
)  # fmt: skip
OF_FAMILIES = HEADS[:3]  # heads for a bare family name; published cards are for these


def usual_head(config: Any, head: str | None = None, heads: Sequence[str] = HEADS) -> str | None:
    """Return the name of the auto class with which to load a model: `head` if it is given; None if the config names its
    model class. Otherwise the name is "AutoModelFor" + the first of `heads` ("CausalLM", ...) with which this config
    has a class that computes a loss; None if no head has one.
    """
    import transformers

    if head or config.architectures:
        return head
    for name in (f"AutoModelFor{kind}" for kind in heads):
        mapping = getattr(transformers, name)._model_mapping
        if type(config) in mapping and head_of(mapping[type(config)].__name__).labels:
            return name
    return None
