"""Wide ResNet against one plain process: every gradient, the running statistics, and real images."""

import warnings
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from parity import EPS, LAYOUTS, LEARNING_RATE, ROWS, STEPS, Result, assert_close, compare
from slapo_zoo import AutoScheduledModel, Mesh, Schedule
from slapo_zoo.errors import ArchitectureError, ScheduleError
from slapo_zoo.hf import models as hf
from slapo_zoo.hf.own.wideresnet import SIZES, WideResNetConfig, WideResNetForImageClassification
from slapo_zoo.pipeline.orders import ORDERS
from slapo_zoo.zoo.apply import apply_table
from slapo_zoo.zoo.options import BuildOptions
from slapo_zoo.zoo.table import table_for
from tiny_configs import TINY

GRID = [layout for layout in LAYOUTS if not layout.endswith("-sp")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("wideresnet"))


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Return a model with 8 blocks, one per stage of interleaved orders on four ranks."""
    return make(tmp_path_factory.mktemp("deep"), depths=(2, 4, 2))


def make(folder, **changes):
    torch.manual_seed(0)
    model = WideResNetForImageClassification(WideResNetConfig(**TINY["wideresnet"] | changes))
    with torch.no_grad():
        for p in [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]:
            p.add_(torch.rand_like(p) * 0.05)  # no norm is 1 and 0
    model.save_pretrained(folder)
    return folder


def batch_of(step, dtype=torch.float32, rows=ROWS):
    g = torch.Generator().manual_seed(100 + step)
    pixels = torch.randn(rows, 3, 12, 12, generator=g) * 2 + 1
    return {"pixel_values": pixels.to(dtype), "labels": torch.randint(3, (rows,), generator=g)}


def parts_of(batch, count):
    parts = zip(*(value.tensor_split(count) for value in batch.values()), strict=True)
    return [dict(zip(batch, part, strict=True)) for part in parts]


def tensors(model):
    floating = {n: b for n, b in model.named_buffers() if b.is_floating_point()}
    return {n: t.detach().clone() for n, t in [*model.named_parameters(), *floating.items()]}


@cache
def plain(folder, dtype, channels_last, micro_batches=1, rows=ROWS):
    model = WideResNetForImageClassification.from_pretrained(
        folder, dtype=dtype, channels_last=channels_last
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, eps=EPS)
    outputs = {"before": model.eval()(**batch_of(0, dtype, rows)).logits.detach()}
    model.train()
    losses, norms, grads = [], [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=dtype)
        for part in parts_of(batch_of(step, dtype, rows), micro_batches):
            term = model(**part).loss / micro_batches
            term.backward()
            loss += term.detach()
        grads = grads or {n: p.grad.clone() for n, p in model.named_parameters()}
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        losses.append(float(loss))
    outputs["after"] = model.eval()(**batch_of(0, dtype, rows)).logits.detach()
    outputs["loss"] = torch.tensor(losses[0], dtype=dtype)
    return Result(outputs["loss"], outputs, grads, norms[0], losses, tensors(model))


def scheduled(folder, layout, micro_batches, rows, options):
    # torch's convolutions may give a gradient with its channels last; it says so once per process
    warnings.filterwarnings("ignore", message="grad and param do not obey")
    tp, pp, dp = layout
    model = AutoScheduledModel.from_pretrained(
        folder, tp=tp, pp=pp, dp=dp, micro_batches=micro_batches, **options
    )
    dtype = options.get("dtype", torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, eps=EPS)
    outputs = {"before": model.eval()(**batch_of(0, dtype, rows)).logits.detach()}
    model.train()
    losses, norms, grads = [], [], {}
    for step in range(STEPS):
        part = parts_of(batch_of(step, dtype, rows), dp)[model.mesh.coord("dp")]
        optimizer.zero_grad()
        losses.append(float(model.train_step(part)))
        if step == 0:
            grads = model.consolidated_state_dict(grads=True)
        norms.append(model.clip_grad_norm_(1.0))
        optimizer.step()
    outputs["after"] = model.eval()(**batch_of(0, dtype, rows)).logits.detach()
    outputs["loss"] = torch.tensor(losses[0], dtype=dtype)
    full = model.consolidated_state_dict()
    grads = {n: g for n, g in grads.items() if "num_batches" not in n}
    counted = {int(full.pop(n)) for n in list(full) if n.endswith("num_batches_tracked")}
    return Result(outputs["loss"], outputs, grads, norms[0], losses, full), counted


def check(folder, threads, layout, micro_batches=1, rows=ROWS, **options):
    parts = micro_batches, rows
    truth = plain(folder, torch.float64, False, *parts)
    plains = [plain(folder, torch.float32, last, *parts) for last in (True, False)]
    world = layout[0] * layout[1] * layout[2]
    results = threads.run(scheduled, world, folder, layout, *parts, options)
    found, counted = results[0]
    assert counted == {STEPS * micro_batches}
    compare(found, plains, truth)
    for name in truth.weights:
        if "running" in name:
            assert_close(name, lambda r: r.weights[name], found, plains, truth)  # noqa: B023
    for other, _ in results:  # the first is compared with the truth above
        assert other.losses == pytest.approx(found.losses, rel=1e-6)


def check_order(folder, threads, layout, micro_batches, rows, **options):
    """Compare in fp64: in fp32 one ReLU input is so near 0 that CPUs round it differently."""
    truth = plain(folder, torch.float64, False, micro_batches, rows)
    options = {**options, "dtype": torch.float64}
    world = layout[0] * layout[1] * layout[2]
    for found, counted in threads.run(
        scheduled, world, folder, layout, micro_batches, rows, options
    ):
        assert counted <= {STEPS * micro_batches}
        assert found.losses == pytest.approx(truth.losses, rel=1e-6)  # told in fp32
        found.outputs.pop("loss")
        for name in ("outputs", "grads", "weights"):
            pairs = getattr(found, name), getattr(truth, name)
            assert pairs[0].keys() <= pairs[1].keys()
            for key, tensor in pairs[0].items():
                assert torch.allclose(tensor, pairs[1][key], rtol=1e-8, atol=1e-10), (name, key)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", GRID)
def test_wideresnet_on_a_mesh_has_the_losses_and_gradients_of_one_process(folder, threads, layout):
    check(folder, threads, LAYOUTS[layout])


@pytest.mark.parametrize("layout", [pytest.param((1, 1, 1), marks=pytest.mark.slow), (2, 2, 1)])
def test_wideresnet_with_micro_batches_has_the_gradients_of_gradient_accumulation(
    folder, threads, layout
):
    check(folder, threads, layout, micro_batches=2)


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 2)])
def test_wideresnet_with_recomputation_has_the_losses_and_batch_norm_statistics_of_one_process(
    folder, threads, layout
):
    check(folder, threads, layout, checkpoint_ratio=1.0)


GRID_OF_ORDERS = [(order, pp) for order in ORDERS for pp in (2, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("order", "pp"), GRID_OF_ORDERS)
def test_wideresnet_in_every_pipeline_order_has_the_gradients_of_gradient_accumulation(
    deep, threads, order, pp
):
    count = 8 if (order, pp) == ("dualpipev", 4) else 4
    check_order(deep, threads, (1, pp, 1), count, 8, pipeline_order=order)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_wideresnet_in_pipeline_orders_with_tp_has_the_gradients_of_gradient_accumulation(
    deep, threads, order
):
    check_order(deep, threads, (2, 2, 1), 4, 8, pipeline_order=order)


def test_wideresnet_with_split_backward_has_the_gradients_of_gradient_accumulation(deep, threads):
    check_order(deep, threads, (1, 2, 1), 4, 8, pipeline_order="zbv")


def unsaid(folder):
    model = AutoScheduledModel.from_pretrained(folder, pp=2).train()
    with pytest.warns(UserWarning, match="one is used, as in one process"):
        return float(model.train_step(batch_of(0)))


def test_wideresnet_batch_norm_uses_statistics_over_all_dp_ranks_by_default(folder, ranks):
    want = plain(folder, torch.float64, False).losses[0]
    assert ranks.run(unsaid, 2, folder) == pytest.approx([want] * 2, rel=1e-5)


def uneven_rows(folder):
    model = AutoScheduledModel.from_pretrained(folder, dp=2).train()
    batch = batch_of(0)
    first = model.mesh.coord("dp") == 0
    model.train_step({k: v[:1] if first else v[1:] for k, v in batch.items()})
    return model.consolidated_state_dict(grads=True), model.consolidated_state_dict()


def test_wideresnet_on_dp_ranks_with_different_batch_sizes_has_the_gradients_of_one_process(
    folder, threads
):
    plain = WideResNetForImageClassification.from_pretrained(folder).train()
    plain(**batch_of(0)).loss.backward()
    grads, weights = threads.run(uneven_rows, 2, folder)[0]
    for name, p in plain.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-4, atol=1e-5)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(weights[name], buffer, rtol=1e-5, atol=1e-6)


def save(folder, out):
    model = AutoScheduledModel.from_pretrained(folder, tp=2, pp=2)
    model.save_pretrained(out)


def test_wideresnet_saved_on_a_mesh_has_the_bits_of_the_loaded_checkpoint(
    folder, threads, tmp_path
):
    threads.run(save, 4, folder, tmp_path / "out")
    want, found = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert found.keys() == want.keys()
    assert all(torch.equal(found[key], want[key]) for key in want)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("wide_resnet50_2", 68.88324), ("wide_resnet101_2", 126.886696), ("wideresnet-250M", 250.3),
     ("wideresnet-1.3B", 1258.7), ("wideresnet-2.6B", 2602.0)],
)  # fmt: skip
def test_wideresnet_configs_by_name_have_the_published_parameter_counts(name, millions):
    with torch.device("meta"):
        model = WideResNetForImageClassification(WideResNetConfig.named(name))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(millions * 1e6, rel=1e-3)
    assert name in SIZES
    assert {"layer1.0.downsample.1.running_var", "layer3.5.bn2.weight", "fc.bias"} <= set(
        model.state_dict()
    )


def test_wideresnet_channels_not_divisible_by_tp_raise(folder):
    from slapo_zoo.parallel.mesh import Mesh
    from slapo_zoo.zoo.outline import Outline

    config = WideResNetConfig.from_pretrained(folder)
    with pytest.raises(ScheduleError, match=r"size 12 is not a multiple of mesh_dim tp=5"):
        Outline(config, None, Mesh(tp=5), torch.float32)


def digits(ratio=0.8):
    datasets = pytest.importorskip("sklearn.datasets")
    found = datasets.load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 8 - 1  # [1797, 1, 8, 8]
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    cut = int(ratio * len(images))
    return images[order], torch.tensor(found.target)[order], cut


def train_on_digits(steps, rows=32):
    images, labels, cut = digits()
    config = WideResNetConfig(
        num_channels=1, depths=(1, 1), stem_channels=16, num_labels=10, small_images=True
    )
    config.architectures = ["WideResNetForImageClassification"]
    model = AutoScheduledModel.from_config(config, tp=2, dp=2, seed=0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step in range(steps):
        first = (2 * step + model.mesh.coord("dp")) * rows % (cut - rows)
        part = slice(first, first + rows)
        optimizer.zero_grad()
        losses.append(
            float(model.train_step({"pixel_values": images[part], "labels": labels[part]}))
        )
        model.clip_grad_norm_(1.0)
        optimizer.step()
    with torch.no_grad():
        found = model.eval()(pixel_values=images[cut:]).logits.argmax(-1)
    return losses, float((found == labels[cut:]).float().mean())


@pytest.mark.slow
def test_wideresnet_on_four_ranks_reaches_85_percent_accuracy_on_handwritten_digits(threads):
    (losses, right), *others = threads.run(train_on_digits, 4, 40)
    assert losses[0] > 1.8
    assert sum(losses[-5:]) / 5 < 0.7
    assert right > 0.85
    assert all(accuracy == right for _, accuracy in others)


def test_wideresnet_with_sequence_parallelism_is_refused():
    """Images have no token axis to shard."""
    config = WideResNetConfig(**TINY["wideresnet"])
    model = hf.build_on_meta(WideResNetForImageClassification, config, torch.float32)
    with pytest.raises(ArchitectureError, match="no rule that shards tokens"):
        apply_table(
            Schedule(model, Mesh(tp=2)),
            table_for("wideresnet"),
            BuildOptions(sequence_parallel=True),
        )
