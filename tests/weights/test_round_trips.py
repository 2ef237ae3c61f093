"""Round trips: any model saved from layout A, loaded and saved by B, then by C, is bit-equal.

The ranks of a layout run one after the other in this process: no step communicates.
"""

import tempfile
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shards import assert_same, cut
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.placement import Placement, TensorSpec
from slapo_zoo.weights.file_layout import plan_layout, torch_dtype
from slapo_zoo.weights.folder import open_checkpoint
from slapo_zoo.weights.load_memory import Target
from slapo_zoo.weights.load_rank_slices import load_tensors
from slapo_zoo.weights.write import write_tensors

DTYPES = (
    "float32",
    "bfloat16",
    "float16",
    "float64",
    "int64",
    "int8",
    "bool",
    "float8_e4m3fn",
    "float8_e5m2",
    "uint8",
)
MOST_TP = 4
LAYOUTS = st.tuples(st.integers(1, MOST_TP), st.integers(1, 3), st.integers(1, 2))


@st.composite
def placements(draw, size_of):
    """A placement that every tp up to MOST_TP allows, and the size of its axis."""
    kind = draw(st.sampled_from(["whole", "plain", "groups", "pad", "replicate"]))
    unit, few = draw(st.integers(1, 3)), st.integers(1, 6)
    counts = [draw(few) for _ in range(draw(st.integers(2, 3)) if kind == "groups" else 1)]
    if kind in ("plain", "groups"):
        counts = [count + MOST_TP - 1 for count in counts]
    sizes = tuple(count * unit for count in counts)
    axis = draw(st.integers(0, size_of - 1))
    groups = sizes if kind == "groups" else ()
    placed = Placement(axis, "tp", groups, unit, kind == "pad", kind == "replicate")
    return (None if kind == "whole" else placed), axis, sum(sizes)


@st.composite
def models(draw):
    """Specs with stages 0..2, and whole tensors of random bytes."""
    specs, full = [], {}
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    for i in range(draw(st.integers(1, 5))):
        shape = [draw(st.integers(0 if i else 1, 4)) for _ in range(draw(st.integers(1, 3)))]
        placed, axis, size = draw(placements(len(shape)))
        shape[axis] = size
        spec = TensorSpec(
            f"t{i}.weight", tuple(shape), draw(st.sampled_from(DTYPES)), placed, i % 3
        )
        count = int(torch.tensor(shape).prod()) * torch_dtype(spec).itemsize
        top = 2 if spec.dtype == "bool" else 256
        raw = torch.randint(top, (count,), dtype=torch.uint8, generator=generator)
        specs.append(spec)
        full[spec.name] = raw.view(torch_dtype(spec)).view(shape)
    return specs, full


def ranks_of(sizes):
    tp, pp, dp = sizes
    return [Mesh(tp, pp, dp, rank) for rank in range(tp * pp * dp)]


def staged(specs, mesh):
    return [TensorSpec(s.name, s.shape, s.dtype, s.placement, s.stage % mesh.pp) for s in specs]


def save(folder, specs, sizes, local):
    """Save as `save_folder` does, without a process group."""
    layout = plan_layout(staged(specs, Mesh(*sizes)), 100, {})
    folder.mkdir()
    for name, header in layout.headers.items():
        (folder / name).write_bytes(header + b"\xff" * (layout.sizes[name] - len(header)))
    for name, text in layout.indexes.items():
        (folder / name).write_text(text)
    for mesh in ranks_of(sizes):
        write_tensors(folder, layout.slots, staged(specs, mesh), local[mesh.rank], mesh)


def load(folder, specs, sizes):
    found = []
    for mesh in ranks_of(sizes):
        targets = {
            s.name: Target(empty(s, mesh), s.shape, s.placement)
            for s in staged(specs, mesh)
            if s.stage == mesh.coord("pp")
        }
        with open_checkpoint(folder) as opened:
            load_tensors(targets, opened, {name: name for name in targets}, mesh)
        found.append({name: target.tensor for name, target in targets.items()})
    return found


def empty(spec, mesh):
    shape = spec.local_shape(mesh.tp, mesh.coord("tp"))
    return torch.empty(shape, dtype=torch_dtype(spec))


def as_bytes(tensors):
    return {
        name: t.contiguous().reshape(-1).view(torch.uint8) if t.numel() else t
        for name, t in tensors.items()
    }


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(models(), LAYOUTS, LAYOUTS, LAYOUTS)
def test_checkpoint_saved_on_any_layout_loads_on_any_other_with_equal_weights(case, a, b, c):
    specs, full = case
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, step) for step in "abc"]
        local = [
            {s.name: cut(full[s.name], s.placement, mesh) for s in staged(specs, mesh)
             if s.stage == mesh.coord("pp")}
            for mesh in ranks_of(a)
        ]  # fmt: skip
        save(folders[0], specs, a, local)
        save(folders[1], specs, b, load(folders[0], specs, b))
        save(folders[2], specs, c, load(folders[1], specs, c))
        with open_checkpoint(folders[2]) as opened:
            found = {key: opened.view(key).clone() for key in opened.key_to_file}
    assert_same(as_bytes(found), as_bytes(full))
