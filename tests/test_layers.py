"""Imports only point down: a module may import its own layer or a lower one, never in a circle."""

import ast
import os
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = [  # low to high; one name per line, so that two people can add
    """
    arithmetic
    compat
    errors
    fresh_store
    mesh
    paths
    placement
    slurm
    """,
    """
    attention
    attention_backends
    collectives
    directive
    distributed
    dropped_attention
    emulation
    graph
    hf
    kernel
    knobs
    losses
    meta
    models
    overlap
    products
    rng
    seeds
    tensors
    traffic
    vocab_logits
    weights
    """,
    """
    kernels
    models
    primitives
    """,
    """
    apart
    consolidate
    costs
    csv_order
    example_inputs
    derive
    explain
    flow
    generation
    input_errors
    data_parallel
    gradients
    input_guard
    kernel_choice
    numerics
    orders
    pipeline
    repeated_calls
    rules
    schedule
    stage_object
    stages
    table
    timeline
    tuned
    zoo
    """,
    """
    adapters
    auto
    cards
    create
    dialects
    feeding
    features
    forecast
    launch
    kernel_times
    locate
    outline
    plan
    planner
    recording
    probe
    reshard
    resume
    runtime
    scheduled
    survey
    trace_files
    trainer
    training_step
    tune
    verify
    """,
    """
    schedules
    """,
    """
    beside
    cli
    commands
    demo
    report
    training
    """,
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer.split()}
LINKED = ("kernels", "schedules", "hub_cards")  # slapo_zoo/<name> -> ../<name>


def sources():
    """Every Python file of the package, by its real place; the lazy exports are exempt."""
    files = [path for folder in ("slapo_zoo", *LINKED) for path in (ROOT / folder).rglob("*.py")]
    real = {path.resolve() for path in files if "__pycache__" not in path.parts}
    return sorted(real - {ROOT.resolve() / "slapo_zoo" / "__init__.py"})


def label(path):
    return str(path.relative_to(ROOT.resolve()))


def unit(path):
    """The name under slapo_zoo that a file belongs to: weights/save.py --> weights."""
    parts = path.relative_to(ROOT.resolve()).with_suffix("").parts
    return parts[0] if parts[0] in LINKED else parts[1]


def imported_modules(path):
    """Full names of the slapo_zoo modules that a file imports, at the top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("slapo_zoo"))
        elif isinstance(node, ast.ImportFrom) and node.module == "slapo_zoo":
            yield from (f"slapo_zoo.{name.name}" for name in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slapo_zoo."):
            yield node.module


def imported_units(path):
    names = {name.split(".")[1] if "." in name else "" for name in imported_modules(path)}
    return sorted(names)


@pytest.mark.parametrize("path", sources(), ids=label)
def test_every_file_has_a_layer(path):
    assert unit(path) in RANK, (
        f"{label(path)} is in no layer: add {unit(path)!r} to LAYERS in tests/test_layers.py, as low "
        "as its imports allow"
    )


@pytest.mark.parametrize("path", sources(), ids=label)
def test_imports_point_down(path):
    own = unit(path)
    for target in imported_units(path):
        assert target in RANK, (
            f"{label(path)} imports {target or 'slapo_zoo'!r}: import from the module that defines "
            "the name, and let that module have a layer"
        )
        assert RANK[target] <= RANK.get(own, -1), f"{own} imports {target}, which lies above it"


@pytest.mark.parametrize("path", sources(), ids=label)
def test_tables_are_found_by_name(path):
    """A table that nobody asks for costs nothing: `zoo` imports it by its name, at run time."""
    named = [name for name in imported_modules(path) if name.startswith("slapo_zoo.schedules")]
    assert not named, f"{label(path)} imports {named}: look the table up in slapo_zoo.zoo.table"


def reachable(name, below):
    """Every unit that `name` imports, directly or through others."""
    found, todo = set(), [name]
    while todo:
        new = below.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


def test_no_circles():
    """Inside a layer too, there is an order; a circle means that two modules are one."""
    below = defaultdict(set)
    for path in sources():
        below[unit(path)] |= set(imported_units(path)) - {unit(path)}
    circle = sorted(name for name in below if name in reachable(name, below))
    assert not circle, f"these modules import each other: {circle}"


@pytest.mark.parametrize("name", LINKED)
def test_root_folders_do_not_shadow_packages(name):
    """With an `__init__.py`, ./kernels would hide the package `kernels` that transformers imports."""
    assert not (ROOT / name / "__init__.py").exists()
    link = ROOT / "slapo_zoo" / name
    assert link.is_symlink(), (
        f"slapo_zoo/{name} must be a symlink; does the checkout keep symlinks?"
    )
    assert os.readlink(link) == f"../{name}"
    assert (ROOT / name).is_dir()
