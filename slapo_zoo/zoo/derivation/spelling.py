"""Find the rules that turn keys of a family's files into names of its model's tensors, by tensors of equal contents."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from slapo_zoo.parallel.digests import digest_of_tensor
from slapo_zoo.weights.keys import NUMBER, WHOLE, KeyMap, Pieces

INDEX = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a name that is a number
LAYER = re.compile(r"\.\d+\.")  # a rename with a layer number holds for that layer only


@dataclass(frozen=True)
class Spelling:
    """Rules that turn keys of checkpoint files into tensor names of their model: `renames` (substring or whole key,
    substitute) and `pieces` (of tensors stored under several keys). `unknown`: keys in files that no rule explains.
    """

    renames: tuple[tuple[str, str], ...] = ()
    pieces: tuple[Pieces, ...] = ()
    unknown: tuple[str, ...] = ()


def find_spelling(files: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> Spelling:
    """Return the rules that turn keys of checkpoint files into names of a model's tensors, found by tensors with equal
    bits (if several names have these bits, the one most like the key). Keys that no rule explains are in `unknown`.

    Args:
        files: key --> tensor, of all files.
        model: name --> tensor, of the model that was saved into these files.
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
    """Return whether `keys` renames each file key in `pairs` (key --> name) to its name and back, and no key of `same`."""
    if any(LAYER.search(old) for old, _ in keys.renames):
        return False
    wanted = [*pairs.items(), *((key, key) for key in same)]
    return all(keys.to_model(key) == name and keys.to_file(name) == key for key, name in wanted)


def _whole_keys(key: str, name: str) -> tuple[str, str]:
    """Return (pattern of a file key, pattern of a model name) that match the full key, {} for block numbers.

    >>> _whole_keys("llm.layers.0.wq.weight", "layers.0.q_proj.weight")
    ('^llm.layers.{}.wq.weight', '^layers.{}.q_proj.weight')
    """
    if INDEX.findall(key) != INDEX.findall(name):
        return f".{key}", f".{name}"  # a rename that explains no key
    old, new = (WHOLE + INDEX.sub(NUMBER, text) for text in (key, name))
    return old, new


def _likeness(key: str, name: str) -> tuple[bool, int]:
    """Return how similar a key and a name are: (whether the block numbers are equal, number of common words)."""
    numbers = [re.findall(r"\d+", text) for text in (key, name)]
    return numbers[0] == numbers[1], len(set(key.split(".")) & set(name.split(".")))


def _difference(key: str, name: str) -> tuple[str, str]:
    """Return the part of a key and the part of a name that differ, at least one word each, with the dots around it.

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
    """Return the rules for the model's tensors that files store in pieces: one per expert, or equal slices of axis 0.
    A rule (`Pieces`) maps the end of a tensor's name to the ends of the keys of its pieces, in order.
    """
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
    """Yield (part, n) for each way in which files may store a tensor as several: as n (1, 2, 3) equal slices of axis 0
    of `part`, which is tensor[0], expert 0, if each expert has keys of its own; then with n > 1 of the tensor itself.
    """
    for part in (tensor[0], tensor) if tensor.ndim and len(tensor) else ():
        for parts in (1, 2, 3):
            if part.ndim and part.shape[0] % parts == 0 and (part is not tensor or parts > 1):
                yield part, parts


def _rule(name: str, keys: list[str], numbered: bool) -> Pieces:
    """Return the rule for a model tensor `name` that files store in pieces under `keys`. It holds the ends of all, from
    the last word before they differ: for "h.0.attn.qkv" and keys "h.0.attn.q", "h.0.attn.k" it is `Pieces(".attn.qkv",
    (".attn.q", ".attn.k"))`. If this word is a number (of a layer), the ends follow it. If `numbered`, keys are those
    of expert 0; the first 0 in each end becomes {}, for any expert.
    """
    words, others = name.split("."), [key.split(".") for key in keys]
    same = 0
    while all(same < len(o) and same < len(words) and o[same] == words[same] for o in others):
        same += 1
    start = max(same - 1, 0)
    if words[start].isdigit():  # the number of a layer
        start = same
    ends = [".".join(o[start:]) for o in others]
    ends = [re.sub(r"\b0\b", NUMBER, end, count=1) if numbered else end for end in ends]
    return Pieces("." + ".".join(words[start:]), tuple("." + end for end in ends))
