"""What a training loop is given, on a plain model and on a scheduled one alike; the loops are in `loop_table`."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from parity import EPS, LEARNING_RATE, Case

STEPS, ROWS, TOKENS, VOCAB = 3, 4, 8, 99
KV1 = (("num_key_value_heads", 1),)
FAMILIES = {
    "gpt2": Case("GPT2LMHeadModel", ("tokens",)),
    "bert": Case("BertForMaskedLM", ("tokens",)),
    "t5": Case("T5ForConditionalGeneration", ("tokens",)),
    "llama": Case("LlamaForCausalLM", ("tokens",), KV1),
    "qwen3": Case("Qwen3ForCausalLM", ("tokens",)),
    "mixtral": Case("MixtralForCausalLM", ("tokens",)),
}
LAYOUTS = {
    "tp2": {"tp": 2}, "tp2-sp": {"tp": 2, "sequence_parallel": True}, "pp2": {"pp": 2}, "dp2": {"dp": 2},
    "tp2-pp2": {"tp": 2, "pp": 2}, "tp2-dp2": {"tp": 2, "dp": 2},
    "dp2-shard": {"dp": 2, "dp_shard": 2}, "dp2-shard-zero1": {"dp": 2, "dp_shard": 2, "zero_stage": 1},
}  # fmt: skip
CALL_TRAIN_STEP = "call model.train_step(batch, loss_fn=...)"


@dataclass(frozen=True)
class Loop:
    """One way to train, and where it is refused: name of a mesh dim --> words of the message."""

    run: Callable[["Trainee"], None]
    refused: tuple[tuple[str, str], ...] = ()

    def words(self, layout: dict[str, Any]) -> str | None:
        """Of the refusal on a mesh, or None where the loop has to train."""
        return next((words for dim, words in self.refused if layout.get(dim, 1) > 1), None)


LOOPS: dict[str, Loop] = {}


def loop(name: str, **refused: str) -> Callable[[Any], Any]:
    """Register a loop; `pp="words"`: under pp it is refused with these words."""

    def register(run: Callable[[Trainee], None]) -> Callable[[Trainee], None]:
        LOOPS[name] = Loop(run, tuple(refused.items()))
        return run

    return register


@dataclass
class Trainee:
    """A model, plain or scheduled, its optimizer, and what it has seen."""

    model: Any
    case: Case
    losses: list[float] = field(default_factory=list)
    optimizer: Any = None

    def __post_init__(self) -> None:
        self.mesh = getattr(self.model, "mesh", None)
        self.dtype = next(self.model.parameters()).dtype
        self.new_optimizer()

    def new_optimizer(self) -> None:
        """AdamW over what is trained now."""
        wanted = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(wanted, lr=LEARNING_RATE, eps=EPS, weight_decay=0.1)

    @property
    def scheduled(self) -> bool:
        """Whether it is a model of AutoScheduledModel."""
        return self.mesh is not None

    def batch(
        self, step: int, labels: bool = False, whole: bool = False
    ) -> dict[str, torch.Tensor]:
        """This rank's rows, or all, of a batch without padding; every row has as many targets."""
        g = torch.Generator().manual_seed(100 + step)
        ids = torch.randint(3, VOCAB, (ROWS, TOKENS), generator=g)
        made = {"input_ids": ids}
        if self.case.cls.startswith("T5"):
            made["decoder_input_ids"] = ids.flip(1)
        if labels:
            made["labels"] = ids.roll(1, 1)
        if whole or not self.scheduled:
            return made
        rows = ROWS // self.mesh.dp
        first = self.mesh.coord("dp") * rows
        return {name: x[first : first + rows] for name, x in made.items()}

    def note(self, loss: torch.Tensor) -> None:
        """The mean over dp of a loss of this rank's rows."""
        total = loss.detach().double().clone()
        if self.scheduled and self.mesh.dp > 1:
            torch.distributed.all_reduce(total, group=self.mesh.group("dp"))
            total /= self.mesh.dp
        self.losses.append(float(total))

    def no_sync(self) -> Any:
        """Of the model where it has one."""
        return self.model.no_sync() if self.scheduled else nullcontext()

    def in_pairs(self) -> dict[str, int]:
        """Options of a step whose micro-batches hold an even number of rows."""
        return {"micro_batches": ROWS // self.mesh.dp // 2} if self.scheduled else {}

    def train_step(self, batch: dict[str, Any], loss_fn: Any, **options: Any) -> torch.Tensor:
        """By the model's own method, or as one would write it for a plain model."""
        if self.scheduled:
            return self.model.train_step(batch, loss_fn=loss_fn, **options)
        of_model = {k: v for k, v in batch.items() if k.endswith(("input_ids", "labels"))}
        loss = loss_fn(self.model(**of_model), batch)
        loss.backward()
        return loss.detach()

    def weights(self) -> dict[str, torch.Tensor]:
        """Whole, under their HuggingFace names; {} on all ranks but the first."""
        if self.scheduled:
            return self.model.consolidated_state_dict()
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}
