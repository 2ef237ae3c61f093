"""How a family's files spell what its model holds, found by content on a tiny model that was saved."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from slapo_zoo.parallel.digests import digest_of_tensor
from slapo_zoo.weights.keys import NUMBER, WHOLE, KeyMap, Pieces

INDEX = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a name that is a number
LAYER = re.compile(r"\.\d+\.")  # a rename with one holds for this layer only


@dataclass(frozen=True)
class Spelling:
    """Names and pieces, as a table has them, and the keys that no rule explains."""

    renames: tuple[tuple[str, str], ...] = ()
    pieces: tuple[Pieces, ...] = ()
    unknown: tuple[str, ...] = ()


def find_spelling(files: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> Spelling:
    """The rules that turn the keys of files into the model's names.

    Args:
        files: every tensor of the files.
        model: every tensor of the model that was saved.
    """
    content: dict[str, list[str]] = {}
    for name, tensor in model.items():
        content.setdefault(digest_of_tensor(tensor), []).append(name)
    other = {key: tensor for key, tensor in files.items() if key not in model}
    pairs = {
        key: max(content[d], key=lambda name: _likeness(key, name))
        for key, tensor in other.items()
        if (d := digest_of_tensor(tensor)) in content
    }
    same = [key for key in files if key in model]
    ways = (_difference, _whole_keys)
    spelled = (KeyMap(tuple(dict.fromkeys(way(*pair) for pair in pairs.items()))) for way in ways)
    keys = next((keys for keys in spelled if _explains(keys, pairs, same)), None)
    if keys is None:
        return Spelling(unknown=tuple(pairs))
    rest = {keys.to_model(key): files[key] for key in other.keys() - pairs.keys()}
    pieces = _pieces(rest, model)
    explained = {name.rpartition(NUMBER)[2] for piece in pieces for name in piece.names}
    unknown = tuple(sorted(key for key in rest if not any(key.endswith(e) for e in explained)))
    return Spelling(keys.renames, pieces, unknown)


def _explains(keys: KeyMap, pairs: Mapping[str, str], same: Iterable[str]) -> bool:
    """Return whether renames turn every key into its name and back, and leave the others alone."""
    if any(LAYER.search(old) for old, _ in keys.renames):
        return False
    wanted = [*pairs.items(), *((key, key) for key in same)]
    return all(keys.to_model(key) == name and keys.to_file(name) == key for key, name in wanted)


def _whole_keys(key: str, name: str) -> tuple[str, str]:
    """Return a rename of whole keys, with the block number left open.

    >>> _whole_keys("llm.layers.0.wq.weight", "layers.0.q_proj.weight")
    ('^llm.layers.{}.wq.weight', '^layers.{}.q_proj.weight')
    """
    if INDEX.findall(key) != INDEX.findall(name):
        return f".{key}", f".{name}"  # which explains nothing
    old, new = (WHOLE + INDEX.sub(NUMBER, text) for text in (key, name))
    return old, new


def _likeness(key: str, name: str) -> tuple[bool, int]:
    """Return how much two names of equal tensors (buffers of zeros) have in common: their numbers, then their words."""
    numbers = [re.findall(r"\d+", text) for text in (key, name)]
    return numbers[0] == numbers[1], len(set(key.split(".")) & set(name.split(".")))


def _difference(key: str, name: str) -> tuple[str, str]:
    """The parts in which two names differ, with a dot and one more word where one would be empty.

    >>> _difference("model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.gate.weight")
    ('.block_sparse_moe.', '.mlp.')
    """
    a, b = key.split("."), name.split(".")
    start = 0
    while start < min(len(a), len(b)) - 1 and a[start] == b[start]:
        start += 1
    end = 0
    while end < min(len(a), len(b)) - start - 1 and a[-1 - end] == b[-1 - end]:
        end += 1
    left, right = ("." if start else ""), ("." if end else "")
    middle = (".".join(words[start : len(words) - end]) for words in (a, b))
    old, new = (f"{left}{part}{right}" for part in middle)
    return old, new


def _pieces(files: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> tuple[Pieces, ...]:
    """Tensors [E, parts * s, ...] that files hold as E * parts tensors [s, ...], or [parts * s, ...] as parts."""
    by_digest = {digest_of_tensor(tensor): key for key, tensor in files.items()}
    found: dict[Pieces, None] = {}
    for name, tensor in model.items():
        for first, parts in _ways_to_part(tensor):
            names = [by_digest.get(digest_of_tensor(chunk)) for chunk in first.chunk(parts)]
            if all(names):
                found[_rule(name, [key for key in names if key], first is not tensor)] = None
                break
    return tuple(found)


def _ways_to_part(tensor: Tensor) -> Iterator[tuple[Tensor, int]]:
    """The first of the experts that a tensor may hold, or all of it, and into how many parts."""
    for part in (tensor[0], tensor) if tensor.ndim and len(tensor) else ():
        for parts in (1, 2, 3):
            if part.ndim and part.shape[0] % parts == 0 and (part is not tensor or parts > 1):
                yield part, parts


def _rule(name: str, keys: list[str], numbered: bool) -> Pieces:
    """Both sides from their last common word on; the first number in that of files counts the pieces."""
    words, others = name.split("."), [key.split(".") for key in keys]
    same = 0
    while all(same < len(o) and same < len(words) and o[same] == words[same] for o in others):
        same += 1
    start = max(same - 1, 0)
    if words[start].isdigit():  # that of a layer
        start = same
    ends = [".".join(o[start:]) for o in others]
    ends = [re.sub(r"\b0\b", NUMBER, end, count=1) if numbered else end for end in ends]
    return Pieces("." + ".".join(words[start:]), tuple("." + end for end in ends))
