"""Users' training loops x families x meshes: the plain model's numbers, or an expected error.

`-s` and a run of 20 cells or more print how many are equal, refused, WRONG, a traceback or a hang. What is wrong today stands in
NOT_YET, with the row of the class that it is of; a mend takes its cells out.
"""

from collections import Counter, defaultdict

import pytest
import torch

from loop_columns import Columns
from loop_runs import folder_for, plain
from loops import CELL_LAYOUTS, FAMILIES, LOOPS

# Accelerate keeps one state in a process; bf16 rounds parts and whole otherwise. tests/loops/test_loops.py has both.
ELSEWHERE = ("Trainer with compute_loss", "autocast bf16")
# Layouts of one line share what plain transformers computed; these run in `slow`.
TURNS = (("one", "tp2"), ("dp2", "tp2-dp2"), ("tp2-sp", "pp2"), ("dp2-shard", "dp2"), ("pp2", "one"), ("tp2", "tp2-sp"), ("tp2-dp2", "dp2-shard"))  # fmt: skip
# Loop --> families, or cells family:layout, whose plain model fails in it, or is NaN in float64: their eager attention over
# padding, blocks that ask for more than hidden states, an encoder of narrower embeddings, a head that calls a part of the backbone.
PLAIN_FAILS = {
    "layer alone": "esm", "encoder": "albert esm", "a hook on the backbone": "opt",
    "set_attn_implementation eager": "modernbert",
    "rows do not see each other": "modernbert:dp2 modernbert:dp2-shard modernbert:tp2-dp2",
}  # fmt: skip
# Pairs of family and layout of the cells that run always: each family on one layout, each layout with two families or more.
COLUMNS = {(family, [*CELL_LAYOUTS][i % len(CELL_LAYOUTS)]) for i, family in enumerate(FAMILIES)}  # fmt: skip
# Row of what is wrong today --> loop --> its cells, family:layout.
NOT_YET: dict[str, dict[str, str]] = {}


def plain_fails(name, family, layout):
    return not {family, f"{family}:{layout}"}.isdisjoint(PLAIN_FAILS.get(name, "").split())


def cells():
    """Yield (loop, family, layout, True to run always): each loop in one family on one layout, and each refusal once; all in `slow`."""
    told = set()  # words of refusals that run always
    used = Counter()  # (family, layout) --> cells that run always
    patched = set()  # families of a patched class that runs always; more in test_patched_classes.py
    for i, (name, loop) in enumerate(LOOPS.items()):
        known = name.startswith("patched") and patched.issuperset(loop.families)
        always = [] if name in ELSEWHERE else always_of(name, loop, told, used, known)
        patched.update(loop.families if name.startswith("patched") else ())
        yield from ((name, *cell, True) for cell in always)
        yield from ((name, *cell, False) for cell in cells_of(i, name, loop) if cell not in always)


def always_of(name, loop, told, used, known):
    """Return the cells of a loop that run always: one that trains, unless it is `known`, and one of each new refusal.

    A cell shares its loading with others of the same family and layout, so it takes a pair in COLUMNS if it can.
    """
    ends = defaultdict(list)  # words of the refusal, or None --> cells
    for family in loop.families:
        for layout in CELL_LAYOUTS:
            if layout not in loop.unlike and not plain_fails(name, family, layout):
                ends[loop.words(CELL_LAYOUTS[layout], layout)].append((family, layout))
    wanted = [words for words in ends if words not in told and (words or not known)]
    found = []
    for words in wanted or list(ends)[: not known]:
        late = words and "tp2-dp2"  # where peers of a rank that raises may wait for their timeout
        rank = {x: (x not in COLUMNS and not used[x], x[1] == late, used[x]) for x in ends[words]}
        found.append(min(rank, key=rank.get))
        used[found[-1]] += 1
    told.update(words for words in wanted if words)
    return found


def cells_of(i, name, loop):
    """Yield the (family, layout) of loop `i` in `slow`: each family on one or two layouts."""
    for j, family in enumerate(() if name in ELSEWHERE else loop.families):
        first = j == i % len(loop.families)
        turn = TURNS[(i + 2 * j) % len(TURNS)][: 2 if first or (i + j) % 2 else 1]
        for layout in turn:
            if layout not in loop.unlike and not plain_fails(name, family, layout):
                yield family, layout


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
