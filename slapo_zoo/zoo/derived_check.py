"""The check of a derived table: a shrunken model on the same mesh, beside the plain one.

All ranks build it, run one forward and one training step in float64, and rank 0 compares outputs and every
gradient with plain `transformers`. Heads, groups and stages are those of the real config; widths are not.
"""

import copy
from collections.abc import Callable
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from slapo_zoo.hf import models as hf
from slapo_zoo.errors import ArchitectureError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.local_tensors import local_part

HEAD_DIM, VOCABULARY, TOKENS = 8, 97, 8
TOLERANCE = (
    1e-4  # norms and rotary tables are float32 in any model; a wrong division is off by 1e-1
)


def shrunken(config: Any, num_stages: int) -> Any:
    """The config of a tiny model of the family, with as many heads and no dropout."""
    small = copy.deepcopy(config)
    layers = max(2, num_stages)
    changes = {
        "num_hidden_layers": layers, "vocab_size": VOCABULARY, "intermediate_size": 120,
        "hidden_size": HEAD_DIM * config.num_attention_heads, "head_dim": HEAD_DIM,
        "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "initializer_range": 0.2, "num_labels": 3,
    }  # fmt: skip
    for name, value in changes.items():
        if getattr(small, name, None) is not None or name in ("pad_token_id", "num_labels"):
            setattr(small, name, value)
    for name, value in vars(small).items():
        if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
            setattr(small, name, 0.0)
    if isinstance(getattr(small, "layer_types", None), list):
        small.layer_types = small.layer_types[:layers]
    return small


def probe(build: Callable[[Any], Any], config: Any, num_stages: int, mesh: Mesh) -> None:
    """ArchitectureError unless the derived schedule equals the plain model.

    Args:
        build: a config --> a scheduled model with new weights, on our mesh.
        config: of the real model.
        num_stages: of the pipeline.
        mesh: ours.
    """
    small = shrunken(config, num_stages)
    try:
        model = build(small)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.add_(_noise(model, name, p))
        problem = _compare(model, small, mesh)
    except ArchitectureError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if problem:
        what = f"schedule='auto' for model_type={config.model_type!r}"
        hint = (
            "write a table (docs/adding_an_architecture.md), or use tp=1 and pp=1 with plain code"
        )
        found = f"the table derived from transformers' plan failed its check: {problem}"
        raise ArchitectureError("probe", what, found, hint)


def _noise(model: Any, name: str, p: Tensor) -> Tensor:
    """A part of the same random tensor on all ranks: biases of 0 would hide mistakes."""
    tied = hf.tied_names(model)
    generator = torch.Generator().manual_seed(crc32(tied.get(name, name).encode()))
    placed = model.schedule.state.placed.get(name)
    shape = placed.shape if placed else p.shape
    full = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.05
    mesh = model.mesh
    part = local_part(full, placed.placement, mesh.tp, mesh.coord("tp")) if placed else full
    return part.to(p)


def _compare(model: Any, config: Any, mesh: Mesh) -> str:
    """What differs, the same on every rank, or ""."""
    batch = _batch(type(model).__name__, 2 * mesh.dp * max(mesh.pp, 1))
    device = next(model.parameters()).device
    batch = {k: v.to(device) for k, v in batch.items()}
    weights = model.consolidated_state_dict()
    with torch.no_grad():
        output = model.eval()(**batch)
    rows = len(batch["input_ids"]) // mesh.dp
    part = slice(mesh.coord("dp") * rows, (mesh.coord("dp") + 1) * rows)
    grads = {}
    if "labels" in batch or "start_positions" in batch:
        model.train().train_step({k: v[part] for k, v in batch.items()})
        grads = model.consolidated_state_dict(grads=True)
    verdict = [_differences(model, config, batch, weights, output, grads) if mesh.rank == 0 else ""]
    if dist.is_initialized():
        dist.broadcast_object_list(verdict, 0, device=device)
    return verdict[0]


def _differences(
    model: Any, config: Any, batch: dict, weights: dict, output: Any, grads: dict
) -> str:
    """Outputs and gradients of the plain class, against those of the scheduled one."""
    config = copy.deepcopy(config)
    config._attn_implementation, config.dtype = "eager", torch.float64
    cls: Any = next(c for c in type(model).__mro__[1:] if hasattr(c, "from_pretrained"))
    plain = cls(config).to(batch["input_ids"].device, torch.float64)
    plain.load_state_dict(weights, strict=False)
    plain.tie_weights()
    want = plain.eval()(**batch)
    for name, value in want.items():
        if isinstance(value, Tensor) and _off(output[name], value, 1.0):
            return f"the output {name} differs by {_error(output[name], value):.1e}"
    if not grads:
        return ""
    plain.train()(**batch).loss.backward()
    expected = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in plain.named_parameters()}  # fmt: skip
    largest = max(float(g.abs().max()) for g in expected.values())
    wrong = [n for n, g in expected.items() if _off(grads[n].to(g), g, largest)]
    return f"the gradients of {len(wrong)} parameters differ, first {wrong[0]}" if wrong else ""


def _error(found: Tensor, want: Tensor) -> float:
    return float((found.detach().double() - want.detach()).abs().max())


def _off(found: Tensor, want: Tensor, scale: float) -> bool:
    """Whether a tensor is further off than its own size, and that of all, allows."""
    allowed = TOLERANCE * float(want.detach().abs().max()) + 0.01 * TOLERANCE * scale
    return found.shape != want.shape or not _error(found, want) <= allowed


def _batch(name: str, rows: int) -> dict[str, Tensor]:
    """Padded rows with the labels of a head, by the ending of its class name."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (rows, TOKENS), generator=g)
    mask = (torch.arange(TOKENS) < torch.randint(4, TOKENS + 1, (rows, 1), generator=g)).long()
    ids = ids * mask
    labels = {
        "ForCausalLM": {"labels": ids.masked_fill(mask == 0, -100)},
        "ForTokenClassification": {"labels": (ids % 3).masked_fill(mask == 0, -100)},
        "ForSequenceClassification": {"labels": ids[:, 0] % 3},
        "ForQuestionAnswering": {"start_positions": ids[:, 0] % 4, "end_positions": ids[:, 1] % 4},
    }
    found = next((more for ending, more in labels.items() if name.endswith(ending)), {})
    return {"input_ids": ids, "attention_mask": mask, **found}
