"""States of optimizers and schedulers survive JSON exactly."""

import json
import math
from collections import Counter, OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slapo_zoo.errors import WeightsError
from slapo_zoo.weights.encode import decode, encode

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers() | st.sampled_from(["$tuple", "$items", "$tensor"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=8,
)


def there_and_back(value):
    return decode(json.loads(json.dumps(encode(value, "value"))))


@given(VALUES)
def test_python_values_are_equal_after_json_encoding_and_decoding(value):
    found = there_and_back(value)
    assert found == value
    assert repr(found) == repr(value)  # 1 == 1.0 == True


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16])
def test_small_tensors_are_equal_after_json_encoding_and_decoding(dtype):
    for tensor in (torch.ones((), dtype=dtype), torch.zeros(2, 3, dtype=dtype)):
        found = there_and_back({"step": tensor})["step"]
        assert found.dtype == dtype
        assert torch.equal(found, tensor)


def test_counter_and_ordered_dict_are_equal_after_json_encoding_and_decoding():
    milestones = there_and_back(Counter({30: 1, 80: 2}))
    assert isinstance(milestones, Counter)
    assert sorted(milestones.elements()) == [30, 80, 80]
    assert there_and_back(OrderedDict(a=1)) == {"a": 1}
    assert math.isnan(there_and_back(math.nan))


def test_state_of_a_random_generator_is_equal_after_json_encoding_and_decoding():
    state = torch.Generator().manual_seed(3).get_state()
    assert torch.equal(there_and_back(state), state)


@pytest.mark.parametrize(
    "value",
    [
        len,
        {1, 2},
        torch.ones(9000),
        torch.ones(2).to_sparse(),
        torch.ones(2, device="meta"),
        object(),
    ],
)
def test_json_encoding_of_unsupported_value_raises_and_names_it(value):
    with pytest.raises(WeightsError, match=r"scheduler.a\[1\]: found a "):
        encode({"a": [0, value]}, "scheduler")
