"""Read a config of `transformers` as data: no code of its repository runs, and its sizes are checked."""

import re
from pathlib import Path
from typing import Any

MAX_BYTES = 2**24
MAX_COUNT = 10_000  # layers or experts


def read_config(name: str | Path, **options: Any) -> Any:
    """Return a model's config, read by AutoConfig without running the checkpoint's code.

    Args:
        name: a folder, or a model on the Hub.
        options: options of `AutoConfig.from_pretrained`; `return_unused_kwargs` returns (config, unused options).

    Raises:
        OSError: there is no such config.
        ValueError: `transformers` does not know the config, or a size in it is out of range.
    """
    from transformers import AutoConfig

    file = Path(name) / "config.json"
    if file.is_file() and file.stat().st_size > MAX_BYTES:
        problem = f"{file} has {file.stat().st_size} bytes, expected at most {MAX_BYTES}"
        raise ValueError(f"{problem}: name the config.json of a model")
    try:
        found = AutoConfig.from_pretrained(name, trust_remote_code=False, **options)
    except (OSError, ValueError):
        raise
    except Exception as error:  # config classes raise many types on absurd values
        problem = f"transformers cannot read this config: {type(error).__name__}: {error}"
        raise ValueError(f"{name}: {problem}; correct config.json") from error
    config = found[0] if isinstance(found, tuple) else found
    for field, value in vars(config).items():
        counts = field.endswith(("layers", "layer", "experts"))
        if counts and type(value) is int and value > MAX_COUNT:
            problem = f"its config has {field}={value}, expected at most {MAX_COUNT}"
            raise ValueError(f"{name}: {problem}; correct config.json")
    return found


def config_key(config: Any) -> str:
    """Return the values of a config as text, with its attention back ends but without the folder that it was read from.

    Equal texts mean equal models, so results of dry runs (on fake tensors) are cached under this text.
    """
    from transformers import PreTrainedConfig

    towers = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    text = re.sub(r'"_name_or_path": "(?:[^"\\]|\\.)*"', "", config.to_json_string(use_diff=False))
    return f"{text} {[str(each._attn_implementation) for each in (config, *towers)]}"
