"""Published bugs in a training step, each of which replaces a function of this package."""

from contextlib import contextmanager
from dataclasses import replace
from pkgutil import resolve_name
from unittest import mock

import torch
import torch.distributed as dist
from corpus_bug import Bug, Fault
from corpus_training import Training
from loop_bugs import Resumed, WithLora

from slapo_zoo.parallel.rank_plan import REPLICAS, TIED

GPT2, BERT, LLAMA, T5, MIXTRAL = (
    "GPT2LMHeadModel", "BertForMaskedLM", "LlamaForCausalLM", "T5ForConditionalGeneration", "MixtralForCausalLM",
)  # fmt: skip
STEP, NORM = "slapo_zoo.model.step.train_step", "slapo_zoo.language.gradients.global_norm"
PARTS = 4  # micro-batches of a step over two stages


def instead(target, make):
    """Return a fault that replaces a function of this package by `make(right)`."""
    owner, _, name = target.rpartition(".")

    def patch():
        holder = resolve_name(owner)
        return mock.patch.object(holder, name, make(getattr(holder, name)))

    return Fault(patch=patch)


def own_counts(right):
    """Divide by the number of this dp rank's targets, then average over ranks."""

    def ask(model, tensors, counts, *more):
        asked = right(model, tensors, counts, *more)
        return replace(asked, totals=[float(n) * model.mesh.dp for n in counts])

    return ask


def means(divisor):
    """Take the mean of each micro-batch over its own targets, divided by `divisor`."""

    def make(right):
        class Means(right):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                found = func(*args, **(kwargs or {}))
                is_loss = func is torch.nn.functional.cross_entropy
                self.found += is_loss
                return found / divisor if is_loss else found

        return Means

    return make


def times(factor):
    """Wrap a function so that its result is multiplied by `factor`."""
    return lambda right: lambda *args: factor * right(*args)


def after(change):
    """Run `change(model, parameters)` after the all-reduces of a step."""

    def make(right):
        def reduce(step):
            right(step)
            change(step.model, step.parameters)

        return reduce

    return make


@after
def divided_again(model, parameters):
    """Divide by the number of micro-batches again on all stages but the last; of tied weights this is refused at once."""
    tied = {name for names in model.plan.sums_of(parameters, TIED).values() for name in names}
    for name, p in parameters.items():
        if p.grad is not None and name not in tied and model.mesh.coord("pp") == 0:
            p.grad.div_(PARTS)


def without(kind, where=lambda mesh: True):
    """Leave out some gradient all-reduces: of weights tied over stages, or of replicated tp ranks."""

    def make(right):
        def sums_of(self, *args, **options):
            found = right(self, *args, **options)
            return {
                one: names
                for one, names in found.items()
                if one.why != kind or not where(self.mesh)
            }

        return sums_of

    return instead("slapo_zoo.parallel.rank_plan.RankPlan.sums_of", make)


def forgets(right):
    """Drop the gradients of earlier micro-batches before the last backward."""

    def last_backward(self, outputs):
        for _, p in self.runtime.calls.named:
            p.grad = None
        right(self, outputs)

    return last_backward


def norm_with(change):
    """Replace the global norm by `change(square, some, mesh)`; some(is_meant) sums squares of this rank."""

    def make(right):
        def norm(named, plan):
            named = list(named)

            def some(is_meant):
                found = [p.grad.double().square().sum() for name, p in named
                         if p.grad is not None and plan.owns(name) and is_meant(name, plan.of(name).placement)]  # fmt: skip
                return torch.stack([torch.zeros((), dtype=torch.float64), *found]).sum()

            return change(right(named, plan).double().square(), some, plan.mesh).sqrt()

        return norm

    return make


def over_tp(x, mesh):
    """All-reduce over tp."""
    x = x.clone()
    dist.all_reduce(x, group=mesh.group("tp"))
    return x


def replicas_each_time(square, some, mesh):
    """Count replicated parameters once per tp rank in the squared norm."""
    return square + (mesh.tp - 1) * some(lambda name, placement: placement is None)


def own_part_of(word):
    """Count only this rank's shard of the parameters that match `word` in the squared norm."""

    def change(square, some, mesh):
        mine = some(lambda name, placement: placement and word in name)
        return square - over_tp(mine, mesh) + mine

    return change


def averaged(square, some, mesh):
    """Average the squares of sharded parameters over tp in the squared norm."""
    parts = over_tp(some(lambda name, placement: placement), mesh)
    return square - parts * (1 - 1 / mesh.tp)


def only_where_the_target_is(right):
    """All-reduce the logit of a target without a backward: other ranks' columns get no gradient."""

    return lambda logits, target, *more: right(logits, target, *more) * (target >= 0)[:, None]


def by_all_ranks(right):
    """Divide an average over dp by the number of all ranks."""
    return lambda parameters, group, factor: right(parameters, group, factor / 2)


class Experts:
    """Collectives of an expert's forward; `change` replaces the all-reduce of the routing weights' gradients."""

    def __init__(self, right, change):
        self.right, self.change = right, change

    def __getattr__(self, name):
        return getattr(self.right, name)

    def reduce_backward(self, x, group):
        if x.shape[-1] == 2:  # [tokens, experts of a token]
            return self.change(x, lambda y: self.right.reduce_backward(y, group))
        return self.right.reduce_backward(x, group)


def scores(change):
    """Return a fault of the gradient that flows back into the router."""
    return instead(
        "slapo_zoo.language.primitives.expert_parallel.collectives",
        lambda right: Experts(right, change),
    )


class HalfWithoutTargets(Training):
    """Loop in which the rows of later dp ranks have no target."""

    def feed(self, step):
        batch = self.trial.case.batch_of(step)
        rows = len(batch["labels"]) // 2
        batch["labels"][rows:] = -100
        return self.trial.part(batch, self.model.mesh.coord("dp"))


HalfWithoutTargets.right = HalfWithoutTargets


class TwoSteps(Training):
    """Loop that accumulates the gradients of two steps before the optimizer's."""

    def backward(self, step):
        return super().backward(2 * step) + super().backward(2 * step + 1)


TwoSteps.right = TwoSteps


def halved(right):
    """Divide accumulated gradients by the number of micro-batches again in each further step."""

    @contextmanager
    def only_new(parameters):
        before = any(p.grad is not None for p in parameters)
        with right(parameters):
            yield
        for p in parameters:
            if before and p.grad is not None:
                p.grad.div_(PARTS)

    return only_new


def adapters_alone(right):
    """Leave out all gradient all-reduces of an adapter."""
    return lambda self, *args: [] if self.adapter else right(self, *args)


def saved(change):
    """Return a fault of the files that ranks write: `change(specs, mesh)`."""

    def make(right):
        def write(path, slots, specs, local, mesh, *more):
            return right(path, slots, *change(specs, local, mesh), *more)

        return write

    right = instead("slapo_zoo.weights.save.write_tensors", make)
    return replace(right, is_file=True, training=Resumed)


def in_other_order(specs, local, mesh):
    """Save the shards of the ranks in the opposite order."""
    return specs, local, replace(mesh, rank=mesh.world_size - 1 - mesh.rank)


def in_one_run(specs, local, mesh):
    """Save a fused projection as the ranks' shards one after the other, not group by group."""
    flat = [
        s if s.placement is None else replace(s, placement=replace(s.placement, groups=()))
        for s in specs
    ]
    return flat, local, mesh


BUGS = [
    Bug("each dp rank divides by its own targets", ("huggingface/transformers#34242", "NVIDIA/Megatron-LM#7452 (3)", "OpenPipe/ART#619"),
        "Trainer under DDP; multi-token prediction in Megatron Core", "a mean of means: 14/3 where the mean over all tokens is 4",
        BERT, instead(f"{STEP}.count_step", own_counts), "verify", "loss", "dp2", always=True),
    Bug("each micro-batch divides by its own targets", ("huggingface/transformers#34191", "ml-explore/mlx-lm#1544", "meta-pytorch/torchtune#1917"),
        "Trainer with gradient accumulation", "accumulated gradients favour short rows; another batch size gives another loss",
        GPT2, instead(f"{STEP}.GlobalMeans", means(PARTS)), "verify", "loss", "pp2"),
    Bug("gradients of micro-batches summed, not averaged", ("deepspeedai/DeepSpeed#7773",),
        "DeepSpeed's pipeline with gradient accumulation", "the norm grows with the number of micro-batches",
        GPT2, instead(f"{STEP}.GlobalMeans", means(1)), "verify", "loss", "pp2"),
    Bug("loss divided by micro-batches once more", ("areal-project/AReaL#1273",),
        "AReaL on Megatron's pipeline", "a loss that is normalised already is divided again: gradients too small",
        GPT2, instead(f"{STEP}.GlobalMeans", means(PARTS * PARTS)), "verify", "loss", "pp2"),
    Bug("loss times tp", ("huggingface/transformers#45994", "huggingface/transformers#39674"),
        "Trainer with tp or ep beside dp", "the loss is scaled by all processes, also those that hold the same batch: 47.88 instead of 11.97",
        LLAMA, instead(f"{STEP}._loss", times(2)), "verify", "loss"),
    Bug("loss times the ranks that share a row", ("huggingface/transformers#46775", "NVIDIA/Megatron-LM#673"),
        "Trainer with sequence parallelism; Megatron-LM with context parallelism", "a count over all ranks is divided by ranks whose tokens are distinct",
        LLAMA, instead(f"{STEP}._loss", times(2)), "verify", "loss", "sp2"),
    Bug("gradient too small by the ranks that share a row", ("NVIDIA/Megatron-LM#906",),
        "Megatron-LM with context parallelism", "the loss reads right, its gradient is divided by their number",
        LLAMA, instead("slapo_zoo.model.dp.data_parallel.DataParallel.backward", lambda right: lambda self, loss: right(self, loss / 2)), "verify", "every gradient", "sp2"),
    Bug("gradients of a stage divided twice", ("deepspeedai/DeepSpeed#8154",),
        "DeepSpeed's pipeline with gradient accumulation", "each stage scales what the next has scaled already",
        GPT2, instead(f"{STEP}.reduce", divided_again), "verify", "transformer.h.0", "pp2"),
    Bug("only the last micro-batch trains", ("NVIDIA-NeMo/Automodel#3530",),
        "AutoModel's pipeline with accumulation and changing lengths", "stages are made anew between micro-batches, which drops what was accumulated; the loss looks fine",
        GPT2, instead("slapo_zoo.model.gradients.gradient_reducer.GradientReducer.last_backward", forgets), "verify", "transformer", "pp2"),
    Bug("tied weight: stages keep their own gradients", ("uw-syfi/piper#13",),
        "Piper, tied embeddings over a pipeline", "the embedding and the head each train on half of the gradient",
        GPT2, without(TIED), "verify", "transformer.wte", "pp2"),
    Bug("tied weight: stages of one dp rank keep their own gradients", ("NVIDIA/Megatron-LM#844",),
        "Megatron-LM, distributed optimizer with a shared embedding", "gradients are scattered over dp before stages add theirs: some ranks add parts",
        GPT2, without(TIED, lambda mesh: mesh.coord("dp") == 1), "verify", "lm_head", "pp2-dp2"),
    Bug("shared KV head: gradients not summed", ("bigcode-project/Megatron-LM#37",),
        "BigCode's Megatron-LM, multi-query attention under tp", "each rank's queries give a part: validation loss 3.74 instead of 2.64",
        LLAMA, without(REPLICAS), "verify", "model.layers.*.self_attn.v_proj", "tp2", (("num_key_value_heads", 1),)),
    Bug("norm counts replicas tp times", ("NVIDIA-NeMo/RL#3788", "ROCm/TransformerEngine#715"),
        "NeMo-RL's DTensor worker; Megatron-LM with multi-latent attention", "what tp ranks hold whole enters the norm once per rank: 1.36 to 1.52 times too large",
        LLAMA, instead(NORM, norm_with(replicas_each_time)), "verify", "norm", "tp2", (("intermediate_size", 16),)),
    Bug("norm leaves out what other ranks hold", ("NVIDIA/Megatron-LM#7452 (8)",),
        "Megatron Core with learnable attention sinks under tp", "a parameter with one entry per head is not marked as sharded: the norm has one rank's part",
        T5, instead(NORM, norm_with(own_part_of("relative_attention_bias"))), "verify", "norm"),
    Bug("norm of experts left to each rank", ("NVIDIA/Megatron-LM#5916", "NVIDIA-NeMo/Automodel#3817"),
        "Megatron-LM and AutoModel with experts over ranks", "each group clips the same dense weights by its own norm, up to ten times apart",
        MIXTRAL, instead(NORM, norm_with(own_part_of("experts"))), "guard", "clip_grad_norm_"),
    Bug("norm averaged over ranks of different parameters", ("deepspeedai/DeepSpeed#8475",),
        "DeepSpeed AutoEP with fp32 clipping", "ranks hold different experts, and their norms are averaged as if of replicas",
        MIXTRAL, instead(NORM, norm_with(averaged)), "verify", "norm"),
    Bug("gradient of the loss reaches one rank's logits alone", ("modelscope/ms-swift#9947",),
        "ms-swift, GRPO on Megatron with tp > 1", "the target's log-probability is summed by a collective without a gradient",
        GPT2, instead("slapo_zoo.kernels.loss.cross_entropy.gradient", only_where_the_target_is), "verify", "lm_head"),
    Bug("averages divide by all ranks", ("meta-pytorch/torchtune#2420 (gradients scaled by the world size)",),
        "torchtune with tp beside dp", "gradients are divided by dp times tp",
        BERT, instead("slapo_zoo.model.gradients.gradient_reducer.Buckets", by_all_ranks), "verify", "every gradient", "tp2-dp2"),
    Bug("router: gradients of scores not summed", ("huggingface/transformers#48205",),
        "transformers with experts over ranks", "each rank's scores have the gradient of its own experts: all before a block of experts loses the rest",
        MIXTRAL, scores(lambda x, summed: x), "guard", "model.layers.*.mlp.gate"),
    Bug("router: gradients of scores too large", ("huggingface/transformers#48687",),
        "transformers, batched_mm with experts over ranks", "the router's gradient is wrong, the loss right",
        MIXTRAL, scores(lambda x, summed: summed(2 * x - x.detach())), "verify", "model.layers.*.mlp.experts"),
    Bug("router detached from the loss", ("NVIDIA-NeMo/Automodel#2995",),
        "AutoModel with experts over ranks", "probabilities are gathered without a gradient: the router learns from its own loss alone",
        MIXTRAL, scores(lambda x, summed: x.detach()), "verify", "model.layers.*.mlp.gate"),
    Bug("a dp rank without targets", ("NVIDIA/Megatron-LM#1764",),
        "Megatron-LM with context parallelism, short padded data", "all tokens of a rank are masked out: loss and gradients are NaN",
        BERT, replace(instead(f"{STEP}.count_step", own_counts), training=HalfWithoutTargets), "verify", "loss", "dp2"),
    Bug("accumulated gradients scaled in each further step", ("pytorch/torchtitan#1733",),
        "torchtitan's pipeline with gradient accumulation", "scale_grads divides all that .grad holds: an average that forgets, not a sum",
        GPT2, replace(instead("slapo_zoo.language.gradients.only_new", halved), training=TwoSteps), "verify", "accumulated"),
    Bug("LoRA factor that sees a rank's tokens: gradient not summed", ("modelscope/mcore-bridge#173",),
        "mcore-bridge, LoRA with tp and sequence parallelism", "each tp rank trains another copy; the adapter that is exported is rank 0's",
        LLAMA, replace(instead("slapo_zoo.parallel.rank_plan.TensorPlan.sums", adapters_alone), training=WithLora), "guard", "lora_", "sp2", always=True),
    Bug("shards joined in another order in the file", ("EleutherAI/gpt-neox#880",),
        "GPT-NeoX, export of a tp 2 model", "the exported model loads and writes random text",
        GPT2, saved(in_other_order), "verify", "transformer"),
    Bug("fused projection joined rank by rank in the file", ("ndif-team/nnsight#719", "awslabs/slapo#46"),
        "nnsight over vLLM with tp; Slapo's own GPT-2", "q0 k0 v0 q1 k1 v1 instead of q k v: the right shape, another model",
        GPT2, saved(in_one_run), "verify", "transformer.h.*.attn.c_attn", always=True),
]  # fmt: skip
