"""Helpers for tests of loading and saving: small models, and slicing done the slow way."""

from types import SimpleNamespace

import torch

from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.placement import Placement, TensorSpec

SPLIT = Placement(axis=0)
COLUMNS = Placement(axis=1)
QKV = Placement(axis=1, groups=(8, 8, 8), unit=2)
KV = Placement(axis=0, unit=4, replicate=True)
VOCAB = Placement(axis=0, pad=True)

# One tensor of every kind: (name, shape, dtype, placement, stage of pp=2)
TENSORS = (
    ("wte.weight", (7, 4), "float32", VOCAB, 0),
    ("h.0.attn.c_attn.weight", (8, 24), "float32", QKV, 0),
    ("h.0.attn.k.weight", (4, 3), "bfloat16", KV, 0),
    ("h.0.experts", (3, 5, 6), "float16", COLUMNS, 0),
    ("h.1.ln.weight", (8,), "float32", None, 1),
    ("h.1.mlp.weight", (6, 5), "float64", SPLIT, 1),
    ("h.1.empty", (0, 3), "float32", None, 1),
    ("h.1.mask", (2, 3), "bool", COLUMNS, 1),
    ("steps", (), "int64", None, 1),
)


def model(pp=2):
    """Return specs and unsharded tensors of a model with all kinds of placements."""
    specs = [TensorSpec(n, s, d, p, min(stage, pp - 1)) for n, s, d, p, stage in TENSORS]
    generator = torch.Generator().manual_seed(7)
    full = {
        s.name: torch.randint(-99, 99, s.shape, generator=generator).to(getattr(torch, s.dtype))
        for s in specs
    }
    return specs, full


def cut(full, placement, mesh):
    """Return the local tensor, sliced element by element along the sharded axis."""
    if placement is None:
        return full.clone()
    n, r = mesh.size(placement.mesh_dim), mesh.coord(placement.mesh_dim)
    size = full.shape[placement.axis]
    index = [i for run in placement.runs(size, n, r) for i in range(*run)]
    local = torch.zeros(placement.local_shape(tuple(full.shape), n, r), dtype=full.dtype)
    rows = full.movedim(placement.axis, 0)[index]
    local.movedim(placement.axis, 0)[: len(index)] = rows
    return local


def local_tensors(specs, full, mesh):
    """Return the local tensors of one rank."""
    stage = mesh.coord("pp")
    return {s.name: cut(full[s.name], s.placement, mesh) for s in specs if s.stage == stage}


def single(pp=1):
    """Return specs and tensors of a model on one rank."""
    specs, full = model(pp)
    return SimpleNamespace(specs=specs, full=full, mesh=Mesh())


def assert_same(found, expected):
    """Fail unless tensors are equal bit for bit, dtypes and names included."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
