"""Files beside the weights of a saved model: its configs, its tokenizer, a card of its schedule."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slapo_zoo.weights.carry import carry_tokenizer
from slapo_zoo.zoo.argument_values import to_dtype


def extras_of(model: Any, target: Any, published: bool, dtype: Any) -> Callable[[Path], None]:
    """Return the writers of the files beside the weights; with a card of the schedule where it is published."""
    write_configs = configs_of(model, target, dtype)

    def write(folder: Path) -> None:
        write_configs(folder)
        if published:
            from slapo_zoo.cards.publish import write_beside

            write_beside(model, folder)

    return write


def configs_of(model: Any, target: Any, dtype: Any = None) -> Callable[[Path], None]:
    """Return a writer of config.json and generation_config.json as they are now, as `transformers` writes them.

    The tokenizer files of the loaded folder come along where the target has none.
    """
    config = model.config.__class__.from_dict(model.config.to_dict())
    config.architectures = [model.unscheduled_class.__name__]
    config.dtype = next(model.parameters()).dtype if dtype is None else to_dtype(dtype)
    configs, source = [config], model._slapo.source
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        configs.append(copy.deepcopy(model.generation_config))

    def write(folder: Path) -> None:
        for one in configs:
            one.save_pretrained(folder)
        carry_tokenizer(source, Path(target), folder)

    return write
