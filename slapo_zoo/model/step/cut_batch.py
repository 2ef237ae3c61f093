"""Shard the tokens of a batch over cp: each rank gets some tokens of every row.

Positions and shifted labels depend on all tokens of a row, so they are computed before the tokens are sharded.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.errors import SlapoError
from slapo_zoo.hf.attention import CoreAttention
from slapo_zoo.hf.attention_backends import NAME
from slapo_zoo.model.gradients.module_changes import WRAPPER
from slapo_zoo.model.step.outputs import LAYERS, asked
from slapo_zoo.parallel.known import IGNORED
from slapo_zoo.parallel.losses.heads import head_of
from slapo_zoo.parallel.token_cut import TokenCut

TOKENS = {
    "input_ids", "attention_mask", "position_ids", "token_type_ids", "labels",
    "decoder_input_ids", "decoder_attention_mask",
}  # fmt: skip
OPTIONS = {"use_cache", "return_dict", "num_items_in_batch", "output_attentions", "output_hidden_states"}  # fmt: skip
MASK = "attention_mask"
WHERE = "a batch with cp > 1"
SHARDED = "batch_is_sharded=True"


def cut_batch(
    model: Any, cut: TokenCut, tensors: Mapping[str, Tensor], whole: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Shard a batch over cp: return (all entries that have tokens, with this rank's tokens alone; other entries).

    Args:
        model: a scheduled model.
        cut: which tokens each cp rank gets.
        tensors: entries with a batch axis and all tokens: [B, S], or a mask [B, 1 or H, S, S].
        whole: the other entries; a tensor among them ([1, S]) applies to all rows, and its tokens are sharded too.

    Raises:
        SlapoError: an entry cannot be sharded, or an attention module was replaced since the load.
    """
    require_core_attention(model)
    if vars(model).get("_loss_function") is not None and "labels" in tensors:
        problem = "a loss function of your own would get labels that are already shifted and sharded over cp"
        raise SlapoError(WHERE, "model.loss_function", problem, "leave it unset, or load with cp=1")
    batch = {**tensors, **{n: x for n, x in whole.items() if isinstance(x, Tensor) and x.ndim}}
    others = {name: x for name, x in whole.items() if name not in batch}
    _require_known(batch, others)
    _refuse_layers(model, cut.n, others)
    rows = len(batch["input_ids"])
    if model.config.is_encoder_decoder and "labels" in batch and "decoder_input_ids" not in batch:
        batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    positions = POSITIONS[model._slapo.schedule.state.positions]
    packed = batch.get("position_ids")  # they may separate the documents of a row
    if positions is not None and packed is None:
        batch["position_ids"] = positions(model, batch)
    if head_of(model._slapo.head_name(model)).shifts and "labels" in batch:
        batch["shift_labels"] = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    found, shifts = {}, head_of(model._slapo.head_name(model)).shifts
    if packed is not None and MASK not in batch and batch["input_ids"].shape[1] % cut.n:
        _require_hidden_padding(model, packed, shifts, cut.n)
    for name, x in _padded(model, batch, cut.n, packed is not None and shifts).items():
        axis = 2 if x.ndim == 4 else 1
        part = x if x.ndim == 4 and cut.by_heads else cut.part(x, axis)
        found[name] = part.expand(rows, *x.shape[1:axis], -1, *x.shape[axis + 1 :])
    return found, others


def whole_batch(cut: TokenCut, batch: Mapping[str, Any]) -> dict[str, Any]:
    """All-gather over cp a batch that has this rank's tokens only; return the batch with all tokens; a collective call.
    Positions, shifted labels and padding, which depend on whole rows, are computed from the result.

    Args:
        cut: which tokens each cp rank has.
        batch: entries [B, s] with one number per token, the same names and shapes on all ranks; rank r has tokens
            r * s to (r + 1) * s of each row, not shifted.

    Raises:
        SlapoError: an entry cannot be gathered, or cp ranks have different entries or shapes.
    """
    tensors = {name: x for name, x in batch.items() if isinstance(x, Tensor) and x.ndim}
    for name, x in tensors.items():
        if name not in TOKENS or x.ndim != 2:
            problem = f"found {list(x.shape)}, expected [rows, tokens] of an entry among {', '.join(sorted(TOKENS))}"
            raise SlapoError(SHARDED, name, problem, "leave batch_is_sharded out and pass the whole batch")  # fmt: skip
    shapes = [(name, tuple(x.shape), str(x.dtype)) for name, x in sorted(tensors.items())]
    device = next((x.device for x in tensors.values()), None)
    mine = torch.tensor([zlib.crc32(repr(shapes).encode())], device=device)
    if len(cut.whole_of_numbers(mine, 0).unique()) > 1:
        problem = f"cp ranks have other entries or shapes than this one: {shapes}"
        raise SlapoError(SHARDED, "batch", problem, "give every cp rank the same entries and as many tokens")  # fmt: skip
    return {**batch, **{name: cut.whole_of_numbers(tensors[name], 1) for name, *_ in shapes}}


def _require_known(batch: Mapping[str, Tensor], others: Mapping[str, Any]) -> None:
    """Raise SlapoError for an entry of a batch whose name is not among those that can be sharded over cp (TOKENS), or
    that is not [rows, tokens] (or a 4-d mask). `batch` are the tensors of the batch, `others` its other entries.
    """
    unknown = sorted(batch.keys() - TOKENS)
    unknown += sorted(name for name, x in others.items() if name not in OPTIONS and x is not None)
    if unknown:
        problem = f"no rule says how to shard this entry over cp; expected entries among {', '.join(sorted(TOKENS))}"
        raise SlapoError(WHERE, unknown[0], problem, "leave it out, or load with cp=1")
    if "input_ids" not in batch:
        raise SlapoError(WHERE, "input_ids", f"found none among {list(batch)}", "pass input_ids")
    ndim = {name: x.ndim for name, x in batch.items()}
    wrong = [n for n, d in ndim.items() if d != 2 and not (n == MASK and d == 4)]
    if wrong:
        problem = f"found {ndim[wrong[0]]} axes, expected [rows, tokens]"
        raise SlapoError(WHERE, wrong[0], problem, "pass one number per token, or load with cp=1")  # fmt: skip
    mask, tokens = batch.get(MASK), batch["input_ids"].shape[1]
    for name in (MASK, "token_type_ids", "position_ids"):
        if name in batch and ndim[name] == 2 and batch[name].shape[1] != tokens:
            problem = f"found {list(batch[name].shape)}, expected {tokens} numbers per row"
            raise SlapoError(WHERE, name, problem, "pass one number per token of input_ids")
    if mask is not None and mask.ndim == 4 and mask.shape[2:] != (tokens, tokens):
        problem = f"found {list(mask.shape)}, expected [rows, 1 or heads, {tokens}, {tokens}], a row of keys per query"
        raise SlapoError(WHERE, MASK, problem, "expand the mask, or pass one [rows, tokens]")


def _refuse_layers(model: Any, n: int, options: Mapping[str, Any]) -> None:
    """Raise SlapoError if `options` (arguments of the forward) or the config ask for hidden states or attentions of
    layers, in a model whose own forward shards the tokens over cp, before its first layer. A cp rank computes these
    outputs for its own tokens only. `n` is the number of cp ranks.
    """
    for name in LAYERS if model._slapo.schedule.state.body else ():
        if asked(model, options, name):
            problem = f"a rank of cp={n} computes this output for its own tokens only"
            raise SlapoError(WHERE, f"{name}=True", problem, "leave it out, call the model in eval(), or use cp=1")  # fmt: skip


def _require_hidden_padding(model: Any, positions: Tensor, shifts: bool, n: int) -> None:
    """Raise SlapoError if real tokens would see the padding that makes rows a multiple of `n` (cp ranks) tokens long.
    With `shifts` (the model predicts the next token) padding follows the real tokens, as a document of its own; only if
    the config has is_decoder=False do tokens see later ones, and that is an error. Without `shifts` a mask hides the
    padding. With a mask transformers does not separate documents packed into a row, so `positions` [B or 1, S] that
    restart within a row are an error.
    """
    why = "with is_decoder=False tokens may see padding after them"
    if not shifts:
        why = "a mask, which would hide padding, lets packed documents see each other"
    fails = (positions.diff(dim=1) != 1).any() if not shifts else not getattr(model.config, "is_decoder", True)  # fmt: skip
    if fails:
        problem = f"cp={n} does not divide the tokens, and {why}"
        hint = f"pad the rows to a multiple of {n}, or pass an attention_mask [rows, 1, S, S] that separates documents"
        raise SlapoError("train_step", "position_ids", problem, hint)


def _padded(model: Any, batch: dict[str, Tensor], n: int, packed: bool) -> dict[str, Tensor]:
    """Return a batch whose rows end with padding, so that n divides their tokens; no real token sees the padding.

    Args:
        model: a scheduled model.
        batch: entries [B, S], or a mask [B, 1 or H, S, S].
        n: number of cp ranks.
        packed: True if `position_ids` separate the documents of a row. A mask would make transformers ignore
            them, so none is added, and the padding is one more document.
    """
    ids = batch["input_ids"]
    if ids.shape[1] % n and MASK not in batch and not packed:
        batch = {**batch, MASK: torch.ones_like(ids)}
    token = getattr(model.config, "pad_token_id", None)
    values: dict[str, int] = dict.fromkeys(("labels", "shift_labels"), IGNORED)
    values |= dict.fromkeys(("input_ids", "decoder_input_ids"), token if isinstance(token, int) else 0)  # fmt: skip
    found = {}
    for name, x in batch.items():
        count = -x.shape[-1] % n
        if x.ndim == 4:
            found[name] = _padded_mask(x, count)
        elif name == "position_ids":
            found[name] = torch.cat([x, x[:, -1:].expand(-1, count)], 1)
        else:
            found[name] = nn.functional.pad(x, (0, count), value=values.get(name, 0))
    return found


def _padded_mask(mask: Tensor, count: int) -> Tensor:
    """Return `mask` [B, H, S, S] padded to [B, H, S + count, S + count]. The queries of `mask` see none of the new
    keys; the new queries see all keys.
    """
    hidden, seen = (torch.finfo(mask.dtype).min, 0.0) if mask.is_floating_point() else (0, 1)
    return nn.functional.pad(nn.functional.pad(mask, (0, count), value=hidden), (0, 0, 0, count), value=seen)  # fmt: skip


def require_core_attention(model: Any) -> None:
    """Raise SlapoError if an attention was replaced since the load: the new one sees the keys of this cp rank only. An
    attention module was not replaced if it still calls its child `core_attn`, which gathers the keys over cp.
    """
    modules = {WRAPPER.sub("", name): module for name, module in model.named_modules()}
    pipeline = model._slapo.pipeline
    for path, core in model._slapo.schedule.state.modules.items():
        if not isinstance(core, CoreAttention) or (pipeline and not pipeline.holds(path)):
            continue
        config = getattr(modules.get(path.rpartition(".")[0]), "config", None)
        ours = str(getattr(config, "_attn_implementation", "")).startswith(NAME)
        if modules.get(path) is not core or not ours:
            problem = "this attention or its attention function was replaced: it would see one cp rank's keys"
            hint = "choose attention= when loading (sdpa or eager), or load with cp=1"
            raise SlapoError(WHERE, path, problem, hint)


def _counted(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    ids = batch["input_ids"]
    return torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)


def _counted_by_mask(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return position ids [B, S] as OPT counts them, by `attention_mask`: real tokens from 0 on, and -1 for padding."""
    mask = batch.get(MASK)
    mask = torch.ones_like(batch["input_ids"]) if mask is None else mask
    if mask.ndim == 4:
        problem = "found 4 axes, but this model counts position_ids by a mask [rows, tokens]"
        raise SlapoError(WHERE, MASK, problem, "pass position_ids too, or a mask [rows, tokens]")
    return (mask.cumsum(1) * mask - 1).long()


def _counted_real(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return position ids [B, S] as RoBERTa counts them: pad_token_id + 1, + 2, ..., and pad_token_id at padding."""
    padding = model.config.pad_token_id
    real = batch["input_ids"].ne(padding).long()
    return real.cumsum(1) * real + padding


# Value in `Table.cut_tokens` --> (model, batch with all tokens) --> position_ids [B, S]; None: the model takes none.
POSITIONS: dict[str, Callable[[Any, Mapping[str, Tensor]], Tensor] | None] = {
    "counted": _counted,
    "counted by mask": _counted_by_mask,
    "counted real": _counted_real,
    **dict.fromkeys(("placed", "relative", "none")),
}
