"""What a scheduled `transformers` model can do beyond its own class."""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo_zoo import consolidate, gradients
from slapo_zoo.distributed import rank_guard
from slapo_zoo.errors import MeshError, SlapoError
from slapo_zoo.losses import LABELS, GlobalMeans, count_targets
from slapo_zoo.mesh import Mesh
from slapo_zoo.pipeline import ROWS, Pipeline, pipeline_forward, pipeline_step, split_batch
from slapo_zoo.placement import TensorSpec
from slapo_zoo.schedule import Schedule
from slapo_zoo.vocab_logits import VocabLogits
from slapo_zoo.weights.keys import KeyMap
from slapo_zoo.weights.ledger import Ledger
from slapo_zoo.weights.push import Push
from slapo_zoo.weights.save import save_folder
from slapo_zoo.weights.together import together


@dataclass
class Runtime:
    """What a scheduled model remembers.

    Args:
        schedule: the program that made it.
        specs: every tensor of the whole model, in the order of its state dict.
        own_forward: of the model's own class.
        pipeline: the stages, or None without.
        keys: names that the family's files use.
        ties: groups of parameters of this rank that stages share: (name, process group).
        replicas: divided parameters that neighbouring tp ranks share: (name, process group).
        owned: names that this stage counts in norms and saves.
        micro_batches: default of `train_step`.
        num_tokens: tokens of an input that is not text.
        whole_batch: options whose loss is no mean over rows.
    """

    schedule: Schedule
    specs: list[TensorSpec]
    own_forward: Callable[..., Any]
    pipeline: Pipeline | None = None
    keys: KeyMap = field(default_factory=KeyMap)
    ledger: Ledger = field(default_factory=Ledger)
    ties: list[tuple[str, Any]] = field(default_factory=list)
    replicas: list[tuple[str, Any]] = field(default_factory=list)
    owned: set[str] = field(default_factory=set)
    micro_batches: int | None = None
    num_tokens: int | None = None
    whole_batch: tuple[str, ...] = ()


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
            micro_batches: how many equal parts the rows are divided into.

        Returns:
            the mean loss over the batch of all dp ranks, a scalar on every rank.
        """
        with rank_guard("train_step"):
            return _train_step(self, batch, micro_batches)

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
        rows = _rows(batch)
        stream.step, stream.num_rows = stream.step + 1, rows
        stream.first_row = rows * mesh.coord("dp")
        if runtime.schedule.state.checkpointed:
            batch["use_cache"] = False  # a recomputation would append to the cache once more
    runtime.schedule.state.tokens_divided = tokens_divide(model, batch)
    refuse_divided(model, batch, pp=mesh.pp)
    run = functools.partial(_run_own, model, runtime)
    if runtime.pipeline is None:
        return run(batch)
    batch = {**batch, "use_cache": False} if _takes_cache(runtime) else batch
    with rank_guard("forward"):
        return pipeline_forward(runtime.pipeline, run, batch)


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
    lengths += [batch[k].shape[axis] for k, axis in names.items() if batch.get(k) is not None]
    divide = bool(lengths) and all(length % model.mesh.tp == 0 for length in lengths)
    if not divide and model.training:
        warnings.warn(
            f"{lengths} tokens are not a multiple of tp={model.mesh.tp}: this step runs without "
            "sequence parallelism; pad to a multiple (pad_to_multiple_of of the tokenizer)",
            stacklevel=4,
        )
    return divide


def _takes_cache(runtime: Runtime) -> bool:
    return "use_cache" in inspect.signature(runtime.own_forward).parameters


def _run_own(model: Any, runtime: Runtime, batch: Mapping[str, Any]) -> Any:
    output = runtime.own_forward(model, **batch)
    for name in list(output) if hasattr(output, "keys") else ():
        if isinstance(output[name], VocabLogits):
            output[name] = output[name].gathered()
    return output


def _rows(batch: Mapping[str, Any]) -> int:
    tensors, _ = split_batch(batch)
    for name in ("input_ids", "inputs_embeds", "pixel_values"):
        if name in tensors:
            return len(tensors[name])
    return len(next(iter(tensors.values()))) if tensors else 0


def _train_step(model: Any, batch: Mapping[str, Any], micro_batches: int | None) -> Tensor:
    runtime: Runtime = model._slapo
    mesh, stream = model.mesh, runtime.schedule.state.random
    tensors, others = split_batch(batch)
    if _takes_cache(runtime):
        others["use_cache"] = False
    rows = _rows(tensors)
    if not rows:
        problem = f"found no tensor with rows among {list(batch)}"
        raise SlapoError("train_step", "batch", problem, "pass input_ids and labels")
    count = runtime.micro_batches if micro_batches is None else micro_batches
    count = _default_micro_batches(rows, mesh) if count is None else count
    legal = [i for i in range(1, rows + 1) if rows % i == 0]
    if count not in legal:
        problem = f"{rows} rows cannot be divided into {count} equal micro-batches"
        raise MeshError("train_step", "micro_batches", problem, f"legal numbers: {legal}")
    refuse_divided(model, others, micro_batches=count, pp=mesh.pp, dp=mesh.dp)
    totals = _over_dp(mesh, [*count_targets(type(model).__name__, tensors), float(rows)])
    runtime.schedule.state.tokens_divided = tokens_divide(model, {**tensors, **others})
    first = _first_row(mesh, rows)
    tensors[ROWS] = torch.arange(first, first + rows, device=next(iter(tensors.values())).device)
    stream.step += 1

    def run(part: Mapping[str, Any], part_rows: Tensor) -> Tensor:
        """The loss of one micro-batch, its means taken over the whole batch."""
        place = stream.at(stream.step, int(part_rows[0]), len(part_rows))
        with place, GlobalMeans(totals[:-1]) if count * mesh.dp > 1 else nullcontext():
            return _loss(runtime.own_forward(model, **part))

    parameters = list(model.parameters())
    with gradients.only_new(parameters):
        if runtime.pipeline is not None:
            loss = _pipelined(runtime.pipeline, run, tensors, others, count)
        else:
            loss = _accumulate(run, tensors, others, count)
        _reduce(model, runtime, parameters)
    return _share(loss, mesh)


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


def _default_micro_batches(rows: int, mesh: Mesh) -> int:
    """One without a pipeline; else the first divisor of the rows that keeps all stages busy."""
    if mesh.pp == 1:
        return 1
    return next((i for i in range(2 * mesh.pp, rows + 1) if rows % i == 0), rows)


def _over_dp(mesh: Mesh, counts: list[float]) -> list[float]:
    if mesh.dp == 1:
        return counts
    total = torch.tensor(counts, dtype=torch.float64)
    dist.all_reduce(total, group=mesh.group("dp"))
    return total.tolist()


def _first_row(mesh: Mesh, rows: int) -> int:
    """Global index of our first row: dp ranks may hold different numbers of rows."""
    if mesh.dp == 1:
        return 0
    each = [torch.zeros(1, dtype=torch.int64) for _ in range(mesh.dp)]
    dist.all_gather(each, torch.tensor([rows]), group=mesh.group("dp"))
    return int(sum(each[: mesh.coord("dp")]))


def _pipelined(
    pipeline: Pipeline, run: Callable, tensors: dict, others: dict, count: int
) -> Tensor:
    """The step of the stages; what a stage raises comes as it was, not as torch wraps it."""
    if not any(name in tensors for name in LABELS):
        raise _no_loss(f"found no labels among {[name for name in tensors if name != ROWS]}")
    try:
        return pipeline_step(pipeline, run, tensors, others, count)
    except RuntimeError as error:
        cause = error.__cause__ if "failed to run" in str(error).lower() else None
        if cause is None:
            raise
    raise cause


def _no_loss(problem: str) -> SlapoError:
    return SlapoError("train_step", "batch", f"no loss: {problem}", "put labels into the batch")


def _loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if loss is None:
        raise _no_loss("the model returned none")
    return loss.float()


def _accumulate(run: Callable, tensors: dict[str, Tensor], others: dict, count: int) -> Tensor:
    """Micro-batches one after the other, without a pipeline."""
    total: Any = 0.0
    for i in range(count):
        part = {k: v.tensor_split(count)[i] for k, v in tensors.items()}
        rows = part.pop(ROWS)
        loss = run({**part, **others}, rows)
        loss.backward()
        total = total + loss.detach()
    return total


def _reduce(model: Any, runtime: Runtime, parameters: list[nn.Parameter]) -> None:
    """Sum gradients over tied stages, over tp where they are partial, and over dp."""
    named = dict(model.named_parameters())
    for name, group in (*runtime.ties, *runtime.replicas):
        gradients.all_reduce_gradients([named[name]], group)
    state = runtime.schedule.state
    names = state.partial_gradients | (state.sequence_gradients if state.tokens_divided else set())
    partial = [named[n] for n in sorted(names) if n in named]
    gradients.all_reduce_gradients(partial, model.mesh.group("tp") if partial else None)
    gradients.all_reduce_gradients(parameters, model.mesh.group("dp"))


def _share(loss: Tensor, mesh: Mesh) -> Tensor:
    """The global loss on every rank: terms of all micro-batches were divided by global counts."""
    loss = loss.detach().clone()
    for mesh_dim in ("pp", "dp"):
        if mesh.size(mesh_dim) > 1:
            dist.all_reduce(loss, group=mesh.group(mesh_dim))
    return loss
