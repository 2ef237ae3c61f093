"""Explain errors of a forward: tokens beyond the vocabulary, rows longer than a model's positions, images that misfit."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from slapo_zoo.errors import SlapoError
from slapo_zoo.pipeline.pipeline_runtime import MAIN_INPUTS

IDS = ("input_ids", "decoder_input_ids")
MEDIA = {"pixel_values", "pixel_values_videos", "input_features", "input_values"}
SPARE = 2  # rows that OPT's table of positions has beyond those of the config


class InputError(SlapoError, IndexError):
    """Error of tokens beyond the vocabulary, of rows longer than a model's positions, or of images that misfit the rows."""


@contextmanager
def explained(model: Any, batch: Mapping[str, Any]) -> Iterator[None]:
    """Context around a forward that turns torch's index error into one that names the tokens or images at fault.
    Nothing is checked before an error. On a GPU, where an index error comes too late to read tensors, errors pass
    unchanged.
    """
    try:
        yield
    except (IndexError, RuntimeError, ValueError) as error:
        if isinstance(error, SlapoError) or "hint:" in str(error):  # it already says what to do
            raise
        for name in MEDIA & batch.keys():
            _explain_media(model, name, error)
        config = model.config.get_text_config()
        for name in IDS:
            ids = batch.get(name)
            if isinstance(ids, Tensor) and ids.ndim == 2 and ids.numel() and not ids.is_cuda:
                _explain(model, config, name, ids, error)
        raise


def require_device(model: Any, batch: Mapping[str, Any]) -> None:
    """Raise SlapoError if a main input in `batch`, e.g. `input_ids`, is on the CPU and the model is on another device."""
    device, given = next(model.parameters()).device, {name: batch.get(name) for name in MAIN_INPUTS}
    here = [n for n, x in given.items() if isinstance(x, Tensor) and x.device.type == "cpu"]
    if here and device.type not in ("cpu", "meta"):
        problem = f"found a tensor on cpu, the model is on {device}"
        hint = "move the batch: {k: x.to(model.device) for k, x in batch.items()}; train_step(batch) does so"
        raise SlapoError("forward", here[0], problem, hint)


def _explain_media(model: Any, media: str, error: Exception) -> None:
    """Raise InputError, if `error`, raised by a forward, comes from `media`, the name of the batch's entry with images,
    videos or sounds. Either its text says that they do not match the rows' placeholder tokens; or tokens are sharded
    over tp, while the model adds features of the media to the hidden states of all tokens. Otherwise return.
    """
    if "tokens do not match" in str(error):
        problem = "the images (videos, sounds) do not fit the rows' placeholder tokens; a split batch needs equally many in each row"
        hint = "pass micro_batches=1, or give all rows equally many images; if they do, correct the placeholder tokens"
        raise InputError("forward", media, problem, hint) from error
    if model._slapo.schedule.state.forward.tokens_divided and not isinstance(error, ValueError):
        problem = "this model adds features of images to the hidden states of all tokens, and a tp rank has some of the tokens"
        raise InputError("forward", media, problem, "load with sequence_parallel=False") from error


def _explain(model: Any, config: Any, name: str, ids: Tensor, error: Exception) -> None:
    size, longest = config.vocab_size, getattr(config, "max_position_embeddings", None)
    low, high = int(ids.min()), int(ids.max())
    if ids.is_floating_point():
        problem = f"found numbers of {ids.dtype}, expected token ids of an integer type"
        raise InputError("forward", name, problem, f"pass {name}.long()") from error
    if low < 0 or high >= size:
        problem = f"found ids {low}..{high}, expected 0..{size - 1}"
        hint = "use this model's own tokenizer: these ids are not in the model's vocabulary"
        raise InputError("forward", name, problem, hint) from error
    usable = _positions(model, longest) if longest else None
    if usable is not None and ids.shape[1] > usable:
        problem = f"found rows of {ids.shape[1]} tokens, the model has {usable} positions for them"
        hint = "truncate the rows, e.g. tokenizer(..., truncation=True, max_length=...)"
        raise InputError("forward", name, problem, hint) from error


def _positions(model: nn.Module, longest: int) -> int | None:
    """Return the most tokens per row for which the model has learned positions; None if it learns no positions.
    `longest` is the config's max_position_embeddings. RoBERTa's positions begin after the padding index.
    """
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    found = [m for m in tables if longest <= m.weight.shape[0] <= longest + SPARE]
    if not found:
        return None
    begins = (m.padding_idx + 1 for m in found if m.padding_idx is not None)
    return longest - max(begins, default=0)
