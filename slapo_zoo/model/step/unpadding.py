"""Leave out padding in `train_step` with the model's own loss, where no result can change by it.

The layers of an encoder then run on real tokens only (kernels/unpadded_encoder.py); the outputs at padding
differ from the plain model's: see docs/decisions/0012-padding-is-left-out-unseen.md.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from slapo_zoo.dispatch.kernel_registry import KNOWN, as_written, is_changed, package_of
from slapo_zoo.hf.attention import ATTRIBUTE
from slapo_zoo.hf.attention_backends import NAME
from slapo_zoo.parallel.losses.heads import head_of

WORTH_UNPADDING = 0.9  # share of real tokens up to which moving them is cheaper
SHOWS = ("output_hidden_states", "output_attentions", "is_decoder")
GIVEN = ("past_key_values", "encoder_hidden_states")
BY_TOKEN = (nn.Linear, nn.Dropout, nn.Identity, nn.LayerNorm, nn.ModuleDict, nn.Sequential, nn.Tanh, nn.ReLU, nn.GELU)  # fmt: skip


def may_unpad(model: Any, batch: Mapping[str, Any]) -> bool:
    """Return whether the padding of a batch may be left out, as far as its shapes and the model tell."""
    state = model._slapo.schedule.state
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if not (state.unpads and model.training and isinstance(mask, Tensor) and mask.ndim == 2):
        return False
    head = head_of(model.unscheduled_class.__name__)
    if not head.ignores_padding or labels is None or labels.shape != mask.shape:
        return False
    shown = any(batch.get(name) or getattr(model.config, name, False) for name in SHOWS)
    given = any(batch.get(name) is not None for name in GIVEN)
    if shown or given or state.checkpointed or state.forward.tokens_divided or model.mesh.pp > 1:
        return False
    return _runs_as_loaded(model)


def _runs_as_loaded(model: Any) -> bool:
    """Return whether every module between the embeddings and the loss is known and acts token by token.

    Hooks, wrappers, other attention backends and foreign recomputation added since the load make it False.
    """
    modules = list(model.modules())
    if _has_any_global_hook() or any(map(_is_watched, modules)):
        return False
    loaded = {id(m) for m in model._slapo.schedule.state.modules.values()}
    classes = {type(m) for m in modules[1:]} | {model.unscheduled_class}
    new = {type(m) for m in modules if id(m) not in loaded}
    return all(cls in BY_TOKEN or package_of(cls) == "peft" for cls in new) and all(
        package_of(cls) in (*KNOWN, "peft") and as_written(cls) for cls in classes
    )


def _is_watched(module: Any) -> bool:
    """Return whether a module has hooks or a changed forward, or an attention that needs unsplit rows."""
    own = vars(module)
    if own.get("gradient_checkpointing") or module._compiled_call_impl or is_changed(module):
        return True
    if ATTRIBUTE in module._modules:
        return not str(module.config._attn_implementation).startswith(NAME)
    return "is_causal" in own
