"""Match checkpoint keys to tensor names of the model."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

# Older spellings, tried when a key matches no name: (pattern, replacement)
LEGACY = (
    (r"([^.]*LayerNorm[^.]*)\.gamma$", r"\1.weight"),
    (r"([^.]*LayerNorm[^.]*)\.beta$", r"\1.bias"),
)

# Buffers that older releases saved, and that the model now computes.
LEFTOVERS = (
    r"(^|\.)h\.\d+\.attn\.(attention\.)?(bias|masked_bias)$",  # causal masks of GPT-2 and GPT-Neo
    r"(^|\.)position_ids$",
    r"(^|\.)rotary_emb\.inv_freq$",
)


@dataclass(frozen=True)
class NameMap:
    """Result of matching checkpoint keys to a model's tensor names.

    Args:
        source: tensor name in the model --> checkpoint key.
        missing: tensor names of the model that no key fills, in model order.
        unexpected: keys that fill no tensor, in checkpoint order.
        doubles: groups of keys of the checkpoint that hold the same tied tensor.
    """

    source: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    doubles: list[tuple[str, ...]] = field(default_factory=list)


def match_names(
    expected: Iterable[str],
    found: Iterable[str],
    base_model_prefix: str = "",
    ignore: Iterable[str] = (),
    tied: Mapping[str, str] | None = None,
) -> NameMap:
    """Match the tensor names of a model against the keys of a checkpoint. A key is compared unchanged, else with the
    base-model prefix removed or added (`h.0.ln_1.weight` <-> `transformer.h.0.ln_1.weight`), else in its modern
    spelling (`weight` for `LayerNorm.gamma`). Where several keys fit a name, the first of these spellings wins,
    whatever their order in the file.

    Args:
        expected: tensor names of the whole model, before it was scheduled.
        found: keys of the checkpoint.
        base_model_prefix: the model's `base_model_prefix`, or "".
        ignore: regular expressions (`re.search`) of keys that may stay unused.
        tied: tied name --> the name it shares memory with. Any of these names in the file fills them all;
            several of them in the file are reported in `doubles`.
    """
    expected, found, tied = list(expected), list(found), tied or {}
    known = {*expected, *tied, *tied.values()}
    direct: dict[str, tuple[int, str]] = {}
    for key in found:
        for rank, name in enumerate(_spellings(key, base_model_prefix)):
            if name in known:
                direct[name] = min(direct.get(name, (rank, key)), (rank, key), key=lambda x: x[0])
                break
    families = _tied_groups(tied)
    source = {}
    for name in expected:
        holder = next((n for n in (name, *families.get(name, ())) if n in direct), None)
        if holder is not None:
            source[name] = direct[holder][1]
    used = {key for _, key in direct.values()}
    may_stay = re.compile("|".join(f"(?:{rule})" for rule in (*LEFTOVERS, *ignore)))
    unexpected = [key for key in found if key not in used and not may_stay.search(key)]
    each = {tuple(dict.fromkeys(direct[n][1] for n in family if n in direct))
            for family in families.values()}  # fmt: skip
    doubles = sorted(keys for keys in each if len(keys) > 1)
    return NameMap(source, [name for name in expected if name not in source], unexpected, doubles)


def _spellings(key: str, prefix: str) -> Iterator[str]:
    """Yield `key`, it without and with `prefix` (base model's; or ""); then all three with LayerNorm.gamma as .weight."""
    modern = key
    for pattern, replacement in LEGACY:
        modern = re.sub(pattern, replacement, modern)
    for spelling in (key, modern):
        yield spelling
        if prefix:
            yield spelling.removeprefix(f"{prefix}.")
            yield f"{prefix}.{spelling}"


def _tied_groups(tied: Mapping[str, str]) -> dict[str, list[str]]:
    """Return {tied name: all names that share its memory}; the name to which the others are tied is the first."""
    members: dict[str, list[str]] = {}
    for name in dict.fromkeys((*tied.values(), *tied)):
        root, seen = name, {name}
        while root in tied and tied[root] not in seen:
            root = tied[root]
            seen.add(root)
        family = members.setdefault(root, [root])
        if name not in family:
            family.append(name)
    return {name: family for family in members.values() for name in family}
