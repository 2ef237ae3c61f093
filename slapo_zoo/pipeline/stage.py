"""Stage of torch.distributed.pipelining that adds timing, errors that name the module, and correct gradients of weights
that several places of a stage use, which torch computes wrong."""

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from slapo_zoo.errors import SlapoError, StageError
from slapo_zoo.parallel.ranks.killed_rank import is_lost_peer
from slapo_zoo.parallel.replaced import replaced
from slapo_zoo.pipeline.busy import Busy
from slapo_zoo.pipeline.in_flight import InFlightStage
from slapo_zoo.pipeline.timeline import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    NAMES,
    Action,
    Span,
)


class Stage(InFlightStage):
    """One pipeline stage during one training step; torch's schedules call its `..._chunk` methods.

    Args:
        args, kwargs: arguments of torch's PipelineStage.
        units: the stage's first and last module (block, embedding, head) as one text, "h.0 .. h.5", for errors.
        spans: list to which a Span (begin and end) of each forward and backward is appended, or None.
        clock: function that returns the time in seconds.
        busy: adds up this rank's computing time, from which the training log has the pipeline's bubble; or None.
        before_last: called with the stage's outputs (tensors) before the backward of the last micro-batch, or None.
    """

    def __init__(
        self,
        *args: Any,
        units: str,
        spans: list[Span] | None,
        clock: Callable[[], float],
        busy: Busy | None = None,
        before_last: Callable[[Any], None] | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.before_last = before_last
        self.units, self.spans, self.clock, self.busy = units, spans, clock, busy
        self._whole: bool | None = None  # backward in one part; same for all micro-batches

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run and time the forward of micro-batch `fwd_chunk_id`; return its output. An error becomes a StageError."""
        run = super().forward_one_chunk
        return self._perform(FORWARD, fwd_chunk_id, lambda: run(fwd_chunk_id, *args, **kwargs))

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run and time the backward of micro-batch `bwd_chunk_id`, of inputs only with `full_backward=False`."""
        run = super().backward_one_chunk
        kind = BACKWARD if kwargs.get("full_backward", True) else BACKWARD_INPUT
        return self._perform(kind, bwd_chunk_id, lambda: run(bwd_chunk_id, *args, **kwargs))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run and time the second part of the backward of micro-batch `bwd_chunk_id`: the weight gradients."""
        run = super().backward_weight_one_chunk
        step = lambda: run(bwd_chunk_id, *args, **kwargs)  # noqa: E731
        return self._perform(BACKWARD_WEIGHT, bwd_chunk_id, step)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict, last_backward: bool = False
    ) -> Any:
        """Run the part `backward_type` ("input", "weight" or "full") of a micro-batch's backward with torch's
        arguments, and before the last one of a step `before_last`; return torch's pair (gradients, weight groups for
        the part "weight" or None). Where torch computes wrong gradients in parts (`used_in_several_places`), as it puts
        a weight that is used twice into two groups or none, "input" runs the full backward, and "weight" does nothing
        and returns ((), None).
        """
        run = super().backward_maybe_with_nosync
        if last_backward and self.before_last is not None:
            self.before_last(bwd_kwargs["stage_output"])
        if backward_type == "input":
            outputs, inputs = bwd_kwargs["stage_output"], bwd_kwargs["input_values"]
            if self._whole is None:
                self._whole = used_in_several_places(outputs, inputs, self.submod.parameters())
            if self._whole:
                loss = outputs[0] if self.is_last else outputs
                return run("full", {**bwd_kwargs, "stage_output": loss}, last_backward)
            found, groups = run(backward_type, bwd_kwargs, last_backward)
            dense = (g if g is None else g.contiguous() for g in found)  # some are strided
            return tuple(dense), groups
        if backward_type == "weight" and self._whole:
            return (), None
        return run(backward_type, bwd_kwargs, last_backward)

    def _perform(self, kind: str, micro_batch: int, step: Callable[[], Any]) -> Any:
        begin = self._now()
        try:
            with self.busy.action() if self.busy else nullcontext():
                return step()
        except Exception as error:
            raise self._with_place(error, kind, micro_batch)  # noqa: B904 - it has its cause
        finally:
            if self.spans is not None:
                action = Action(self.stage_index, kind, micro_batch)
                self.spans.append(Span(self.group_rank, action, begin, self._now()))

    def _now(self) -> float:
        if self.spans is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock()

    def _with_place(self, error: Exception, kind: str, micro_batch: int) -> Exception:
        """Return a StageError that names stage, module, micro-batch and action (`kind`), caused by `error`.

        Errors of slapo_zoo, and errors that report a lost peer, are returned unchanged.
        """
        cause = error.__cause__ if "failed to run" in str(error).lower() else error
        cause = cause if isinstance(cause, Exception) else error
        if isinstance(cause, SlapoError) or is_lost_peer(cause):
            return cause
        path = failed_module(self.submod.get_submodule("model"), cause)
        where = f"stage {self.stage_index}, micro-batch {micro_batch}{path and ', '}{path}"
        problem = f"{type(cause).__name__}: {cause}"
        hint = f"look at {path or 'the stage'} and its inputs; the stage holds the modules {self.units}"
        named = StageError(where, NAMES[kind], problem, hint)
        named.__cause__ = cause
        return named


def used_in_several_places(
    outputs: Iterable[Tensor], inputs: Iterable[Any], weights: Iterable[Tensor]
) -> bool:
    """Return whether torch 2.13 computes wrong gradients when it splits the stage's backward (inputs, then weights).

    True if several operations between the received tensors `inputs` and the stage's `outputs` use one of its `weights`
    (as in ALBERT), or if an output that depends on no input uses it, too. Also True if the autograd graph has a
    parameter that is not in `weights`, such as one of the user's loss: torch gives it no gradient.
    """
    weights = list(weights)
    roots = {x.grad_fn for x in outputs if x.grad_fn is not None}
    above = _consumers(roots)
    ends = [get_gradient_edge(x).node for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    way = _reaching([node for node in ends if node in above], above, set())
    for weight in weights:
        node = get_gradient_edge(weight).node if weight.requires_grad else None
        if node in above:
            met = _reaching([node], above, way)
            if len(met & way) + len(met & (roots - way)) > 1:
                return True
    own, leaves = {id(weight) for weight in weights}, [getattr(n, "variable", None) for n in above]
    return any(isinstance(x, nn.Parameter) and id(x) not in own for x in leaves)


def _consumers(roots: set[Any]) -> dict[Any, list[Any]]:
    """Return {autograd node: nodes that consume its result in the forward} of all nodes that `roots` depend on."""
    above: dict[Any, list[Any]] = {node: [] for node in roots}
    todo = list(roots)
    while todo:
        node = todo.pop()
        for following, _ in node.next_functions:
            if following is not None:
                if following not in above:
                    above[following] = []
                    todo.append(following)
                above[following].append(node)
    return above


def _reaching(nodes: list[Any], above: dict[Any, list[Any]], ends: set[Any]) -> set[Any]:
    """Return `nodes` and all autograd nodes whose results depend on them; `above` maps a node to the nodes that consume
    its result in the forward. The search does not go past nodes in `ends`, which are included where it meets them.
    """
    seen, todo = set(nodes), list(nodes)
    while todo:
        node = todo.pop()
        new = [] if node in ends else [n for n in above[node] if n not in seen]
        seen.update(new)
        todo += new
    return seen


def failed_module(model: nn.Module, error: BaseException) -> str:
    """Return the path in `model` of the innermost module whose code ran when `error` was raised; '' for none."""
    names = {id(module): name for name, module in model.named_modules() if name}
    found, traceback = "", error.__traceback__
    while traceback is not None:
        values = traceback.tb_frame.f_locals
        own = values.get("self")
        for value in (own, getattr(own, "module", None), *values.values()):  # `module` of a hook
            if id(value) in names:
                found = names[id(value)]
                break
        traceback = traceback.tb_next
    return found


def quiet_schedules() -> AbstractContextManager[None]:
    """Context in which torch does not log the whole pipeline order when a stage fails; StageError names the action."""
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    return replaced(logger, "disabled", True)
