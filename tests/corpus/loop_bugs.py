"""Published bugs that are faults of a loop: what is fed, counted, scaled, clipped and summed."""

from unittest import mock

import torch
from corpus_bug import Bug, Fault
from corpus_training import Training

from slapo_zoo.verify.runs import LEARNING_RATE, MAX_NORM

GPT2, BERT, LLAMA, T5 = (
    "GPT2LMHeadModel", "BertForMaskedLM", "LlamaForCausalLM", "T5ForConditionalGeneration",
)  # fmt: skip
QWEN3, MIXTRAL = "Qwen3ForCausalLM", "MixtralForCausalLM"


class ClipsItsOwnPart(Training):
    """torch's own function sees one rank's part of the model."""

    def clip(self):
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM))


class ClipsOnOneRank(Training):
    """Only the first tp rank scales what all of them hold."""

    def clip(self):
        norm = torch.tensor(4.0)
        if self.model.mesh.coord("tp") == 0:
            whole = [p for n, p in self.model.named_parameters() if "norm" in n]
            torch.nn.utils.clip_grads_with_norm_(whole, MAX_NORM, norm)
        return float(norm)


def other_rows(mesh_dim):
    """Ranks that must share a batch read their own."""

    class Fed(Training):
        def feed(self, step):
            whole = self.subject.batch(step + 10 * self.model.mesh.coord(mesh_dim))
            return self.subject.part(whole, self.model.mesh.coord("dp"))

    return Fed


class SameRows(Training):
    """All dp ranks read the same rows."""

    def feed(self, step):
        return self.subject.part(self.subject.batch(step), 0)


class Orthogonal(torch.optim.Optimizer):
    """An update by matrices, as Muon's, that nobody knows by name."""

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
    """Each rank orthogonalises its own part of a matrix."""

    def new_optimizer(self):
        return Orthogonal(self.model.train().parameters())


class ScalesAlone(Training):
    """torch's GradScaler skips the step of the rank that overflows, and of no other."""

    def update(self):
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(torch.zeros(()))
        if self.model.mesh.coord("tp") == 1:
            next(self.model.parameters()).grad.fill_(torch.inf)
        scaler.step(self.optimizer)
        scaler.update()


def loop(training):
    """A fault of a user's own loop."""
    return Fault(training=training)


def instead(target, make):
    """A fault of a function of ours: `make(right)` stands in its place."""
    module, _, name = target.rpartition(".")

    def patch():
        owner = mock._importer(module)  # a module, or a class in one
        return mock.patch.object(owner, name, make(getattr(owner, name)))

    return Fault(patch=patch)


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
]  # fmt: skip
