"""Tiny configs of any family: few layers and heads; other sizes shrink in proportion, by rules for the names of fields."""

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from slapo_zoo.parallel.mesh import Mesh

TOKENS = 16
ALL = 1 << 20  # as an upper bound: more than any model has
# what a number in a config counts, by the name of its field
LAYERS = re.compile(
    r"^(n_layers?|depth|(num_)?(hidden_|encoder_|decoder_|entity_|text_|vision_)?(hidden_)?(layers|blocks))$"
)
HEADS = re.compile(r"(^|_)(n_heads?|num_heads?|heads|attention_heads|query_heads)$")
KV_HEADS = re.compile(r"(key_value_heads|kv_heads)$")
HEAD_SIZE = re.compile(r"(^|_)(head_dim|d_kv|head_size|d_head|kv_channels|attention_head_dim)$")
POSITIONS = re.compile(
    r"(max_position_embeddings|n_positions|positions|max_(seq|sequence)_len(gth)?|n_ctx|context_length)$"
)
EXPERTS = re.compile(r"(num_experts|num_local_experts|n_routed_experts|num_routed_experts)$")
CHOSEN = re.compile(r"(experts_per_tok|top_k|topk|moe_k|num_selected_experts|experts_per_token)$")
GROUPS = re.compile(r"^(n_group|num_expert_group|topk_group|n_groups?)$")
WIDTH = re.compile(
    r"hidden|d_model|latents|n_embd|emb|width|dim|intermediate|ffn|d_ff|inner|mlp|size|channels|rank|filters|features|state"
)
INNER = re.compile(r"intermediate|ffn|d_ff|inner|mlp")
NO_WIDTH = re.compile(
    r"vocab|patch|image|kernel|window|num_|chunk|type|token|stride|ratio|group|crop|pool|block_size"
    r"|bucket|max_|sample|label|batch|factor|_layer|conv$"
)
WINDOWS, VOCABULARY = re.compile(r"^(sliding_window|window_size)$"), re.compile("vocab")
HIDDEN = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "emb_dim", "hidden_dim", "width")
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
DROPS = re.compile(r"drop|noise|jitter")


@dataclass(frozen=True)
class Sizes:
    """Upper bounds of a tiny model's sizes: numbers of heads, layers, experts, ids, positions, pixels on a side, ...

    Args:
        widths: how widths shrink: "rounded" (to whole heads), "halved" (by powers of 2) or "kept" (not at all).
        window: tokens of an attention window.
        ranks: number of tp ranks; sizes divided by it keep the remainder that they had in the given config. 0: any.
    """

    heads: int = 4
    head_size: int = 8
    layers: int = 2
    vocabulary: int = 96
    experts: int = 4
    image: int = 32
    patch: int = 8
    positions: int = 128
    widths: str = "rounded"
    window: int = ALL
    ranks: int = 0

    def of(self, own: Mapping[str, Any]) -> "Sizes":
        """Return `self` fitted to a config with fields `own`: heads keep their remainder modulo `ranks` (0: no change)."""
        if not self.ranks:
            return self
        heads = _counts(own, _heads)
        width = max((n for name in HIDDEN if type(n := own.get(name)) is int), default=0)
        head_size = self.head_size or max(_counts(own, HEAD_SIZE.search), default=0)
        head_size = head_size or (width // max(heads) if heads else 8)
        few = few_heads(heads, _counts(own, KV_HEADS.search), self.ranks)
        patterns = own.get("attention_types")  # GPT-Neo: keep whole periods of layers
        period = len(patterns[0][0]) if patterns else 1
        image = self.patch * 2 ** len(own["depths"]) if "depths" in own else self.image
        layers = -(-self.layers // period) * period
        return replace(self, heads=few, head_size=head_size, layers=layers, image=image)

    def with_remainder(self, size: int, given: int) -> int:
        """Return a size near `size`, equal to `given` (the config's) modulo `ranks`, at most `given`; 0 ranks: `size`."""
        return min(given, size - size % self.ranks + given % self.ranks) if self.ranks else size


def few_heads(heads: Sequence[int], kv_heads: Sequence[int], ranks: int) -> int:
    """Return a small number of query heads that has the same remainder modulo `ranks` as the largest number in `heads`.
    The query heads per KV head stay the same, and so does whether there are fewer KV heads than ranks. `heads` and
    `kv_heads` are the numbers in one config's fields; of `kv_heads` the least counts, or for [] as many as `heads`.
    """
    most = max(heads, default=0)
    kv = min(kv_heads, default=most)
    for few in range(2 * ranks, most):
        fewer, rest = divmod(few * kv, most)
        if few % ranks == most % ranks and not rest and (fewer >= ranks) == (kv >= ranks):
            return few
    return most


# widths: rounded to whole heads; all divided by one power of 2; unchanged
ROUNDED, HALVED, KEPT = "rounded", "halved", "kept"
UNREAD = (
    "architectures",
    "auto_map",
    "quantization_config",
)  # fields that a tiny config leaves out
IMAGES, STACKS = (1, 4), (1, 3)  # factors of image size and layers to try: some stacks need more


def sizes_in_turn(sizes: Sizes) -> Iterator[Sizes]:
    """Yield `sizes`, then changed ones to try: for ever more layers and larger images, each rule of shrinking widths."""
    for layers in STACKS:
        for image in IMAGES:
            for widths in (ROUNDED, HALVED, KEPT):
                bigger = {"image": sizes.image * image, "patch": sizes.patch * image}
                yield replace(sizes, **bigger, layers=sizes.layers * layers, widths=widths)


def tiny(config: Any, sizes: Sizes = Sizes()) -> Any:
    """Return a config of a tiny model of the same family; the given config is not changed.

    Args:
        config: a config of `transformers`; configs nested in it are shrunk too.
        sizes: upper bounds; widths that `sizes` does not name keep their ratio to the hidden size.
    """
    small = copy.deepcopy(config)
    _shrink(small, sizes)
    return small


def tiny_like(
    config: Any, mesh: Mesh, num_stages: int | None = 1, keep_head_size: bool = False
) -> Any:
    """Return a config of a tiny model that a mesh shards as it shards the given one, which is not changed.

    Each new size modulo tp is that of the given config, so sizes that are uneven or padded over tp stay so.
    Query heads per KV head stay too, and whether there are fewer KV heads than ranks.

    Args:
        config: a config of `transformers`.
        mesh: mesh with the number of tp ranks.
        num_stages: number of pipeline stages, each of which keeps a block; None keeps the number of layers,
            for a schedule that names blocks by number.
        keep_head_size: keep the size of a head, for a schedule that holds it as a number.
    """
    layers = ALL if num_stages is None else max(2, num_stages)
    small = tiny(config, Sizes(
        head_size=0 if keep_head_size else 8, layers=layers, experts=max(4, mesh.tp), image=12,
        patch=4, positions=32, window=9, ranks=mesh.tp,
    )).to_dict()  # fmt: skip
    small = {name: value for name, value in small.items() if name not in UNREAD}
    if not small.get("loss_type", True):
        del small["loss_type"]
    new = type(config).from_dict(small)
    new.architectures = config.architectures
    return new


def layer_fields(config: Any) -> dict[str, int]:
    """Return the fields of a config that count layers: name --> number of layers."""
    named = vars(config).items()
    return {name: n for name, n in named if LAYERS.search(name) and type(n) is int}


def _shrink(config: Any, sizes: Sizes) -> None:
    from transformers import PreTrainedConfig

    own = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    for value in own.values():
        if isinstance(value, PreTrainedConfig):
            _shrink(value, sizes)
    sizes = sizes.of(own)
    rules = _Rules(own, sizes)
    by_kind = _own_of_layers(config, rules)
    for name, value in own.items():
        found = rules.of(name, value)
        if found != value:
            with suppress(Exception):  # a derived property cannot be set
                setattr(config, name, found)
    _special(config, own, sizes)
    _repair(config, own, sizes)
    if by_kind:
        kinds = enumerate(config.layer_types)
        config.per_layer_config = {i: by_kind[kind] for i, kind in kinds if kind in by_kind}


def _special(config: Any, own: dict[str, Any], sizes: Sizes) -> None:
    """Set ids of a shrunken config that are None in `own` (its fields before) to 0; fit lists of layers to `sizes`."""
    if own.get("pad_token_id", 0) is None:
        config.pad_token_id = 0
    if own.get("num_kv_shared_layers"):
        config.num_kv_shared_layers = 0  # layers whose keys others share may be gone
    if own.get("is_encoder_decoder") and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    if sizes.layers >= ALL:
        return
    if "stage_names" in own:  # fields that name layers which a backbone returns
        config.stage_names = own["stage_names"][: sizes.layers + 1]
        config._out_features, config._out_indices = config.stage_names[-1:], [sizes.layers]
    if own.get("attention_types"):
        pattern = own["attention_types"][0][0]
        config.attention_types = [[pattern, config.num_layers // len(pattern)]]


def _own_of_layers(config: Any, rules: "_Rules") -> dict[str, dict[str, Any]]:
    """Return {layer type: {field: value shrunken by `rules`}} of a config with fields per layer (Gemma 4), whose
    `per_layer_config` becomes None until the caller sets it again; {} for any other config, which stays as it is.
    """
    if not getattr(config, "is_heterogeneous", False):
        return {}
    given = config.to_dict()["per_layer_config"]
    config.per_layer_config = None
    kinds = {config.layer_types[int(i)]: values for i, values in given.items()}
    return {
        kind: {name: rules.of(name, value) for name, value in values.items()}
        for kind, values in kinds.items()
    }


def _repair(config: Any, own: dict[str, Any], sizes: Sizes) -> None:
    """Set fields of a shrunken config that follow from others (head_dim) or from `sizes`; `own`: its fields before."""
    now = {name: value for name, value in vars(config).items() if type(value) is int}
    rope, rest = now.get("qk_rope_head_dim"), now.get("qk_nope_head_dim")
    width = now.get("mamba_expand", now.get("expand", 0)) * now.get("hidden_size", 0)
    kinds = own.get("layers_block_type") and config.layers_block_type
    wanted = {
        "qk_head_dim": rope and rest and rope + rest,
        "head_dim": (rope if own.get("head_dim") == own["qk_rope_head_dim"] else rope + rest)
        if rope and rest
        else own.get("head_dim", 0) is None
        and now.get("hidden_size", 0) // max(now.get("num_attention_heads", 0), 1),
        "mamba_n_heads": width // (now.get("mamba_d_head") or width or 1),
        "mamba_d_ssm": width,
        "hybrid_layer_ids": [i for i, kind in enumerate(kinds or ()) if kind == "hybrid"],
        "mamba_headdim": width // now.get("n_mamba_heads", 1),
        "attention_head_dim": now.get("attention_hidden_size", 0)
        // (now.get("num_attention_heads") or 1),
        "window_size": "depths" in own and _window(now, len(own["depths"])),
        "attn_layer_period": "attn_layer_offset" in own and 2,
        "attn_layer_offset": "attn_layer_period" in own and 1,
        "attn_layer_indices": [1],
        "num_experts_per_tok": own.get("num_experts_per_tok", 0) is None and 2,
        "vocab_size": own.get("vocab_size", 0) is None and 96,
        "n_routed_experts": own.get("n_routed_experts", 0) is None and 4,
        "depths": "width_per_group" in own and sizes.layers < ALL and [1, 2, 1],
        "width_per_group": min(96, own.get("width_per_group", 0)),
    }
    if own.get("model_type") == "mamba2" or {"expand", "head_dim", "num_heads"} <= own.keys():
        wanted["num_heads"] = width // now.get("head_dim", 1)
    for name, value in wanted.items():
        if name in own and value:
            with suppress(Exception):
                setattr(config, name, value)


def _window(now: dict[str, int], stages: int) -> int:
    """Return the side of a Swin model's attention window, at least 2, that fits the patch grid of the last stage. Each
    of the model's `stages` stages after the first halves the grid. `now` are the shrunken config's fields.
    """
    grid = now.get("image_size", 0) // max(now.get("patch_size", 1), 1)
    return max(2, min(now.get("window_size", 0), grid >> (stages - 1)))


class _Rules:
    """Rules by which a config with fields `own` is shrunk to a tiny one; `of(name, value)` gives a field's new value."""

    def __init__(self, own: dict[str, Any], sizes: Sizes):
        self.sizes = sizes
        whole = {name: value for name, value in own.items() if type(value) is int}
        self.heads = max((v for n, v in whole.items() if _heads(n)), default=0)
        self.layers = {v for n, v in whole.items() if LAYERS.search(n)}
        self.stages = len(own.get("depths") or ())  # the number of stages stays
        hidden = self.hidden = next((whole[name] for name in HIDDEN if name in whole), 0)
        lists = [v[0] for n, v in own.items() if _is_list(v) and _width(n)]
        hidden = hidden or max(lists, default=0)
        if any(_is_list(v) and _heads(n) for n, v in own.items()):  # the width of the first stage
            hidden = whole.get("embed_dim", hidden)
        self.width = sizes.heads * sizes.head_size
        if not self.width:
            self.width = 8 * sizes.ranks + hidden % sizes.ranks
        self.scale = self.width / hidden if hidden else 1 / 8
        self.scale = min(self.scale, 1.0)
        if sizes.widths != ROUNDED:
            self.scale = 2.0 ** math.ceil(math.log2(self.scale)) if sizes.widths == HALVED else 1.0

    def of(self, name: str, value: Any) -> Any:
        """Return the value that the config field `name`, now `value`, gets in the shrunken config."""
        if type(value) is int and value > 0:
            return self._number(name, value)
        per_layer = isinstance(value, list) and len(value) in self.layers
        if _is_list(value) and not (per_layer and len(value) > 8):
            return self._list(name, value)
        if isinstance(value, list) and len(value) in self.layers and len(value) > self.sizes.layers:
            kinds = list(
                dict.fromkeys(map(str, value))
            )  # one layer of each kind, where there is room
            few = [next(v for v in value if str(v) == kind) for kind in kinds]
            count = self.sizes.layers
            return few + value[: count - len(few)] if len(few) <= count else value[:count]
        return value

    def _number(self, name: str, value: int) -> int:
        sizes = self.sizes
        most = {
            LAYERS: sizes.layers, EXPERTS: sizes.with_remainder(sizes.experts, value), POSITIONS: sizes.positions,
            HEAD_SIZE: sizes.head_size, CHOSEN: 2, GROUPS: 1, WINDOWS: sizes.window,
            VOCABULARY: sizes.with_remainder(sizes.vocabulary, value),
        }  # fmt: skip
        for pattern, limit in most.items():
            if pattern.search(name):
                return value if pattern is LAYERS and self.stages == value else min(value, limit)
        if KV_HEADS.search(name):
            return self._kv_heads(value)
        if HEADS.search(name):
            return min(value, sizes.heads)
        if name.endswith("_id"):
            return value if value < sizes.vocabulary else SPECIAL.get(name, 3)
        if name in ("image_size", "patch_size"):
            return min(value, sizes.image if name == "image_size" else sizes.patch)
        return self._width(name, value) if _width(name) else value

    def _kv_heads(self, value: int) -> int:
        if not self.heads or self.heads <= self.sizes.heads:
            return min(value, self.sizes.heads)
        return max(1, self.sizes.heads * value // self.heads)

    def _width(self, name: str, value: int) -> int:
        if self.sizes.widths != ROUNDED:
            return max(1, int(value * self.scale))
        if self.sizes.ranks and value == self.hidden:
            return self.width
        unit = self.sizes.head_size
        if value < 4 * unit:
            return value
        size = max(unit, round(value * self.scale / unit) * unit)
        return self.sizes.with_remainder(size, value) if INNER.search(name) else size

    def _list(self, name: str, value: Any) -> Any:
        if "depth" in name or "layers" in name or "blocks" in name:
            return type(value)(min(number, self.sizes.layers) for number in value)
        if name == "image_size":
            return type(value)(min(number, self.sizes.image) for number in value)
        if HEADS.search(name) and self.sizes.widths != ROUNDED:
            return value
        if HEADS.search(name):
            first, most = value[0], self.sizes.heads
            return value if first <= 1 else type(value)(max(1, n * most // first) for n in value)
        return type(value)(self._width(name, n) for n in value) if _width(name) else value


def _counts(own: Mapping[str, Any], is_one: Callable[[str], Any]) -> list[int]:
    """Return the integer values of the config fields in `own` whose names `is_one` accepts; of a list, its first item."""
    found = (value[0] if _is_list(value) else value for name, value in own.items() if is_one(name))
    return [value for value in found if type(value) is int]


def _heads(name: str) -> bool:
    return bool(HEADS.search(name)) and not KV_HEADS.search(name)


def _width(name: str) -> bool:
    return bool(WIDTH.search(name)) and not NO_WIDTH.search(name)


def _is_list(value: Any) -> TypeGuard[list[int] | tuple[int, ...]]:
    return isinstance(value, list | tuple) and bool(value) and all(type(n) is int for n in value)


def without_dropout(config: Any) -> list[str]:
    """Set every dropout or noise probability of a config and its nested configs to 0; return the names of those changed."""
    from transformers import PreTrainedConfig

    found = []
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            found += [f"{name}.{inner}" for inner in without_dropout(value)]
        elif isinstance(value, float) and value and DROPS.search(name):
            setattr(config, name, 0.0)
            found.append(name)
    return found
