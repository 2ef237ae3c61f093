"""Runtime state of a scheduled model, and functions that count and check the rows of a batch."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slapo_zoo.errors import MeshError
from slapo_zoo.language.directive import ForwardContext
from slapo_zoo.language.planned_rows import plan_of
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.model.dp.data_parallel import DataParallel
from slapo_zoo.model.gradients.calls import Calls
from slapo_zoo.model.gradients.input_gradients import nodes_of
from slapo_zoo.model.gradients.module_changes import require_known_order
from slapo_zoo.model.step.mixed_precision import MixedPrecision
from slapo_zoo.model.step.outputs import shows_layers
from slapo_zoo.parallel.known import known
from slapo_zoo.parallel.losses.heads import SHIFTED
from slapo_zoo.parallel.placement import TensorSpec
from slapo_zoo.parallel.rank_plan import RankPlan, Sum, TensorPlan
from slapo_zoo.pipeline.pipeline_runtime import MAIN_INPUTS, Pipeline, split_batch
from slapo_zoo.weights.keys import KeyMap
from slapo_zoo.weights.ledger import Ledger
from slapo_zoo.zoo.table import Table


@dataclass
class Runtime:
    """State that a scheduled model needs to run: how it was sharded, its pipeline stages, data parallelism, options.

    Args:
        schedule: schedule of the model: its mesh, and the directives that have sharded and changed the modules.
        own_forward: forward of the model's own class in `transformers`.
        table: sharding rules of the model's family, from `schedules/`.
        pipeline: this rank's pipeline stages; None if pp is 1.
        keys: maps names of parameters to their names in the family's checkpoint files.
        ledger: record of the load: bytes and files that this rank read, seconds.
        adapters: adapter name --> shapes and placements of its matrices on this stage.
        peft_config: configs of the adapters, as peft keeps them.
        groups: global ranks --> process group, for ranks that sum a gradient but are not all ranks of a mesh dim, such
            as those with replicas of one KV head.
        source: folder of the checkpoint, or None.
        micro_batches: number of micro-batches where `train_step` is not given one.
        data_parallel: object that runs the model and reduces gradients over dp; ZeRO or an engine (DDP) replaces it.
        calls: gradient hooks of the model; settings (padding, sharded tokens) of a forward, for its backward.
        within_engine: True while an engine (a DDP module) calls the model, whose forward is then `own_forward` alone.
        generates: True while `generate` is running.
        evaluated: number of forwards without a backward so far (evaluation, `generate`, a pipeline's forward).
        recomputed: paths of the layers that `gradient_checkpointing_enable` recomputes.
        precision: compute dtype and loss scale.
    """

    schedule: Schedule
    own_forward: Callable[..., Any]
    table: Table
    pipeline: Pipeline | None = None
    keys: KeyMap = field(default_factory=KeyMap)
    ledger: Ledger = field(default_factory=Ledger)
    adapters: dict[str, list[TensorSpec]] = field(default_factory=dict)
    peft_config: Any = None
    groups: dict[tuple[int, ...], Any] = field(default_factory=dict)
    source: Path | None = None
    micro_batches: int | None = None
    data_parallel: DataParallel = field(default_factory=DataParallel)
    calls: Calls = field(init=False)
    within_engine: bool = False
    generates: bool = False
    evaluated: int = 0
    recomputed: list[str] = field(default_factory=list)
    precision: MixedPrecision = field(default_factory=MixedPrecision)

    @property
    def plan(self) -> RankPlan:
        """Return the plan of this rank: how each tensor is sharded, over which ranks its gradient is summed."""
        return plan_of(self.schedule.state)

    @property
    def specs(self) -> list[TensorPlan]:
        """Return shape, sharding and gradient sums of each tensor in a checkpoint, in the order of the state dict."""
        return self.plan.saved

    def group(self, one: Sum) -> Any:
        """Return the process group over which the plan's entry `one` sums gradients; None if it has this rank alone."""
        mesh = self.schedule.mesh
        return self.groups.get(one.ranks(mesh)) if one.parts else mesh.group(one.mesh_dim)

    def head_name(self, model: Any) -> str:
        """Return the name of the model's class, from which losses know whether labels are shifted by one token; or, if
        the family's table of sharding rules says so, SHIFTED (labels are shifted) or "" (labels are not shifted).
        """
        if self.table.shifts_labels is None:
            return model.unscheduled_class.__name__
        return SHIFTED if self.table.shifts_labels else ""


def tokens_divide(model: Any, batch: Mapping[str, Any]) -> bool:
    """Return whether the tokens of a batch are sharded over tp in this forward (sequence parallelism). The sequence
    lengths of encoder and decoder must be multiples of tp; otherwise this forward runs without sequence parallelism,
    with the same result and a warning in training.
    """
    runtime: Runtime = model._slapo
    if runtime.schedule.state.sequence_parallel and model.mesh.pp == 1:  # stages check themselves
        require_known_order(model)
    if not runtime.schedule.state.sequence_parallel or shows_layers(model, batch):
        return False
    if nodes_of(batch.get("encoder_outputs")):  # of an encoder call, which had all tokens
        return False
    count = runtime.table.num_tokens
    sides = [x.shape[-2:] for name, x in batch.items() if name == "pixel_values"]
    lengths = [count(model.config, *sides)] if count else []
    names = {"input_ids": -1, "inputs_embeds": -2, "decoder_input_ids": -1, "decoder_inputs_embeds": -2}  # fmt: skip
    if model.config.is_encoder_decoder:
        names["labels"] = -1
    given = ((at, batch.get(name)) for name, at in names.items())
    lengths += [x.shape[at] for at, x in given if x is not None and x.ndim > 1]  # no class labels
    divide = bool(lengths) and all(length % model.mesh.tp == 0 for length in lengths)
    if not divide and model.training:
        warnings.warn(
            f"{lengths} tokens are not a multiple of tp={model.mesh.tp}: this step runs without "
            "sequence parallelism; pad to a multiple (pad_to_multiple_of of the tokenizer)",
            stacklevel=5,
        )
    return divide


def calling(
    model: Any, batch: Mapping[str, Any], divided: bool, cut: Any = None
) -> AbstractContextManager[None]:
    """Context of a forward, from which modules read which tokens are padding and whether tokens are sharded. `divided`
    is True if the tokens of `batch` are sharded over tp (sequence parallelism); `cut` says which tokens each cp rank
    computes (None: all).
    """
    real = None if known().real is None else batch["attention_mask"].bool()
    state = model._slapo.schedule.state
    return state.within(ForwardContext(divided, real, is_call=True, cut=cut))


def count_rows(batch: Mapping[str, Any]) -> int:
    """Return the number of rows of a batch, i.e. the size of axis 0 of input_ids or the like; 0 without tensors."""
    tensors, _ = split_batch(batch)
    for name in MAIN_INPUTS:
        if name in tensors:
            return len(tensors[name])
    return len(next(iter(tensors.values()))) if tensors else 0


def refuse_divided(model: Any, options: Mapping[str, Any], own: bool = False, **parts: int) -> None:
    """Raise MeshError if a batch is to be split (a number in `parts`, e.g. micro_batches=4 or dp=2, is above 1) and its
    loss is no mean over rows, because of the model's class or of an option such as output_router_logits=True. `options`
    are the forward's arguments; the config gives those that are missing. With `own` the user's loss_fn replaces the
    model's loss: then the class is allowed, unless its forward mixes rows before the loss.
    """
    divided = [f"{name}={count}" for name, count in parts.items() if count > 1]
    table = model._slapo.table
    own = own and table.undivided is not True  # of all classes, the rows may meet before the loss
    rows = [p for p in divided if p[:3] not in ("pp=", "cp=")]  # parts with some of the rows
    if rows and table.is_undivided(model.unscheduled_class) and not own:
        problem = f"found {', '.join(divided)}: the loss is no mean over rows, so the batch cannot be split"
        more = "" if table.undivided is True else ", or give train_step a loss_fn"
        raise MeshError("the model", "loss", problem, f"pass micro_batches=1 and use dp=1{more}")
    for name in table.whole_batch if divided else ():
        given = options.get(name)
        if getattr(model.config.get_text_config(), name, False) if given is None else given:
            problem = f"found {', '.join(divided)}: with {name}=True the loss needs the whole batch at once"
            hint = f"pass {name}=False, or use tp only"
            raise MeshError("the model", f"{name}=True", problem, hint)
