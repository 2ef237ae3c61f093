"""Methods of a scheduled model that its `transformers` class does not have, or has in another form."""

import functools
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from slapo_zoo.errors import SlapoError
from slapo_zoo.language.copying import independent_copy
from slapo_zoo.language.directive import ForwardContext
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.model.checkpoints.adapter_methods import Adapts
from slapo_zoo.model.checkpoints.current_specs import extras_of, refresh_specs, written_as
from slapo_zoo.model.gradients.batch_check import INTERVAL
from slapo_zoo.model.gradients.module_changes import COPIED, Structure
from slapo_zoo.model.gradients.of_models import note
from slapo_zoo.model.rank_memory import Memory, memory
from slapo_zoo.model.step.forward import forward_of, uncompiled
from slapo_zoo.model.step.generation import Generates
from slapo_zoo.model.step.parts import call_parts_alone, features_alone
from slapo_zoo.model.step.recompute import Recomputes
from slapo_zoo.model.step.runtime import Runtime
from slapo_zoo.model.step.train_step import StepOptions, train_step
from slapo_zoo.parallel import gather as consolidate
from slapo_zoo.parallel.begun import note_step
from slapo_zoo.parallel.local_tensors import rows_of
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.rank_plan import RankPlan
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.parallel.ranks.killed_rank import rank_guard
from slapo_zoo.parallel.ranks.patience import patient_group
from slapo_zoo.weights.ledger import Ledger
from slapo_zoo.weights.load_memory import settle
from slapo_zoo.weights.push import Push
from slapo_zoo.weights.save import save_folder
from slapo_zoo.zoo.hf_arguments import saved_stem


class Scheduled(Adapts, Structure, Generates, Recomputes):
    """Mixin that adds training, saving and adapters to a transformers class; parameters stay plain local tensors."""

    _slapo: Runtime
    unscheduled_class: type  # of transformers
    input_check_interval: int = INTERVAL  # steps between checks of the batch over ranks; 0: never

    @property
    def schedule(self) -> Schedule:
        """Return the schedule of the model: mesh, and the directives (`shard`, `sync`, ...) that changed its modules."""
        return self._slapo.schedule

    @property
    def mesh(self) -> Mesh:
        """Return the mesh of the model: sizes of tp, pp, dp and cp, and this rank's coordinates."""
        return self._slapo.schedule.mesh

    @property
    def plan(self) -> RankPlan:
        """Return the plan of this rank: for each tensor of the model its sharding, and the ranks that sum its gradient."""
        return self._slapo.plan

    @property
    def ledger(self) -> Ledger:
        """Return the record of the model's load: bytes and files that this rank read, and the memory that it took."""
        return self._slapo.ledger

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return an independent copy of the model on the same mesh, e.g. for averaged weights or a frozen reference."""
        runtime, model = self._slapo, cast(nn.Module, self)
        memo.update({id(group): group for group in runtime.groups.values()})
        new = independent_copy(model, memo)
        new.schedule.state.index()
        note(new._slapo, new.named_parameters())
        call_parts_alone(new)
        new.__dict__[COPIED] = True
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise SlapoError when the model is pickled, since it has shards and process groups of one rank."""
        problem = "the model has shards and process groups of one rank, which cannot be pickled"
        hint = "call model.save_pretrained(folder), or torch.save(model.consolidated_state_dict(), file)"
        raise SlapoError(type(self).__name__, "pickle or torch.save", problem, hint)

    @property
    def accepts_loss_kwargs(self) -> Any:
        """Return, for Trainer, the model class's attribute that is True if the forward takes `num_items_in_batch`. On
        several ranks raise SlapoError unless ScheduledTrainer or `prepare` is used: Trainer would use DDP.
        """
        _ = self._is_accelerate_prepared
        return self.unscheduled_class.accepts_loss_kwargs

    def train(self, mode: bool = True) -> Any:
        """Set training mode, or evaluation if `mode` is False; return the model.

        In training mode memory-mapped weights with `requires_grad` are copied into memory, in the same Parameter objects.
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
        targets: Sequence[float | Tensor] | None = None,
        loss_fn: Callable[[Any, dict[str, Any]], Tensor] | None = None,
        scaler: Any = None,
        batch_is_sharded: bool = False,
    ) -> Any:
        """Run forward and backward of a batch in micro-batches on any mesh; gradients are added to `.grad`.

        Losses and gradients equal those of one process on the whole batch, for every mesh.

        Args:
            batch: keyword arguments of the forward with labels: this dp rank's rows; ranks that differ only in tp, pp
                or cp pass the same rows.
            micro_batches: number of equal parts of the rows. BatchNorm takes its statistics over each part (of all dp
                ranks), as in plain gradient accumulation.
            return_logits: return the logits too; they are sent from the last stage to every rank.
            targets: for gradients accumulated over several batches: number of targets of each loss term in all these
                batches on this dp rank (`losses.count_targets`). The loss is then this batch's share of the mean, and the
                shares add up as in one large batch.
            loss_fn: a loss of your own: (output, batch) --> the mean over the rows that it is given, a scalar. It is
                called per micro-batch, with all entries of the batch; the loss of the step is the mean over
                micro-batches and dp ranks. With `targets=[n]` it returns a sum, and the loss is all sums over all n.
            scaler: a `slapo_zoo.GradScaler`, which multiplies loss and gradients; the returned loss is not multiplied.
            batch_is_sharded: each cp rank passes its own tokens [rows, tokens / cp] of each entry, in the order
                of the ranks and not shifted; they are all-gathered, and the step is that of the whole batch.

        Returns:
            the mean loss over the batch of all dp ranks, a scalar on every rank. With `return_logits` the model's own
            output object: this loss, and the logits of this dp rank's rows, unsharded on every tp and pp rank.

        Raises:
            StageError: code of the model failed in a stage; names stage, module and micro-batch.
                After any error gradients and random streams are as before the call.
        """
        model: Any = self
        own_call = self.schedule.state.within(ForwardContext(is_call=True))
        note_step()
        with rank_guard("train_step"), own_call, self._slapo.precision.step(model):
            given = micro_batches, return_logits, targets, loss_fn, scaler, batch_is_sharded
            return train_step(model, batch, StepOptions(*given))

    def memory(
        self, optimizer: Any = None, batch: Mapping[str, Any] | None = None,
        micro_batches: int | None = None,
    ) -> Memory:  # fmt: skip
        """Return the bytes that this rank holds, by kind (weights, gradients, ...), as an object that prints as a table.

        Args:
            optimizer: optimizer whose states are counted, or None.
            batch: argument of `train_step`, on all ranks: one step is run on it, and its peak is counted too.
                Afterwards gradients, buffers, dropout's step count and the loss scale are restored.
            micro_batches: number of micro-batches of that step.
        """
        with rank_guard("memory"):
            return memory(self, optimizer, batch, micro_batches)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backwards accumulate gradients without averaging over dp, as with torch's DDP.

        The next backward outside of the context averages all accumulated gradients over dp.
        """
        return self._slapo.calls.reducer.no_sync()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their 2-norm over all ranks is at most `max_norm`; return the norm before."""
        model: Any = self
        with rank_guard("clip_grad_norm_"):
            return self._slapo.data_parallel.clip_grad_norm_(model, max_norm)

    def consolidated_state_dict(self, grads: bool = False) -> dict[str, Tensor]:
        """Return {HuggingFace name: unsharded tensor or, if `grads`, gradient} on rank 0, else {}; a collective call."""
        with rank_guard("consolidated_state_dict"):
            refresh_specs(self, "consolidated_state_dict")
            local = consolidate.local_tensors(self, self._slapo.specs, self.mesh, grads)
            hosts = patient_group() if self.mesh.world_size > 1 else None
            return consolidate.gather(local, self._slapo.specs, self.mesh, hosts)

    def stream_weights(
        self, dtype: Any = None, bucket: int | str = "512MB", ranks: Collection[int] = (0,)
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, unsharded tensor) of all tensors that `save_pretrained` would write, collected some at a time.

        All ranks must run the iteration to its end; ranks that are not in `ranks` get no pairs.

        Args:
            dtype: dtype of the yielded floating tensors; None keeps that of the model.
            bucket: most bytes held beyond the model at a time, e.g. "512MB"; a larger tensor is sent alone.
            ranks: global ranks that get the tensors.
        """
        from slapo_zoo.model.checkpoints.weight_stream import stream_weights

        return stream_weights(self, dtype, bucket, ranks)

    def load_stream(
        self, stream: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor] | None, rank: int = 0
    ) -> None:
        """Load (name, tensor) pairs, as `stream_weights` yields them on any mesh, into this model; a collective call.

        Args:
            stream: (name, unsharded tensor) pairs, or a dict of them; read on one rank only.
            rank: global rank that reads `stream`; others may pass None.
        """
        from slapo_zoo.model.checkpoints.weight_stream import load_stream

        load_stream(self, stream, rank)

    def save_pretrained(
        self,
        save_directory: Any,
        max_shard_size: str = "5GB",
        push_to_hub: bool = False,
        dtype: str | torch.dtype | None = None,
        check_finite: bool = True,
        **kwargs: Any,
    ) -> None:
        """Write a checkpoint that plain `transformers` loads; a collective call of all ranks.

        Each rank writes its own slices; the folder appears by one rename when all slices are written. If the model has
        an adapter, only the adapter is written, as `transformers` does; see `save_adapter`.

        Args:
            save_directory: folder on a file system that all ranks share.
            max_shard_size: largest size of a file, as text ("5GB") or in bytes.
            push_to_hub: upload the saved model afterwards.
            dtype: dtype in which floating tensors are written; None keeps that of the model.
            check_finite: refuse to replace an older checkpoint by weights with NaN or infinity.
            kwargs: repo_id, token, private, commit_message, variant, ... as in `transformers`.
        """
        stem = saved_stem(kwargs, Push.ALLOWED if push_to_hub else ())
        if self._slapo.adapters:
            changed = dtype is not None or stem != "model"
            self._save_adapter_alone(save_directory, push_to_hub, changed, check_finite)
            return
        push = Push(Path(save_directory), kwargs) if push_to_hub else None
        keys = self._slapo.keys
        with rank_guard("save_pretrained"):
            refresh_specs(self, "save_pretrained")
            local = consolidate.local_tensors(self, self._slapo.specs, self.mesh, rows=True)
            local = keys.to_files(local, self._slapo.specs, self.mesh)
            rows = {name: rows_of(tensor) for name, tensor in local.items()}
            local, specs = written_as(dtype, local, keys.file_specs(self._slapo.specs))
            _on_first(self.mesh, push and push.create)
            save_folder(
                save_directory, specs, local, self.mesh,
                write_extras=extras_of(self, save_directory, push is not None, dtype),
                max_shard_size=max_shard_size, stem=stem, rows=rows, check_finite=check_finite,
            )  # fmt: skip
            _on_first(self.mesh, push and push.upload)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> None:
        """Upload the weights as plain `transformers` reads them, and the schedule (how modules are sharded) as JSON and README.

        A collective call of all ranks; rank 0's temporary folder (TMPDIR) must be one that all ranks reach. A load with
        `schedule=repo_id` then uses that schedule. A schedule with a Python function is left out, with a warning.

        Args:
            repo_id: org/name on the Hub; created if it does not exist.
            kwargs: token, private, commit_message, max_shard_size, ... as in `save_pretrained`.
        """
        with tempfile.TemporaryDirectory() as mine:
            folder = together(self.mesh, "push_to_hub", lambda: mine)[0]
            place = Path(folder) / repo_id.rpartition("/")[2]
            self.save_pretrained(place, push_to_hub=True, repo_id=repo_id, **kwargs)
            together(self.mesh, "push_to_hub", lambda: None)  # before rank 0 deletes it

    def push_schedule_to_hub(
        self, repo_id: str | Path, base_model: str | None = None, any_size: bool = False, **kwargs: Any
    ) -> str:  # fmt: skip
        """Publish the schedule (how modules are sharded) as JSON and README; return the text for `schedule=` of a load.

        All ranks call this method.

        Args:
            repo_id: org/name on the Hub, or a folder: a `Path`, `./...`, or an existing one.
            base_model: id of the checkpoint that the schedule is for; None takes the id in the config.
            any_size: let the published schedule serve every model of the class with the same number of blocks.
            kwargs: of the upload: token, private, tag, message, parent; a folder takes none.
        """
        from slapo_zoo.zoo.cards.publish import card_of, publish

        with rank_guard("push_schedule_to_hub"):
            make = functools.partial(card_of, self, base_model, any_size)
            return publish(self.mesh, make, repo_id, **kwargs)


def _on_first(mesh: Mesh, action: Callable[[], None] | None) -> None:
    """Run `action` (None: nothing) on rank 0 while the other ranks wait; if `action` fails, all ranks raise an error."""
    if action is not None:
        together(mesh, "push_to_hub", action if mesh.rank == 0 else lambda: None)


@functools.cache
def scheduled_class(cls: type) -> type:
    """Return a subclass of the transformers class `cls` with the methods of `Scheduled`, under the name of `cls`."""

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and self.mesh.tp * self.mesh.pp > 1:
            return uncompiled()(self, args, kwargs)
        return forward_of(self, args, kwargs)

    # transformers resolves annotations in `__module__`, and looks classes up by name.
    own = {"forward": forward, "__module__": cls.__module__, "unscheduled_class": cls}
    return type(cls.__name__, (Scheduled, cls), own | features_alone(cls))
