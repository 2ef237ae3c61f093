"""Write the files beside the weights of a saved model: configs, tokenizer, a card of the schedule."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slapo_zoo.weights.carry import carry_tokenizer
from slapo_zoo.zoo.argument_values import to_dtype


def extras_of(model: Any, target: Any, published: bool, dtype: Any) -> Callable[[Path], None]:
    """Return a function that writes the files beside the weights; `published` adds a card of the schedule."""
    write_configs = configs_of(model, target, dtype)

    def write(folder: Path) -> None:
        write_configs(folder)
        if published:
            from slapo_zoo.cards.publish import write_beside

            write_beside(model, folder)

    return write


def configs_of(model: Any, target: Any, dtype: Any = None) -> Callable[[Path], None]:
    """Return a function that writes config.json and generation_config.json into a folder, as they are now.

    The tokenizer files of the loaded folder are copied where the folder `target` has none.
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
