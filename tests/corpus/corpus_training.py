"""Short training on a mesh and in plain `transformers`, to see whether a fault changes the numbers."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from mutants import CONFIGS as FAMILIES
from mutants import IDS, LLAMA
from slapo_zoo.hf.models import no_progress_bars
from slapo_zoo.model.numerics import NumericsWatch, digests, unlike_replicas
from slapo_zoo.verify.case import Trial, dropouts
from slapo_zoo.verify.compare import LEARNING_RATE, MAX_NORM
from slapo_zoo.verify.judge import load, optimizer_of

STEPS = 2
CONFIGS = {
    **FAMILIES,
    "BloomForCausalLM": {"hidden_size": 32, "n_head": 4, "n_layer": 2, "vocab_size": 99, **IDS},
    "Phi3ForCausalLM": {**LLAMA, "num_key_value_heads": 4},
    "MistralForCausalLM": {**LLAMA, "sliding_window": 3},
    "BartForConditionalGeneration": {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
        "max_position_embeddings": 32, "vocab_size": 99, "pad_token_id": 0,
        "decoder_start_token_id": 2, "forced_eos_token_id": None, **IDS,
    },
}  # fmt: skip


def config_of(cls: str, changes: Any) -> Any:
    """A tiny config of a family."""
    made = getattr(transformers, cls)
    return made.config_class(**{**CONFIGS[cls], **dict(changes), "architectures": [cls]})


@dataclass
class Trained:
    """Result of a training: unsharded tensors under their HuggingFace names, on rank 0."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    digests: dict[str, tuple[str, str]] = field(default_factory=dict)
    reports: list[str] = field(default_factory=list)


class Training:
    """Correct training loop; a bug of a loop is a subclass.

    Args:
        model: of AutoScheduledModel.
        trial: tells the batches.

    Attributes:
        right: the loop without a bug, where it is another one than plain `transformers` trains by.
    """

    right: type["Training"] | None = None

    def __init__(self, model: Any, trial: Trial):
        self.model, self.trial = model, trial
        self.optimizer = self.new_optimizer()

    def new_optimizer(self) -> torch.optim.Optimizer:
        """Return an optimizer over the parameters of the model."""
        return optimizer_of(self.model.train())

    def feed(self, step: int) -> dict[str, torch.Tensor]:
        """Return this rank's rows of a batch."""
        whole = self.trial.case.batch_of(step)
        return self.trial.part(whole, self.model.mesh.coord("dp"))

    def backward(self, step: int) -> float:
        """Run forward and backward of one step."""
        batch = self.feed(step)
        return float(
            self.model.train_step(
                batch, micro_batches=self.trial.micro_batches(self.model._slapo.table)
            )
        )

    def clip(self) -> float:
        """Scale the gradients; returns their norm."""
        return float(self.model.clip_grad_norm_(MAX_NORM))

    def update(self) -> None:
        """Take one step of the optimizer."""
        self.optimizer.step()

    def between(self, step: int) -> None:
        """Run before each step."""

    def grads(self) -> dict[str, torch.Tensor]:
        """Return the unsharded gradients."""
        return self.model.consolidated_state_dict(grads=True)

    def run(self, watch: NumericsWatch | None = None) -> Trained:
        """Run all steps."""
        found = Trained()
        for step in range(STEPS):
            self.between(step)
            self.optimizer.zero_grad()
            found.losses.append(self.backward(step))
            if not step:
                found.grads = self.grads()
            found.norms.append(self.clip())
            self.update()
            if watch is not None:
                watch.step(found.losses[-1])
                watch.replicas()
                found.reports = watch.reports
        found.weights = self.model.consolidated_state_dict()
        found.digests = digests(self.model)
        return found


class _Plain(Training):
    def feed(self, step: int) -> dict[str, torch.Tensor]:
        return self.trial.case.batch_of(step)

    def backward(self, step: int) -> float:
        loss = self.model(**self.feed(step)).loss
        loss.backward()
        return float(loss.detach())

    def clip(self) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM))

    def grads(self) -> dict[str, torch.Tensor]:
        named = self.model.named_parameters()
        return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named}

    def run(self, watch: NumericsWatch | None = None) -> Trained:
        found = Trained()
        for step in range(STEPS):
            self.optimizer.zero_grad()
            found.losses.append(self.backward(step))
            if not step:
                found.grads = self.grads()
            found.norms.append(self.clip())
            self.update()
        found.weights = {n: p.detach() for n, p in self.model.named_parameters()}
        return found


@no_progress_bars()
def plain(trial: Trial) -> Trained:
    """The reference: plain `transformers`, one process, whole batches."""
    model = trial.case.cls.from_pretrained(trial.case.folder, **trial.case.changes())
    return _Plain(model, trial).run()


def on_rank(
    trial: Trial, training: type[Training], dropout: float, guarded: bool, watched: bool
) -> Trained:  # fmt: skip
    """This rank of a training.

    Args:
        trial: the model, the mesh and the batches.
        training: the loop.
        dropout: probability of every dropout.
        guarded: whether each step is looked at.
        watched: whether NumericsWatch looks on.
    """
    drops = dict.fromkeys(dropouts(trial.case.config), dropout) if dropout else {}
    model = load(trial, {**trial.case.changes(), **drops}, torch.float32)
    model.input_check_interval = int(guarded)
    run = training(model, trial)
    if not watched:
        return run.run()
    with NumericsWatch(model) as watch:
        return run.run(watch)


def distance(found: list[Trained], want: Trained) -> float:
    """The largest relative difference of losses, norms, gradients and weights; infinity where replicas differ."""
    if any(unlike_replicas([one.digests for one in found])):
        return float("inf")
    first = found[0]
    errors = [_apart(torch.tensor(one.losses), torch.tensor(want.losses)) for one in found]
    errors += [_apart(torch.tensor(one.norms), torch.tensor(want.norms)) for one in found]
    least = 0.01 * max(float(g.abs().max()) for g in want.grads.values())
    errors += [_apart(first.grads[n], g, least) for n, g in want.grads.items() if n in first.grads]
    moved = LEARNING_RATE  # largest change of a weight in one step
    errors += [
        _apart(first.weights[n], w, moved) for n, w in want.weights.items() if n in first.weights
    ]
    return max(errors)


def _apart(found: torch.Tensor, want: torch.Tensor, least: float = 0.0) -> float:
    if found.shape != want.shape or not bool(torch.isfinite(found).all()):
        return float("inf")
    error = (found.double() - want.double()).abs().max()
    return float(error / max(least, float(want.double().abs().max())))


def quiet() -> Any:
    """Context without warnings, which are findings of another checker."""
    return warnings.catch_warnings(action="ignore")
