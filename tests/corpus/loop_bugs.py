"""Published bugs in a user's loop: feeding, clipping, stepping and saving."""

import json
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from corpus_bug import Bug, Fault
from corpus_training import Training

from slapo_zoo import load_checkpoint, save_checkpoint
from slapo_zoo.parallel.ranks.agreement import once_for_all, together
from slapo_zoo.parallel.rng.layout_independent_random import drawn_from
from slapo_zoo.verify.compare import LEARNING_RATE, MAX_NORM

GPT2, BERT, LLAMA, T5 = (
    "GPT2LMHeadModel", "BertForMaskedLM", "LlamaForCausalLM", "T5ForConditionalGeneration",
)  # fmt: skip
QWEN3, MIXTRAL = "Qwen3ForCausalLM", "MixtralForCausalLM"


class ClipsItsOwnPart(Training):
    """Loop that clips by torch's function, which sees one rank's shard of the model."""

    def clip(self):
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM))


class ClipsOnOneRank(Training):
    """Loop in which only the first tp rank scales replicated gradients."""

    def clip(self):
        norm = super().clip()
        rows = self.model._slapo.plan.tensors
        whole = [p for n, p in self.model.named_parameters() if rows[n].placement is None]
        if self.model.mesh.coord("tp") == 0:
            torch.nn.utils.clip_grads_with_norm_(whole, MAX_NORM, torch.tensor(4.0))
        return norm


class WithLora(Training):
    """Loop that trains adapters of a frozen model."""

    def __init__(self, model, trial):
        from peft import LoraConfig

        model.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "o_proj"]))
        with drawn_from(0):
            for name, p in model.named_parameters():
                if "lora_B" in name and name not in divided(model):
                    torch.nn.init.normal_(p, std=0.1)
        super().__init__(model, trial)

    def grads(self):
        return {}


class LoraDrawnByRank(WithLora):
    """Loop in which each tp rank initialises its adapters differently."""

    def __init__(self, model, trial):
        super().__init__(model, trial)
        for name, p in model.named_parameters():
            if "lora_" in name and name not in divided(model):
                p.data.mul_(1.0 + 0.5 * model.mesh.coord("tp"))


WithLora.right = WithLora


class Resumed(Training):
    """Loop that saves after the first step and resumes from there."""

    folder: Path

    def between(self, step):
        if not step:
            return
        with TemporaryDirectory(prefix=f"rank-{self.model.mesh.world_size}-") as own:
            folder = Path(once_for_all("between", lambda: own)) / "saved"
            save_checkpoint(self.model, folder, self.optimizer, step=1)
            once_for_all("between", lambda: self.damage(folder))
            load_checkpoint(self.model, folder, self.optimizer)
            together(self.model.mesh, "between", lambda: None)

    def damage(self, folder):
        """Do nothing."""


class OptimizerOfAnother(Resumed):
    """Loop that exchanges two tensors of the optimizer state."""

    def damage(self, folder):
        (path,) = folder.glob("optimizer*.safetensors")
        data = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        names = [n for n in sorted(header) if "exp_avg" in n]
        wide = [n for n in names if "exp_avg_sq" not in n and len(header[n]["shape"]) == 2]
        one, other = next(
            (a, b) for a, b in combinations(wide, 2) if header[a]["shape"] == header[b]["shape"]
        )
        here, there = (slice(*(start + i for i in header[n]["data_offsets"])) for n in (one, other))
        data[here], data[there] = data[there], data[here]
        path.write_bytes(data)


Resumed.right = Resumed


def divided(model):
    """Return the names of the parameters that are sharded on this rank."""
    return {row.name for row in model._slapo.plan.tensors.values() if row.placement is not None}


def other_rows(mesh_dim):
    """Feed different batches to ranks that must share one."""

    class Fed(Training):
        def feed(self, step):
            whole = self.trial.case.batch_of(step + 10 * self.model.mesh.coord(mesh_dim))
            return self.trial.part(whole, self.model.mesh.coord("dp"))

    return Fed


class SameRows(Training):
    """Loop in which all dp ranks read the same rows."""

    def feed(self, step):
        return self.trial.part(self.trial.case.batch_of(step), 0)


class Orthogonal(torch.optim.Optimizer):
    """Optimizer whose update needs full matrices, as Muon's, under an unknown name."""

    def __init__(self, parameters):
        super().__init__(list(parameters), {"lr": LEARNING_RATE})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            update = p.grad
            if p.ndim == 2:
                u, _, v = torch.linalg.svd(update, full_matrices=False)
                update = u @ v
            p.add_(update, alpha=-LEARNING_RATE)


class OwnMuon(Training):
    """Loop in which each rank orthogonalises its shard of a matrix."""

    def new_optimizer(self):
        return Orthogonal(self.model.train().parameters())


class ScalesAlone(Training):
    """Loop in which torch's GradScaler skips the step only of the rank that overflows."""

    def update(self):
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(torch.zeros(()))
        if self.model.mesh.coord("tp") == 1:
            next(self.model.parameters()).grad.fill_(torch.inf)
        scaler.step(self.optimizer)
        scaler.update()


def loop(training):
    """Return the fault of a user's loop."""
    return Fault(training=training)


BUGS = [
    Bug("clipping by the norm of a rank's own part", ("huggingface/trl#5713", "meta-pytorch/torchtune#2420", "huggingface/transformers#36296"),
        "TRL and torchtune with tp or ep > 1", "each rank clips by the norm of what it holds: ranks scale by different factors",
        GPT2, loop(ClipsItsOwnPart), "guard", "clip_grad_norm_", always=True),
    Bug("tp ranks read different rows", ("huggingface/accelerate#3173", "pytorch/torchtitan#48"),
        "accelerate and torchtitan, each rank with its own loader under tp", "rows of two batches are mixed in every sum over tp",
        BERT, loop(other_rows("tp")), "guard", "batch: ranks", always=True),
    Bug("stages read different rows", ("deepspeedai/DeepSpeed#3131",),
        "DeepSpeed's pipeline with a random data set", "inputs of one batch meet the labels of another",
        GPT2, loop(other_rows("pp")), "guard", "batch: ranks", "pp2"),
    Bug("dp ranks read the same rows", ("NVIDIA-NeMo/Megatron-Bridge#5944",),
        "Megatron-Bridge, cyclic sampler with a last batch that does not divide", "dp ranks train on duplicates of one another's rows",
        BERT, loop(SameRows), "guard", "data-parallel ranks", "dp2", always=True),
    Bug("Muon on a rank's part of a matrix", ("deepspeedai/DeepSpeed#8437", "pytorch/torchtitan#3719"),
        "DeepSpeed AutoTP with Muon", "orthogonalising a shard is another update: off by 0.39 at tp 2, with right gradients",
        GPT2, loop(OwnMuon), "guard", "whole_matrices"),
    Bug("one tp rank skips a step on overflow", ("hpcaitech/ColossalAI#1175",),
        "ColossalAI fp16 over pipeline ranks", "ranks see an overflow in their own part only, and step or skip by themselves",
        GPT2, loop(ScalesAlone), "guard", "GradScaler"),
    Bug("one tp rank clips what all hold", ("deepspeedai/DeepSpeed#1801", "TrainCheck (OSDI'25), BLOOM-176B"),
        "BLOOM's training, bf16 optimizer of DeepSpeed", "gradients of layer norms were clipped on the first tp rank alone: replicas diverged for weeks",
        GPT2, loop(ClipsOnOneRank), "guard", "clip_grad_norm_", always=True),
    Bug("tp ranks draw their own LoRA factors", ("InfiniTensor/InfiniTrain#150",),
        "InfiniTrain, LoRA under tp", "a factor that ranks hold whole begins with other values on each: losses diverge",
        LLAMA, loop(LoraDrawnByRank), "watch", "lora_A"),
    Bug("optimizer state of another tensor after a resume", ("huggingface/transformers#48569",),
        "Trainer under tp", "the optimizer comes back with the wrong state without a word",
        GPT2, Fault(training=OptimizerOfAnother, is_file=True), "load", "exp_avg", always=True),
]  # fmt: skip
