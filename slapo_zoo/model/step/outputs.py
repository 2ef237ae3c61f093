"""Optional outputs (hidden states, attentions, tuples): returned unsharded on every rank, or refused."""

from collections.abc import Mapping
from typing import Any

from slapo_zoo.errors import SlapoError

LAYERS = ("output_hidden_states", "output_attentions")


def asked(model: Any, batch: Mapping[str, Any], name: str) -> bool:
    """Return whether `name`, e.g. "output_attentions", is True in the batch or, if it is absent there, in the config."""
    given = batch.get(name)
    return bool(getattr(model.config, name, False) if given is None else given)


def shows_layers(model: Any, batch: Mapping[str, Any]) -> bool:
    """Return whether the caller wants the hidden states of layers, for which every rank must hold all tokens."""
    return asked(model, batch, LAYERS[0])


def refuse_outputs(model: Any, batch: Mapping[str, Any]) -> None:
    """Raise SlapoError for output_hidden_states with pp > 1; output_attentions with pp or tp > 1 or not eager."""
    mesh = model.mesh
    for name in LAYERS:
        if mesh.pp > 1 and asked(model, batch, name):
            problem = f"a stage of pp={mesh.pp} holds its own layers only"
            raise SlapoError("forward", f"{name}=True", problem, "leave it out, or use pp=1")
    if not asked(model, batch, LAYERS[1]):
        return
    if mesh.tp > 1:
        problem = f"a rank of tp={mesh.tp} computes the attention of its own heads only"
        raise SlapoError("forward", "output_attentions=True", problem, "leave it out, or use tp=1")
    used = str(getattr(model.config, "_attn_implementation", None) or "eager")
    if not used.endswith("eager"):
        problem = f"found attention={used!r}, expected eager, which alone computes the weights"
        hint = 'load the model with attention="eager"'
        raise SlapoError("forward", "output_attentions=True", problem, hint)


def set_return_dict(model: Any, batch: dict[str, Any]) -> bool:
    """Set `return_dict=True` in the batch, since outputs are read by name; return whether the caller wanted a tuple."""
    given = batch.get("return_dict")
    wants_tuple = not (getattr(model.config, "return_dict", True) if given is None else given)
    if wants_tuple:
        batch["return_dict"] = True
    return wants_tuple
