"""The runs that are compared: the plain model in one process, and one rank of the scheduled one."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.hf.models import freeze_as_made
from slapo_zoo.model.loader import Source, load_checkpoint
from slapo_zoo.model.numerics import part_of
from slapo_zoo.parallel import collectives
from slapo_zoo.parallel.digests import digest_of_tensor
from slapo_zoo.verify.batch import has_loss
from slapo_zoo.verify.events import Recorder
from slapo_zoo.verify.safe import agreed_collectives
from slapo_zoo.verify.subject import Subject, changes_for_comparison
from slapo_zoo.zoo.options import LoaderOptions

LEARNING_RATE, EPS, DECAY, MAX_NORM = 1e-3, 1e-5, 0.1, 1.0


@dataclass
class Result:
    """Result of one run; tensors are full ones under their HuggingFace names."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    loss: float = 0.0
    grads: dict[str, Tensor] = field(default_factory=dict)
    norm: float = 0.0
    weights: dict[str, Tensor] = field(default_factory=dict)
    events: dict[Any, Any] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)  # another name of a parameter --> its first

    def rename(self, tied: Mapping[str, str]) -> None:
        """Call tied parameters by the names that the plain model has for them."""
        self.grads = {tied.get(name, name): x for name, x in self.grads.items()}
        self.weights = {tied.get(name, name): x for name, x in self.weights.items()}


@dataclass
class RankResult(Result):
    """The same of one rank; full gradients and weights are on rank 0 only.

    Args:
        coords: of tp, pp and dp.
        digests: local parameter --> hash of its bytes after the step, and which part it is.
        untied: names that should share memory and do not.
        grad_digests: the same of its gradient, before clipping.
        collectives: kind --> how many over tp in the step.
        twice: gradients after a second step on the same batch.
    """

    coords: tuple[int, int, int] = (0, 0, 0)
    digests: dict[str, tuple[str, str]] = field(default_factory=dict)
    grad_digests: dict[str, tuple[str, str]] = field(default_factory=dict)
    untied: list[str] = field(default_factory=list)
    collectives: dict[str, int] = field(default_factory=dict)
    twice: dict[str, Tensor] = field(default_factory=dict)


def cast(batch: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Cast the floating inputs of a batch to the dtype of the model."""
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


def tensors_of(output: Any) -> dict[str, Tensor]:
    """Return the tensors of a HuggingFace output by name; caches and tuples of layers are left out."""
    return {k: v.detach().clone() for k, v in output.items() if isinstance(v, Tensor)}


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """The optimizer of every run; a large eps keeps it from amplifying noise in tiny gradients."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=DECAY, eps=EPS)


def shaken(model: torch.nn.Module, seed: int | None) -> torch.nn.Module:
    """Move every parameter by about one unit in its last place, in place; return the model. Without a seed, change nothing.

    What it computes then differs by rounding alone: it tells how far rounding leads.
    """
    if seed is None:
        return model
    # ranks may be threads: torch's own generator is theirs together
    own = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        noise = torch.rand(p.shape, dtype=torch.float64, generator=own).sub_(0.5).mul_(2)
        p.data = p.data + p.data * noise.to(p.data) * torch.finfo(p.dtype).eps
    return model


def plain(
    subject: Subject, dtype: torch.dtype, attention: str, reverse: bool = False,
    shake: int | None = None,
) -> Result:  # fmt: skip
    """Plain `transformers`, one process, the whole batch at once.

    Args:
        subject: what is verified.
        dtype: of parameters and inputs.
        attention: "sdpa" or "eager".
        reverse: take the rows in the opposite order: the same values, added in another order.
        shake: seed of `shaken`.
    """
    model = subject.cls.from_pretrained(
        subject.folder, dtype=dtype, attn_implementation=attention,
        **changes_for_comparison(subject.config),
    )  # fmt: skip
    freeze_as_made(shaken(model, shake))
    batch, result = cast(subject.batch(), dtype), Result()
    batch = {k: v.flip(0) for k, v in batch.items()} if reverse else batch
    with torch.no_grad():
        outputs = tensors_of(model.eval()(**batch))
    result.outputs = {k: v.flip(0) if reverse and v.ndim else v for k, v in outputs.items()}
    if not has_loss(subject.cls.__name__):
        return result
    first = {id(p): name for name, p in model.named_parameters()}
    for name, p in model.named_parameters(remove_duplicate=False):
        result.tied[name] = first[id(p)]
    optimizer = optimizer_of(model.train())
    loss = model(**batch).loss
    loss.backward()
    result.loss = float(loss.detach())
    result.grads = {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for n, p in model.named_parameters()
    }
    result.norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
    optimizer.step()
    result.weights = {n: p.detach() for n, p in model.named_parameters()}
    return result


def load(subject: Subject, changes: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Load this rank of the scheduled model."""
    tp, pp, dp = subject.sizes
    options = LoaderOptions(
        tp=tp, pp=pp, dp=dp, seed=subject.seed, auto_class=subject.cls, schedule=subject.schedule,
        dtype=dtype, **{"kernels": "reference", **subject.knobs},
    )  # fmt: skip
    model = load_checkpoint("verify", options, Source(str(subject.folder), changes=changes))
    model.input_check_interval = 0  # what differs is told by module, not by the guards of training
    return model


def scheduled(
    subject: Subject, changes: Mapping[str, Any], dtype: torch.dtype = torch.float32,
    save: Path | None = None, shake: int | None = None,
) -> RankResult:  # fmt: skip
    """This rank of the scheduled model on the mesh; all ranks call it together.

    Args:
        subject: what is verified.
        changes: fields of the config that differ from the folder's.
        dtype: of the parameters.
        save: folder for the weights after the step.
        shake: seed of `shaken`.
    """
    model = shaken(load(subject, changes, dtype), shake)
    result = RankResult(coords=_coords(model))
    whole = cast(subject.batch(), dtype)
    with agreed_collectives(model.mesh):
        with torch.no_grad():
            model.eval()
            result.outputs = tensors_of(model(**whole))
        if has_loss(subject.cls.__name__):
            _train(model, subject, whole, result, save is not None)
    if save is not None:
        model.save_pretrained(save)
    return result


def recorded(
    subject: Subject, changes: Mapping[str, Any], dtype: torch.dtype = torch.float32
) -> RankResult:
    """One training step (a forward, for a model without a loss) with all its events."""
    model = load(subject, changes, dtype)
    result = RankResult(coords=_coords(model))
    whole = cast(subject.batch(), dtype)
    pipeline = model._slapo.pipeline
    units = () if pipeline is None else pipeline.units
    recorder = Recorder(model, model.schedule.state.random, units)
    result.events = recorder.events
    with agreed_collectives(model.mesh, recorder), recorder:
        if has_loss(subject.cls.__name__):
            batch = subject.part(whole, model.mesh.coord("dp"))
            model.train().train_step(batch, micro_batches=subject.micro_batches)
        else:
            model.eval()(**whole)
    return result


def _coords(model: Any) -> tuple[int, int, int]:
    tp, pp, dp = (model.mesh.coord(mesh_dim) for mesh_dim in ("tp", "pp", "dp"))
    return tp, pp, dp


def _train(
    model: Any, subject: Subject, whole: dict[str, Tensor], result: RankResult, twice: bool = False
) -> None:  # fmt: skip
    batch = subject.part(whole, model.mesh.coord("dp"))
    optimizer = optimizer_of(model.train())
    with counted(model.mesh, result.collectives):
        result.loss = float(model.train_step(batch, micro_batches=subject.micro_batches))
    result.grads = model.consolidated_state_dict(grads=True)
    result.grad_digests = digests(model, grads=True)
    if twice:
        kept = [(p, p.grad.clone()) for p in model.parameters() if p.grad is not None]
        model.train_step(batch, micro_batches=subject.micro_batches)
        result.twice = model.consolidated_state_dict(grads=True)
        for p, grad in kept:
            p.grad = grad
    result.norm = float(model.clip_grad_norm_(MAX_NORM))
    optimizer.step()
    result.weights = model.consolidated_state_dict()
    result.digests = digests(model)
    result.untied = untied(model)


def digests(model: Any, grads: bool = False) -> dict[str, tuple[str, str]]:
    """A hash of the bytes of every parameter (or gradient) that this rank holds, and which part it is."""
    named = model.named_parameters(remove_duplicate=False)
    held = ((name, p.grad if grads else p) for name, p in named)
    return {name: (digest_of_tensor(x), part_of(model, name)) for name, x in held if x is not None}


def untied(model: Any) -> list[str]:
    """Tied names of this rank that are tensors of their own."""
    from slapo_zoo.hf.models import tied_names

    here = dict(model.named_parameters(remove_duplicate=False))
    ties = tied_names(model).items()
    return [a for a, b in ties if a in here and b in here and here[a] is not here[b]]


@contextmanager
def counted(mesh: Any, counts: dict[str, int]) -> Iterator[None]:
    """Count the collectives over tp that this rank calls within, by kind."""
    if mesh.tp == 1:
        yield
        return
    group, found = mesh.group("tp"), Counter[str]()

    def count(kind: str, whole: Tensor, over: Any) -> None:
        if over is group:  # each rank has its own, also where ranks are threads of one process
            found[kind] += 1

    collectives.OBSERVERS.append(count)
    try:
        yield
    finally:
        collectives.OBSERVERS.remove(count)
        counts.update(found)
