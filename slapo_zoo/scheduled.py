"""What a scheduled `transformers` model can do beyond its own class."""

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from slapo_zoo import consolidate, gradients
from slapo_zoo.distributed import rank_guard
from slapo_zoo.errors import SlapoError
from slapo_zoo.mesh import Mesh
from slapo_zoo.pipeline import pipeline_forward
from slapo_zoo.runtime import Runtime, count_rows, refuse_divided, takes_cache, tokens_divide
from slapo_zoo.schedule import Schedule
from slapo_zoo.training_step import train_step
from slapo_zoo.vocab_logits import VocabLogits
from slapo_zoo.weights.ledger import Ledger
from slapo_zoo.weights.push import Push
from slapo_zoo.weights.save import save_folder
from slapo_zoo.weights.together import together


class Scheduled:
    """Mixed into the class of a scheduled model; parameters stay plain local tensors."""

    _slapo: Runtime

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

    def train_step(self, batch: Mapping[str, Any], micro_batches: int | None = None) -> Tensor:
        """Forward and backward over the micro-batches; gradients are added to `.grad`.

        Losses and gradients equal those of one process on the whole batch, however it is divided.

        Args:
            batch: keyword arguments of the forward with labels: this dp rank's rows; tp and pp
                peers pass the same ones.
            micro_batches: how many equal parts the rows are divided into. BatchNorm takes its
                statistics over each part (of all dp ranks), as in plain gradient accumulation.

        Returns:
            the mean loss over the batch of all dp ranks, a scalar on every rank.
        """
        with rank_guard("train_step"):
            return train_step(self, batch, micro_batches)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that the global 2-norm is at most `max_norm`; returns the norm."""
        model: Any = self
        with rank_guard("clip_grad_norm_"):
            state = self._slapo.schedule.state
            named = list(model.named_parameters())
            norm = gradients.global_norm(named, state, self.mesh, self._slapo.owned)
        nn.utils.clip_grads_with_norm_([p for _, p in named], max_norm, norm)
        return norm

    def consolidated_state_dict(self, grads: bool = False) -> dict[str, Tensor]:
        """Full tensors (or gradients) under their HuggingFace names on rank 0, {} elsewhere."""
        with rank_guard("consolidated_state_dict"):
            local = consolidate.local_tensors(self, self._slapo.specs, self.mesh, grads)
            return consolidate.gather(local, self._slapo.specs, self.mesh)

    def save_pretrained(
        self,
        save_directory: Any,
        max_shard_size: str = "5GB",
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write a checkpoint that plain `transformers` loads; all ranks call it together.

        Each rank writes its own slices; the folder appears by one rename when all is written.

        Args:
            save_directory: the folder, on a file system that all ranks share.
            max_shard_size: largest file, "5GB" or bytes.
            push_to_hub: upload the saved model afterwards.
            kwargs: repo_id, token, private, commit_message, ... as in `transformers`.
        """
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
                write_extras=functools.partial(write_configs, self),
                max_shard_size=max_shard_size,
            )  # fmt: skip
            _on_first(self.mesh, push and push.upload)


def _on_first(mesh: Mesh, action: Callable[[], None] | None) -> None:
    """Rank 0 does it, the others wait; its failure is theirs."""
    if action is not None:
        together(mesh, "push_to_hub", action if mesh.rank == 0 else lambda: None)


def write_configs(model: Any, folder: Path) -> None:
    """config.json and generation_config.json, as `transformers` writes them."""
    config = model.config.__class__.from_dict(model.config.to_dict())
    config.architectures = [type(model).__name__]
    config.dtype = next(model.parameters()).dtype
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(folder)


def scheduled_class(cls: type) -> type:
    """The class of a scheduled model: `cls` with our methods, under its own name."""

    @functools.wraps(cls.forward)  # pyright: ignore[reportAttributeAccessIssue]
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _forward(self, args, kwargs)

    # object.__init_subclass__ of transformers reads annotations; the name serves its look-ups.
    return type(cls.__name__, (Scheduled, cls), {"forward": forward, "__module__": cls.__module__})


def _forward(model: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The model's own forward; logits are full and every rank has the output."""
    runtime: Runtime = model._slapo
    mesh = model.mesh
    bound = inspect.signature(runtime.own_forward).bind_partial(model, *args)
    batch = {**dict(list(bound.arguments.items())[1:]), **kwargs}
    stream = runtime.schedule.state.random
    if model.training:
        rows = count_rows(batch)
        stream.step, stream.num_rows = stream.step + 1, rows
        stream.first_row = rows * mesh.coord("dp")
        if runtime.schedule.state.checkpointed:
            batch["use_cache"] = False  # a recomputation would append to the cache once more
    runtime.schedule.state.tokens_divided = tokens_divide(model, batch)
    refuse_divided(model, batch, pp=mesh.pp)
    run = functools.partial(_run_own, model, runtime)
    if runtime.pipeline is None:
        return run(batch)
    batch = {**batch, "use_cache": False} if takes_cache(runtime) else batch
    with rank_guard("forward"):
        return pipeline_forward(runtime.pipeline, run, batch)


def _run_own(model: Any, runtime: Runtime, batch: Mapping[str, Any]) -> Any:
    output = runtime.own_forward(model, **batch)
    for name in list(output) if hasattr(output, "keys") else ():
        if isinstance(output[name], VocabLogits):
            output[name] = output[name].gathered()
    return output
