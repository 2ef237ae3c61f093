"""A training job from its arguments: check everything first, then start the ranks."""

import importlib.util
import os
from pathlib import Path
from typing import Any

from slapo_zoo.model.dialects import HOMES
from slapo_zoo.parallel.process_group import (
    init_distributed,
    is_distributed_launch,
    rank_guard,
    shutdown_distributed,
    world_size_of_launch,
)
from slapo_zoo.errors import ArchitectureError, MeshError, WeightsError
from slapo_zoo.parallel.launch import run_local
from slapo_zoo.cli.training.loop import TrainOptions, position, train
from slapo_zoo.cli.training.text import (
    Batches,
    DataError,
    Masking,
    pack,
    read_documents,
)
from slapo_zoo.weights.encode import decode
from slapo_zoo.weights.training_state import read_state


def data_parallel_size(tp: int, pp: int, dp: int | None) -> int:
    """dp, by default what the launched processes leave; MeshError if they do not fit."""
    if not is_distributed_launch():
        return dp or 1
    world = world_size_of_launch()
    size = dp or max(1, world // (tp * pp))
    if tp * pp * size != world:
        problem = f"found {world} processes, expected a multiple of tp*pp = {tp * pp}"
        if dp:
            problem = f"found {world} processes, expected tp*pp*dp = {tp * pp * dp}"
        raise MeshError("train", f"tp={tp} pp={pp} dp={dp}", problem, "start that many processes")
    return size


def device_named(name: str) -> str | None:
    """The device of `--device`; None for auto."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        problem = "found no such device, expected auto, cpu or cuda"
        raise MeshError("--device", name, problem, "leave it out for auto")
    if name == "cuda" and not torch.cuda.is_available():
        problem = "found no CUDA device that this torch can use"
        raise MeshError("--device", name, problem, "leave it out, or choose cpu")
    return None if name == "auto" else name


def check_engine(name: str, zero_stage: int, pp: int) -> str:
    """The name of an engine that is installed and can do what is asked for."""
    if name not in HOMES:
        problem = f"found {name!r}, expected one of {sorted(HOMES)}"
        raise MeshError("train", "--engine", problem, "choose one of them")
    if importlib.util.find_spec(name) is None:
        hint = f"pip install slapo-zoo[{name}]"
        raise MeshError("train", f"--engine {name}", "its package is not installed", hint)
    if zero_stage and name != "deepspeed":
        problem = f"ZeRO belongs to DeepSpeed, found --engine {name}"
        raise MeshError("train", f"--zero-stage {zero_stage}", problem, "add --engine deepspeed")
    if zero_stage > 1 and pp > 1:
        problem = f"DeepSpeed's pipeline takes stage 0 and 1, found pp={pp}"
        raise MeshError("train", f"--zero-stage {zero_stage}", problem, "choose 1, or pp=1")
    if name == "megatron" and pp > 1:
        problem = f"found pp={pp}, expected 1: Megatron's pipeline needs CUDA"
        raise MeshError("train", "--engine megatron", problem, "choose --engine torch or deepspeed")
    return name


def check_batch(batch_size: int, dp: int, micro_batches: int | None) -> None:
    """Every data-parallel rank and every micro-batch gets the same number of rows."""
    parts = dp * (micro_batches or 1)
    if batch_size % parts:
        problem = f"found {batch_size}, expected a multiple of dp * micro-batches = {parts}"
        hint = f"nearest: {(batch_size // parts + 1) * parts}"
        raise MeshError("train", "--batch-size", problem, hint)


def check_output(folder: Path, option: str = "--output") -> None:
    """Only a new or empty folder, or an older checkpoint, may be written to."""
    if folder.is_file():
        raise WeightsError(str(folder), option, "found a file, expected a folder")
    inside = list(folder.iterdir()) if folder.is_dir() else []
    if inside and not (folder / "config.json").exists():
        problem = f"found {len(inside)} other files and no config.json: it is not a checkpoint"
        raise WeightsError(str(folder), option, problem, "name a new folder")
    parent = next(path for path in [folder, *folder.absolute().parents] if path.exists())
    if not os.access(parent, os.W_OK):
        raise WeightsError(str(folder), option, f"{parent} cannot be written to")


def check_checkpoint(folder: Path, batches: Batches, steps: int) -> None:
    """A checkpoint that is there was made with these rows, and has done no more steps than asked for."""
    check_output(folder, "--checkpoint")
    if not folder.exists() or not any(folder.iterdir()):
        return
    state, now = read_state(folder), position(batches)
    then = decode(state["data_position"])
    then = then if isinstance(then, dict) else {}
    differ = [name for name in now if then.get(name) != now[name]]
    if differ:
        said = ", ".join(f"{name}={then.get(name)} (now {now[name]})" for name in differ)
        hint = "take the same --data, --seq-len, --batch-size and --seed, or name a new folder"
        raise WeightsError(str(folder), "--checkpoint", f"it was trained with {said}", hint)
    if state["step"] > steps:
        problem = f"it has done {state['step']} steps, and --steps asks for {steps} in all"
        raise WeightsError(str(folder), "--checkpoint", problem, "ask for more --steps")


def read_config(name: str) -> Any:
    """The config of a checkpoint folder or Hub id whose family has a table."""
    from transformers import AutoConfig

    from slapo_zoo.zoo.table import table_for

    folder = Path(name).expanduser()
    if folder.is_dir() and not (folder / "config.json").exists():
        raise WeightsError(name, "model", "found no config.json", "name a checkpoint folder")
    if not folder.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise WeightsError(name, "model", "found no such folder", "name a folder or a Hub id")
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as exc:
        hint = "name a checkpoint folder, or the id of a model on the Hub"
        raise WeightsError(name, "model", first_line(exc), hint) from exc
    table_for(config.model_type)
    return config


def task_of(config: Any) -> str:
    """The task that a family is trained on: the next token, or masked tokens."""
    from transformers.models.auto import modeling_auto as names

    family = config.model_type
    if family in names.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not config.is_decoder:
        return "masked"
    if family in names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "causal"
    problem = "found no language-modelling head that this command trains"
    hint = "call model.train_step from a script of your own"
    raise ArchitectureError("train", f"model_type={family!r}", problem, hint)


def load_tokenizer(name: str) -> Any:
    """The tokenizer of the checkpoint."""
    from transformers import AutoTokenizer

    hint = "save the tokenizer beside the weights: tokenizer.save_pretrained(folder)"
    try:
        found = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, ImportError) as exc:
        raise DataError(name, "tokenizer", first_line(exc), hint) from exc
    if len(found) <= len(found.all_special_ids):  # what transformers makes where there are no files
        raise DataError(name, "tokenizer", f"found one of {len(found)} tokens, all special", hint)
    return found


def first_line(exc: Exception) -> str:
    """The first line of a library's message; the rest repeats it."""
    return (str(exc).strip() or type(exc).__name__).splitlines()[0]


def make_batches(
    tokenizer: Any, config: Any, data: Path, seq_len: int, batch_size: int, options: TrainOptions
) -> Batches:
    """Read and pack the text, and check that it fits the model."""
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and seq_len > longest:
        problem = f"found {seq_len}, but the model has {longest} positions"
        raise DataError("train", "--seq-len", problem, f"choose at most {longest}")
    rows = pack(tokenizer, read_documents(data), seq_len, least=batch_size)
    if int(rows.max()) >= config.vocab_size:
        problem = f"found token {int(rows.max())}, but the vocabulary has {config.vocab_size} rows"
        raise DataError(options.model, "tokenizer", problem, "it belongs to another model")
    masking = None
    if options.task == "masked":
        if tokenizer.mask_token_id is None:
            raise DataError(options.model, "tokenizer", "found no [MASK] token")
        special = tuple(tokenizer.all_special_ids)
        masking = Masking(tokenizer.mask_token_id, config.vocab_size, special)
    return Batches(rows, batch_size, options.seed, masking)


def run(options: TrainOptions, batches: Batches, tokenizer: Any) -> None:
    """Train on the ranks that a launcher started, or on local ranks that we start."""
    world = options.tp * options.pp * options.dp
    first = True
    if is_distributed_launch():
        init_distributed(device=options.device)
        with rank_guard("train"):
            train(options, batches)
        first = os.environ["RANK"] == "0"
        shutdown_distributed()
    elif world == 1:
        train(options, batches)
    else:
        run_local(train, world, (options, batches), device=options.device)
    if first and options.output is not None:
        tokenizer.save_pretrained(options.output)
