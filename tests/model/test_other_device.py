"""Training on a device other than the CPU, over process groups that serve only this device, as nccl does.

Real numbers on real ranks (tests/support/other_device.py): a tensor on the wrong device is an error,
and every wait of the host for the device is counted.
"""

import warnings
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from heads import HEADS
from parity import Case, batch_of, tiny_config
from slapo_zoo.errors import SlapoError
from slapo_zoo.model.gradients import step_guard

FAMILIES = {
    "gpt2": "GPT2LMHeadModel", "bert": "BertForMaskedLM", "t5": "T5ForConditionalGeneration",
    "gpt_neo": "GPTNeoForCausalLM", "llama": "LlamaForCausalLM",
}  # fmt: skip
# each operation runs in Python
ONE_BLOCK = {"gpt2": (("n_layer", 1),), "bert": (("num_hidden_layers", 1),), "esm": (("num_hidden_layers", 1),)}  # fmt: skip


@pytest.fixture(scope="module")
def device_ranks():
    """Return a separate rank pool, since torch keeps a registered device for the rest of a process."""
    from ranks import RankPool

    pool = RankPool()
    yield pool
    pool.close()


def _model(family, layout, device, **options):
    from slapo_zoo import AutoScheduledModel

    found = Case(FAMILIES[family], ("tokens",)) if family in FAMILIES else HEADS[family][0]
    case = replace(
        found, dropout=options.pop("dropout", 0.0), config=options.pop("config", found.config)
    )
    config, _ = tiny_config(case)
    config.architectures = [case.cls]
    tp, pp, dp = layout[:3]
    sequence_parallel = layout[3:] == (True,)
    model = AutoScheduledModel.from_config(
        config, tp=tp, pp=pp, dp=dp, seed=0, device=device, sequence_parallel=sequence_parallel,
        **options,
    )  # fmt: skip
    rows = case.rows // dp
    part = slice(model.mesh.coord("dp") * rows, (model.mesh.coord("dp") + 1) * rows)
    batch = {k: v[part].to(device) for k, v in batch_of(case).items() if torch.is_tensor(v)}
    return model.train(), {**batch_of(case), **batch}


def _life(family, layout, device, folder):
    """Run all that a training does: steps, clipping, saving and resuming, evaluation, generation."""
    from slapo_zoo import broadcast_batch, load_checkpoint
    from slapo_zoo.model.checkpoints.training_checkpoint import async_save_checkpoint

    model, batch = _model(
        family, layout, device, config=() if layout[1] > 1 else ONE_BLOCK.get(family, ())
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    found = []
    for _ in range(2):
        found.append(float(model.train_step(batch, micro_batches=2)))
        found.append(float(model.clip_grad_norm_(1.0)))
        optimizer.step()
        optimizer.zero_grad()
    async_save_checkpoint(model, folder, optimizer, step=2).result()
    found.append(float(model.train_step(batch)))
    load_checkpoint(model, folder, optimizer)
    optimizer.zero_grad()
    found.append(float(model.train_step(batch)))
    assert found[-1] == found[-2]
    with torch.no_grad():
        output = model.eval()(**batch)
    found += [float(output.loss), float(output.logits[..., 0].sum())]
    shared = broadcast_batch(batch, model.mesh)
    assert torch.equal(shared["input_ids"].cpu(), batch["input_ids"].cpu())
    if layout[1] == 1 and family != "bert":
        ids = model.generate(input_ids=batch["input_ids"][:1], max_new_tokens=3, do_sample=False)
        found.append(float(ids.sum()))
    return found


def _on_both(family, layout, folder):
    from other_device import DEVICE, DeviceOnly, install

    install()  # before the first backward: torch counts its devices then
    on_cpu = _life(family, layout, "cpu", folder / "cpu")
    with warnings.catch_warnings(), DeviceOnly() as watch:
        warnings.simplefilter("ignore")  # torch warns about an experimental device
        found = _life(family, layout, DEVICE, folder / "device")
    return on_cpu, found, dict(watch.collectives)


LIVES = [("t5", (1, 2, 1)), ("bert", (2, 1, 1, True)), ("gpt2", (2, 1, 2)),
         *((family, layout) for family in FAMILIES for layout in [(1, 1, 2), (2, 1, 1), (1, 2, 2), (2, 2, 1)])]  # fmt: skip


@pytest.mark.parametrize(
    "family, layout",
    [pytest.param(*cell, marks=() if cell == ("gpt2", (2, 1, 1)) else pytest.mark.slow) for cell in LIVES],
)  # fmt: skip
def test_training_in_process_groups_without_cpu_backend_has_the_losses_of_cpu(
    device_ranks, tmp_path, family, layout
):
    world = layout[0] * layout[1] * layout[2]
    for on_cpu, found, collectives in device_ranks.run(_on_both, world, family, layout, tmp_path):
        assert sum(collectives.values()) > 4
        assert found == pytest.approx(on_cpu, rel=1e-4)


def _cpu_tensor_in_a_collective():
    import torch.distributed as dist

    from other_device import DeviceOnly, install

    install()
    with DeviceOnly():
        dist.all_reduce(torch.ones(2))


def test_collective_with_a_cpu_tensor_in_a_process_group_without_cpu_backend_raises(device_ranks):
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        device_ranks.run(_cpu_tensor_in_a_collective, 2)


def _scale_after_an_overflow_on_rank_1():
    import torch.distributed as dist

    from other_device import DEVICE, DeviceOnly, install
    from slapo_zoo.model.step.mixed_precision import MixedPrecision
    from slapo_zoo.parallel.mesh import Mesh

    install()
    with DeviceOnly():
        p = torch.nn.Parameter(torch.ones(2).to(DEVICE))
        p.grad = p.detach() * torch.inf if dist.get_rank() else None
        precision = MixedPrecision(torch.float16, scales=True)
        precision.unscale([p], Mesh(dp=2, rank=dist.get_rank()))
        return precision.scale


def test_rank_without_gradients_learns_of_an_overflow_in_a_process_group_without_cpu_backend(
    device_ranks,
):
    assert device_ranks.run(_scale_after_an_overflow_on_rank_1, 2) == [2.0**11] * 2


def _waits(family, layout, options):
    from other_device import DEVICE, DeviceOnly, install

    install()
    with warnings.catch_warnings(), DeviceOnly() as watch:
        warnings.simplefilter("ignore")
        model, batch = _model(family, layout, DEVICE, **options)
        model.input_check_interval = 0  # once in 16 steps it asks for the batches of all ranks
        model.train_step(batch)
        model.zero_grad()
        watch.waits.clear()
        watch.uncapturable.clear()
        model.train_step(batch)
        model.clip_grad_norm_(1.0)
    return dict(watch.waits), dict(watch.uncapturable)


WAITS = [("gpt2", (2, 1, 2), {"config": ONE_BLOCK["gpt2"]}), ("swin", (1, 1, 1), {"dropout": 0.1}),
         ("bert", (1, 1, 1), {"kernels": ["unpadded_encoder", "sparse_mlm_head_loss"]}),
         ("gpt2", (1, 1, 2), {"dp_shard": 2, "config": ONE_BLOCK["gpt2"]}),
         ("llama", (1, 2, 1), {"config": (("num_hidden_layers", 2),)})]  # fmt: skip
MORE_WAITS = [("gpt2", (2, 1, 2), {}), ("t5", (1, 1, 1), {}), ("falcon", (1, 1, 1), {}), ("whisper", (1, 1, 2), {}),
              ("gpt_neo", (1, 1, 1), {}), ("deberta-v2", (1, 1, 1), {})]  # fmt: skip
# A GPU has a kernel for the products of experts in bfloat16 alone, of rows of 16 bytes.
EXPERTS = {"dtype": torch.bfloat16, "config": (("intermediate_size", 32),)}
OPTIONS = {"mixtral": EXPERTS}
LAYOUTS = {"clip": (2, 1, 1)}  # its loss compares the rows of one batch
GRID = [(family, LAYOUTS.get(family, (2, 1, 2)), OPTIONS.get(family, {}))
        for family in HEADS if family != "gpt2"]  # fmt: skip


@pytest.mark.parametrize(
    "family, layout, options",
    [*WAITS, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in MORE_WAITS + GRID)],
)
def test_train_step_syncs_host_and_device_at_most_once_and_never_inside_layers(
    device_ranks, family, layout, options
):
    world = layout[0] * layout[1] * layout[2]
    for waits, uncapturable in device_ranks.run(_waits, world, family, layout, options):
        assert sum(waits.values()) <= 1, waits
        assert not uncapturable  # in what a CUDA graph would hold


def _waits_of_steps(family, layout, count):
    """Count how often the host waited for the device in each of `count` steps, of which the first two are all checked."""
    from other_device import DEVICE, DeviceOnly, install

    install()
    found = []
    few = patch.object(step_guard, "ALWAYS", 2)
    with warnings.catch_warnings(), few, DeviceOnly() as watch:
        warnings.simplefilter("ignore")
        model, batch = _model(family, layout, DEVICE, config=ONE_BLOCK[family])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(count):
            watch.waits.clear()
            optimizer.zero_grad()
            model.train_step(batch)
            optimizer.step()
            found.append(sum(watch.waits.values()))
    return found


@pytest.mark.parametrize(("family", "layout"), [("bert", (1, 1, 2)), pytest.param("gpt2", (2, 1, 2), marks=pytest.mark.slow)])  # fmt: skip
def test_train_steps_after_warm_up_sync_host_and_device_at_most_once(device_ranks, family, layout):
    world = layout[0] * layout[1] * layout[2]
    for found in device_ranks.run(_waits_of_steps, world, family, layout, 5):
        assert min(found[:2]) > 1 >= max(found[3:]), found


def _losses_of_cpu_batch(layout):
    from other_device import DEVICE, DeviceOnly, install

    install()
    with warnings.catch_warnings(), DeviceOnly():
        warnings.simplefilter("ignore")
        model, batch = _model("gpt2", layout, DEVICE, config=ONE_BLOCK["gpt2"])
        there = {name: x.cpu() for name, x in batch.items()}
        found = [float(model.train_step(one)) for one in (batch, there)]
        with pytest.raises(SlapoError, match=rf"input_ids: found a tensor on cpu.*{DEVICE}"):
            model(**there)
    return found


def test_train_step_moves_a_cpu_batch_to_the_model_device_and_a_forward_refuses_it(device_ranks):
    for on_device, on_cpu in device_ranks.run(_losses_of_cpu_batch, 2, (1, 1, 2)):
        assert on_cpu == on_device


# per step, the dp ranks whose loss reads the contact head of ESM, which its own loss leaves out
READ_BY = [(), (), (1,), (0, 1), (0,), (), (0, 1), (0, 1), (1,), ()]


def _read_by_some(device):
    from other_device import DeviceOnly, install

    install()
    found, watch = [], DeviceOnly()
    with warnings.catch_warnings(), nullcontext() if device == "cpu" else watch:
        warnings.simplefilter("ignore")
        model, batch = _model("esm", (1, 1, 2), device, config=ONE_BLOCK["esm"])
        model.input_check_interval = 0
        head, bias = model.esm.contact_head.regression.parameters()
        for ranks in READ_BY:
            model.zero_grad()
            watch.waits.clear()
            more = (head.sum() + bias.sum()) * 3 if model.mesh.rank in ranks else 0.0
            model.train_step(batch, loss_fn=lambda out, _: out.loss + more)  # noqa: B023
            waits = sum(watch.waits.values())
            found.append((None if head.grad is None else head.grad.sum().item(), waits))
    return tuple(zip(*found, strict=True))


def test_gradient_that_only_some_dp_ranks_have_is_averaged_with_no_extra_host_sync(device_ranks):
    from other_device import DEVICE

    on_cpu = device_ranks.run(_read_by_some, 2, "cpu")
    on_device = device_ranks.run(_read_by_some, 2, DEVICE)
    assert on_device[0][0] == on_device[1][0] == on_cpu[0][0] == on_cpu[1][0]
    assert [grad is not None for grad in on_cpu[0][0]] == [bool(ranks) for ranks in READ_BY]
    known = [False, *(len(ranks) < 2 for ranks in READ_BY)]  # True where some rank lacks a gradient
    for rank, (_, waits) in enumerate(on_device):
        pairs = zip(READ_BY, known, strict=False)
        assert list(waits) == [1 + (rank not in ranks and not asked) for ranks, asked in pairs]
