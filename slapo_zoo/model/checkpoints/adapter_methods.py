"""Methods of a scheduled model for LoRA adapters of peft: add, load, delete and save them."""

from pathlib import Path
from typing import Any

from torch import Tensor

from slapo_zoo.errors import SlapoError
from slapo_zoo.model.checkpoints import adapters
from slapo_zoo.parallel.compat import require_release
from slapo_zoo.parallel.ranks.killed_rank import rank_guard
from slapo_zoo.weights.adapter_files import CONFIG, save_adapter_files
from slapo_zoo.weights.staging import resolved


class Adapts:
    """Mixin with the adapter methods that a transformers class has, for a model whose layers are sharded."""

    _slapo: Any
    _adds_adapter = False

    def add_adapter(self, adapter_config: Any, adapter_name: str | None = None) -> None:
        """Add a LoRA adapter of peft, and freeze the parameters that it does not train; a collective call of all ranks.

        The matrices are sharded like the weights that they adapt, and their values are equal for every (tp, pp, dp).
        peft's methods work as usual: `set_adapter`, `disable_adapters`.

        Args:
            adapter_config: a `peft.LoraConfig`.
            adapter_name: name for the adapter; None takes "default".
        """
        self._add_adapter(adapter_config, adapter_name or "default", None)

    def load_adapter(
        self, peft_model_id: Any, adapter_name: str | None = None, is_trainable: bool = False, **others: Any
    ) -> None:  # fmt: skip
        """Load a LoRA adapter from a folder that peft or `save_adapter` wrote; a collective call of all ranks.

        Args:
            peft_model_id: the folder.
            adapter_name: name for the adapter; None takes "default".
            is_trainable: True to train the adapter's matrices; False freezes them.
            others: arguments of transformers' `load_adapter`, which are refused unless None.
        """
        with rank_guard("load_adapter"):
            if given := [f"{name}=" for name, value in others.items() if value is not None]:
                problem = "found an argument that a sharded model does not take: each rank reads its own slices to its device"
                hint = "pass a folder, adapter_name= and is_trainable= alone"
                raise SlapoError("load_adapter", ", ".join(given), problem, hint)
            folder, name = resolved(peft_model_id), adapter_name or "default"
            config = _saved_config(folder, is_trainable)
        self._add_adapter(config, name, folder)
        model: Any = self
        for at, p in model.named_parameters():
            if f".{name}." in f"{at}." or (at.endswith(".bias") and not is_trainable):
                p.requires_grad_(is_trainable)

    def _add_adapter(self, config: Any, name: str, folder: Path | None) -> None:
        def inject() -> None:
            self._adds_adapter = True  # else the setter of peft_config raises
            try:
                super(Adapts, self).add_adapter(config, name)  # pyright: ignore[reportAttributeAccessIssue]
            finally:
                self._adds_adapter = False

        from transformers.integrations.peft import MIN_PEFT_VERSION as LEAST

        with rank_guard("add_adapter"):
            require_release("add_adapter", "peft", LEAST, "this transformers takes no older one")
            if name in self._slapo.adapters:
                hint = "pass another adapter_name=, or first call model.delete_adapter(name)"
                raise SlapoError("add_adapter", repr(name), "the model has an adapter of this name", hint)  # fmt: skip
            adapters.add_adapter(self, config, name, inject, folder)

    def disable_adapters(self) -> None:
        """Let the model compute without its adapters; adapters that are merged into the weights are subtracted now."""
        model: Any = self
        for layer in model.modules():
            if getattr(layer, "merged", False):
                layer.unmerge()
        super().disable_adapters()  # pyright: ignore[reportAttributeAccessIssue]

    def delete_adapter(self, adapter_names: list[str] | str) -> None:
        """Delete adapters by name. While one is left, `save_pretrained` saves it alone and `save_checkpoint` raises."""
        super().delete_adapter(adapter_names)  # pyright: ignore[reportAttributeAccessIssue]
        for name in [adapter_names] if isinstance(adapter_names, str) else adapter_names:
            self._slapo.adapters.pop(name, None)

    def save_adapter(
        self, save_directory: Any, adapter_name: str | None = None, check_finite: bool = True
    ) -> None:
        """Write an adapter, with unsharded matrices, as plain peft loads it; a collective call of all ranks.

        Args:
            save_directory: folder to write: new, empty, or of an older adapter, which one rename replaces.
            adapter_name: name of the adapter; None takes the active one.
            check_finite: refuse to replace an older adapter by matrices with NaN or infinity.
        """
        with rank_guard("save_adapter"):
            name, mesh = self._adapter(adapter_name), self._slapo.schedule.mesh
            full = adapters.consolidated_adapter(self, name)
            write = self.peft_config[name].save_pretrained
            save_adapter_files(mesh, save_directory, full, write, check_finite)

    def get_adapter_state_dict(
        self, adapter_name: str | None = None, grads: bool = False
    ) -> dict[str, Tensor]:
        """Return {key in peft's files: unsharded matrix, or its gradient if `grads`} on rank 0, and {} on other ranks;
        a collective call. `adapter_name` None takes the active adapter; a missing gradient is returned as zeros.
        """
        with rank_guard("get_adapter_state_dict"):
            return adapters.consolidated_adapter(self, self._adapter(adapter_name), grads)

    def _adapter(self, name: str | None) -> str:
        model: Any = self
        active = [name] if name else model.active_adapters()
        if len(active) > 1:
            problem = f"found the active adapters {', '.join(active)}, expected one to save"
            hint = f"pass adapter_name={active[0]!r}, or first call model.set_adapter with one name"
            raise SlapoError("adapter", "adapter_name", problem, hint)
        return active[0]

    @property
    def peft_config(self) -> Any:
        """Return {adapter name: its peft config}; AttributeError if the model has no adapter."""
        if not isinstance(self._slapo.peft_config, dict):
            raise AttributeError(
                "the model has no adapter, so no peft_config: call model.add_adapter(config) first"
            )
        return self._slapo.peft_config

    @peft_config.setter
    def peft_config(self, value: Any) -> None:
        ranks = self._slapo.schedule.mesh.world_size
        if not self._adds_adapter and ranks > 1:
            problem = f"peft cannot shard an adapter over the model's {ranks} ranks"
            hint = "load the model again and call model.add_adapter(config), not get_peft_model"
            raise SlapoError("peft", "get_peft_model", problem, hint)
        self._slapo.peft_config = value

    @peft_config.deleter
    def peft_config(self) -> None:
        self._slapo.peft_config = None

    def _save_adapter_alone(
        self, save_directory: Any, push_to_hub: bool, changed: bool, check_finite: bool
    ) -> None:
        if push_to_hub:
            problem = "the model has an adapter, which this call cannot upload"
            hint = "save_pretrained(folder), then huggingface_hub.HfApi().upload_folder(...)"
            raise SlapoError("save_pretrained", "push_to_hub", problem, hint)
        if changed:
            problem = "the model has an adapter, which is written in its own dtype, without a variant"  # fmt: skip
            raise SlapoError("save_pretrained", "dtype= or variant=", problem, "leave both out")
        self.save_adapter(save_directory, check_finite=check_finite)


def _saved_config(folder: Path, is_trainable: bool) -> Any:
    """Return the peft config of a saved adapter, for training if `is_trainable`; SlapoError if the folder has none."""
    from peft import PeftConfig

    try:
        config = PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # peft raises many types on damaged text
        problem = f"found no {CONFIG} that peft can read: {error!r:.200}"
        hint = "pass a folder that peft or save_adapter wrote"
        raise SlapoError("load_adapter", str(folder), problem, hint) from error
    config.inference_mode = not is_trainable
    return config
