"""What torch says of tokens that a model has no row for, in words that teach."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from slapo_zoo.errors import SlapoError

IDS = ("input_ids", "decoder_input_ids")
SPARE = 2  # rows of a table of positions that RoBERTa's kin keep for padding


class InputError(SlapoError, IndexError):
    """Tokens beyond the vocabulary, or rows beyond the positions, of a model."""


@contextmanager
def explained(model: Any, batch: Mapping[str, Any]) -> Iterator[None]:
    """Around a forward: an error of torch becomes one that names the tokens at fault.

    Nothing is looked at before something failed; on a GPU an embedding fails only later.
    """
    try:
        yield
    except (IndexError, RuntimeError) as error:
        if isinstance(error, SlapoError) or "hint:" in str(error):  # it teaches as it is
            raise
        config = model.config.get_text_config()
        for name in IDS:
            ids = batch.get(name)
            if isinstance(ids, Tensor) and ids.ndim == 2 and ids.numel():
                _explain(model, config, name, ids, error)
        raise


def _explain(model: Any, config: Any, name: str, ids: Tensor, error: Exception) -> None:
    size, longest = config.vocab_size, getattr(config, "max_position_embeddings", None)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= size:
        problem = f"found ids {low}..{high}, expected 0..{size - 1}"
        hint = "do the tokenizer and the model have the same vocabulary?"
        raise InputError("forward", name, problem, hint) from error
    if longest and ids.shape[1] + SPARE > longest and _has_table(model, longest):
        problem = f"found rows of {ids.shape[1]} tokens, the model has {longest} positions"
        hint = "cut the rows (RoBERTa's kin keep two positions for padding)"
        raise InputError("forward", name, problem, hint) from error


def _has_table(model: nn.Module, rows: int) -> bool:
    """Whether positions are learned; computed ones know no end."""
    tables = (m.weight.shape[0] for m in model.modules() if isinstance(m, nn.Embedding))
    return any(rows <= count <= rows + SPARE for count in tables)
