"""Libraries to compare with, each a class that loads a model, runs training steps, and reports its gradients.

Each runs in processes of its own; no library is imported before they are started.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compare.shapes import Work

LEARNING_RATE = 1e-4
BERT_BLOCKS = {
    "bert.encoder.layer.*.attention.self.query": "colwise",
    "bert.encoder.layer.*.attention.self.key": "colwise",
    "bert.encoder.layer.*.attention.self.value": "colwise",
    "bert.encoder.layer.*.attention.output.dense": "rowwise",
    "bert.encoder.layer.*.intermediate.dense": "colwise",
    "bert.encoder.layer.*.output.dense": "rowwise",
}


class Contender:
    """Plain `transformers` in one process; subclasses load the model or run the step with another library."""

    name = "transformers"
    divides = False  # True: over tp ranks; False: one process with as many threads

    @staticmethod
    def why_not(config: Any) -> str:
        """Return the reason why the library cannot train a family, or ""."""
        return ""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.model: Any = self.load().train()
        self.batch = work.batch(self.model.config)
        self.optimizer: Any = self.make_optimizer()

    def load(self) -> Any:
        """Return the model, loaded from the checkpoint."""
        return plain(self.work.folder)

    def make_optimizer(self) -> Any:
        """Return the optimizer, the same for every contender; None if the library steps its own."""
        return torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def gradients(self) -> Tensor:
        """Run forward and backward, and return the loss."""
        loss = self.model(**self.batch).loss
        loss.backward()
        return loss.detach()

    def step(self, between: Callable[[], None] | None = None) -> float:
        """Run one training step and return the loss; `between` is called after the backward."""
        loss = self.gradients()
        if between is not None:
            between()
        self.update()
        return float(loss)

    def update(self) -> None:
        """Step the optimizer and clear the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def norm(self) -> float:
        """Return the global norm of all gradients, however they are sharded."""
        whole = dict(_plain_shapes(self.work.folder))
        total = 0.0
        for name, parameter in self.model.named_parameters():
            grad = parameter.grad
            if grad is None:
                continue
            joined = hasattr(grad, "full_tensor")  # a plan may have transposed it too
            grad = grad.full_tensor() if joined else grad
            square = grad.double().square().sum()
            if self.divides and not joined and grad.shape != whole.get(name, grad.shape):
                dist.all_reduce(square)
            total += float(square)
        return math.sqrt(total)

    def save(self, folder: str) -> bool:
        """Write a checkpoint that plain `transformers` loads; return False if the library has no single call for it."""
        self.model.save_pretrained(folder)
        return True

    def bytes_read(self) -> int | None:
        """Return the bytes of the checkpoint that this rank read; None if the library does not count them."""
        return None

    @staticmethod
    def plan_lines(config: Any) -> int:
        """Return the number of plan entries that a user must write for a family."""
        return 0

    def parameter_bytes(self) -> int:
        """Return the bytes of the parameters on this rank."""
        local = (p.to_local() if hasattr(p, "to_local") else p for p in self.model.parameters())
        return sum(p.numel() * p.element_size() for p in local)


def plain(folder: str, **options: Any) -> Any:
    """Load a checkpoint as the class of `transformers` that its config names; `options` go to from_pretrained."""
    import transformers

    config: Any = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    cls = getattr(transformers, config.architectures[0])
    return cls.from_pretrained(folder, **options)


def _plain_shapes(folder: str) -> list[tuple[str, torch.Size]]:
    import transformers

    config: Any = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    return [(name, p.shape) for name, p in model.named_parameters()]


class Ours(Contender):
    """slapo_zoo with tensor parallelism."""

    name = "slapo_zoo"
    divides = True

    def load(self) -> Any:
        from slapo_zoo.model.load.auto import AutoScheduledModel

        return AutoScheduledModel.from_pretrained(
            self.work.folder, tp=self.work.tp if self.divides else 1
        )

    def gradients(self) -> Tensor:
        return self.model.train_step(self.batch)

    def norm(self) -> float:
        return float(self.model.clip_grad_norm_(math.inf))

    def bytes_read(self) -> int:
        return self.model.ledger.bytes_read


class OursAlone(Ours):
    """slapo_zoo with tp=1, to see the cost of the schedule itself."""

    name = "slapo_zoo tp=1"
    divides = False


class TransformersTP(Contender):
    """Tensor parallelism of `transformers`; BERT has a plan written by hand."""

    name = "transformers tp"
    divides = True

    @staticmethod
    def why_not(config: Any) -> str:
        if config.model_type == "bert" or getattr(config, "base_model_tp_plan", None):
            return ""
        return f"transformers has no tp plan for {config.model_type}"

    def load(self) -> Any:
        from transformers import AutoConfig, DistributedConfig

        by_hand = (
            AutoConfig.from_pretrained(self.work.folder, trust_remote_code=False).model_type
            == "bert"
        )
        plan: Any = BERT_BLOCKS if by_hand else "auto"
        options = DistributedConfig(tp_size=self.work.tp, tp_plan=plan)
        return plain(self.work.folder, distributed_config=options)

    @staticmethod
    def plan_lines(config: Any) -> int:
        return len(BERT_BLOCKS) if config.model_type == "bert" else 0


class DTensor(Contender):
    """`parallelize_module` of torch, with a hand-written plan that shards the same weights as slapo_zoo."""

    name = "DTensor"
    divides = True

    @staticmethod
    def why_not(config: Any) -> str:
        from compare.dtensor import PLANS

        return "" if config.model_type in PLANS else f"no plan written for {config.model_type}"

    def load(self) -> Any:
        from compare.dtensor import divide

        return divide(plain(self.work.folder), self.work.tp)

    def gradients(self) -> Tensor:
        from compare.dtensor import loss_and_backward

        return loss_and_backward(self.model, self.batch)

    def save(self, folder: str) -> bool:
        return (
            False  # gathering is the user's, and for GPT-2 the rewriting of what `divide` rewrote
        )

    @staticmethod
    def plan_lines(config: Any) -> int:
        from compare.dtensor import ENDS, PLANS

        return len(PLANS[config.model_type]) + ENDS


class DeepSpeed(Contender):
    """AutoTP of DeepSpeed, without its default gradient clipping."""

    name = "DeepSpeed AutoTP"
    divides = True

    @staticmethod
    def why_not(config: Any) -> str:
        from importlib.util import find_spec

        if find_spec("deepspeed") is None:
            return "deepspeed is not installed"
        return "AutoTP refuses gpt2" if config.model_type == "gpt2" else ""

    def load(self) -> Any:
        from slapo_zoo.model.integrations.dialects.deepspeed import import_deepspeed

        config = {
            "train_micro_batch_size_per_gpu": self.work.batch_size,
            "gradient_clipping": 0.0,  # the default of 1.0 would clip, unlike the others
            "tensor_parallel": {"autotp_size": self.work.tp},
            "zero_optimization": {"stage": 0},
        }
        model = plain(self.work.folder)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self.engine, *_ = import_deepspeed().initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
        return self.engine.module

    def make_optimizer(self) -> None:
        return None

    def gradients(self) -> Tensor:
        loss = self.engine(**self.batch).loss
        self.engine.backward(loss)
        return loss.detach()

    def update(self) -> None:
        self.engine.step()

    def save(self, folder: str) -> bool:
        return False  # transformers cannot load its checkpoints


class Compiled(Contender):
    """Plain `transformers` with the whole model under torch.compile."""

    name = "torch.compile"

    def load(self) -> Any:
        model = plain(self.work.folder)
        self._compiled = torch.compile(model)
        return model

    def gradients(self) -> Tensor:
        loss = self._compiled(**self.batch).loss
        loss.backward()
        return loss.detach()


class _DividesRows(Contender):
    """Base class of data-parallel contenders: each rank has some rows; gradients and losses are averaged."""

    divides = True

    def gradients(self) -> Tensor:
        rows = self.work.batch_size // dist.get_world_size()
        part = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
        loss = self.model(**{name: x[part] for name, x in self.batch.items()}).loss
        self.backward(loss)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean / dist.get_world_size()

    def backward(self, loss: Tensor) -> None:
        """Run the backward; the library averages the gradients over the ranks."""
        loss.backward()


class FSDP2(_DividesRows):
    """FSDP2: torch's `fully_shard` of each block and of the rest."""

    name = "FSDP2"

    def load(self) -> Any:
        from torch.distributed.fsdp import fully_shard

        model = plain(self.work.folder)
        for module in list(model.modules()):
            if isinstance(module, torch.nn.ModuleList):
                for block in module:
                    fully_shard(block)
        return fully_shard(model)

    def save(self, folder: str) -> bool:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=whole)
        if dist.get_rank() == 0:
            self.model.save_pretrained(folder, state_dict=state)
        return True


class Accelerate(_DividesRows):
    """Accelerate: DistributedDataParallel by `Accelerator.prepare`."""

    name = "Accelerate"

    @staticmethod
    def why_not(config: Any) -> str:
        from importlib.util import find_spec

        return "" if find_spec("accelerate") else "accelerate is not installed"

    def load(self) -> Any:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        return plain(self.work.folder)

    def make_optimizer(self) -> Any:
        config = self.model.config
        self.model, optimizer = self.accelerator.prepare(self.model, super().make_optimizer())
        self.model.config = config
        return optimizer

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def save(self, folder: str) -> bool:
        model: Any = self.accelerator.unwrap_model(self.model)
        model.save_pretrained(folder, is_main_process=self.accelerator.is_main_process)
        return True


CONTENDERS: dict[str, type[Contender]] = {
    cls.name: cls
    for cls in (
        Ours, Contender, OursAlone, Compiled, TransformersTP, DTensor, DeepSpeed, FSDP2, Accelerate
    )
}  # fmt: skip
