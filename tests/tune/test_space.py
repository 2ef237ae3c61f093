"""Tuning spaces: dependent and conditional symbols, constraints, and the API of the original Slapo."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slapo_zoo import Space, Symbol, get_logger
from slapo_zoo.tune.space import SpaceError


def test_tuning_symbol_without_a_fixed_value_compares_false():
    symbol = Symbol("batch_size", [8, 16])
    assert not any([symbol > 1, symbol >= 1, symbol < 100, symbol <= 100])
    with pytest.raises(ValueError, match="is not fixed yet"):
        _ = symbol.value
    symbol.add(32)
    symbol.add(8)
    symbol.fix_at(2)
    assert (symbol.value, len(symbol), symbol.is_fixed()) == (32, 3, True)
    assert symbol > 16
    assert symbol <= 32
    with pytest.raises(ValueError, match="found index 3, the symbol has 3 values"):
        symbol.fix_at(3)


def test_create_symbol_of_a_tuning_space_keeps_the_value_of_a_fixed_symbol():
    space = Space()
    space.create_symbol("a", [1, 2]).fix_at(1)
    assert space.create_symbol("a", [7]).value == 2
    space.create_symbol("b", [1, 2])
    assert space.create_symbol("b", [3]).vals == [3]
    copy = space.clone()
    copy.space["b"].fix_at(0)
    assert not space.space["b"].is_fixed()
    assert copy.to_dict() == {"a": 2, "b": 3}
    assert Space.cfg_dict_to_str(copy.to_dict()) == "(a: 2, b: 3)"
    copy.reset()
    assert copy.next() is copy.space["a"]
    with pytest.raises(ValueError, match="not fixed yet"):
        copy.to_dict()


def test_values_of_a_tuning_symbol_may_depend_on_earlier_symbols():
    space = Space()
    space.create_symbol("tp", [1, 2, 4])
    space.create_symbol("pp", lambda tp: [n for n in (1, 2, 4) if tp * n <= 4])
    space.create_symbol("order", ["1f1b", "gpipe"], when=lambda pp: pp > 1)
    space.constrain(lambda tp, pp: tp * pp > 1)
    points = space.all_points()
    pairs = [(1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]
    assert list(dict.fromkeys((p["tp"], p["pp"]) for p in points)) == pairs
    assert all(("order" in p) == (p["pp"] > 1) for p in points)
    assert len(points) == 3 * 2 + 2


def polyhedral(arguments, space):
    """Space function in the older form, called again for each fixed symbol."""
    batch = space.create_symbol("batch_size", arguments["batches"])
    ratios = [0.5, 1.0] if batch >= 16 else [0.0]
    space.create_symbol("ckpt_ratio", ratios)
    return space


def test_log_space_lists_all_points_of_a_tuning_space_defined_by_a_function(caplog):
    space = Space()
    logger = get_logger("slapo_zoo")
    logger.addHandler(caplog.handler)  # it does not propagate
    space.log_space({"batches": [8, 16]}, polyhedral)
    logger.removeHandler(caplog.handler)
    assert "(batch_size: 16, ckpt_ratio: 0.5)" in caplog.text
    assert "Space size: 3" in caplog.text
    assert space.all_points({"batches": [8, 16]}, polyhedral)[0] == {
        "batch_size": 8,
        "ckpt_ratio": 0.0,
    }


def test_invalid_tuning_space_raises_space_error():
    space = Space()
    space.create_symbol("a", [1])
    with pytest.raises(SpaceError, match="the function takes 'b'"):
        space.create_symbol("c", lambda b: [b])
    with pytest.raises(SpaceError, match="the symbols created so far are"):
        space.constrain(lambda z: True)
    space.constrain(lambda a: a > 1)
    with pytest.raises(SpaceError, match="no configuration is left"):
        space.all_points()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), min_size=1, max_size=3),
       st.integers(0, 12))  # fmt: skip
def test_tuning_space_points_are_the_product_of_values_filtered_by_the_constraint(values, most):
    from itertools import product

    names, space = "abc", Space()
    for name, candidates in zip(names, values, strict=False):
        space.create_symbol(name, candidates)
    rule = {
        1: lambda a: a <= most,
        2: lambda a, b: a + b <= most,
        3: lambda a, b, c: a + b + c <= most,
    }
    space.constrain(rule[len(values)])
    expected = [p for p in product(*values) if sum(p) <= most]
    assert [tuple(p.values()) for p in space.points()] == expected
