"""Blocks of scheduled models under torch.compile(fullgraph=True): one graph each, equal to eager.

With dropout: a graph takes the place of the random stream as an input.
"""

import warnings
from dataclasses import replace

import pytest
import torch

from heads import HEADS
from parity import batch_of, tiny_config
from slapo_zoo.parallel.random_stream import RandomStream

CHEAP = {("gpt2", 1), ("bert", 1), ("bart", 1), ("falcon", 2), ("t5", 1)}


def _blocks(model):
    """The first block of each stack."""
    found = {}
    for name, module in model.named_modules():
        parent, _, last = name.rpartition(".")
        is_list = last == "0" and isinstance(model.get_submodule(parent), torch.nn.ModuleList)
        if is_list and type(module).__name__ != "SwinStage":  # of blocks
            found[parent] = module
    outer = [p for p in found if not any(p.startswith(f"{q}.") for q in found)]
    return [found[p] for p in outer]


def _steps(family, tp, compiled, micro_batches=1, **options):
    from slapo_zoo import AutoScheduledModel

    case = HEADS[family][0]
    config, _ = tiny_config(replace(case, dropout=0.25))
    config.architectures = [case.cls]
    model = AutoScheduledModel.from_config(config, tp=tp, seed=0, kernels="auto", **options).train()
    blocks = _blocks(model) if compiled else []
    assert blocks or not compiled
    for block in blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    losses = [float(model.train_step(batch_of(case), micro_batches=micro_batches))]
    with torch._dynamo.config.patch(error_on_recompile=True):  # from step to step
        losses.append(float(model.train_step(batch_of(case), micro_batches=micro_batches)))
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


@pytest.mark.parametrize(
    "family, tp",
    [pytest.param(family, tp, marks=() if (family, tp) in CHEAP else pytest.mark.slow)
     for family in HEADS for tp in (1, 2)],
)  # fmt: skip
def test_a_block_is_one_graph(ranks, family, tp):
    _assert_equal(ranks.run(_both, tp, family, tp))


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5", "deberta-v2", "bart", "swin"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.slow
def test_masks_of_seeds(ranks, family, tp):
    _assert_equal(ranks.run(_both, tp, family, tp, True))


@pytest.mark.parametrize("on_device", [False, True])
def test_what_is_recomputed_draws_its_own_masks(ranks, on_device):
    """The stream has gone on to the second micro-batch, or the next stage's, by then."""
    options = {"checkpoint_ratio": 1.0, "micro_batches": 2}
    _assert_equal(ranks.run(_both, 1, "gpt2", 1, on_device, options))
