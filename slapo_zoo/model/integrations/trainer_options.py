"""Options of transformers' Trainer that a sharded model does not support, and what to do instead."""

from collections.abc import Sized
from inspect import signature
from typing import Any

import torch
from transformers import set_seed
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

from slapo_zoo.errors import SlapoError
from slapo_zoo.model.integrations.dialects.engine import is_exact
from slapo_zoo.parallel.compat import group_kinds

# Option --> why it is refused, what to do.
REFUSED = {
    "fsdp": ("Trainer would wrap a model that is sharded already", 'leave it out; call init_target_engine(model, "torch", ...)'),
    "deepspeed": ("Trainer would wrap a model that is sharded already", 'leave it out; call init_target_engine(model, "deepspeed", ...)'),
    "fp16": ("a scheduled model casts its own weights and scales its own loss", 'load it with precision="fp16", or set bf16=True'),
    "torch_compile": ("the whole model cannot be compiled, because its forward runs collectives", "compile the blocks yourself: block.compile()"),
    "use_liger_kernel": ("it would replace forwards that the schedule has replaced", 'leave it out; load the model with kernels="auto"'),
}  # fmt: skip
# The same for an exact model alone.
REFUSED_EXACT = {
    "gradient_accumulation_steps": ("with exact= the virtual ranks count the targets of one batch", "leave it out, and load the model with micro_batches=N"),
    "bf16": ("autocast holds for one thread, and the virtual ranks run in other threads", 'load the model with precision="bf16"'),
    "neftune_noise_alpha": ("its noise would be drawn once per process, not per virtual rank", "leave it out, or load without exact="),
}  # fmt: skip
# Options of TRL's samplers --> values without a statistic over all processes, some of which have the same rows over tp.
OF_GROUPS = {
    "scale_rewards": ("group", "none"), "multi_objective_aggregation": ("sum_then_normalize",),
    "normalize_advantages": (False,), "top_entropy_quantile": (1.0,),
}  # fmt: skip
IN_BACKWARD = ("lomo", "adalomo")  # optimizers that step within the backward


def add_adapter(cls: type, model: Any, kwargs: dict[str, Any]) -> None:
    """Add the adapter of TRL's `peft_config` by `model.add_adapter`, which shards it; TRL would not shard it.
    `kwargs` are the arguments of the Trainer class `cls`; `peft_config` is removed from them.
    """
    config = kwargs.pop("peft_config", None)
    if config is None:
        return
    takes = {n for base in cls.__mro__ for n in signature(base.__init__).parameters}
    if "ref_model" in takes and kwargs.get("ref_model") is None:
        problem = "without ref_model the trained model itself would be the reference"
        hint = "pass ref_model=copy.deepcopy(model) too"
        raise SlapoError(cls.__name__, "peft_config", problem, hint)
    model.add_adapter(config)


def refuse_options(model: Any, args: Any, own_loss: str, data: Any = None) -> None:
    """Raise SlapoError for the first option that would be ignored or wrong with a sharded model.

    Args:
        model: a scheduled model.
        args: TrainingArguments, or None.
        own_loss: name of the option that replaces the model's loss, or "".
        data: the data set to train on, or None.
    """
    mesh = model.mesh
    _refuse_device(mesh, getattr(args, "device", None))
    for name, (problem, hint) in REFUSED.items():
        if getattr(args, name, None):
            raise _refusal(name, problem, hint)
    if is_exact(model):
        _refuse_options_of_exact(args, own_loss)
        _refuse_short_batch(model, args, data)
        return
    if own_loss and mesh.pp > 1:
        problem = f"found pp={mesh.pp}, expected 1: only the last stage has logits for this loss"
        hint = "use pp=1, or a loop of your own: model.train_step(batch, loss_fn=...)"
        raise _refusal(own_loss, problem, hint)
    saves = str(getattr(getattr(args, "save_strategy", None), "value", "no"))
    if model._slapo.peft_config and saves != "no":
        problem = "found a model with an adapter, for which no training checkpoint is written"
        hint = 'pass save_strategy="no"; trainer.save_model(folder) writes the adapter at the end'
        raise _refusal(f"save_strategy={saves!r}", problem, hint)
    _refuse_parts_of_rows(model, args)
    _share_generations(mesh, args)
    optimizer = str(getattr(getattr(args, "optim", None), "value", ""))
    if optimizer in IN_BACKWARD:
        problem = "this optimizer steps during the backward, before gradients are complete"
        raise _refusal(f"optim={optimizer!r}", problem, 'use another one, e.g. optim="adafactor"')


def _refuse_device(mesh: Any, device: Any) -> None:
    """Raise SlapoError if Trainer would move the model to a `device` whose tensors the ranks' process group cannot send."""
    if device is not None and mesh.world_size > 1 and device.type not in group_kinds():
        served = ", ".join(sorted(group_kinds()))
        problem = f"Trainer would move the model to {device}, but the process group sends tensors of {served} alone"
        raise _refusal("use_cpu=False", problem, "pass use_cpu=True, or start one rank per GPU")


def _refuse_parts_of_rows(model: Any, args: Any) -> None:
    """Raise SlapoError for options in TRL's `args`. If tp, pp or cp ranks read the same rows:
    `precompute_ref_log_probs`, and a statistic over all processes' rows. If ranks shard tokens: `neftune_noise_alpha`.
    """
    mesh = model.mesh
    shares_rows = mesh.world_size > mesh.size("batch")
    if getattr(args, "precompute_ref_log_probs", None) and shares_rows:
        problem = "TRL would compute them with other rows on each process, but ranks of a dp replica need the same rows"
        raise _refusal("precompute_ref_log_probs", problem, "leave it out: the reference then runs in each step")  # fmt: skip
    for name, known in OF_GROUPS.items() if shares_rows else ():
        if (value := getattr(args, name, None)) not in (None, *known):
            problem = "TRL takes a statistic over the rows of all processes, and counts a row once per rank that reads it"
            raise _refusal(
                f"{name}={value!r}", problem, f"pass {known[0]!r}, or load the model with dp alone"
            )
    divided = mesh.cp > 1 or model.schedule.state.sequence_parallel
    if divided and getattr(args, "neftune_noise_alpha", None):
        problem = "with sequence_parallel or cp a rank would scale the noise by its own tokens only"
        hint = "load the model without sequence_parallel, and with cp=1"
        raise _refusal("neftune_noise_alpha", problem, hint)


def _refuse_options_of_exact(args: Any, own_loss: str) -> None:
    """Raise SlapoError for the first of the TrainingArguments `args` that a model loaded with `exact=` refuses. Such a
    model trains with the same bits on every mesh whose sizes divide those of `exact=`; these options break that.
    `own_loss` names the option that replaces the model's loss, and is refused too; "" if none does.
    """
    if own_loss:
        hint = "use the model's own loss, or your own loop: model.train_step(batch, loss_fn=...)"
        problem = "with exact= this loss would be computed once for several virtual ranks"
        raise _refusal(own_loss, problem, hint)
    for name, (problem, hint) in REFUSED_EXACT.items():
        if getattr(args, name, None) != getattr(type(args), name, None):
            raise _refusal(name, problem, hint)


def _refuse_short_batch(model: Any, args: Any, data: Any) -> None:
    """Raise SlapoError if the number of rows of the data set `data` is no multiple of `per_device_train_batch_size` *
    dp and the short last batch is kept. Accelerate fills such a batch up on several dp ranks only, but `model`, loaded
    with `exact=`, has to compute the same bits on every mesh. `args` are TrainingArguments.
    """
    if args is not None and isinstance(data, Sized) and model.virtual.dp > 1:
        rows = args.per_device_train_batch_size * model.mesh.dp
        if len(data) % rows and not args.dataloader_drop_last:
            problem = f"{len(data)} rows leave a short last batch (batches have {rows}), whose rows depend on dp"
            raise _refusal("dataloader_drop_last", problem, "set dataloader_drop_last=True")


def _share_generations(mesh: Any, args: Any) -> None:
    """Set `generation_batch_size` of a sampling trainer (GRPO) to the rows of all dp ranks, instead of all ranks. Ranks
    that differ only in tp or pp read the same rows, so counting all ranks would take too many rows.
    """
    groups = getattr(args, "num_generations", None)
    alone = mesh.world_size == mesh.size("batch")
    if not groups or alone or not hasattr(args, "generation_batch_size"):
        return
    rows = args.per_device_train_batch_size
    if rows % groups:
        problem = f"{groups} generations per prompt do not divide the {rows} rows of a dp rank"
        hint = f"choose per_device_train_batch_size={(rows // groups + 1) * groups}: the answers to a prompt stay on one rank"
        raise _refusal("num_generations", problem, hint)
    args.generation_batch_size = rows * mesh.size("batch") * args.steps_per_generation


def seed_samples(mesh: Any, args: Any) -> None:
    """Set torch's seed for a sampling trainer of TRL by dp rank, not by process: tp ranks sample the same tokens."""
    if hasattr(args, "num_generations") and mesh.world_size > mesh.size("batch"):
        set_seed(args.seed + mesh.coord("batch"))


def sampler_of_dp(sampler: Any, mesh: Any, args: Any) -> Any:
    """Return Trainer's `sampler` of training samples, or one in its place that chooses rows for dp ranks, not for all
    ranks. A sampler that groups by length gets its order from seed and epoch; it would draw it from torch's generator,
    which a resume restores. `args` are TrainingArguments.
    """
    if isinstance(sampler, LengthGroupedSampler):
        seed, own = args.seed if args.data_seed is None else args.data_seed, torch.Generator()
        vars(sampler).update(generator=own, set_epoch=lambda epoch: own.manual_seed(seed + epoch))
    if isinstance(sampler, BatchRebalanceSampler):
        rows = sampler.effective_batch_size * mesh.size("batch") // mesh.world_size
        return BatchRebalanceSampler(
            sampler.lengths, rows, mesh.size("batch"), sampler.grad_accum, rank=mesh.coord("batch"),
            drop_last=sampler.drop_last,
        )  # fmt: skip
    return sampler


def take_one_gpu(args: Any) -> None:
    """Set the number of GPUs in `args` (TrainingArguments), by default all that the process sees, to 1: with more,
    Trainer would wrap the model in DataParallel, and read a batch of rows for each GPU.
    """
    if getattr(args, "n_gpu", 1) > 1:
        args._n_gpu = 1


def _refusal(what: str, problem: str, hint: str) -> SlapoError:
    return SlapoError("ScheduledTrainer", what, problem, hint)
