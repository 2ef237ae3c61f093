"""`gradient_checkpointing_enable()` of `transformers`, by our recomputation.

The recomputation of `transformers` does not restore the random state that the layer had in its forward, so it would
draw other dropout masks.
"""

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint

from slapo_zoo.errors import SlapoError
from slapo_zoo.language.primitives.checkpoint import recompute_module
from slapo_zoo.pipeline.stages import Foreign

WITHOUT_MEANING = {"use_reentrant", "preserve_rng_state"}  # both forms have the same gradients


class Recomputes:
    """Mixin of a scheduled model that switches recomputation of layers on and off."""

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] | None = None,
        every_n_layers: int = 1,
    ) -> None:
        """Switch recomputation on for one of every `every_n_layers` layers if `enable`, else off for all layers.

        `transformers` calls this method in `gradient_checkpointing_enable()` and `gradient_checkpointing_disable()`.
        Layers that the schedule recomputes are recomputed in either case. `gradient_checkpointing_func` may
        have the options `use_reentrant` and `preserve_rng_state`, which change nothing.
        """
        model: Any = self
        _require_no_options(gradient_checkpointing_func)
        runtime, state = model._slapo, model.schedule.state
        layers = _layers(model)
        if enable and not layers:
            problem = f"{model.unscheduled_class.__name__} names no layers that can be recomputed"
            hint = "load the model with checkpoint_ratio=1.0"
            raise SlapoError("gradient_checkpointing_enable", "the model", problem, hint)
        for path in runtime.recomputed:
            state.checkpointed.remove(path)
        wanted = layers[::every_n_layers] if enable else []
        runtime.recomputed = [path for path in wanted if path not in state.checkpointed]
        for path in runtime.recomputed:
            module = model.get_submodule(path)
            if isinstance(module, Foreign) or hasattr(module.forward, "recomputes"):
                state.checkpointed.append(path)
            else:
                recompute_module(module, path, state)

    @property
    def is_activation_checkpointing(self) -> bool:
        """Return whether `gradient_checkpointing_enable()` has switched recomputation on."""
        model: Any = self
        return bool(model._slapo.recomputed)


def _require_no_options(function: Callable[..., Any] | None) -> None:
    options = set[str](getattr(function, "keywords", ())) - WITHOUT_MEANING
    if getattr(function, "func", checkpoint) is not checkpoint:  # transformers' offload=True
        options.add("offload")
    if options:
        problem = f"found {sorted(options)}, expected use_reentrant or preserve_rng_state at most"
        hint = 'leave them out; from_pretrained has checkpoint_policy="save_matmuls" and "offload" instead'
        what = "gradient_checkpointing_kwargs"
        raise SlapoError("gradient_checkpointing_enable", what, problem, hint)


def _layers(model: Any) -> list[str]:
    """Return the paths of the layers that `gradient_checkpointing_enable()` of transformers recomputes."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    found = []
    for path, module in model.named_modules():
        own = module.__dict__["_original"] if isinstance(module, Foreign) else module
        if isinstance(own, GradientCheckpointingLayer):
            found.append(path)
    return found
