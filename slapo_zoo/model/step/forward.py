"""Forward of a scheduled model: that of its class, with an output that is unsharded on every rank."""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.errors import MeshError, SlapoError
from slapo_zoo.hf.attention import CACHES
from slapo_zoo.hf.cut_body import own_lengths
from slapo_zoo.hf.example_inputs import accepts
from slapo_zoo.model.dp.dp_shard import Sharded
from slapo_zoo.model.gradients.batch_check import check_peers
from slapo_zoo.model.gradients.step_guard import ALWAYS
from slapo_zoo.model.step.generation import refuse_cache, refuse_whole_heads, with_source
from slapo_zoo.model.step.input_errors import explained, require_device
from slapo_zoo.model.step.of_all_tokens import cut_call, cut_of_call, run_cut
from slapo_zoo.model.step.outputs import refuse_outputs, set_return_dict
from slapo_zoo.model.step.own_loss import whole_output
from slapo_zoo.model.step.runtime import (
    Runtime,
    calling,
    count_rows,
    refuse_divided,
    tokens_divide,
)
from slapo_zoo.parallel.once import refuse_transform
from slapo_zoo.parallel.ranks.heartbeat import names_of
from slapo_zoo.parallel.ranks.killed_rank import rank_guard
from slapo_zoo.parallel.ranks.patience import meet
from slapo_zoo.pipeline.pipeline_runtime import Pipeline, pipeline_forward

_TOLD: list[str] = []
_DOCUMENTS = (
    "position_ids: a row holds several sequences, and each sees its own tokens alone, as in train_step; plain "
    "transformers lets them see each other unless use_cache=False. Pass use_cache= to choose"
)


def forward_of(model: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run the model's own forward on all ranks; every rank returns the output with unsharded logits. `args` and
    `kwargs` are the arguments of the call.
    """
    runtime: Runtime = model._slapo
    if runtime.within_engine:
        return runtime.own_forward(model, *args, **kwargs)
    mesh = model.mesh
    if mesh.world_size > 1:
        refuse_transform()
    bound = inspect.signature(runtime.own_forward).bind_partial(model, *args)
    batch = with_source({**dict(list(bound.arguments.items())[1:]), **kwargs})
    stream, rows = runtime.schedule.state.random, count_rows(batch)
    if model.training and runtime.schedule.state.checkpointed:
        batch["use_cache"] = False  # a recomputation would append to the cache again
    require_device(model, batch)
    _keep_documents_apart(model, batch)
    given, cut = batch, cut_of_call(model)
    batch = batch if cut is None else cut_call(model, cut, batch)
    divided = tokens_divide(model, own_lengths(runtime.schedule.state, cut, batch))
    refuse_divided(model, batch, pp=mesh.pp, cp=1 if cut is None else cut.n)
    refuse_outputs(model, batch)
    require_together(model, given)
    wants_tuple, run = set_return_dict(model, batch), functools.partial(_run_own, model, runtime)
    calls = runtime.calls
    draws = stream.call(model.training, rows * mesh.coord("batch"), rows)
    with calling(model, batch, divided, cut), draws:
        if runtime.pipeline is None:  # the user's backward will reduce the gradients
            if mesh.tp > 1:
                refuse_whole_heads(model, batch)
            calls.begin(model, given, model.training)
            output = run(batch) if cut is None else run_cut(model, cut, run, batch, given)
            calls.watch(output)
        else:
            output = _run_stages(model, runtime.pipeline, run, batch)
    return output.to_tuple() if wants_tuple else output


def _keep_documents_apart(model: Any, batch: dict[str, Any]) -> None:
    """Set use_cache=False if `batch` has `position_ids`, and the model trains or the batch has labels: with a cache
    transformers ignores the borders of sequences packed in a row.
    """
    found = [batch[n] for n in ("position_ids", "decoder_position_ids") if batch.get(n) is not None]
    caches = accepts(model.unscheduled_class, "use_cache")
    chosen = batch.keys() & {"use_cache", *CACHES} or not caches
    if chosen or not found or not (model.training or batch.get("labels") is not None):
        return
    batch["use_cache"] = False
    masked = batch.get("attention_mask") is not None
    if not masked and not _TOLD and any(bool((x.diff(dim=-1) != 1).any()) for x in found):
        _TOLD.append("documents")
        warnings.warn(_DOCUMENTS, stacklevel=4)


@functools.cache
def uncompiled() -> Callable[..., Any]:
    """Return f(model, args, kwargs): the forward on several tp or pp ranks, uncompiled inside torch.compile."""
    return torch.compiler.disable(_warned, reason="a model on several tp or pp ranks")


def _warned(model: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    said = "torch.compile: a whole model on tp={} pp={} runs uncompiled; compile its blocks: block.compile()"
    warnings.warn(said.format(model.mesh.tp, model.mesh.pp), stacklevel=2)
    return forward_of(model, args, kwargs)


def _run_stages(model: Any, pipeline: Pipeline, run: Callable, batch: dict[str, Any]) -> Any:
    refuse_cache(batch)
    if accepts(model.unscheduled_class, "use_cache"):
        batch = {**batch, "use_cache": False}
    with rank_guard("forward"):
        output = pipeline_forward(pipeline, run, batch)
    return _without_backward(model, output) if torch.is_grad_enabled() else output


def _run_own(model: Any, runtime: Runtime, batch: Mapping[str, Any]) -> Any:
    with explained(model, batch):
        output = runtime.own_forward(model, **batch)
    return whole_output(output)


def _without_backward(model: Any, output: Any) -> Any:
    """Return the output of a pipeline's forward, changed so that its backward raises SlapoError (use train_step)."""
    asks = torch.zeros((), requires_grad=True), *model.parameters()
    for name in list(output) if hasattr(output, "keys") else ():
        x = output[name]
        if isinstance(x, Tensor) and x.is_floating_point():
            output[name] = _NoBackward.apply(x.clone() if x._is_view() else x, *asks)
    return output


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *_asks: Tensor) -> Tensor:
        ctx.mark_dirty(x)  # returns x itself: logits are not copied, and may be changed in place
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        problem = "the model's layers are on several ranks, and this backward reaches none of them"
        hint = "call model.train_step(batch, loss_fn=...), which runs forward and backward of all stages"
        raise SlapoError("backward", "the output of a model with pp > 1", problem, hint)


def require_together(model: Any, batch: Mapping[str, Any]) -> None:
    """Raise MeshError in a forward without a backward (evaluation, `generate`, `no_grad`) if a rank that has to compute
    a part of the output does not call the model, or passes another `batch` (arguments of the call). Ranks check this in
    the first ALWAYS (16) calls, and then in one of every `model.input_check_interval` calls.
    """
    runtime, interval = model._slapo, model.input_check_interval
    is_checked_later = model.training and torch.is_grad_enabled() and runtime.pipeline is None
    if is_checked_later or torch.compiler.is_compiling() or not interval:
        return
    runtime.evaluated += 1
    if runtime.evaluated > ALWAYS and runtime.evaluated % interval:
        return
    ranks = computing_with(model)
    if len(ranks) == 1:
        return
    with rank_guard("forward"):
        if gone := meet("forward", ranks):
            problem = f"{names_of(gone)} did not call the model, and each rank computes a part of the output"
            hint = "call the model on all ranks, each of which gets the full output"
            raise MeshError("forward", "a model called on some ranks only", problem, hint)
        draws = runtime.schedule.state.random.step if model.training else 0
        check_peers(model.mesh, batch, 1, interval, draws, ("tp", "pp"))


def computing_with(model: Any) -> list[int]:
    """Return the ranks, this one included, with which this rank communicates in a forward (tp, pp, ZeRO)."""
    mesh, engine = model.mesh, model._slapo.data_parallel
    size = engine.shards.size if isinstance(engine, Sharded) else 1
    sharing = mesh.coord("loss") // size  # index of this rank's ZeRO group
    return [r for r in range(mesh.world_size) if mesh.coord("loss", r) // size == sharing]
