"""What a scheduled `transformers` model can do beyond its own class."""

import copy
import functools
import inspect
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from slapo_zoo.model import adapters
from slapo_zoo.parallel import gather as consolidate
from slapo_zoo.parallel.process_group import rank_guard
from slapo_zoo.errors import SlapoError
from slapo_zoo.model.generation import Generates, refuse_cache, with_source
from slapo_zoo.model.input_errors import explained
from slapo_zoo.model.batch_check import INTERVAL
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.pipeline.runtime import pipeline_forward
from slapo_zoo.model.runtime import (
    Runtime,
    count_rows,
    real_tokens,
    refuse_divided,
    takes_cache,
    tokens_divide,
)
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.model.train_step import train_step
from slapo_zoo.parallel.vocab_parallel import VocabLogits
from slapo_zoo.weights.carry import carry_tokenizer
from slapo_zoo.weights.ledger import Ledger
from slapo_zoo.weights.memory import settle
from slapo_zoo.weights.push import Push
from slapo_zoo.weights.save import save_folder
from slapo_zoo.parallel.agreement import together


class Scheduled(Generates):
    """Mixed into the class of a scheduled model; parameters stay plain local tensors."""

    _slapo: Runtime
    unscheduled_class: type  # of transformers
    input_check_interval: int = INTERVAL  # steps between checks of the batch over ranks; 0: never

    @property
    def schedule(self) -> Schedule:
        """The program that was applied."""
        return self._slapo.schedule

    @property
    def mesh(self) -> Mesh:
        """Sizes of tp, pp, dp and our coordinates."""
        return self._slapo.schedule.mesh

    @property
    def ledger(self) -> Ledger:
        """What loading read and how much memory it took."""
        return self._slapo.ledger

    def train(self, mode: bool = True) -> Any:
        """As torch's; weights that are still pages of a file become memory, since training writes.

        Parameters stay the objects that they are; frozen ones stay pages.
        """
        if mode and self.ledger.mapped:
            model: Any = self
            held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            frozen = [n for n in self.ledger.mapped if n not in held or not held[n].requires_grad]
            settle(held[name] for name in self.ledger.mapped if name not in frozen)
            self.ledger.mapped[:] = frozen
        return super().train(mode)  # pyright: ignore[reportAttributeAccessIssue]

    def train_step(
        self,
        batch: Mapping[str, Any],
        micro_batches: int | None = None,
        return_logits: bool = False,
        targets: Sequence[float] | None = None,
    ) -> Any:
        """Forward and backward over the micro-batches; gradients are added to `.grad`.

        Losses and gradients equal those of one process on the whole batch, however it is divided.

        Args:
            batch: keyword arguments of the forward with labels: this dp rank's rows; tp and pp
                peers pass the same ones.
            micro_batches: how many equal parts the rows are divided into. BatchNorm takes its
                statistics over each part (of all dp ranks), as in plain gradient accumulation.
            return_logits: keep and return the logits too; they cross the pipeline to every rank.
            targets: of each loss term on this dp rank, where gradients of several batches add up:
                how many all of them have (`losses.count_targets`). The loss is then this batch's
                share of the mean, and the shares add up as in one large batch.

        Returns:
            the mean loss over the batch of all dp ranks, a scalar on every rank. With
            `return_logits` the model's own output object: this loss, and the logits of this dp
            rank's rows, whole on every tp and pp rank.

        Raises:
            StageError: code of the model failed in a stage; names stage, module and micro-batch.
                After any error gradients and random streams are those of before.
        """
        with rank_guard("train_step"):
            return train_step(self, batch, micro_batches, return_logits, targets)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that the global 2-norm is at most `max_norm`; returns the norm."""
        model: Any = self
        with rank_guard("clip_grad_norm_"):
            return self._slapo.data_parallel.clip_grad_norm_(model, max_norm)

    def consolidated_state_dict(self, grads: bool = False) -> dict[str, Tensor]:
        """Full tensors (or gradients) under their HuggingFace names on rank 0, {} elsewhere."""
        with rank_guard("consolidated_state_dict"):
            local = consolidate.local_tensors(self, self._slapo.specs, self.mesh, grads)
            return consolidate.gather(local, self._slapo.specs, self.mesh)

    def add_adapter(self, adapter_config: Any, adapter_name: str | None = None) -> None:
        """Add a new LoRA adapter of peft and train it alone; a collective call on all ranks.

        Its matrices are divided as the weights beside which they stand, and drawn alike for every
        (tp, pp, dp). All that took peft's layers still does: `set_adapter`, `disable_adapters`.

        Args:
            adapter_config: a `peft.LoraConfig`.
            adapter_name: "default" unless given.
        """
        self._add_adapter(adapter_config, adapter_name or "default", None)

    def load_adapter(
        self, peft_model_id: Any, adapter_name: str | None = None, is_trainable: bool = False
    ) -> None:
        """Add the adapter of a folder that peft or `save_adapter` wrote; a collective call.

        Args:
            peft_model_id: the folder.
            adapter_name: "default" unless given.
            is_trainable: whether its matrices take gradients.
        """
        folder, name = Path(peft_model_id), adapter_name or "default"
        with rank_guard("load_adapter"):
            config = adapters.saved_config(folder, is_trainable)
        self._add_adapter(config, name, folder)
        model: Any = self
        for spec in self._slapo.adapters[name]:
            model.get_parameter(adapters.parameter_of(spec.name, name)).requires_grad_(is_trainable)

    def _add_adapter(self, config: Any, name: str, folder: Path | None) -> None:
        def inject() -> None:
            self._slapo.peft_config = self._slapo.peft_config or {}  # peft is let in
            super(Scheduled, self).add_adapter(config, name)  # pyright: ignore[reportAttributeAccessIssue]

        with rank_guard("add_adapter"):
            adapters.add_adapter(self, config, name, inject, folder)

    def save_adapter(self, save_directory: Any, adapter_name: str | None = None) -> None:
        """Write an adapter that plain peft loads, whole; all ranks call it together.

        Args:
            save_directory: new, empty, or of an older adapter; it appears by one rename.
            adapter_name: the active one unless given.
        """
        with rank_guard("save_adapter"):
            adapters.save_adapter(self, Path(save_directory), self._adapter(adapter_name))

    def get_adapter_state_dict(
        self, adapter_name: str | None = None, grads: bool = False
    ) -> dict[str, Tensor]:
        """Whole matrices (or gradients) of an adapter, by their keys in files: rank 0, else {}."""
        with rank_guard("get_adapter_state_dict"):
            return adapters.consolidated_adapter(self, self._adapter(adapter_name), grads)

    def _adapter(self, name: str | None) -> str:
        model: Any = self
        return name or next(iter(model.active_adapters()))

    @property
    def peft_config(self) -> Any:
        """What peft keeps at a model: adapter name --> its config."""
        if not self._slapo.peft_config:
            raise AttributeError("peft_config")
        return self._slapo.peft_config

    @peft_config.setter
    def peft_config(self, value: Any) -> None:
        if self._slapo.peft_config is None and self.mesh.world_size > 1:
            problem = f"it divides nothing on this mesh of {self.mesh.world_size} ranks"
            hint = "load the model anew and call model.add_adapter(config)"
            raise SlapoError("peft", "get_peft_model", problem, hint)
        self._slapo.peft_config = value

    @peft_config.deleter
    def peft_config(self) -> None:
        self._slapo.peft_config = None

    def save_pretrained(
        self,
        save_directory: Any,
        max_shard_size: str = "5GB",
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write a checkpoint that plain `transformers` loads; all ranks call it together.

        With an adapter only that is written, as `transformers` does; see `save_adapter`. Each rank writes its own slices; the folder appears by one rename when all is written.

        Args:
            save_directory: the folder, on a file system that all ranks share.
            max_shard_size: largest file, "5GB" or bytes.
            push_to_hub: upload the saved model afterwards.
            kwargs: repo_id, token, private, commit_message, ... as in `transformers`.
        """
        if self._slapo.adapters:
            self._save_adapter_alone(save_directory, push_to_hub)
            return
        push = Push(Path(save_directory), kwargs) if push_to_hub else None
        if unknown := [name for name in kwargs if not push or name not in Push.ALLOWED]:
            problem = "these arguments of transformers are not supported here"
            raise SlapoError("save_pretrained", ", ".join(unknown), problem, "leave them out")
        local = consolidate.local_tensors(self, self._slapo.specs, self.mesh, grads=False)
        keys = self._slapo.keys
        with rank_guard("save_pretrained"):
            _on_first(self.mesh, push and push.create)
            save_folder(
                save_directory, keys.file_specs(self._slapo.specs),
                keys.to_files(local, self._slapo.specs, self.mesh), self.mesh,
                write_extras=_extras(self, save_directory, push is not None),
                max_shard_size=max_shard_size,
            )  # fmt: skip
            _on_first(self.mesh, push and push.upload)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> None:
        """Upload the weights as plain `transformers` reads them, with the schedule beside them.

        All ranks call it together; they share a temporary folder. `schedule=repo_id` then trains
        with the same schedule, if it can be published: a live function cannot.

        Args:
            repo_id: org/name on the Hub; made when it is not there.
            kwargs: token, private, commit_message, max_shard_size, ... as in `save_pretrained`.
        """
        with tempfile.TemporaryDirectory() as mine:
            folder = together(self.mesh, "push_to_hub", lambda: mine)[0]
            place = Path(folder) / repo_id.rpartition("/")[2]
            self.save_pretrained(place, push_to_hub=True, repo_id=repo_id, **kwargs)
            together(self.mesh, "push_to_hub", lambda: None)  # nobody removes it before the end

    def push_schedule_to_hub(
        self, repo_id: str, base_model: str | None = None, any_size: bool = False, **kwargs: Any
    ) -> str:
        """Publish the schedule of this model as a card; all ranks call it together.

        Args:
            repo_id: org/name on the Hub; made when it is not there.
            base_model: id of the checkpoint that it is for; None takes the config's own.
            any_size: for every size of the model that meets the constraints.
            kwargs: token, private, tag, message, parent.

        Returns:
            what `from_pretrained(schedule=...)` takes, `org/name@sha`.
        """
        from slapo_zoo.cards.publish import publish

        with rank_guard("push_schedule_to_hub"):
            return publish(self, repo_id, base_model, any_size, kwargs)

    def _save_adapter_alone(self, save_directory: Any, push_to_hub: bool) -> None:
        if push_to_hub:
            problem = "an adapter is saved here, and not uploaded"
            hint = "upload the folder: huggingface_hub.HfApi().upload_folder(...)"
            raise SlapoError("save_pretrained", "push_to_hub", problem, hint)
        self.save_adapter(save_directory)


def _on_first(mesh: Mesh, action: Callable[[], None] | None) -> None:
    """Rank 0 does it, the others wait; its failure is theirs."""
    if action is not None:
        together(mesh, "push_to_hub", action if mesh.rank == 0 else lambda: None)


def _extras(model: Any, target: Any, published: bool) -> Callable[[Path], None]:
    write_configs = configs_of(model, target)

    def write(folder: Path) -> None:
        write_configs(folder)
        if published:
            from slapo_zoo.cards.publish import write_beside

            write_beside(model, folder)

    return write


def configs_of(model: Any, target: Any) -> Callable[[Path], None]:
    """What writes config.json and generation_config.json as they are now, as `transformers` does.

    The tokenizer files of the loaded folder come along where the target has none.
    """
    config = model.config.__class__.from_dict(model.config.to_dict())
    config.architectures = [model.unscheduled_class.__name__]
    config.dtype = next(model.parameters()).dtype
    configs, source = [config], model._slapo.source
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        configs.append(copy.deepcopy(model.generation_config))

    def write(folder: Path) -> None:
        for one in configs:
            one.save_pretrained(folder)
        carry_tokenizer(source, Path(target), folder)

    return write


@functools.cache
def scheduled_class(cls: type) -> type:
    """The class of a scheduled model: `cls` with our methods, under its own name."""

    @functools.wraps(cls.forward)  # pyright: ignore[reportAttributeAccessIssue]
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _forward(self, args, kwargs)

    # object.__init_subclass__ of transformers reads annotations; the name serves its look-ups.
    own = {"forward": forward, "__module__": cls.__module__, "unscheduled_class": cls}
    return type(cls.__name__, (Scheduled, cls), own)


def _forward(model: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The model's own forward; logits are full and every rank has the output."""
    runtime: Runtime = model._slapo
    if runtime.within_engine:
        return runtime.own_forward(model, *args, **kwargs)
    mesh = model.mesh
    bound = inspect.signature(runtime.own_forward).bind_partial(model, *args)
    batch = with_source({**dict(list(bound.arguments.items())[1:]), **kwargs})
    stream = runtime.schedule.state.random
    if model.training:
        rows = count_rows(batch)
        stream.step, stream.num_rows = stream.step + 1, rows
        stream.first_row = rows * mesh.coord("dp")
        if runtime.schedule.state.checkpointed:
            batch["use_cache"] = False  # a recomputation would append to the cache once more
    runtime.schedule.state.tokens_divided = tokens_divide(model, batch)
    runtime.schedule.state.real_tokens = real_tokens(model, batch)
    refuse_divided(model, batch, pp=mesh.pp)
    run = functools.partial(_run_own, model, runtime)
    if runtime.pipeline is None:
        return run(batch)
    refuse_cache(batch)
    batch = {**batch, "use_cache": False} if takes_cache(runtime) else batch
    with rank_guard("forward"):
        return pipeline_forward(runtime.pipeline, run, batch)


def _run_own(model: Any, runtime: Runtime, batch: Mapping[str, Any]) -> Any:
    with explained(model, batch):
        output = runtime.own_forward(model, **batch)
    for name in list(output) if hasattr(output, "keys") else ():
        if isinstance(output[name], VocabLogits):
            output[name] = output[name].gathered()
    return output
