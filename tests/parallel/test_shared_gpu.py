"""Pipeline stages that share a GPU: their process group is gloo, which cannot send CUDA tensors."""

import pytest
import torch

from slapo_zoo.errors import MeshError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.zoo.argument_values import check_shared_gpu


def test_stages_on_gpus_without_nccl_are_refused_before_anything_is_sent(gloo):
    check_shared_gpu("from_config", Mesh(pp=2), "cpu")
    check_shared_gpu("from_config", Mesh(tp=2), "cuda")
    with pytest.raises(
        MeshError, match=r"pp=2: found device='cuda:0' with gloo.*\n.*device=\"cpu\""
    ):
        check_shared_gpu("from_config", Mesh(pp=2), torch.device("cuda", 0))


@pytest.fixture
def gloo():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
