"""Every registered primitive: its effect, gradients on one and two ranks, an error, and JSON.

A primitive without a row in USES fails here. What is special about one is in its own test file.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from slapo_zoo import AutoScheduledModel, Mesh, Schedule, ScheduleError, build
from slapo_zoo.dispatch.kernel_registry import register_kernel
from slapo_zoo.hf.attention import register_attention
from slapo_zoo.hf.attention_backends import NAME
from slapo_zoo.language.directive import PRIMITIVES
from slapo_zoo.language.graph.traced import TracedModule
from slapo_zoo.language.schedule import from_json
from slapo_zoo.parallel.local_tensors import local_part
from slapo_zoo.zoo.apply import apply_table
from slapo_zoo.zoo.table import table_for
from small_modules import (
    Biased,
    Fusable,
    Multi,
    Normed,
    Sloped,
    biased,
    fusable,
    multi,
    normed,
    sloped,
)
from tiny_models import batch_for, tiny_model

LAYER = "bert.encoder.layer.0"
ACT = f"{LAYER}.intermediate.intermediate_act_fn"
INNER = f"{LAYER}.intermediate"


@register_kernel("gelu_of_tests")
def _install(site):
    site.module.forward = functional.gelu


# --- models and what they are compared by --------------------------------------------------------


def hf(family):
    """Return a tiny model without dropout whose attention is a `core_attn` module."""
    register_attention()
    model = tiny_model(family).train()
    model.set_attn_implementation(NAME)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for name in ("attention_probs_dropout_prob", "attn_pdrop"):
        if hasattr(model.config, name):
            setattr(model.config, name, 0.0)
    for module in model.modules():
        if isinstance(getattr(module, "attn_dropout", None), float):
            module.attn_dropout = 0.0
    return model


def seeded(make):
    torch.manual_seed(7)
    return make()


MODELS = {
    "bert": lambda: hf("bert"),
    "gpt2": lambda: hf("gpt2"),
    "mixtral": lambda: hf("mixtral"),
    "dropout": lambda: seeded(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 6))
    ),
    "norm": lambda: seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))),
    "fusable": lambda: seeded(lambda: nn.Sequential(nn.Linear(6, 6), Fusable())),
    "biased": lambda: seeded(lambda: nn.Sequential(nn.Linear(6, 6), Biased())),
    "normed": lambda: seeded(lambda: nn.Sequential(nn.Linear(6, 6), Normed())),
    "normed by torch": lambda: seeded(lambda: nn.Sequential(nn.Linear(6, 6), Normed(nn.RMSNorm))),
    "multi": lambda: seeded(lambda: nn.Sequential(nn.Linear(6, 6), Multi())),
    "sloped": lambda: seeded(lambda: nn.Sequential(nn.Linear(6, 6), Sloped())),
}


def batch_of(name, plain):
    if name in ("bert", "gpt2", "mixtral"):
        return batch_for(plain, 4, 12)
    generator = torch.Generator().manual_seed(3)
    shape = (4, 3, 5, 5) if name == "norm" else (4, 6)
    return {"input": torch.randn(shape, generator=generator)}


def step_of(model, batch):
    """Return the output, and the gradient of every parameter."""
    y = model(**batch)
    y = y if isinstance(y, torch.Tensor) else y.logits
    y = y + 0.0  # logits that are sharded over ranks: gathered
    y.sin().sum().backward()  # not constant after a BatchNorm, as squares are
    return y.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def divide_mlp(sch, before=lambda sch: None):
    """Shard the feed-forward of BERT over tp."""
    before(sch)
    sch["bert.encoder.layer.*.intermediate.dense"].shard("weight", 0).shard("bias", 0)
    sch["bert.encoder.layer.*.intermediate.dense"].sync("bwd_post", "all_reduce")
    sch["bert.encoder.layer.*.output.dense"].shard("weight", 1).sync("fwd_post", "all_reduce")
    return sch


# --- the uses ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Use:
    """One use of a primitive.

    Args:
        primitive: its name.
        use: applies it, with whatever must come before.
        effect: whether the model shows it.
        bad: a use that is an error.
        problem: what that error says.
        model: one of MODELS.
        variant: what is special.
        live: it holds a live object, so it cannot be written.
        mesh_dim: the one of size 2.
        reference: applied to the plain model too (random numbers of our own).
    """

    primitive: str
    use: Callable
    effect: Callable
    bad: Callable
    problem: str
    model: str = "bert"
    variant: str = ""
    live: bool = False
    mesh_dim: str = "tp"
    reference: Callable = lambda sch: None


def divided(then, before=lambda sch: None):
    return lambda sch: then(divide_mlp(sch, before))


def traced(then, path=INNER, leaves=()):
    """Shard, trace one module, and return its selection."""

    def use(sch):
        divide_mlp(sch)
        sch[path].trace(flatten=True, leaves=leaves)
        then(sch[path])

    return use


def table(family):
    return lambda sch: apply_table(sch, table_for(family))


class FusedQKV(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(96, 32)), nn.Parameter(torch.empty(96))

    def forward(self, x):
        return functional.linear(x, self.weight, self.bias).chunk(3, -1)


def gelu_node(part):
    return part.find(lambda node: getattr(node.target, "__name__", "") == "gelu")[0]


def tokens_divided(sch):
    """Shard the tokens: each rank normalises its own, so its gradient of the norm is a partial sum."""
    divide_mlp(sch)
    norm = sch[f"{LAYER}.output.LayerNorm"]
    norm.sync("fwd_pre", "RR->SR").sync("fwd_post", "SR->RR")
    norm.sum_gradient("weight").sum_gradient("bias")


def forked(sch):
    sch["1"].fork_rng()
    sch["2"].sync("bwd_post", "all_reduce")
    sch["2"].shard("weight", 0).shard("bias", 0).sync("fwd_post", "all_gather", tensor_parallel_output_grad=False)  # fmt: skip


def child(name, path=INNER):
    return lambda sch: any(key.startswith(name) for key in sch[path].child)


def has_forward(path):
    return lambda sch: "forward" in vars(sch[path].mod)


def halved(path, attribute, whole):
    return lambda sch: getattr(sch[path].mod, attribute) == whole // sch.mesh.tp


def call_count(sch):
    return sch[LAYER].mod._forward_hooks


USES = [
    Use("annotate", divided(lambda sch: sch[f"{INNER}.dense"].annotate("weight", "note", 7)),
        lambda sch: sch[f"{INNER}.dense"].mod.weight.note == 7,
        lambda sch: sch[ACT].annotate("weight", "note", 7), "no parameter 'weight'"),
    Use("checkpoint", divided(lambda sch: sch["bert.encoder.layer.*"].checkpoint()), has_forward(LAYER),
        lambda sch: sch[LAYER].checkpoint(policy="all"), "found policy 'all'"),
    Use("checkpoint", traced(lambda part: part.checkpoint("dense")), child("Checkpoint_0"),
        lambda sch: sch[ACT].checkpoint("dense"), "the module has no graph", variant="of a subgraph by name"),
    Use("checkpoint", traced(lambda part: part.checkpoint(part.find(lambda x: functional.gelu(x)))), child("Checkpoint_0"),
        lambda sch: sch[ACT].checkpoint("dense"), "the module has no graph", variant="of a pattern", live=True),
    Use("core_attention", table("bert"), child("core_attn", f"{LAYER}.attention.self"),
        lambda sch: sch[f"{LAYER}.attention.self"].core_attention(-1), "heads cannot be sharded"),
    Use("cut_pipeline_stage", divided(lambda sch: sch[LAYER].cut_pipeline_stage()), lambda sch: sch.state.cuts == [(LAYER, 0)],
        lambda sch: sch.cut_pipeline_stage(), "the whole model cannot be cut"),
    Use("decompose", divided(lambda sch: None, lambda sch: sch[f"{INNER}.dense"].decompose()),
        lambda sch: type(sch[f"{INNER}.dense"].mod).__name__ == "DecomposedLinear",
        lambda sch: sch[ACT].decompose(), "expected Linear or Conv1D"),
    Use("expert_parallel", table("mixtral"), halved("model.layers.0.mlp.experts", "num_experts", 4),
        lambda sch: sch["model.layers.0.mlp"].expert_parallel("nobody"), "expected an integer attribute 'nobody'", model="mixtral"),
    Use("fork_rng", forked, has_forward("1"),
        lambda sch: sch["1"].fork_rng(axis=-1), "cannot be sharded over tp", model="dropout", reference=lambda sch: sch["1"].fork_rng()),
    Use("fork_rng", forked, has_forward("1"),
        lambda sch: sch["1"].fork_rng(after="fc1", axis=-1), "expected the name of a child", model="dropout", reference=lambda sch: sch["1"].fork_rng(), variant="of a child that is not there"),
    Use("fuse", traced(lambda part: part.fuse("dense", compiler=None)), child("FusedModule_0"),
        lambda sch: sch[ACT].fuse("dense", compiler="tvm"), "found compiler 'tvm'", variant="grouping by name"),
    Use("fuse", traced(lambda part: part.fuse(part.find(lambda x: functional.gelu(x)), compiler="TorchScript")), child("FusedModule_0"),
        lambda sch: sch[ACT].fuse(), "found no argument subgraph=", variant="TorchScript", live=True),
    Use("hook", divided(lambda sch: sch[LAYER].hook("fw_post", lambda m, args, y: y)), call_count,
        lambda sch: sch[LAYER].hook("fw_past", print), "found mode 'fw_past'", live=True),
    Use("pipeline_split", divided(lambda sch: sch[LAYER].pipeline_split()), lambda sch: sch.state.cuts == [(LAYER, 0)],
        lambda sch: sch.pipeline_split(), "the whole model cannot be cut"),
    Use("replace", divided(lambda sch: sch[ACT].replace("gelu_of_tests")), has_forward(ACT),
        lambda sch: sch[ACT].replace("nobody"), "no kernel 'nobody'", variant="by a kernel"),
    Use("replace", divided(lambda sch: sch[ACT].replace(nn.GELU())), lambda sch: type(sch[ACT].mod) is nn.GELU,
        lambda sch: sch.replace(nn.GELU()), "the root of the model cannot be replaced", variant="by a module", live=True),
    Use("replace", traced(lambda part: part.replace(lambda input: functional.gelu(input), gelu_node(part))),
        lambda sch: "lambda" in sch[INNER].mod.code,
        lambda sch: sch[ACT].replace(functional.gelu, "dense"), "the module has no graph", variant="of one node", live=True),
    Use("replace", traced(lambda part: part.replace(nn.GELU(), part.find(lambda x: functional.gelu(x)))), child("GELU_0"),
        lambda sch: sch[ACT].replace("nobody", "dense"), "no kernel 'nobody'", variant="of a subgraph", live=True),
    Use("replace", traced(lambda part: part.replace(FusedQKV(), "query|key|value", carry=True), f"{LAYER}.attention.self"),
        child("FusedQKV_0", f"{LAYER}.attention.self"),
        lambda sch: sch[ACT].replace("nobody", "dense"), "no kernel 'nobody'", variant="of several subgraphs", live=True),
    Use("replace_all", divided(lambda sch: sch.replace_all("GELUActivation", "gelu_of_tests")), has_forward(ACT),
        lambda sch: sch.replace_all("Conv3d", "gelu_of_tests"), "no module of type 'Conv3d'"),
    Use("shard", divide_mlp, halved(f"{INNER}.dense", "out_features", 48),
        lambda sch: sch[f"{INNER}.dense"].shard("weight", 2), "found axis 2, expected 0..1"),
    Use("shard", multi, halved("1.qkv", "out_features", 12),
        lambda sch: sch["1.down"].shard("weight", 1, shared=4), "shared=4 on axis 1 of a Linear", model="multi", variant="of an end that all ranks use"),
    Use("shard_argument", sloped, lambda sch: sch.mesh.tp == 1 or len(sch["1.inner"].mod._forward_pre_hooks) == 2,
        lambda sch: Schedule(MODELS["sloped"](), Mesh(tp=4))["1.inner"].shard_argument("slopes", 3), "3 heads cannot be sharded over tp=4", model="sloped"),
    Use("shard_attribute", table("gpt2"), halved("transformer.h.0.attn", "num_heads", 4),
        lambda sch: sch["transformer.h.0.attn"].shard_attribute("nobody"), "expected an integer attribute 'nobody'", model="gpt2"),
    Use("sum_gradient", tokens_divided, lambda sch: sch.mesh.tp == 1 or f"{LAYER}.output.LayerNorm.bias" in sch.state.partial_gradients,
        lambda sch: sch[ACT].sum_gradient("weight"), "no parameter 'weight'"),
    Use("sync", tokens_divided, lambda sch: sch.mesh.tp == 1 or sch[f"{LAYER}.output.LayerNorm"].mod._forward_hooks,
        lambda sch: sch[ACT].sync("fwd_past", "all_reduce"), "found mode 'fwd_past'"),
    Use("sync_batch_norm", lambda sch: sch["1"].sync_batch_norm(), has_forward("1"),
        lambda sch: sch["0"].sync_batch_norm(), "expected BatchNorm2d", model="norm", mesh_dim="dp"),
    Use("sync_rms_norm", normed, lambda sch: sch.mesh.tp == 1 or "forward" in vars(sch["1.norm"].mod),
        lambda sch: sch["1.norm"].sync_rms_norm("eps"), "the module's weight is not sharded", model="normed"),
    Use("sync_rms_norm", normed, lambda sch: sch.mesh.tp == 1 or "forward" in vars(sch["1.norm"].mod),
        lambda sch: sch["1.norm"].sync_rms_norm(), "the module's weight is not sharded", model="normed by torch", variant="of torch"),
    Use("trace", traced(lambda part: None), lambda sch: isinstance(sch[INNER].mod, TracedModule),
        lambda sch: sch["bert.embeddings"].trace(leaves=(), example_inputs=()), "trace"),
    Use("trace_until", divided(lambda sch: sch.trace_until([LAYER])), lambda sch: isinstance(sch["bert.encoder"].mod, TracedModule),
        lambda sch: sch.trace_until("bert.nobody"), "no module 'bert.nobody' below this one"),
    Use("unfused", fusable, lambda sch: sch.mesh.tp == 1 or "forward" in vars(sch["1"].mod),
        lambda sch: Schedule(nn.Sequential(nn.Dropout(0.1)))["0"].unfused(), "the module applies a dropout itself", model="fusable"),
    Use("vocab_bias", biased, lambda sch: sch.mesh.tp == 1 or "forward" in vars(sch["1"].mod),
        lambda sch: sch["1"].vocab_bias("decoder"), "the parameter bias is not sharded", model="biased"),
]  # fmt: skip
INDEX = {f"{use.primitive} {use.variant}".strip(): use for use in USES}
OURS = {n for n, cls in PRIMITIVES.items() if cls.__module__.startswith("slapo_zoo.")}


def test_every_schedule_primitive_has_a_row_in_the_table_of_tests():
    assert {use.primitive for use in USES} == OURS, "add a row to USES"
    assert len(INDEX) == len(USES)


# --- the tests -----------------------------------------------------------------------------------


def compare(key, n=1):
    """Compare effect, output and every gradient with the plain model, on one rank."""
    use = INDEX[key]
    rank = dist.get_rank() if n > 1 else 0
    plain, sch = (
        MODELS[use.model](),
        Schedule(MODELS[use.model](), Mesh(rank=rank, **{use.mesh_dim: n})),
    )
    use.reference(Schedule(plain))
    batch = batch_of(use.model, plain)
    want, wanted = step_of(plain, batch)
    use.use(sch)
    assert use.effect(sch)
    state = sch.state
    rows = {k: v.chunk(n)[rank] for k, v in batch.items()} if use.mesh_dim == "dp" else batch
    found, grads = step_of(build(sch), rows)
    torch.testing.assert_close(found, want.chunk(n)[rank] if use.mesh_dim == "dp" else want)
    carried = {name for name in grads if "FusedQKV" in name}
    assert grads.keys() - carried == wanted.keys() & grads.keys()
    assert len(wanted.keys() - grads.keys()) == 3 * len(carried)
    for name in sorted(grads.keys() - carried):
        grad, whole = grads[name], wanted[name]
        if n > 1 and use.mesh_dim == "dp":
            dist.all_reduce(grad)
        if placed := state.placed.get(name):
            whole = local_part(whole, placed.placement, n, rank)
        torch.testing.assert_close(grad, whole, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("key", INDEX)
def test_every_schedule_primitive_keeps_outputs_and_gradients_on_one_rank(key):
    compare(key)


@pytest.mark.parametrize("key", INDEX)
def test_every_schedule_primitive_keeps_outputs_and_gradients_on_two_ranks(key, ranks):
    ranks.run(compare, 2, key, 2)


def stages(primitive, pp):
    config = hf("bert").config
    config.architectures = ["BertForMaskedLM"]
    use = [(LAYER, PRIMITIVES[primitive]())] if pp > 1 else []
    model = AutoScheduledModel.from_config(config, pp=pp, seed=0, schedule=use)
    ids = torch.arange(4 * 12).view(4, 12) + 3
    loss = model.train_step({"input_ids": ids, "labels": ids}, micro_batches=2)
    return loss, model.consolidated_state_dict(grads=True)


@pytest.mark.parametrize("primitive", ["cut_pipeline_stage", "pipeline_split"])
def test_pipeline_cut_over_two_ranks_keeps_loss_and_gradients(primitive, ranks):
    want, wanted = stages(primitive, 1)
    for loss, grads in ranks.run(stages, 2, primitive, 2):
        torch.testing.assert_close(loss, want)
        for name, grad in grads.items():  # on rank 0; {} elsewhere
            torch.testing.assert_close(grad, wanted[name], atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("key", INDEX)
def test_every_schedule_primitive_that_fails_leaves_the_model_unchanged(key):
    use = INDEX[key]
    sch = Schedule(MODELS[use.model]())
    before = {path: type(module) for path, module in sch.model.named_modules()}
    with pytest.raises(ScheduleError, match=use.problem) as caught:
        use.bad(sch)
    assert caught.value.hint
    assert caught.value.problem
    assert sch.history == []
    assert {path: type(module) for path, module in sch.model.named_modules()} == before


@pytest.mark.parametrize("key", INDEX)
def test_schedule_primitives_replay_equally_from_json_unless_they_hold_python_objects(key):
    """The schedule stays the same when written, read and replayed; a live Python object is refused with a reason."""
    use = INDEX[key]
    sch = Schedule(MODELS[use.model]())
    use.use(sch)
    if use.live:
        with pytest.raises(ScheduleError, match="cannot be written") as caught:
            sch.to_json()
        assert f"{use.primitive}(" in str(caught.value)
        return
    again = Schedule(MODELS[use.model]()).replay(from_json(sch.to_json()))
    assert str(again) == str(sch)
    assert again.to_json() == sch.to_json()
    assert use.effect(again)
