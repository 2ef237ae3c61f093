"""Users' training loops x families x meshes: the plain model's numbers, or an expected error.

`-s` and a run of 20 cells or more print how many are equal, refused, WRONG, a traceback or a hang. What is wrong today stands in
NOT_YET, with the row of the class that it is of; a mend takes its cells out.
"""

from collections import defaultdict

import pytest
import torch

from loop_columns import Columns
from loop_runs import folder_for, plain
from loops import CELL_LAYOUTS, FAMILIES, LOOPS

# Accelerate keeps one state in a process; bf16 rounds parts and whole otherwise. tests/loops/test_loops.py has both.
ELSEWHERE = ("Trainer with compute_loss", "autocast bf16")
# Layouts of one line share what plain transformers computed.
TURNS = (("one", "tp2"), ("dp2", "tp2-dp2"), ("tp2-sp", "pp2"), ("dp2-shard", "dp2"), ("pp2", "one"), ("tp2", "tp2-sp"), ("tp2-dp2", "dp2-shard"))  # fmt: skip
# Loop --> families, or cells family:layout, whose plain model fails in it, or is NaN in float64: their eager attention over
# padding, blocks that ask for more than hidden states, an encoder of narrower embeddings, a head that calls a part of the backbone.
PLAIN_FAILS = {
    "layer alone": "esm", "encoder": "albert esm", "a hook on the backbone": "opt",
    "set_attn_implementation eager": "modernbert",
    "rows do not see each other": "modernbert:dp2 modernbert:dp2-shard modernbert:tp2-dp2",
}  # fmt: skip
# Row of what is wrong today --> loop --> its cells, family:layout.
NOT_YET: dict[str, dict[str, str]] = {}


def plain_fails(name, family, layout):
    return not {family, f"{family}:{layout}"}.isdisjoint(PLAIN_FAILS.get(name, "").split())


def cells():
    """Yield (loop, family, layout, True to run always): each loop in one family on one layout, and each refusal once; all in `slow`."""
    told = set()  # words of refusals that run always
    patched = (
        set()
    )  # families of which a patched class runs always; test_patched_classes.py has more
    for i, (name, loop) in enumerate(LOOPS.items()):
        known = len(told)
        found = [*cells_of(i, name, loop, told)]
        if found and not any(always for *_, always in found):
            found[0] = (*found[0][:3], True)  # its own turn is left out
        if name.startswith("patched") and patched.issuperset(loop.families) and len(told) == known:
            found = [(*cell, False) for *cell, _ in found]
        patched.update(loop.families if name.startswith("patched") else ())
        yield from found


def cells_of(i, name, loop, told):
    """Yield the cells of loop `i`; add to `told` the words of its refusals that run always."""
    for j, family in enumerate(() if name in ELSEWHERE else loop.families):
        first = j == i % len(loop.families)
        turn = TURNS[(i + 2 * j) % len(TURNS)][: 2 if first or (i + j) % 2 else 1]
        some = [x for x in turn if x not in loop.unlike and not plain_fails(name, family, x)]
        words = {layout: loop.words(CELL_LAYOUTS[layout], layout) for layout in some}
        trained = [layout for layout in some if words[layout] is None]
        spared = trained[1:] if i // len(TURNS) % 2 else trained[:-1]
        spared += [x for x in some if trained and words[x] in told]
        for layout in some:
            yield name, family, layout, first and layout not in spared
        told |= {x for x in words.values() if x and first}


def marks(name, family, layout, always):
    found = [] if always else [pytest.mark.slow]
    known = (
        row for row, loops in NOT_YET.items() if f"{family}:{layout}" in loops.get(name, "").split()
    )
    return found + [
        pytest.mark.xfail(reason=row, raises=AssertionError, strict=True) for row in known
    ]


CELLS = [pytest.param(*cell[:3], marks=marks(*cell), id="-".join(cell[:3]).replace(" ", "-")) for cell in cells()]  # fmt: skip


@pytest.fixture(scope="module")
def columns():
    """Return the worker process in which the loops run."""
    pool = Columns()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def outcome(request, tmp_path_factory, columns):
    """Return how a (loop, family, layout) ended; the first of a column runs all that were selected."""
    root, found, chosen = tmp_path_factory.mktemp("cells"), {}, defaultdict(list)
    for item in request.session.items:
        if (
            getattr(item, "originalname", "")
            == test_user_training_loop_on_a_layout_equals_one_process_or_raises_as_listed.__name__
        ):
            name, family, layout = (
                item.callspec.params[key] for key in ("name", "family", "layout")
            )
            chosen[family, layout].append(name)

    def of(name, family, layout):
        if (column := (family, layout)) not in found:
            found[column] = columns.run(chosen[column], family, layout, root)
        return found[column][name]

    return of


def check(name, layout, found):
    """Fail unless the outcome is equal, or an error where one is expected."""
    words = LOOPS[name].words(CELL_LAYOUTS[layout], layout)
    assert found.kind in ("equal", "refused"), f"{found.kind}: {found.said}"
    refused = found.kind == "refused"
    assert not refused or (words and words in found.said), (
        f"a refusal that is not listed: {found.said}"
    )


@pytest.mark.parametrize(("name", "family", "layout"), CELLS)
def test_user_training_loop_on_a_layout_equals_one_process_or_raises_as_listed(
    name, family, layout, outcome, record_property
):
    found = outcome(name, family, layout)
    record_property("outcome", found.kind)
    check(name, layout, found)


@pytest.mark.parametrize(
    ("name", "cell"), [(name, cell) for name, some in PLAIN_FAILS.items() for cell in some.split()]
)
def test_training_loops_excluded_from_the_tests_fail_or_give_nan_with_plain_transformers(
    name, cell, tmp_path
):
    family, _, layout = cell.partition(":")
    dp = CELL_LAYOUTS[layout].get("dp", 1) if layout else 1
    try:
        found = plain(name, family, folder_for(name, family, tmp_path), torch.float64, dp)
    except Exception:
        return  # plain transformers raises
    numbers = [*found.grads.values(), *found.shown.values()]
    assert not all(bool(torch.isfinite(x).all()) for x in numbers)


@pytest.mark.soak
@pytest.mark.parametrize("layout", CELL_LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_user_training_loop_on_every_layout_equals_one_process_or_raises_as_listed(
    family, layout, tmp_path, columns
):
    """All 8,000 combinations, for a nightly run."""
    names = [
        n
        for n, loop in LOOPS.items()
        if family in loop.families
        and layout not in loop.unlike
        and n not in ELSEWHERE
        and not plain_fails(n, family, layout)
    ]
    outcomes = columns.run(names, family, layout, tmp_path)
    for name, found in outcomes.items():
        if not any(m.name == "xfail" for m in marks(name, family, layout, True)):
            check(name, layout, found)
