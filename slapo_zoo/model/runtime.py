"""What a scheduled model remembers, and what it asks of a batch."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from slapo_zoo.model.data_parallel import DataParallel
from slapo_zoo.errors import MeshError
from slapo_zoo.pipeline.runtime import Pipeline, split_batch
from slapo_zoo.parallel.placement import TensorSpec
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.weights.keys import KeyMap
from slapo_zoo.weights.ledger import Ledger

WORTH_UNPADDING = 0.9  # share of real tokens up to which moving them is cheaper


@dataclass
class Runtime:
    """What a scheduled model remembers.

    Args:
        schedule: the program that made it.
        specs: every tensor of the whole model, in the order of its state dict.
        own_forward: of the model's own class.
        pipeline: the stages, or None without.
        keys: names that the family's files use.
        adapters: the matrices of each adapter, by its name, that this stage holds.
        peft_config: what peft keeps at a model.
        ties: groups of parameters of this rank that stages share: (name, process group).
        replicas: divided parameters that neighbouring tp ranks share: (name, process group).
        owned: names that this stage counts in norms and saves.
        source: the folder that was loaded.
        micro_batches: default of `train_step`.
        num_tokens: tokens of an input that is not text.
        whole_batch: options whose loss is no mean over rows.
        batch_statistics: whether micro-batches change the result.
        data_parallel: how it runs and sums over dp; an engine puts its own here.
        within_engine: a call of the model comes from the engine around it.
    """

    schedule: Schedule
    specs: list[TensorSpec]
    own_forward: Callable[..., Any]
    pipeline: Pipeline | None = None
    keys: KeyMap = field(default_factory=KeyMap)
    ledger: Ledger = field(default_factory=Ledger)
    adapters: dict[str, list[TensorSpec]] = field(default_factory=dict)
    peft_config: Any = None
    ties: list[tuple[str, Any]] = field(default_factory=list)
    replicas: list[tuple[str, Any]] = field(default_factory=list)
    owned: set[str] = field(default_factory=set)
    source: Path | None = None
    micro_batches: int | None = None
    num_tokens: int | None = None
    whole_batch: tuple[str, ...] = ()
    batch_statistics: bool = False
    data_parallel: DataParallel = field(default_factory=DataParallel)
    within_engine: bool = False


def tokens_divide(model: Any, batch: Mapping[str, Any]) -> bool:
    """Whether the tokens of a batch can be divided over tp, where the schedule asks for it.

    Every stack (encoder, decoder) must divide; otherwise this forward runs without sequence
    parallelism, with the same result.
    """
    runtime: Runtime = model._slapo
    if not runtime.schedule.state.sequence_parallel:
        return False
    lengths = [runtime.num_tokens] if runtime.num_tokens else []
    names = {
        "input_ids": -1,
        "inputs_embeds": -2,
        "decoder_input_ids": -1,
        "decoder_inputs_embeds": -2,
    }
    if model.config.is_encoder_decoder:
        names["labels"] = -1
    given = {name: batch.get(name) for name in names}
    given = {name: x for name, x in given.items() if x is not None and x.ndim > 1}  # not a class
    lengths += [x.shape[names[name]] for name, x in given.items()]
    divide = bool(lengths) and all(length % model.mesh.tp == 0 for length in lengths)
    if not divide and model.training:
        warnings.warn(
            f"{lengths} tokens are not a multiple of tp={model.mesh.tp}: this step runs without "
            "sequence parallelism; pad to a multiple (pad_to_multiple_of of the tokenizer)",
            stacklevel=4,
        )
    return divide


def real_tokens(model: Any, batch: Mapping[str, Any]) -> Tensor | None:
    """Which tokens are real [B, S], where a kernel may leave the others out: nothing reads them.

    That is where a loss over tokens ignores every label at padding.
    """
    state = model._slapo.schedule.state
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if not (state.unpads and model.training and isinstance(mask, Tensor) and mask.ndim == 2):
        return None
    over_tokens = model.unscheduled_class.__name__.endswith(
        ("ForMaskedLM", "ForTokenClassification")
    )
    if not over_tokens or labels is None or labels.shape != mask.shape:
        return None
    config = model.config
    shown = any(batch.get(name) or getattr(config, name, False)
                for name in ("output_hidden_states", "output_attentions", "is_decoder"))  # fmt: skip
    if shown or state.checkpointed or state.tokens_divided or model.mesh.pp > 1:
        return None
    real = mask.bool()
    ignored = bool((labels[~real] == -100).all()) and bool(real.any(1).all())
    return real if ignored and int(real.sum()) <= WORTH_UNPADDING * real.numel() else None


def takes_cache(runtime: Runtime) -> bool:
    """Whether the model's own forward has a use_cache argument."""
    return "use_cache" in inspect.signature(runtime.own_forward).parameters


def count_rows(batch: Mapping[str, Any]) -> int:
    """Rows of a batch, by its main input."""
    tensors, _ = split_batch(batch)
    for name in ("input_ids", "inputs_embeds", "pixel_values"):
        if name in tensors:
            return len(tensors[name])
    return len(next(iter(tensors.values()))) if tensors else 0


def refuse_divided(model: Any, options: Mapping[str, Any], **parts: int) -> None:
    """MeshError for an option whose loss is no mean over rows where the batch is divided."""
    divided = [f"{name}={count}" for name, count in parts.items() if count > 1]
    for name in model._slapo.whole_batch if divided else ():
        given = options.get(name)
        if getattr(model.config, name, False) if given is None else given:
            problem = f"its loss needs the whole batch in one piece, found {', '.join(divided)}"
            raise MeshError(
                "the model", f"{name}=True", problem, f"pass {name}=False, or use tp only"
            )
