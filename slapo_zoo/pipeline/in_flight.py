"""Pipeline stage whose buffers exist only while their micro-batch is in flight.

`PipelineStage` of torch makes a receive buffer per micro-batch and direction before a step, and keeps every sent tensor
until the step ends. Here a buffer is made when its receive is posted, and freed once it was used. A sent tensor is
freed when a later message proves that it arrived, although its backward has not run: autograd needs only its shape.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from slapo_zoo.parallel.live_bytes import counted_as
from slapo_zoo.pipeline.timeline import BACKWARD, BACKWARD_WEIGHT, FORWARD, Action


def arrivals(
    ranks: Sequence[Sequence[Action]], rank_of: Callable[[int], int], rank: int
) -> dict[Action, list[Action]]:
    """Return {action of `rank`: its earlier actions whose results must have arrived at the receiver when it starts}.

    An action is the forward or backward of a micro-batch on a stage. `ranks` lists each rank's actions in order,
    `rank_of` maps a stage to its rank. Once stage 0 has the gradient for its backward 0, stage 1 has used the output of
    forward 0: waiting for that send never blocks.
    """
    place = {_whole(a): at for actions in ranks for at, a in enumerate(actions) if _moves(a)}
    sent: dict[int, list[tuple[int, Action]]] = defaultdict(list)
    for action in filter(_moves, ranks[rank]):
        user = _whole(action, 1 if action.kind == FORWARD else -1)
        if user in place and rank_of(user.stage) != rank:
            sent[rank_of(user.stage)].append((place[user], _whole(action)))
    for waiting in sent.values():
        waiting.sort()
    found = {}
    for action in filter(_moves, ranks[rank]):
        source = _whole(action, -1 if action.kind == FORWARD else 1)
        waiting = sent.get(rank_of(source.stage), []) if source in place else []
        done = bisect_right(waiting, place[source], key=lambda pair: pair[0]) if waiting else 0
        found[_whole(action)] = [one for _, one in waiting[:done]]
        del waiting[:done]
    return found


def _moves(action: Action) -> bool:
    return action.kind != BACKWARD_WEIGHT


def _whole(action: Action, step: int = 0) -> Action:
    """Return the action of the same micro-batch on stage `action.stage + step`: a forward, or for any kind of backward
    the full BACKWARD. There may be no such stage.
    """
    kind = FORWARD if action.kind == FORWARD else BACKWARD
    return Action(action.stage + step, kind, action.micro_batch)


class Sends:
    """Sends of one rank in one pipeline step that may not have arrived yet. `arrived`, made by `arrivals`, maps a
    forward or backward of this rank to its earlier ones whose results the receivers must have when it starts.
    """

    def __init__(self, arrived: Mapping[Action, Sequence[Action]]):
        self.arrived = arrived
        self._works: dict[Action, list[Any]] = {}
        self._given_up: dict[Action, Callable[[], None]] = {}

    def post(self, action: Action, operations: list[Any], give_up: Callable[[], None]) -> None:
        """Start the P2POps that send `action`'s results; once they have arrived, `give_up()` is called to free them."""
        from torch.distributed.pipelining.schedules import _batch_p2p

        self._works[action], self._given_up[action] = _batch_p2p(operations), give_up

    def release(self, action: Action) -> None:
        """Wait for the earlier sends that must have arrived before `action`, a forward or backward of this rank, could
        start; free the sent tensors.
        """
        self._wait(self.arrived.get(action, ()))

    def finish(self) -> None:
        """Wait until all remaining sends are complete, and free the sent tensors; called at the end of a step."""
        self._wait(list(self._works))

    def _wait(self, actions: Iterable[Action]) -> None:
        for action in actions:
            works = self._works.pop(action, ())
            for work in works:
                work.wait()
            if works:
                self._given_up.pop(action)()


class InFlightStage(PipelineStage):
    """torch's PipelineStage (same arguments), with buffers only for the micro-batches that are in flight. `sends`
    tracks this rank's sends; `has_met` is True after the first step, whose messages connect the ranks once.
    """

    sends: Sends
    has_met = False

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> Any:
        """Run torch's set-up exchange with torch's arguments; return a tensor [1], 1 if this and all earlier stages
        have fixed shapes. After the first step, return 1 without messages.
        """
        vote = super()._warmup_forward_vote
        return torch.ones(1, device="cpu") if self.has_met else vote(*args, **kwargs)

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> Any:
        vote = super()._warmup_backward_result
        return torch.ones(1, device="cpu") if self.has_met else vote(*args, **kwargs)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        """Context in which torch allocates the stage's buffers on the meta device, with shapes and without memory."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Allocate buffers for the inputs of micro-batch `fwd_chunk_id`; return P2POps that receive into them."""
        self._make(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Allocate buffers for output gradients of micro-batch `bwd_chunk_id`; return P2POps that receive into them."""
        if self.has_backward and not self.is_last:
            self._make(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take the output gradients of micro-batch `mb_index`, `next_stage_bwd_outputs`, from the next stage, which is
        on this rank; a None among them becomes a buffer of zeros.
        """
        infos = self.grad_recv_info[mb_index]
        self._make(info for info, x in zip(infos, next_stage_bwd_outputs, strict=True) if x is None)
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Send the outputs of micro-batch `fwd_chunk_id`; return [], so that torch does not send them again."""
        action = Action(self.stage_index, FORWARD, fwd_chunk_id)
        return self._post(action, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Send input gradients of micro-batch `bwd_chunk_id`; return [], so that torch does not send them again."""
        action = Action(self.stage_index, BACKWARD, bwd_chunk_id)
        return self._post(action, super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of micro-batch `fwd_chunk_id`; free inputs that autograd has not saved; return the output."""
        self.sends.release(Action(self.stage_index, FORWARD, fwd_chunk_id))
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._give_up_inputs(fwd_chunk_id)
        self._forget(self.args_recv_info[fwd_chunk_id])
        if self.is_last and self.output_chunks:  # unread, but would keep the graph alive
            self.output_chunks[-1] = tuple(x.detach() for x in self.output_chunks[-1])
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: torch.Tensor | None = None, **kwargs: Any
    ) -> None:
        """Run the backward of micro-batch `bwd_chunk_id` (whole, or of inputs only); free its graph and buffers."""
        self.sends.release(Action(self.stage_index, BACKWARD, bwd_chunk_id))
        super().backward_one_chunk(bwd_chunk_id, loss=loss, **kwargs)
        if not self.is_last:
            self._forget(self.grad_recv_info[bwd_chunk_id])
        elif loss is not None and not self.is_first:
            loss.detach_()

    def _post(self, action: Action, operations: list[Any]) -> list[Any]:
        made = [action.micro_batch] if action.kind == FORWARD else []
        self.sends.post(action, operations, lambda: self._give_up(made))
        return []

    def _give_up(self, chunks: Iterable[int]) -> None:
        """Free the outputs of micro-batches `chunks`, which another rank has received, but keep their shapes."""
        following = self.stage_index_to_group_rank.get(self.stage_index + 1, self.group_rank)
        for chunk in chunks if following != self.group_rank else ():
            outputs, _ = self.fwd_cache.get(chunk, ((), None))
            for tensor in outputs:
                tensor.data = tensor.new_empty(()).expand_as(tensor)  # 1 element

    def _give_up_inputs(self, chunk: int) -> None:
        """Free the tensors received for micro-batch `chunk` after its forward; shapes and what autograd saved stay."""
        from_rank = self.stage_index_to_group_rank.get(self.stage_index - 1, self.group_rank)
        for info in self.args_recv_info[chunk] if from_rank != self.group_rank else ():
            tensor = getattr(info, "buffer", None)
            if tensor is not None and tensor.requires_grad:
                tensor.data = tensor.new_empty(()).expand_as(tensor)  # 1 element

    def _make(self, infos: Iterable[Any]) -> None:
        with counted_as("buffers"):
            for info in infos:
                if (example := getattr(info, "buffer", None)) is not None:
                    asked = example.requires_grad
                    info.buffer = torch.empty_like(example, device=self.device, requires_grad=asked)

    def _forget(self, infos: Iterable[Any]) -> None:
        for info in infos:
            if (used := getattr(info, "buffer", None)) is not None:
                asked = used.requires_grad
                info.buffer = torch.empty_like(used, device="meta", requires_grad=asked)
