"""Blocks of scheduled models under torch.compile(fullgraph=True): one graph each, equal to eager.

With dropout a graph takes the position of the random stream as an input.
"""

import warnings
from dataclasses import replace

import pytest
import torch

from heads import HEADS
from parity import batch_of, tiny_config
from slapo_zoo.parallel.rng.layout_independent_random import RandomStream

CHEAP = {("gpt2", 1), ("gpt2", 2), ("t5", 1)}


DEPTHS = (
    "n_layer",
    "n_layers",
    "num_hidden_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
)
KINDS = {"t5": 4}  # graphs of like blocks: in each stack the first makes the bias of positions


def _blocks(model):
    """The blocks of all stacks."""
    found = {}
    for name, module in model.named_modules():
        parent, _, last = name.rpartition(".")
        is_list = last.isdigit() and isinstance(model.get_submodule(parent), torch.nn.ModuleList)
        inside = any(name.startswith(f"{block}.") for block in found)
        if is_list and not inside and type(module).__name__ != "SwinStage":  # a list of blocks
            found[name] = module
    return list(found.values())


def _model(family, tp, changes=(), **options):
    from slapo_zoo import AutoScheduledModel

    case = HEADS[family][0]
    config, _ = tiny_config(replace(case, dropout=0.25))
    for name, value in changes:
        setattr(config, name, value)
    config.architectures = [case.cls]
    options = {"kernels": "auto", **options}
    model = AutoScheduledModel.from_config(config, tp=tp, seed=0, **options)
    return model.train(), batch_of(case)


def _steps(family, tp, compiled, micro_batches=1, fullgraph=True, **options):
    model, batch = _model(family, tp, **options)
    blocks = _blocks(model) if compiled else []
    assert blocks or not compiled
    for block in blocks:
        block.compile(backend="aot_eager", fullgraph=fullgraph)
    losses = [float(model.train_step(batch, micro_batches=micro_batches))]
    with torch._dynamo.config.patch(error_on_recompile=True):  # from step to step
        losses.append(float(model.train_step(batch, micro_batches=micro_batches)))
    assert losses[0] != losses[1] or not _drops(model), "the masks of a step are those of another"
    return losses, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _drops(model):
    return any(isinstance(m, torch.nn.Dropout) and m.p for m in model.modules())


def _both(family, tp, on_device=False, options=()):
    options = dict(options)
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if on_device:  # masks are hashed from seeds where they are used
            patch.setattr(RandomStream, "draws_in_blocks", staticmethod(lambda device: False))
        eager = _steps(family, tp, compiled=False, **options)
        return eager, _steps(family, tp, compiled=True, **options)


def _assert_equal(pairs):
    for eager, compiled in pairs:
        assert compiled[0] == pytest.approx(eager[0], rel=1e-6)
        assert compiled[1].keys() == eager[1].keys()
        for name, wanted in eager[1].items():
            assert torch.allclose(compiled[1][name], wanted, rtol=1e-4, atol=1e-6), name


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "family, tp",
    [pytest.param(family, tp, marks=() if (family, tp) in CHEAP else pytest.mark.slow)
     for family in HEADS for tp in (1, 2)],
)  # fmt: skip
def test_compiled_block_has_the_loss_and_gradients_of_the_uncompiled_block(ranks, family, tp):
    _assert_equal(ranks.run(_both, tp, family, tp))


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5", "deberta-v2", "bart", "swin"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.slow
def test_compiled_block_draws_the_dropout_masks_of_the_uncompiled_block(ranks, family, tp):
    _assert_equal(ranks.run(_both, tp, family, tp, True))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("on_device", [False, True])
def test_recomputed_compiled_block_draws_the_dropout_masks_of_its_first_forward(ranks, on_device):
    """At the time of recomputation the random stream is already at the next micro-batch."""
    options = {"checkpoint_ratio": 1.0, "micro_batches": 2}
    _assert_equal(ranks.run(_both, 1, "gpt2", 1, on_device, options))


ON_RANKS = {  # ranks, family, options
    "stages": (2, "gpt2", {"pp": 2, "micro_batches": 2}),
    "a table from stage to stage": (
        2, "t5", {"pp": 2, "micro_batches": 4, "pipeline_order": "interleaved_1f1b", "checkpoint_ratio": 1.0},
    ),
    "weights gathered between graphs": (2, "bert", {"dp": 2, "dp_shard": 2, "fullgraph": False}),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_RANKS)
@pytest.mark.slow
def test_compiled_blocks_on_several_ranks_have_the_gradients_of_uncompiled_blocks(ranks, name):
    count, family, options = ON_RANKS[name]
    _assert_equal(ranks.run(_both, count, family, 1, False, options))


def _graphs(family, tp, blocks):
    torch._dynamo.reset()
    model, batch = _model(family, tp, [(name, blocks) for name in DEPTHS])
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = _blocks(model)
    for block in compiled:
        block.compile(backend=backend, fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.train_step(batch)
    return len(compiled), len(graphs)


@pytest.mark.parametrize("family, tp", [
    ("gpt2", 2), *(pytest.param(f, tp, marks=pytest.mark.slow) for f, tp in (("bert", 1), ("bart", 2), ("t5", 2), ("llama", 2), ("opt", 1))),
])  # fmt: skip
def test_identical_transformer_blocks_share_one_compiled_graph(ranks, family, tp):
    """torch.compile recompiles one function at most eight times."""
    for blocks, graphs in ranks.run(_graphs, tp, family, tp, 10):
        assert blocks >= 10
        assert graphs == KINDS.get(family, blocks // 10)
