"""Staging buffers: tensors of all placements arrive complete through much smaller buffers."""

import pytest
import torch
from safetensors.torch import save_file

from shards import assert_same, local_tensors, model
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.weights import load_rank_slices
from slapo_zoo.weights.device_copy import DeviceCopy
from slapo_zoo.weights.folder import open_checkpoint
from slapo_zoo.weights.load_memory import Target
from slapo_zoo.weights.load_rank_slices import load_tensors


def load_onto(device, folder, mesh):
    """Load tensors of all placements by the function that loads models."""
    specs, full = model()
    save_file(full, folder / "model.safetensors")
    expected = local_tensors(specs, full, mesh)
    by_name = {spec.name: spec for spec in specs}
    targets = {
        name: Target(
            torch.empty_like(t, device=device), by_name[name].shape, by_name[name].placement
        )
        for name, t in expected.items()
    }
    with open_checkpoint(folder) as files:
        load_tensors(targets, files, {name: name for name in targets}, mesh)
    assert_same({name: target.tensor.cpu() for name, target in targets.items()}, expected)


@pytest.mark.parametrize("mesh", [Mesh(2, 2, rank=r) for r in range(4)], ids=lambda m: m.rank)
def test_weights_loaded_through_staging_buffers_equal_the_file_for_every_sharding(
    tmp_path, monkeypatch, mesh
):
    """The buffers work on the CPU too: `load_tensors` copies through them as it would for a GPU."""
    copies, cpu = [], torch.device("cpu")
    monkeypatch.setattr(
        load_rank_slices,
        "_copy",
        lambda *args: copies.append(args) or DeviceCopy(cpu, size=96).fill(*args),
    )
    load_onto(cpu, tmp_path, mesh)
    assert copies


def test_copy_to_the_device_casts_tensors_to_the_parameter_dtype():
    source, target = torch.randn(5, 7)[:, 1:6], torch.empty(5, 5, dtype=torch.bfloat16)
    DeviceCopy(torch.device("cpu"), size=32).fill(target, 1, [source[:, :2], source[:, 2:]])
    assert torch.equal(target, source.bfloat16())


def test_staging_buffers_wait_for_the_stream_of_the_device_they_copy_to(monkeypatch):
    """On another GPU's stream the wait ended before the copy did, and the next tensor overwrote the buffer."""
    events = []

    class Stream:
        def __init__(self, device=None):
            self.device = device

        def record_event(self):
            events.append(self.device)
            return self

        def synchronize(self):
            events.append("waited")

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    copy = DeviceCopy(torch.device("cpu"), size=32)
    copy._device, copy._cuda = torch.device("cuda", 1), True
    copy.fill(torch.empty(6, dtype=torch.int64), 0, [torch.arange(6)])
    copy.finish()
    assert events == [torch.device("cuda", 1)] * 2 + ["waited"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("mesh", [Mesh(2, 2, rank=r) for r in range(4)], ids=lambda m: m.rank)
def test_weights_loaded_onto_a_gpu_equal_the_file(tmp_path, mesh):
    load_onto(torch.device("cuda"), tmp_path, mesh)


@pytest.mark.gpu
def test_staging_buffers_are_not_refilled_before_the_copy_completes():
    device = torch.device("cuda")
    source = torch.arange(1 << 22, dtype=torch.int64)
    target = torch.empty_like(source, device=device)
    copy = DeviceCopy(device, size=1 << 16)
    copy.fill(target, 0, [source])
    copy.finish()
    assert torch.equal(target.cpu(), source)
    assert copy._buffers[0].is_pinned()
