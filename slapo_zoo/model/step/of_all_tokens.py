"""Gather the outputs of a forward whose tokens are sharded over cp, for losses that the user computes.

Each rank computes its own tokens. Then logits are all-gathered over cp, and the model's own loss is summed from the
ranks' shares, so that every cp rank computes the user's loss of all tokens. In the backward every cp rank sends the
same gradient of the logits; the gather sums these, so it is cp times too large, and the mean of parameter gradients
over cp, in place of their sum, corrects that.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from slapo_zoo.errors import SlapoError
from slapo_zoo.hf.example_inputs import accepts
from slapo_zoo.model.step.cut_batch import cut_batch
from slapo_zoo.model.step.outputs import LAYERS, asked
from slapo_zoo.model.step.own_loss import of_model, whole_output
from slapo_zoo.parallel.collectives import reduce_backward, reduce_forward
from slapo_zoo.parallel.losses.loss_means import GlobalMeans, count_targets
from slapo_zoo.parallel.token_cut import TokenCut, cutting
from slapo_zoo.pipeline.pipeline_runtime import FOR_LOSS, split_batch


def cut_of_call(model: Any) -> TokenCut | None:
    """Return which tokens each cp rank computes in a call `model(...)` of the user's loop; None if each computes all.
    Tokens are sharded if a backward will follow; in evaluation and in a pipeline every rank computes all tokens.
    """
    follows = model.training and torch.is_grad_enabled() and model._slapo.pipeline is None
    return cut_of(model) if follows else None


def cut_of(model: Any) -> TokenCut | None:
    """Return which tokens of each row every cp rank computes in the steps of a model; None when cp is 1."""
    return TokenCut.of(model.mesh, model._slapo.schedule.state.cp_attention)


def cut_call(model: Any, cut: TokenCut, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments `batch` of a call `model(...)` with only those tokens that this cp rank computes, as `cut`
    says; with all tokens if the model's own forward shards them, before its first layer.
    """
    if model._slapo.schedule.state.body is not None:
        return dict(batch)
    if asked(model, batch, LAYERS[1]):
        problem = f"a rank of cp={cut.n} computes the attention of its own tokens only"
        hint = "leave it out, or call the model in eval()"
        raise SlapoError("forward", f"{LAYERS[1]}=True", problem, hint)
    part, others = cut_batch(model, cut, *split_batch(batch))
    # a cache would lack the keys of other ranks
    cached = {"use_cache": False} if accepts(model.unscheduled_class, "use_cache") else {}
    return {**part, **others, **cached}


def cut_step(
    model: Any, cut: TokenCut, tensors: Mapping[str, Tensor], whole: Mapping[str, Any], own: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Shard a batch over cp: return `tensors` (entries with a batch axis) and `whole` (the others) with this cp rank's
    tokens only, chosen by `cut`. If `own` (a loss_fn), each dict also has its uncut entries, under FOR_LOSS + name.
    """
    part, others = cut_batch(model, cut, of_model(tensors), of_model(whole))
    if own:
        part |= {FOR_LOSS + name.removeprefix(FOR_LOSS): x for name, x in tensors.items()}
        others |= {FOR_LOSS + name.removeprefix(FOR_LOSS): x for name, x in whole.items()}
    return part, others


def run_cut(
    model: Any, cut: TokenCut, run: Callable[[Any], Any], part: Mapping[str, Any], given: Mapping[str, Any]
) -> Any:  # fmt: skip
    """Run a forward by `run(part)`, where `part` is the batch `given` cut to this cp rank's tokens. Return its output
    for all tokens: logits and hidden states gathered over cp, the loss summed. `cut` tells each rank's tokens.
    """
    if (body := model._slapo.schedule.state.body) is not None:
        with body.sharded(cut):
            return run(part)
    with cutting(model._slapo.schedule.state.random, cut), means_of_all(model, given):
        return of_all_tokens(cut, run(part), given)


def means_of_all(model: Any, given: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Context in which the model's loss is this cp rank's share of the loss of all tokens: the sum over this rank's
    tokens, divided by the number of labels other than -100 on all cp ranks. The caller sums the shares over cp. `given`
    is the batch with all tokens. Without labels in it the loss stays as it is, and also if the model itself divides its
    sum of losses by the batch's `num_items_in_batch`, which gives a share already.
    """
    if given.get("labels") is None:
        return nullcontext()
    means = GlobalMeans(count_targets(model._slapo.head_name(model), given))  # pyright: ignore[reportArgumentType]
    means.is_needed = given.get("num_items_in_batch") is None
    return means.over(model, {})


def tokens_of(name: str, given: Mapping[str, Any]) -> int:
    """Return the number of tokens per row, without padding for cp, of the output called `name`, e.g. "logits": that of
    `input_ids` in the batch `given` for an encoder's output, else that of the decoder's inputs or labels, if any.
    """
    source = given["input_ids"].shape[1]
    if name.startswith("encoder"):
        return source
    labels = given.get("decoder_input_ids")
    labels = given.get("labels") if labels is None else labels
    return source if labels is None else labels.shape[1]


def of_all_tokens(cut: TokenCut, output: Any, given: Mapping[str, Any]) -> Any:
    """Return a model's output for all tokens: logits and hidden states [B, s, D] gathered over cp, scalars (the loss)
    summed over cp. SlapoError for tensors with another number of axes.

    Args:
        cut: which tokens each cp rank computed.
        output: the model's output for this rank's tokens; its loss is this rank's share.
        given: the batch with all tokens, which tells the length of each output.
    """

    def of_all(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x.ndim == 3:
            return cut.whole(x, 1).narrow(1, 0, tokens_of(name, given))
        if x.ndim:
            problem = f"found {x.ndim} axes, expected [rows, tokens, width]"
            what = f"the output {name!r} with cp > 1"
            raise SlapoError("forward", what, problem, "use cp=1 for this model")
        return reduce_forward(reduce_backward(x, cut.group), cut.group)

    output = whole_output(output)
    for name in list(output) if hasattr(output, "keys") else ():
        output[name] = tree_map(partial(of_all, name), output[name])
    return output
