"""generate() of `transformers` on a mesh: every rank calls it with the same arguments and gets the same tokens.

With tp alone it is the unmodified generate(): each rank's KV cache, dynamic or static, holds its own heads. A
pipeline keeps no cache: every new token runs the whole sequence (and an encoder) through all stages again,
so it serves evaluation between training steps. Ranks that sample need equal torch seeds.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from slapo_zoo.errors import SlapoError
from slapo_zoo.hf.attention import CACHES
from slapo_zoo.model.dp.dp_shard import Sharded
from slapo_zoo.parallel.replaced import replaced


class SourceTokens(dict):
    """Encoder's inputs, which replace `encoder_outputs` in `generate` if pp > 1: each forward runs the encoder."""


class LateEncoder(nn.Module):
    """Module that `generate` calls as the encoder of a pipelined model; it only passes the encoder's inputs on. The
    real encoder runs again in every forward, because its stage may be on another rank.
    """

    def forward(self, **kwargs: Any) -> SourceTokens:
        """Return the tensors in `kwargs`, inputs of the encoder, as `encoder_outputs`; each forward encodes them."""
        given = {k: v for k, v in kwargs.items() if isinstance(v, Tensor) and k != "labels"}
        return SourceTokens(given)


def with_source(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a batch. If its entry `encoder_outputs` is a SourceTokens, a dict of the encoder's inputs, these
    inputs replace the entry, so that the pipeline runs the encoder (in `generate` with pp > 1).
    """
    source = batch.get("encoder_outputs")
    if not isinstance(source, SourceTokens):
        return dict(batch)
    return {**{k: v for k, v in batch.items() if k != "encoder_outputs"}, **source}


def refuse_cache(batch: Mapping[str, Any]) -> None:
    """Raise SlapoError if `batch`, the arguments of a forward with pp > 1, asks for or holds a KV cache."""
    found = [name for name in CACHES if batch.get(name) is not None]
    if found or batch.get("use_cache"):
        problem = "pipeline stages keep no KV cache: each forward runs the whole sequence"
        what = (found or ["use_cache=True"])[0]
        raise SlapoError("forward", what, problem, "leave it out, or use pp=1")


def refuse_whole_heads(model: Any, batch: Mapping[str, Any]) -> None:
    """Raise SlapoError if `batch` has a KV cache of all heads (peft's prefix tuning), of which a tp rank has some."""
    name, cache = next(((n, batch[n]) for n in CACHES if batch.get(n) is not None), (None, None))
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    keys = next((x for layer in layers if (x := getattr(layer, "keys", None)) is not None), None)
    if keys is None:
        return
    counts = (
        d.name == "shard_attribute" or getattr(d, "num_heads", 0) for _, d in model.schedule.history
    )
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if keys.shape[1] == heads > 1 and any(counts):  # of sharded heads
        problem = f"the cache has all {heads} heads, but each rank of tp={model.mesh.tp} computes some of them"
        hint = "use tp=1, or prompt tuning in place of prefix tuning"
        raise SlapoError("forward", name, problem, hint)


class Generates:
    """Mixin of a scheduled model: `generate()` of transformers on all ranks, without a KV cache if pp > 1."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as `transformers` does; all ranks pass the same arguments and return the same tokens.

        With pp > 1 there is no KV cache, so each new token runs the whole sequence again. With `dp_shard=` every rank
        runs forwards until the rows of all ranks have ended.
        """
        model: Any = self
        if model.mesh.pp > 1:
            if kwargs.get("use_cache"):
                problem = f"a pipeline of pp={model.mesh.pp} stages keeps no KV cache"
                raise SlapoError("generate", "use_cache=True", problem, "leave it out, or use pp=1")
            kwargs["use_cache"] = False
        if model.mesh.tp * model.mesh.pp > 1:  # its compiled graphs would contain collectives
            kwargs.setdefault("disable_compile", True)
        runtime = model._slapo
        if isinstance(runtime.data_parallel, Sharded):  # a rank whose rows have ended still gathers
            kwargs.setdefault("synced_gpus", True)
        with replaced(runtime, "generates", True), runtime.precision.computing(model):
            return super().generate(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def get_encoder(self, *args: Any, **kwargs: Any) -> Any:
        """Return the encoder; within `generate` with pp > 1, a module that returns its own inputs. The pipeline then
        runs the encoder in each decoder forward.
        """
        model: Any = self
        if model.mesh.pp > 1 and model._slapo.generates:
            return LateEncoder()
        return super().get_encoder(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def _get_static_cache_init_shape(self) -> Any:
        """Return None to transformers if tp > 1: the static cache then takes its shape from the first keys it gets."""
        model: Any = self
        if model.mesh.tp > 1:
            return None
        return super()._get_static_cache_init_shape()  # pyright: ignore[reportAttributeAccessIssue]
