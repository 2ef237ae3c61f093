"""Encode Python values as JSON and back without loss, for states of optimizers and schedulers (no pickle).

Numbers, strings, lists and dicts stay readable; any other type becomes a dict with one `$` key, such as
{"$tuple": [0.9, 0.999]}.
"""

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slapo_zoo.errors import WeightsError

OF_OTHERS = ("$like", "$by_dp")  # other marks in records and training states
MOST_ELEMENTS = 8192  # the state of a generator has 5056; larger tensors go to a safetensors file


def encode(value: Any, where: str) -> Any:
    """Return the JSON form of a value; an unsupported type raises WeightsError, in which `where` names the value.

    >>> encode({"betas": (0.9, 0.99), 3: None}, "lr")
    {'$items': [['betas', {'$tuple': [0.9, 0.99]}], [3, None]]}
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    lists = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
    if lists and value.numel() <= MOST_ELEMENTS and not value.is_complex():
        dtype = str(value.dtype).removeprefix("torch.")
        return {"$tensor": value.detach().cpu().tolist(), "dtype": dtype}
    if type(value) in (list, tuple):
        items = [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if isinstance(value, dict):
        pairs = [[encode(k, where), encode(v, f"{where}.{k}")] for k, v in value.items()]
        if isinstance(value, Counter):
            return {"$counter": pairs}
        is_plain = all(type(k) is str and not k.startswith("$") for k in value)
        return dict(pairs) if is_plain else {"$items": pairs}
    problem = f"found a {type(value).__name__}, expected numbers, texts, lists, dictionaries, or tensors of at most {MOST_ELEMENTS} elements"
    hint = "convert it to these, or leave it out of what is saved (optimizer, scheduler, `extra`)"
    raise WeightsError("save_checkpoint", where, problem, hint)


def decode(value: Any) -> Any:
    """Return the value whose JSON form is `value`; raise WeightsError for JSON that `encode` never returns."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if any(key.startswith("$") for key in value if key not in OF_OTHERS):
        try:
            return _marked(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            if isinstance(error, WeightsError):
                raise
            raise _no_value(value, f": {error}") from error
    return {key: decode(item) for key, item in value.items()}


def _marked(value: dict[str, Any]) -> Any:
    match value:
        case {"$tuple": list(items), **rest} if not rest:
            return tuple(decode(items))
        case {"$items": list(pairs), **rest} if not rest:
            return {decode(k): decode(v) for k, v in pairs}
        case {"$counter": list(pairs), **rest} if not rest:
            return Counter({decode(k): decode(v) for k, v in pairs})
        case {"$tensor": data, "dtype": str(name), **rest} if not rest:
            return _tensor(data, name)
    raise _no_value(value)


def _tensor(data: Any, name: str) -> Tensor:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no dtype of torch")
    found = torch.tensor(data, dtype=dtype)
    if found.numel() > MOST_ELEMENTS:
        raise ValueError(f"a tensor in it has {found.numel()} elements, expected at most {MOST_ELEMENTS}")  # fmt: skip
    return found


def _no_value(value: Any, reason: str = "") -> WeightsError:
    problem = f"found {value!r:.80}, which save_checkpoint never writes{reason:.200}"
    hint = "pass the folder that save_checkpoint wrote; if it is that one, copy it again: it may be damaged"
    return WeightsError("load_checkpoint", "training_state.json", problem, hint)
