"""Graphs whose backward runs in parts, or never, are freed: autograd's saved tensors do not keep them alive."""

import gc

import pytest
import torch

from cut_rows import case_of, rows_of
from parity import tiny_config
from slapo_zoo import AutoScheduledModel, emulate
from slapo_zoo.parallel.live_bytes import LiveBytes
from slapo_zoo.parallel.made_again import saving

LAYOUTS = [
    ({"cp": 2}, (1, 1, 2)),
    ({"dp_shard": 2, "dp": 2}, (1, 1, 2)),
    ({"tp": 2, "checkpoint_ratio": 1.0, "checkpoint_policy": "sharded"}, (2, 1, 1)),
    ({"tp": 2, "checkpoint_ratio": 1.0, "checkpoint_policy": "offload"}, (2, 1, 1)),
    ({"pp": 2, "pipeline_order": "zbv"}, (1, 2, 1)),
    ({"pp": 2, "cp": 2, "pipeline_order": "zbv"}, (1, 2, 2)),
    ({"pp": 2, "dp": 2, "dp_shard": 2, "pipeline_order": "interleaved_zero_bubble"}, (1, 2, 2)),
]


def kept(**layout):
    """Bytes of live tensors that stay after each of three uses of a model, gradients apart."""
    case = case_of("BertForMaskedLM", num_hidden_layers=4 if "pp" in layout else 2)
    config = tiny_config(case)[0]
    layout = {"dp": 1, "seed": 3, "kernels": "reference", **layout}
    model = AutoScheduledModel.from_config(config, auto_class=case.cls, **layout).train()
    found = []
    with LiveBytes() as live:
        for _ in range(3):
            n, r = model.mesh.place("dp")
            batch = {k: v.tensor_split(n)[r] for k, v in rows_of(case, "bare").items()}
            if layout.get("pp", 1) > 1:
                model.train_step(batch, micro_batches=2)
            else:
                model(**batch)
            model.zero_grad()
            gc.collect()
            found.append(sum(live.live.values()))
    return found


@pytest.mark.parametrize(
    ("layout", "mesh"),
    [*LAYOUTS[:5], *(pytest.param(*row, marks=pytest.mark.slow) for row in LAYOUTS[5:])],
)
def test_autograd_graph_of_a_forward_without_full_backward_is_freed(layout, mesh):
    for _, second, third in emulate(kept, mesh=mesh, **layout):
        assert third <= second


def test_autograd_node_that_saves_its_own_output_is_freed():
    live = LiveBytes()
    x = torch.ones(100, requires_grad=True)
    with live, saving(lambda saved: saved, lambda saved: saved):
        y = x.exp()
        y.sum().backward(retain_graph=True)
        assert torch.equal(x.grad, y)
        x.grad = None
        del y
        assert not sum(live.live.values())
