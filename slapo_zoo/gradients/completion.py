"""After any backward each rank's `.grad` is its slice of the true gradient: hooks see to it.

A gradient that is a part of the sum over tp (norms that see a part of the tokens or heads, KV heads that
neighbouring ranks share) is summed before it is added to `.grad`. Over dp `.grad` is averaged, as DDP
does it: bucket by bucket while the backward goes on, waited for at its end; not within `no_sync`.

`train_step` is a loop on top of this: it sums over tp once, after the last micro-batch.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from slapo_zoo.errors import MeshError
from slapo_zoo.gradients.batch_check import check_peers
from slapo_zoo.gradients.input_gradients import OF_MODELS, nodes_of, trained_inputs
from slapo_zoo.gradients.parameter_hooks import take_over
from slapo_zoo.gradients.step_guard import StepGuard
from slapo_zoo.gradients.structure import require_known_weights
from slapo_zoo.gradients.weight_terms import Uses
from slapo_zoo.language.directive import ForwardContext
from slapo_zoo.parallel.collectives import all_reduce_, summed
from slapo_zoo.parallel.gradient_buckets import Bucket, buckets
from slapo_zoo.parallel.once import refuse_graph
from slapo_zoo.parallel.rank_plan import PARTIAL, REPLICAS

_OWN_GRADIENTS = (
    "torch.autograd.grad returns the gradients of this dp rank's rows, not their average over dp: average "
    "them (torch.distributed.all_reduce over model.mesh.group('dp')), or call backward()"
)


class Completion:
    """The hooks of one model, and what they do in the backward that runs now.

    Attributes:
        over_dp: whether gradients are averaged over dp here; an engine does it itself.
        over_tp: whether partial gradients are summed in the backward; else at the end of a step.
        divided_parameters: an engine keeps parameters that no hook can be put on.
        paused: within `no_sync`.
        replaced: parameters whose gradient comes summed, of a tensor that took their place (functional_call).
        missed: whether a parameter had no gradient here in the last step, and a device knows if others do.
        divided: whether the call that ended last divided its tokens.
        outside: what held before a backward took up what its call had set up.
        calls: in loops by hand, in training.
        asks_hosts: some dp rank `missed`; all of them then ask each other in this step, past the device.
        beyond: parameters of no model that inputs were made of (a soft prompt), numbered.
    """

    def __init__(self, runtime: Any) -> None:
        self.runtime, self.mesh = runtime, runtime.schedule.mesh
        self.over_dp, self.over_tp, self.paused = self.mesh.dp > 1, True, False
        self.divided_parameters, self.guard, self.uses = False, StepGuard(self.mesh), Uses()
        self.named: list[tuple[str, nn.Parameter]] = []
        self.hooked: list[nn.Parameter] = []
        self.parameters: list[nn.Parameter] = []
        self.trained: list[int] = []
        self._known: Any = WeakIdKeyDictionary()
        self.beyond: Any = WeakIdKeyDictionary()
        self.in_step = self.missed = self.asks_hosts = self.divided = False
        self.outside: ForwardContext | None = None
        self.calls = 0
        self._forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Completion":
        """Copy for a copied model: a parameter's copy has no hooks yet."""
        new = Completion.__new__(Completion)
        memo[id(self)] = new
        new.__dict__.update(self.__dict__, named=[], hooked=[], parameters=[], trained=[])
        new._known, new.beyond = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        new.guard, new.uses = StepGuard(self.mesh), Uses()
        new.runtime = memo.get(id(self.runtime), self.runtime)
        new._forget()
        return new

    def _forget(self) -> None:
        """No backward is under way."""
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[int, Bucket] = {}
        self.reached: list[nn.Parameter] = []  # of `beyond`, in this backward
        self.next, self.task, self.modes, self.replaced = 0, -1, set(), set()
        self.done = self.came = self.kept = False

    def prepare(self, model: Any, own_loop: bool = False) -> None:
        """Hook the parameters that a model has now: at the load, and before each forward that is trained on.

        In a loop of one's own (`own_loop`) the backward is not that of `train_step`.
        """
        self.task = -1
        if torch._C._current_graph_task_id() < 0:  # a backward that failed has not come to its end
            self.uses.found.clear()
            self._end_of_call()
        for p in model.parameters():
            OF_MODELS.setdefault(p)
        if self.divided_parameters:
            if own_loop:
                self._require_whole_gradients()
            return
        if self.mesh.world_size == 1 and own_loop:
            return
        every = list(model.named_parameters())
        named = [(n, p) for n, p in every if p.requires_grad]
        self.named = [(n, p) for n, p in named if p.is_leaf]
        if self.mesh.world_size == 1:
            take_over(self, self.named)
            return
        self.guard.interval = model.input_check_interval
        if [id(p) for _, p in named] != self.trained:
            require_known_weights(model, "forward")
            self.trained = [id(p) for _, p in named]
            rows = self.runtime.plan.tensors.values()
            self.guard.watch(named, {row.name for row in rows if row.placement is not None})
        self.parameters = [p for _, p in self.named]
        partial = self._partial()
        self._hook([(n, p) for n, p in every if self.over_dp or n in partial])
        take_over(self, self.named)

    def begin(self, model: Any, batch: Mapping[str, Any], trains: bool) -> None:
        """A call of a model or of a part in a loop by hand: dp averages what its inputs are made of, too."""
        if not torch.is_grad_enabled():
            return
        self.prepare(model, own_loop=True)
        if trains:
            self.calls += 1
            number = self.runtime.schedule.state.random.step
            check_peers(self.mesh, batch, self.calls, model.input_check_interval, number)
        if self.mesh.world_size == 1:
            return
        for p in trained_inputs(self.mesh, batch, self.beyond):
            if self.mesh.dp > 1 and p not in self._known:
                self._known[p] = True
                _first_of(p, _Accumulated(self))

    def _hook(self, named: list[tuple[str, nn.Parameter]]) -> None:
        """Hooks stay: a backward may come after a forward with other parameters (functional_call)."""
        if [id(p) for _, p in named] == [id(p) for p in self.hooked]:
            return
        self.hooked = [p for _, p in named if p.is_leaf]
        for name, p in named:
            if p in self._known or not p.is_floating_point() or p.is_inference():
                continue
            self._known[p], trains = True, p.requires_grad
            p.requires_grad_()  # a frozen one may be trained later, by a call of one module
            p.register_hook(_Incoming(self, name, p))
            if self.over_dp and p.is_leaf:
                _first_of(p, _Accumulated(self))
            p.requires_grad_(trains)

    def _partial(self) -> set[str]:
        """Names of parameters whose gradient may be a part of a sum over tp."""
        rows = self.runtime.plan.tensors.values() if self.mesh.tp > 1 else ()
        return {row.name for row in rows if row.sums(True, PARTIAL, REPLICAS)}

    def _require_whole_gradients(self) -> None:
        if names := sorted(self._partial()):
            problem = f"the engine divides parameters, and nothing sums {names[0]} over tp"
            raise MeshError("backward", "a loop of your own", problem, "call train_step(batch)")

    def watch(self, output: Any) -> None:
        """Notice when a backward arrives at an output of the call that ends now."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        state = self.runtime.schedule.state
        self.divided = state.forward.tokens_divided
        call = state.forward, state.random.position()
        for node in nodes_of(output):
            node.register_prehook(lambda _grads: self.arrived(*call))
        rows, divided = self.runtime.plan.tensors, state.forward.tokens_divided
        if self.mesh.tp > 1 and not self.in_step:  # there a loss is seen: `weight_terms.count_once`
            self.uses.note(output, {id(p) for name, p in self.named
                                    if name in rows and rows[name].sums(divided, PARTIAL, REPLICAS)})  # fmt: skip

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, a backward averages nothing over dp: the next one outside does, for all."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    @contextmanager
    def one_step(self, in_hooks: bool) -> Iterator[None]:
        """Around a step that sums over tp at its end, and says when to average over dp.

        `in_hooks`: someone's hook takes each gradient before the step ends, as an optimizer may.
        """
        self.done, before, self.over_tp = False, self.over_tp, in_hooks
        self.in_step = True
        try:
            yield
        except BaseException:
            self._forget()
            self._end_of_call()
            raise
        finally:
            self.over_tp, self.in_step = before, False

    def finish(self) -> None:
        """Average over dp what the backward has not."""
        if self.over_dp and not self.done:
            self._open()
            self._close()

    def last_backward(self, _outputs: Any) -> None:
        """Let the last backward of a stage within `no_sync` average over dp."""
        self.paused = False

    def incoming(self, name: str, parameter: Any, grad: Tensor, is_leaf: bool) -> Tensor | None:
        """A gradient before it is added to `.grad`, or goes on to what a parameter is made of."""
        self.came = self.came or is_leaf
        if (bucket := self.bucket_of.get(id(parameter))) is not None:
            bucket.wait()  # what is under way must not be written to
        sums = self.over_tp and name not in self.replaced
        groups, term = self._groups(name) if sums else [], None
        if groups and not self.in_step:
            grad, term = self.uses.split(parameter, grad)
        if self.over_dp and not self.paused and not is_leaf:
            groups, grad = [*groups, self.mesh.group("dp")], grad * (1.0 / self.mesh.dp)
        if not is_leaf:
            self.replaced.add(name)
        for group in groups:
            refuse_graph()
            grad = summed(grad, group)
        grad = grad if term is None else grad + term
        return grad if groups else None

    def _groups(self, name: str) -> list[Any]:
        """Over which ranks a gradient is summed."""
        row = self.runtime.plan.of(name)
        sums = row.sums(True, REPLICAS, PARTIAL) if row else []
        if any(one.if_tokens_sharded for one in sums) and not self._tokens_divided():
            sums = [one for one in sums if not one.if_tokens_sharded]
        return [group for one in sums if (group := self.runtime.group(one)) is not None]

    def _tokens_divided(self) -> bool:
        modes = self.modes or {self.divided}
        if len(modes) > 1:
            problem = "it goes through one forward that divides its tokens and one that does not"
            hint = "pad both batches to a multiple of tp (pad_to_multiple_of of the tokenizer)"
            raise MeshError("backward", "sequence_parallel=True", problem, hint)
        return next(iter(modes))

    def arrived(self, forward: ForwardContext, position: tuple[int, int, int]) -> None:
        """A backward begins at an output of a call: what recomputes in it runs as in that call."""
        if self.task != torch._C._current_graph_task_id():
            self._open_backward()
        self.modes.add(forward.tokens_divided)
        state = self.runtime.schedule.state
        self.outside = self.outside or state.forward
        state.forward, state.random.again = forward, position

    def _end_of_call(self) -> None:
        """The backward of a call has ended, or failed."""
        state = self.runtime.schedule.state
        state.forward, state.random.again = self.outside or state.forward, None
        self.outside = None

    def _open_backward(self) -> None:
        self._open()
        take_over(self, self.named)
        self.task = torch._C._current_graph_task_id()
        torch.autograd.Variable._execution_engine.queue_callback(self._end)  # pyright: ignore[reportAttributeAccessIssue]

    def _open(self) -> None:
        self._forget()
        if not self.over_dp:
            return
        wanted = [p for p in reversed(self.hooked) if p.requires_grad and not others(p)]
        self.buckets = [Bucket(each) for each in buckets(wanted)]
        self.bucket_of = {id(p): bucket for bucket in self.buckets for p in bucket.parameters}

    def accumulated(self, parameter: nn.Parameter) -> None:
        """A gradient was added to `.grad`."""
        if parameter in self.beyond:
            self._reach(parameter)
            return
        if self.paused or not self.over_dp:
            return
        if others(parameter):  # they take it as it is now
            self._average(parameter)
            return
        if self.task < 0:
            self._open_backward()
        bucket = self.bucket_of.get(id(parameter))
        if bucket is None:  # of an earlier forward, frozen or replaced since
            self._average(parameter)
            return
        bucket.late = id(parameter) in bucket.ready and self.buckets.index(bucket) < self.next
        bucket.ready.add(id(parameter))
        while self.next < len(self.buckets) and self._is_ready(self.buckets[self.next]):
            self.buckets[self.next].start(self.mesh.group("dp"), self.mesh.dp)
            self.next += 1

    def _reach(self, parameter: nn.Parameter) -> None:
        """Average a gradient outside the model at the end, or before another hook takes it."""
        if others(parameter) and not (self.paused or self.in_step):
            self._average(parameter)
        elif not (self.paused or self.in_step):
            self.reached.append(parameter)

    def _average(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None  # noqa: S101 - it was added
        self.kept = True
        all_reduce_(parameter.grad.mul_(1.0 / self.mesh.dp), self.mesh.group("dp"))

    def _is_ready(self, bucket: Bucket) -> bool:
        return len(bucket.ready) == len(bucket.parameters)

    def _end(self) -> None:
        """The backward has come to its end."""
        if averaged := any(bucket.ready for bucket in self.buckets):
            self._close()
        elif self.came and self.over_dp and not (self.kept or self.paused or self.in_step):
            warnings.warn(_OWN_GRADIENTS, stacklevel=2)
        for parameter in sorted(self.reached, key=self.beyond.__getitem__):
            self._average(parameter)
        self.reached = []
        self.task, self.modes, self.replaced = -1, set(), set()
        self._end_of_call()
        if not self.in_step and self.mesh.world_size > 1:
            engine = self.runtime.data_parallel
            engine.own_backward_ended(self.parameters, self.mesh, self.paused)
            self.guard.complete(self.parameters, averaged=averaged)

    def _close(self) -> None:
        """Average what is not under way, in the same order on every rank; then wait for all."""
        group, size = self.mesh.group("dp"), self.mesh.dp
        late = [bucket for bucket in self.buckets[: self.next] if bucket.late]
        for bucket in (*self.buckets[self.next :], *late):
            bucket.start(group, size)
        somewhere = self._somewhere()
        for bucket in self.buckets:
            bucket.wait(somewhere)
        self.buckets, self.bucket_of, self.done = [], {}, True

    def _somewhere(self) -> set[int] | None:
        """Ids of parameters with a gradient on some dp rank; asked while all sums are under way, or None."""
        parameters = [p for bucket in self.buckets for p in bucket.parameters]
        here = [p.grad is not None for p in parameters]
        self.missed = not all(here) and parameters[0].device.type != "cpu"
        asks, self.asks_hosts = self.asks_hosts and self.in_step, False
        if not asks:
            return None
        held = torch.tensor(here, dtype=torch.int32)
        dist.all_reduce(held, dist.ReduceOp.MAX, self.mesh.group_of_hosts("dp"))
        return {id(p) for p, some in zip(parameters, held.tolist(), strict=True) if some}


class _Incoming:
    """A hook of a parameter; weak, since the collector does not see all that torch keeps."""

    __torch_unserializable__ = True  # torch.save says nothing of it

    def __init__(self, completion: Completion, name: str, parameter: nn.Parameter):
        self.completion, self.name, self.parameter = ref(completion), name, ref(parameter)
        self.is_leaf = parameter.is_leaf

    def __call__(self, grad: Tensor) -> Tensor | None:
        completion = self.completion()
        if completion is None:  # the model is gone, its parameter lives on
            return None
        return completion.incoming(self.name, self.parameter(), grad, self.is_leaf)


class _Accumulated:
    __torch_unserializable__ = True

    def __init__(self, completion: Completion):
        self.completion = ref(completion)

    def __call__(self, parameter: Any) -> None:
        if (completion := self.completion()) is not None:
            completion.accumulated(parameter)


def others(parameter: Any) -> bool:
    """Return whether hooks that are not ours take the gradient as soon as it is there."""
    hooks = parameter._post_accumulate_grad_hooks or {}
    return any(not isinstance(hook, _Accumulated) for hook in hooks.values())


def _first_of(parameter: nn.Parameter, hook: _Accumulated) -> None:
    """Register it before those that wait for the whole gradient."""
    parameter.register_post_accumulate_grad_hook(hook)
    hooks: Any = parameter._post_accumulate_grad_hooks  # pyright: ignore[reportAttributeAccessIssue]
    before = [(key, hooks.pop(key)) for key in list(hooks) if hooks[key] is not hook]
    hooks.update(before)
