"""`transformers.Trainer` and Accelerate with a scheduled model: tp, pp and dp, on CPU and GPU.

Only these parts of Trainer are replaced: the samples that a rank reads, forward and backward, the gradient norm,
gathering of results, and checkpoints.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils.memory import clear_device_cache
from accelerate.utils.operations import gather_object, recursively_apply
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils.generic import find_labels

from slapo_zoo.errors import SlapoError
from slapo_zoo.model.checkpoints.resume import load_checkpoint
from slapo_zoo.model.checkpoints.training_checkpoint import save_checkpoint
from slapo_zoo.model.gradients.scaler import GradScaler
from slapo_zoo.model.integrations import trainer_options as options
from slapo_zoo.model.integrations.dialects.engine import is_exact, is_scheduled
from slapo_zoo.model.integrations.trl_head import take_back_forward
from slapo_zoo.model.step.mixed_precision import FIRST_SCALE
from slapo_zoo.parallel.compat import require_release
from slapo_zoo.parallel.losses.loss_means import count_targets
from slapo_zoo.parallel.mesh import Mesh


class ScheduledTrainer(Trainer):
    """Subclass of `transformers.Trainer` for a scheduled model.

    `per_device_train_batch_size` counts the rows of a dp rank; ranks that differ only in tp, pp or cp read the
    same rows. With gradient accumulation the loss is the mean over all targets of a step, on all dp ranks.
    A `compute_loss` of your own, `compute_loss_func` and label smoothing get unsharded logits; they need pp=1.
    If the model has `precision="fp16"`, each backward multiplies the loss, also one of your own, by a loss scale.
    This class can be combined with a Trainer of another library: `class Mine(ScheduledTrainer, DPOTrainer)`;
    an adapter given as `peft_config=` is then sharded as by `model.add_adapter`.
    A checkpoint can be resumed on another (tp, pp, dp), and `transformers` loads its weights.

    Args:
        model: a scheduled model.
        args: TrainingArguments; `use_cpu=True` for the CPU.
        **kwargs: arguments of Trainer.

    Raises:
        SlapoError: the model is not scheduled, or an option is not supported.
    """

    def __init__(self, model: Any = None, args: Any = None, **kwargs: Any):
        _require_scheduled("ScheduledTrainer", model, "use transformers.Trainer")
        self._own_loss = _own_loss(type(self), args, kwargs)
        options.add_adapter(type(self), model, kwargs)
        options.refuse_options(model, args, self._own_loss, kwargs.get("train_dataset"))
        for each in (model, kwargs.get("ref_model")):
            if is_scheduled(each):
                each._is_accelerate_prepared = True  # not wrapped in DDP, which averages over tp
        options.take_one_gpu(args)
        super().__init__(model=model, args=args, **kwargs)
        options.take_one_gpu(self.args)  # of a Trainer without args
        options.seed_samples(model.mesh, self.args)
        self._train_batch_size = self.args.train_batch_size
        if self._own_loss and model._slapo.precision.scales:  # without: train_step scales
            self.accelerator.scaler = GradScaler(model, init_scale=FIRST_SCALE)
        for each in (self.model, getattr(self, "ref_model", None)):
            if is_scheduled(each):
                take_back_forward(each)
        self._read_signature(model)
        if not self._own_loss:
            self.model_accepts_loss_kwargs = False  # our train_step divides by the global counts
        _set_over_dp(self.accelerator, model.mesh)
        self._targets: list[float | Tensor] | None = None
        self._is_checkpoint = self._evaluates = False

    def _read_signature(self, model: Any) -> None:
        """Set this Trainer's names of inputs and labels, and `use_cache` of each config, if `model` holds the models of
        several virtual ranks (`exact=`). Do nothing for other models: Trainer has set these values itself.
        """
        if not is_exact(model):
            return
        hosted = model.hosted
        cls = type(hosted[0])
        self.label_names = self.args.label_names or find_labels(cls)
        inputs = list(signature(cls.forward).parameters)[1:]
        self._signature_columns = [*inputs, "label", "label_ids", *self.label_names]
        for each in hosted:  # Trainer has set that of the first
            each.config.use_cache = model.config.use_cache

    @property
    def _scheduled(self) -> Any:
        """Return this Trainer's model, typed as Any so that methods of scheduled models can be called."""
        return self.model

    def get_tp_size(self) -> int:
        """Return tp * pp * cp, the number of ranks that read the same rows. transformers divides by it the number of
        ranks, to size batches, and the number of labels summed over all ranks. In `prediction_step`, where that number
        is this rank's own and not summed, return 1.
        """
        mesh: Any = self._scheduled.mesh
        return 1 if self._evaluates else mesh.world_size // mesh.size("batch")

    # Seq2SeqTrainer would set a function that returns each row once for every tp, pp and cp rank.
    gather_function: Any = property(
        lambda self: self.accelerator.gather_for_metrics, lambda *_: None
    )

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # it sums over all ranks
        seen = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + seen // self.get_tp_size()

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_train_sampler(*args, **kwargs)
        return options.sampler_of_dp(found, self._mesh, self.args)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> tuple[list[Any], Any]:
        """Return (batches of one optimizer step, number of their labels that count in a loss of the user's own). For
        the model's loss the number is None; that of several batches, per loss term, is stored in `_targets`.
        """
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._own_loss:
            return batches, items
        self._targets = None  # with one batch, `train_step` counts its targets
        if len(batches) > 1:
            name = self._scheduled._slapo.head_name(self._scheduled)
            counts = [count_targets(name, batch) for batch in batches]
            self._targets = [sum(each) for each in zip(*counts, strict=True)]
        return batches, None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run forward and backward of the batch `inputs`; return a scalar whose sum over the step's batches is the
        step's loss. `model` and `num_items_in_batch` are used only with a loss of the user's own.
        """
        if self._own_loss:
            return super().training_step(model, inputs, num_items_in_batch)
        self._scheduled.train()
        if callable(switch := getattr(self.optimizer, "train", None)):  # a schedule-free optimizer
            switch()
        batch = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self._scheduled.train_step(batch, targets=self._targets)
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        return loss

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return (loss, logits, labels) of an evaluation batch; the loss is the mean over the batch's own targets.
        Trainer's own method divides a loss of the user's own by the targets of all dp ranks' batches, with which
        `eval_loss`, a mean over batches, would depend on dp.
        """
        average = self.args.average_tokens_across_devices
        self._evaluates, self.args.average_tokens_across_devices = True, False
        try:
            return super().prediction_step(*args, **kwargs)
        finally:
            self._evaluates, self.args.average_tokens_across_devices = False, average

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """Return the context in which Trainer computes a loss: autocast if `bf16=True`, else one without effect."""
        if not self.args.bf16:
            return nullcontext()
        kind, dtype = self.args.device.type, torch.bfloat16
        return torch.autocast(kind, dtype=dtype, cache_enabled=cache_enabled)

    def _unscale(self) -> None:
        """Divide the gradients of the user's own loss by the fp16 loss scale, before anything reads them."""
        if self.accelerator.scaler is not None:
            optimizer: Any = self.optimizer
            self.accelerator.scaler.unscale_(getattr(optimizer, "optimizer", optimizer))

    def _clip_grad_norm(self, model: Any) -> Tensor:
        self._unscale()
        return self._scheduled.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Tensor | None = None) -> Any:
        if grad_norm is None:
            self._unscale()
            grad_norm = self._scheduled.clip_grad_norm_(float("inf"))
        return grad_norm

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save the model to the folder `output_dir` (None: `args.output_dir`), in a call from `_save_checkpoint` also
        optimizer, scheduler and the Trainer's state. Rank 0 adds the tokenizer and the arguments. `state_dict` is
        ignored.
        """
        folder: Any = output_dir or self.args.output_dir
        if self._is_checkpoint:
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
            both = (None, None) if self.args.save_only_model else (optimizer, self.lr_scheduler)
            state = json.dumps(asdict(self.state), indent=2, sort_keys=True) + "\n"
            texts = {TRAINER_STATE_NAME: state}  # else written after the save, lost if killed
            save_checkpoint(self.model, folder, *both, self.state.global_step, texts=texts)
        else:
            self._scheduled.save_pretrained(folder)
        if self.args.should_save:
            processor: Any = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if processor is not None:
                processor.save_pretrained(folder)
            torch.save(self.args, Path(folder, "training_args.bin"))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._is_checkpoint = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._is_checkpoint = False

    def _do_nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing, in place of Trainer's methods for weights, optimizer, scheduler and random states of a
        checkpoint: `_save` writes all, and `_load_optimizer_and_scheduler` reads all. The order of samples follows from
        seed and epoch.
        """

    _save_optimizer_and_scheduler = _save_rng_state = _do_nothing
    _load_from_checkpoint = _load_rng_state = _do_nothing

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
            load_checkpoint(self.model, checkpoint, optimizer, self.lr_scheduler)

    def _load_best_model(self) -> None:
        best: Any = self.state.best_model_checkpoint
        load_checkpoint(self.model, best)

    @property
    def _mesh(self) -> Mesh:
        return self.model.mesh  # pyright: ignore[reportOptionalMemberAccess, reportReturnType]


def _require_scheduled(where: str, model: Any, instead: str) -> None:
    """Raise SlapoError unless `model` is scheduled; `where` names the call, `instead` says what else to do."""
    require_release(where, "accelerate", "1.14", "older ones wrap a sharded model in DDP")
    if not is_scheduled(model):
        problem = f"found {type(model).__name__}, expected a model of AutoScheduledModel"
        raise SlapoError(where, "model", problem, f"load it by AutoScheduledModel, or {instead}")


def _own_loss(cls: type, args: Any, kwargs: dict[str, Any]) -> str:
    """Return the name of the first of these that replaces the model's loss, or "": a method `compute_loss` or
    `training_step` overridden in `cls`, a subclass of ScheduledTrainer; `compute_loss_func`; `label_smoothing_factor`.
    `args` are TrainingArguments, `kwargs` the other arguments of the Trainer's constructor.
    """
    after = cls.__mro__[cls.__mro__.index(ScheduledTrainer) + 1 :]
    for name, classes in {"compute_loss": cls.__mro__, "training_step": after}.items():
        owner = next(c for c in classes if name in vars(c))
        if owner is not Trainer:
            return f"{owner.__name__}.{name}"
    if kwargs.get("compute_loss_func") is not None:
        return "compute_loss_func"
    return "label_smoothing_factor" if getattr(args, "label_smoothing_factor", 0) else ""


def prepare(accelerator: Any, model: Any, optimizer: Any, *others: Any) -> tuple[Any, ...]:
    """Replace `accelerator.prepare` for a scheduled model in a loop of your own; return (model, optimizer, *others).

    rewrite:  accelerator.backward(model(**batch).loss)  -->  loss = model.train_step(batch)

    Args:
        accelerator: an Accelerator of Accelerate. Its `save_state` and `load_state` raise an error from now on.
        model: a scheduled model; it is not wrapped, and `accelerator.clip_grad_norm_` clips by its global norm.
        optimizer: torch optimizer.
        *others: data loaders, which then give all ranks of a dp replica the same batches, and each replica its own;
            learning-rate schedulers, which then step once per optimizer step on every mesh; further models.
    """
    _require_scheduled("prepare", model, "pass it second: prepare(accelerator, model, ...)")
    if (kind := accelerator.mixed_precision) != "no":
        problem = "Accelerate casts in its own forward and backward alone, not in train_step"
        own, what = "bf16" if kind == "fp8" else kind, f"mixed_precision={kind!r}"
        hint = f"make the Accelerator without it, and load the model with precision={own!r}"
        raise SlapoError("prepare", what, problem, hint)
    for each in (model, *filter(is_scheduled, others)):
        each._is_accelerate_prepared = True
        if accelerator.gradient_accumulation_steps > 1:
            each.train_step = partial(_with_targets, each.train_step)
    _set_over_dp(accelerator, model.mesh)
    accelerator.clip_grad_norm_ = partial(_clip_grad_norm, accelerator)
    accelerator.get_state_dict = lambda m, unwrap=True: getattr(m, "consolidated_state_dict", m.state_dict)()  # fmt: skip
    for name, own in {"save_state": "save_checkpoint", "load_state": "load_checkpoint"}.items():
        setattr(accelerator, name, partial(_refuse_state, name, own))
    return accelerator.prepare(model, optimizer, *others)


def _clip_grad_norm(
    accelerator: Any, parameters: Any, max_norm: float, norm_type: float = 2
) -> Tensor:
    """Clip gradients of a scheduled model by their 2-norm over all ranks, those of another module as Accelerate does;
    return the norm. A scheduled model needs `norm_type` 2, and all its parameters with gradients, else SlapoError.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    given = {id(p) for p in parameters}
    for model in filter(is_scheduled, accelerator._models):
        own = {id(p): p.grad is None for p in model.parameters()}
        if not given & own.keys():
            continue
        if norm_type != 2 or given - own.keys() or any(not own[key] for key in own.keys() - given):
            problem = "found parameters of other modules too, or not all of the model that have a gradient"
            problem = f"found norm_type={norm_type}, expected 2" if norm_type != 2 else problem
            hint = "call it once per model with model.parameters(), or call model.clip_grad_norm_(max_norm)"
            raise SlapoError("Accelerator", "clip_grad_norm_", problem, hint)
        return model.clip_grad_norm_(max_norm)
    return type(accelerator).clip_grad_norm_(accelerator, parameters, max_norm, norm_type)


def _refuse_state(name: str, own: str, *_: Any, **__: Any) -> None:
    """Raise SlapoError for the method `name` of an Accelerator; the function `own` of slapo_zoo is to be used instead."""
    problem = "Accelerate's files have only rank 0's shards of the model and of the optimizer"
    hint = f"call slapo_zoo.{own}(model, folder, optimizer, scheduler) on all ranks"
    raise SlapoError("Accelerator", name, problem, hint)


def _with_targets(step: Any, batch: Any, *given: Any, **options: Any) -> Any:
    """Return `step(batch, *given, **options)`, the loss of a model's `train_step` under gradient accumulation.
    SlapoError if `targets`, the number of labels of all accumulated batches, is missing or None: it averages over them.
    """
    if options.get("targets", next(iter(given[2:]), None)) is None:  # the third after the batch
        problem = "found gradient_accumulation_steps > 1 and no targets: gradients would be added, not averaged"
        hint = "pass targets=[labels of all batches of this optimizer step]; or micro_batches= and no accumulation"
        raise SlapoError("train_step", "targets", problem, hint)
    return step(batch, *given, **options)


def _set_over_dp(accelerator: Any, mesh: Mesh) -> None:
    """Have an Accelerator distribute batches over dp ranks instead of all ranks, gather each row once, and step a
    learning-rate scheduler once per optimizer step instead of once per process.
    """

    def prepare_loader(loader: Any, *_: Any, **__: Any) -> Any:
        if getattr(loader, "_is_accelerate_prepared", False):
            return loader
        seed = getattr(loader, "worker_init_fn", None)
        if isinstance(seed, partial) and "rank" in seed.keywords:  # Trainer's: of the process
            loader.worker_init_fn = partial(seed, rank=mesh.coord("batch"))
        prepared = prepare_data_loader(
            loader, accelerator.device, num_processes=mesh.size("batch"), process_index=mesh.coord("batch"),
            split_batches=accelerator.split_batches, put_on_device=True,
            rng_types=accelerator.rng_types.copy(), dispatch_batches=False,
            even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
            non_blocking=accelerator.non_blocking,
        )  # fmt: skip
        accelerator._dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(scheduler: Any) -> Any:
        both = accelerator.step_scheduler_with_optimizer
        return AcceleratedScheduler(scheduler, accelerator._optimizers, both, split_batches=True)

    accelerator.gather_for_metrics = gather_over_dp(accelerator, mesh)
    accelerator.prepare_data_loader = prepare_loader
    accelerator.prepare_scheduler = prepare_scheduler


def gather_over_dp(accelerator: Any, mesh: Mesh) -> Callable[..., Any]:
    """Return a function for `accelerator.gather_for_metrics`: (tensors, or a list of other objects) --> the rows of
    all dp ranks. Each row comes once, though several ranks (tp, pp) hold the same rows.
    """
    firsts = mesh.peers("batch")

    def short(rows: Any) -> Any:
        state = accelerator.gradient_state
        is_short = state.end_of_dataloader and state.remainder > 0
        return rows[: state.remainder] if is_short else rows

    def pick(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0:  # a scalar is not sharded by rows
            return tensor
        parts = tensor.chunk(accelerator.num_processes)
        return short(torch.cat([parts[rank] for rank in firsts]))

    def gather(data: Any, use_gather_object: bool = False) -> Any:
        if not use_gather_object and all(isinstance(x, Tensor) for x in tree_leaves(data)):
            return recursively_apply(pick, accelerator.gather(data))
        held = gather_object([data])
        return short([each for rank in firsts for each in held[rank]])

    return gather
