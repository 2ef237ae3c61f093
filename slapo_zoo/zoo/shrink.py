"""Small configs of the same family: few and narrow layers, with heads in the same proportions."""

import math
from collections.abc import Iterable
from typing import Any

from slapo_zoo.errors import SlapoError
from slapo_zoo.parallel.mesh import Mesh

HEAD_DIM, TOKENS = 8, 64
# what a number of the config is, by the names that the families use
HEADS = (
    "num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads",
)  # fmt: skip
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
HEAD_SIZES = ("head_dim", "d_kv")
WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim")
FFN_WIDTHS = (
    "intermediate_size",
    "n_inner",
    "d_ff",
    "ffn_dim",
    "ffn_hidden_size",
    "hidden_dim",
    "moe_intermediate_size",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
)
LAYERS = (
    "num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers", "encoder_layers", "decoder_layers",
)  # fmt: skip
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions")
SMALL = {
    "embedding_size": 12, "sliding_window": 9, "window_size": 5, "image_size": 12, "patch_size": 4,
    "state_size": 4, "time_step_rank": 3, "rotary_dim": 4, "stem_channels": 8, "width_per_group": 96,
    "max_source_positions": 16,
}  # fmt: skip
TOWERS = ("text_config", "vision_config")
PER_LAYER = ("layer_types", "attention_layers", "mlp_layer_types", "no_rope_layers")
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "sep_token_id")


def shrink(
    config: Any, mesh: Mesh, num_stages: int = 1, keep_layers: bool = False,
    keep_head_size: bool = False,
) -> Any:  # fmt: skip
    """Return a small config for a quick verification on one core; the given config is not changed.

    The new sizes have the remainders of the given ones when they are sharded over tp: what is uneven or padded
    stays so. Query heads per KV head stay too, and whether there are fewer KV heads than ranks.

    Args:
        config: a config of `transformers`.
        mesh: mesh with the number of tp ranks.
        num_stages: number of pipeline stages; a stage keeps at least one block.
        keep_layers: keep the number of layers, for a schedule that names blocks by number.
        keep_head_size: keep the size of a head, for a schedule that holds it as a number.
    """
    small = config.to_dict()
    for name in ("architectures", "auto_map", "quantization_config"):
        small.pop(name, None)
    small = {name: value for name, value in small.items() if name != "loss_type" or value}
    tp, layers = mesh.tp, max(2, num_stages)
    heads, divisor = _heads(config, tp)
    head_size = _head_size(config) if keep_head_size else HEAD_DIM
    width = heads * head_size if heads else 8 * tp + config.to_dict().get("hidden_size", 0) % tp
    _set(small, config, HEADS + KV_HEADS, lambda n: n // divisor)
    _set(small, config, HEAD_SIZES, lambda n: head_size)
    _set(small, config, WIDTHS, lambda n: width)
    _set(small, config, FFN_WIDTHS, lambda n: _like(n, 2 * width, tp))
    _set(small, config, ("vocab_size",), lambda n: _like(n, 96, tp))
    _set(small, config, POSITIONS, lambda n: min(n, TOKENS))
    if not keep_layers:
        _set(small, config, LAYERS, lambda n: min(n, _whole_pattern(config, layers)))
    for name, value in SMALL.items():
        _set(small, config, (name,), lambda n, value=value: min(n, value))
    _cut_lists(small, config, keep_layers, keep_head_size)
    for name in TOWERS:
        if name in small:
            within = getattr(config, name), mesh, num_stages, keep_layers, keep_head_size
            small[name] = shrink(*within).to_dict()
    for name in SPECIAL:
        if type(small.get(name)) is int and small[name] >= 96:
            small[name] = 1
    new = type(config).from_dict(small)
    new.architectures = config.architectures
    return new


def shrink_for(
    program: Any, config: Any, sizes: dict[str, int], cls: Any
) -> tuple[Any, list[Any]] | None:
    """Return (small config that a card's schedule fits, the schedule's directives for it); None if there is none.

    Args:
        program: the schedule of the card.
        config: config of the model that the card is for.
        sizes: sizes by name: tp, pp, dp and stages.
        cls: name of the model's class.
    """
    mesh = Mesh(sizes["tp"], sizes["pp"], sizes["dp"])
    fixed = any(text.isdigit() for text in program.numbers.values())
    small = shrink(config, mesh, sizes["stages"], keep_layers=True, keep_head_size=fixed)
    small.architectures = [cls]
    try:
        return small, program.resolve(small, sizes)
    except SlapoError:
        return None


def _head_size(config: Any) -> int:
    found = [n for name in HEAD_SIZES if type(n := getattr(config, name, None)) is int]
    heads = [n for name in HEADS if type(n := getattr(config, name, None)) is int]
    return found[0] if found else config.hidden_size // heads[0] if heads else HEAD_DIM


def _heads(config: Any, tp: int) -> tuple[int, int]:
    """Return (number of query heads of the small model, number by which all head counts are divided)."""
    counts = [n for name in HEADS + KV_HEADS if type(n := getattr(config, name, None)) is int]
    if not counts:
        return 0, 1
    heads, kv = max(counts), min(counts)
    some = range(1, heads + 1) if heads == kv else _divisors(math.gcd(*counts))  # Falcon-7B has 71
    for divisor in sorted(some, reverse=True):
        few, fewer = heads // divisor, kv // divisor
        if few >= 2 * tp and few % tp == heads % tp and (fewer >= tp) == (kv >= tp):
            return few, divisor
    return heads, 1


def _divisors(n: int) -> Iterable[int]:
    return (i for i in range(1, n + 1) if n % i == 0)


def _like(n: int, size: int, tp: int) -> int:
    """Return a number of about `size`, at most n, whose remainder on division by tp is that of n."""
    return min(n, size - size % tp + n % tp)


def _set(small: dict[str, Any], config: Any, names: Iterable[str], change: Any) -> None:
    for name in names:
        if name in small and type(small[name]) is int and small[name] > 0:
            small[name] = change(getattr(config, name))


def _whole_pattern(config: Any, layers: int) -> int:
    """Return the number of layers, rounded up to a multiple of the period of attention types (GPT-Neo)."""
    patterns = getattr(config, "attention_types", None)
    period = len(patterns[0][0]) if patterns else 1
    return -(-layers // period) * period


def _cut_lists(small: dict[str, Any], config: Any, keep_layers: bool, keep_head_size: bool) -> None:
    count = next((small[n] for n in LAYERS if type(small.get(n)) is int), None)
    if small.get("attention_types") and count and not keep_layers:
        pattern = config.attention_types[0][0]
        small["attention_types"] = [[pattern, count // len(pattern)]]
        small.pop("attention_layers", None)
    for name in PER_LAYER:
        if isinstance(small.get(name), list) and count:
            small[name] = small[name][:count]
    if isinstance(small.get("depths"), list):
        small["depths"] = [1, 2, 1][: len(small["depths"])]
    if isinstance(small.get("num_heads"), list):  # Swin: of each stage
        first = small["num_heads"][0]
        small["embed_dim"] = first * (small["embed_dim"] // first if keep_head_size else HEAD_DIM)
        later = len(small["num_heads"]) - 1
        small["depths"] = list(config.depths) if keep_layers else [2, *[1] * later]
        small["window_size"] = 2
        small["image_size"] = small["patch_size"] * 2 * 2**later  # the last stage has one window


def dropouts(config: Any) -> list[str]:
    """Return the names of the config's dropout probabilities, also of those that are 0."""
    values = config.to_dict()
    named = [n for n in values if "drop" in n and "layerdrop" not in n]
    return [n for n in named if values[n] is None or type(values[n]) in (int, float)]


def expressive(config: Any) -> dict[str, Any]:
    """Return config fields under which mistakes show: no dropout, and initial weights that are not tiny."""
    known = config.to_dict()
    scale = {"initializer_range": 0.2, "initializer_factor": 1.0, "init_std": 0.2}
    changes: dict[str, Any] = {n: v for n, v in scale.items() if n in known}
    changes |= {n: 0.0 for n in dropouts(config) if known[n] is not None}
    changes |= {n: 0.0 for n in known if n.endswith("layerdrop")}
    # a classifier of rows needs to know where they end, a decoder how to begin
    needed = ["pad_token_id", *(["decoder_start_token_id"] if config.is_encoder_decoder else [])]
    return changes | {name: 0 for name in needed if known.get(name) is None}
