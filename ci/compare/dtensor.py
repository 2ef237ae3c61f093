"""Hand-written DTensor plans that shard the same weights as the zoo's schedules, vocabulary and loss included.

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

COLUMN, ROW = "column", "row"
ENDS = 2  # two more plan entries: embedding and head
PLANS: dict[str, dict[str, str]] = {
    "bert": {
        "bert.encoder.layer.*.attention.self.query": COLUMN,
        "bert.encoder.layer.*.attention.self.key": COLUMN,
        "bert.encoder.layer.*.attention.self.value": COLUMN,
        "bert.encoder.layer.*.attention.output.dense": ROW,
        "bert.encoder.layer.*.intermediate.dense": COLUMN,
        "bert.encoder.layer.*.output.dense": ROW,
    },
    "gpt2": {
        "transformer.h.*.attn.c_attn": COLUMN,
        "transformer.h.*.attn.c_proj": ROW,
        "transformer.h.*.mlp.c_fc": COLUMN,
        "transformer.h.*.mlp.c_proj": ROW,
    },
    "llama": {
        "model.layers.*.self_attn.q_proj": COLUMN,
        "model.layers.*.self_attn.k_proj": COLUMN,
        "model.layers.*.self_attn.v_proj": COLUMN,
        "model.layers.*.self_attn.o_proj": ROW,
        "model.layers.*.mlp.gate_proj": COLUMN,
        "model.layers.*.mlp.up_proj": COLUMN,
        "model.layers.*.mlp.down_proj": ROW,
    },
}


def divide(model: Any, tp: int) -> Any:
    """Replace a model's parameters by DTensors sharded over `tp` ranks, in place; return the model."""
    kind = model.config.model_type
    if kind == "gpt2":
        _use_linear(model, tp)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    styles = {COLUMN: ColwiseParallel, ROW: RowwiseParallel}
    plan: dict[str, Any] = {name: styles[style]() for name, style in PLANS[kind].items()}
    names = {module: name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    plan[names[embedding]] = RowwiseParallel(input_layouts=Replicate())
    plan[names[head]] = ColwiseParallel(output_layouts=Shard(2), use_local_output=False)
    parallelize_module(model, init_device_mesh("cpu", (tp,)), plan)
    if tied:  # embedding and head were sharded separately
        head.weight = embedding.weight
    return model


def loss_and_backward(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Run forward and backward with a loss over the sharded vocabulary; return the loss."""
    labels = batch["labels"]
    if model.config.model_type != "bert":  # the next token
        labels = functional.pad(labels[:, 1:], (0, 1), value=-100)
    with loss_parallel():
        logits = model(input_ids=batch["input_ids"]).logits
        loss: Any = functional.cross_entropy(logits.transpose(1, 2), labels)
        loss.backward()
    return loss.detach().full_tensor() if hasattr(loss, "full_tensor") else loss.detach()


def _use_linear(model: Any, tp: int) -> None:
    """Replace GPT-2's Conv1D by Linear, which DTensor supports; q, k and v are reordered so that a rank's columns are
    adjacent.
    """
    for block in model.transformer.h:
        attention, mlp = block.attn, block.mlp
        attention.c_attn = _linear(attention.c_attn, by_rank=tp)
        attention.split_size //= tp
        attention.c_proj = _linear(attention.c_proj)
        mlp.c_fc, mlp.c_proj = _linear(mlp.c_fc), _linear(mlp.c_proj)


def _linear(conv: Any, by_rank: int = 0) -> nn.Linear:
    """Return a Linear with the weights of a Conv1D; `by_rank` ranks: q, k and v of each rank are made adjacent (0:
    not).
    """
    weight, bias = conv.weight.detach().T, conv.bias.detach()
    if by_rank:
        order = torch.arange(len(bias)).view(3, by_rank, -1).transpose(0, 1).flatten()
        weight, bias = weight[order], bias[order]
    made = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    made.weight, made.bias = nn.Parameter(weight.contiguous()), nn.Parameter(bias.clone())
    return made
