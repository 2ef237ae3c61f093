"""Arguments of transformers' `from_pretrained` and `save_pretrained`: accepted, translated or refused."""

import copy
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from slapo_zoo.errors import SlapoError
from slapo_zoo.zoo.options import INSTEAD

WHERE = "from_pretrained"
ATTENTION = {
    "sdpa": "sdpa",
    "eager": "eager",
    "flash_attention_2": "flash",
    "flex_attention": "flex",
}
# Argument --> values with which it asks for what is done here anyway.
ANYWAY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(INSTEAD, (None, False)),
    "low_cpu_mem_usage": (None, True, False),
    "weights_only": (None, True),
    "use_safetensors": (None, True),
}
# The same for `save_pretrained`: (values, hint). All ranks call it, so `is_main_process` says nothing.
SAVED_ANYWAY: dict[str, tuple[tuple[Any, ...], str]] = {
    "is_main_process": ((True, False), "leave it out: all ranks call save_pretrained"),
    "safe_serialization": ((None, True), "leave it out: transformers reads safetensors, and no pickle is written"),
    "state_dict": ((None,), "leave it out: the model's tensors are written; write others by safetensors.torch.save_file"),
    "save_peft_format": ((True,), "leave it out: an adapter is written as peft does"),
    "save_original_format": ((True,), "leave it out: files have the keys that transformers writes"),
    "distributed_checkpoint": ((False,), "leave it out: every rank writes its slices anyway"),
}  # fmt: skip


@dataclass(frozen=True)
class HubArguments:
    """Arguments of transformers that say where a checkpoint is and how it is read.

    Args:
        token: access token of the Hub.
        cache_dir: folder of downloaded files.
        local_files_only: True uses downloaded files only.
        force_download: True downloads even files that are in `cache_dir`.
        subfolder: folder of the checkpoint within the Hub repository or the local folder.
        variant: read files named `model.<variant>.safetensors`.
        config: a config to use instead of the checkpoint's, or the folder or name of one.
        ignore_mismatched_sizes: True draws new values for tensors whose shape in the files is not the model's.
        generation_config: a GenerationConfig that replaces the checkpoint's; None keeps the checkpoint's.
    """

    token: Any = None
    cache_dir: Any = None
    local_files_only: bool = False
    force_download: bool = False
    subfolder: str = ""
    variant: str | None = None
    config: Any = None
    ignore_mismatched_sizes: bool = False
    generation_config: Any = None

    @staticmethod
    def taken(given: dict[str, Any]) -> "HubArguments":
        """Remove the arguments that are fields of this class from `given`, and return them as an object.

        Arguments that ask for what slapo_zoo does anyway, e.g. low_cpu_mem_usage=True, are removed from `given` too.
        """
        for name, allowed in ANYWAY.items():
            if name in given and any(given[name] is one for one in allowed):
                del given[name]
        known = [field.name for field in fields(HubArguments)]
        return HubArguments(**{name: given.pop(name) for name in known if name in given})

    @property
    def fetching(self) -> dict[str, Any]:
        """Return the arguments of this object that `snapshot_download` takes."""
        names = ("token", "cache_dir", "local_files_only", "force_download")
        return {name: getattr(self, name) for name in names}

    @property
    def stem(self) -> str:
        """Return the first part of the weight files' names: `model`, or `model.<variant>`."""
        return f"model.{self.variant}" if self.variant else "model"

    def own_config(self, changes: dict[str, Any]) -> Any:
        """Return a copy of the config object in `config`, with `changes` set; None if `config` is a name or None."""
        if self.config is None or isinstance(self.config, str | Path):
            return None
        if not hasattr(self.config, "to_dict"):
            problem = f"found a {type(self.config).__name__}, expected a config of transformers"
            hint = "pass a config object, or its folder; to change a field, pass it by name, e.g. num_hidden_layers=2"
            raise SlapoError(WHERE, "config=", problem, hint)
        config = copy.deepcopy(self.config)
        for name, value in changes.items():
            if not hasattr(config, name):
                problem = f"{type(config).__name__} has no such field"
                raise SlapoError(WHERE, f"{name}=", problem, "leave it out, or correct its name")
            setattr(config, name, value)
        return config


def renamed(given: dict[str, Any], attention: Any, dtype: Any) -> tuple[Any, Any]:
    """Return the loader's (attention, dtype), which the user may have given by transformers' argument names.

    Args:
        given: further arguments; `attn_implementation` and `torch_dtype` are removed.
        attention: value of slapo_zoo's `attention=`; SlapoError if `attn_implementation` was given too.
        dtype: value of the argument `dtype`, which prevails over `torch_dtype`; None means "auto".
    """
    theirs = given.pop("attn_implementation", None)
    if theirs is not None:
        if attention is not None or str(theirs) not in ATTENTION:  # a dict is one for each part
            found = f"attn_implementation={theirs!r}" + (f", attention={attention!r}" if attention else "")  # fmt: skip
            problem = f"expected one of {', '.join(ATTENTION)}, and no attention= beside it"
            hint = f"pass attention= alone, one of {', '.join(ATTENTION.values())}"
            raise SlapoError(WHERE, found, problem, hint)
        attention = ATTENTION[theirs]
    older = given.pop("torch_dtype", None)
    return attention, next((d for d in (dtype, older) if d not in (None, "auto")), "auto")


def saved_stem(given: dict[str, Any], allowed: Collection[str]) -> str:
    """Return the first part of the weight files' names, from the arguments of transformers' `save_pretrained`.

    Args:
        given: the arguments; `variant` and those with their default values are removed.
        allowed: names that may remain; SlapoError for others.
    """
    where = "save_pretrained"
    for name, (values, hint) in SAVED_ANYWAY.items():
        if name in given and not any(given[name] is value for value in values):
            problem = f"found {given[name]!r:.60}, which is not supported here"
            raise SlapoError(where, f"{name}=", problem, hint)
        given.pop(name, None)
    variant = given.pop("variant", None)
    given.pop("save_function", None)  # transformers ignores it too
    if not allowed:
        given.pop("token", None)  # the token of an upload that was not requested
    if unknown := [name for name in given if name not in allowed]:
        problem = "no such argument of save_pretrained"
        raise SlapoError(where, ", ".join(unknown), problem, "leave them out")
    return f"model.{variant}" if variant else "model"
