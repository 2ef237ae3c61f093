"""Gathering of unsharded tensors from all ranks: every dtype and shape arrives as it was."""

import torch

from slapo_zoo import Mesh, emulate
from slapo_zoo.parallel.gather import gather
from slapo_zoo.parallel.placement import TensorSpec

TENSORS = {
    "empty": torch.zeros(0, 3), "bool": torch.tensor([True, False]), "scalar": torch.tensor(3), "turned": torch.arange(6.0).view(2, 3).t(),
    "complex": torch.tensor([1 + 2j]).conj(), "bf16": torch.ones(2, dtype=torch.bfloat16), "fp8": torch.ones(2).to(torch.float8_e4m3fn),
}  # fmt: skip


def gathered():
    mesh = Mesh(2, rank=torch.distributed.get_rank())
    specs = [TensorSpec(name, tuple(x.shape), str(x.dtype)[6:]) for name, x in TENSORS.items()]
    return gather(TENSORS, specs, mesh)


def test_gathered_tensors_of_every_dtype_and_shape_arrive_unchanged():
    """Their bytes are sent, not torch's pickles."""
    first, second = emulate(gathered, mesh=(2, 1, 1))
    assert second == {}
    assert first.keys() == TENSORS.keys()
    for name, x in TENSORS.items():
        assert (first[name].shape, first[name].dtype) == (x.shape, x.dtype)
        assert first[name].tolist() == x.tolist()
