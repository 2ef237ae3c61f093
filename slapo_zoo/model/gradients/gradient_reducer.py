"""After any backward each rank's `.grad` is its shard of the gradient that one process would compute.

The plan of a rank lists, for each parameter, the ranks over which its gradient is summed. In a user's own loop a hook
on each parameter sums its gradient over tp before autograd adds the gradient to `.grad`, so that the user's hooks see
the sum; over dp `.grad` is averaged as in DDP, bucket by bucket while the backward continues. In `train_step` the
average over dp runs in the backward of the last micro-batch, and the sums over tp and pp run after that backward.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from slapo_zoo.errors import MeshError
from slapo_zoo.model.gradients.weight_terms import Uses
from slapo_zoo.parallel.collectives import all_reduce_, summed
from slapo_zoo.parallel.gradient_buckets import Bucket, all_reduce_gradients, buckets
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.once import refuse_graph
from slapo_zoo.parallel.rank_plan import PARTIAL, REPLICAS, TIED

_OWN_HINT = "call loss.backward(); or call grad within model.no_sync(), and average gradients over model.mesh.group('loss')"


class GradientReducer:
    """Reducer that sums the gradients of one model over tp and averages them over dp, during or after its backwards.

    Attributes:
        over_dp: True if gradients are averaged over dp here, not by an engine.
        at_once: True if each gradient is summed over tp as soon as it is computed; else `finish` sums after a step.
        paused: True while `no_sync` is active.
        tokens_sharded: True if the last call sharded its tokens over tp.
        beyond: parameter outside the model from which inputs were computed (a soft prompt) --> its number in order of
            first use, by which all ranks order their all-reduces.
        missed: True if some parameter had no gradient on this rank in the last step; always False on a CPU.
        asks_hosts: True if `missed` is True on some dp rank. In this step all dp ranks then exchange, over a CPU
            process group, which gradients are missing.
    """

    def __init__(self, runtime: Any, mesh: Mesh) -> None:
        self.runtime, self.mesh, self.uses = runtime, mesh, Uses()
        self.over_dp, self.at_once, self.averaged = self.mesh.size("loss") > 1, True, False
        self.paused = self.in_step = self.tokens_sharded = self.missed = self.asks_hosts = False
        self.parameters: list[nn.Parameter] = []
        self.hooked, self.beyond = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> "GradientReducer":
        """Return a new reducer for a copied model, whose parameters have no gradient hooks yet."""
        runtime = memo.get(id(self.runtime), self.runtime)
        memo[id(self)] = new = GradientReducer(runtime, self.mesh)
        new.over_dp = self.over_dp
        return new

    def forget(self) -> None:
        """Drop all state of the last backward (buckets, gradients seen), so that the next one can begin."""
        self.buckets: list[Bucket] = []
        self.waiting: list[Bucket] = []  # buckets whose all-reduce has not begun
        self.bucket_of: dict[int, Bucket] = {}
        self.reached: dict[int, nn.Parameter] = {}  # those of `beyond` with a gradient
        self.replaced: set[str] = set()  # names with a `functional_call` tensor
        self.token_modes: set[bool] = set()  # `tokens_sharded` of the calls of this backward
        self.is_open, self.latest = False, None
        self.stored: bool | None = None  # True: one is in `.grad`; None: no gradient yet

    def attach(self, named: Iterable[tuple[str, Any]]) -> None:
        """Register for good, on parameters (`named`: (name, parameter) pairs), hooks that sum gradients over ranks."""
        hooked = [self.hook(name, p) for name, p in named]
        self.parameters = [p for p in hooked if p.is_leaf]

    def hook(self, name: str, p: Any) -> Any:
        """Register a hook on the parameter `p`, once, that sums its gradient over the ranks that the model's plan
        (sharding and gradient sums of each tensor) lists for `name`; return p.
        """
        if p in self.hooked or not p.is_floating_point() or p.is_inference():
            return p
        mine, parameter, is_leaf, trains = ref(self), ref(p), p.is_leaf, p.requires_grad

        def hook(grad: Tensor | None) -> Tensor | None:
            reducer = mine()
            if reducer is None or grad is None:  # the model was deleted, its parameter not
                return None
            found = reducer.gradient(name, parameter(), grad, is_leaf)
            return None if found is grad else found

        hook.__torch_unserializable__ = True  # torch.save says nothing of it  # pyright: ignore[reportFunctionMemberAccess]
        p.requires_grad_()  # register_hook needs it; a frozen one may be trained later
        p.register_hook(hook)
        p.requires_grad_(trains)
        self.hooked[p] = True
        return p

    def open(self) -> None:
        """Begin a backward (see `close`): finish all-reduces of an outer one; group parameters into buckets for dp."""
        self._count_stored()
        for bucket in self.buckets:
            bucket.wait()
        before = self.stored
        self.forget()
        self.is_open, self.stored = True, before or None
        wanted = [p for p in reversed(self.parameters) if p.requires_grad and not is_taken(p)]
        for each in buckets(wanted) if self.over_dp else ():
            self.buckets.append(Bucket(each, self.mesh.group("loss"), 1.0 / self.mesh.size("loss")))
            self.bucket_of |= dict.fromkeys(map(id, each), self.buckets[-1])
        self.waiting = list(self.buckets)

    def gradient(self, name: str, p: Any, grad: Tensor, is_leaf: bool) -> Tensor:
        """Return the gradient that goes on to `.grad` of parameter `p`: `grad`, this rank's gradient, summed over those
        tp ranks that the model's plan lists for the parameter's `name`.

        The gradient is averaged over dp here unless an engine, a bucket or `close` does so later, or `paused` is set.
        `is_leaf` is False if `p` is a computed tensor that `functional_call` put in the parameter's place.
        """
        if not self.is_open:
            self.runtime.calls.open()
        self._count_stored()
        groups = self._groups(name) if self.at_once and name not in self.replaced else []
        grad, term = self.uses.split(p, grad) if groups and not self.in_step else (grad, None)
        for group in groups:
            refuse_graph()
            grad = summed(grad, group)
        grad = grad if term is None else grad + term
        if not is_leaf:
            self.replaced.add(name)
        averages = (
            self.mesh.size("loss") > 1 and not self.in_step if p in self.beyond else self.over_dp
        )
        return self._over_dp(p, grad, is_leaf) if averages and not self.paused else grad

    def _groups(self, name: str) -> list[Any]:
        """Return the process groups, without dp's, over which the running backward sums parameter `name`'s gradient."""
        row = self.runtime.plan.of(name)
        sums = row.sums(True, REPLICAS, PARTIAL) if row else []
        if len(self.token_modes) > 1 and any(one.if_tokens_sharded for one in sums):
            problem = "this backward goes through a forward with sharded tokens and through one without"  # fmt: skip
            hint = "pad both batches to a multiple of tp (pad_to_multiple_of of the tokenizer)"
            raise MeshError("backward", "sequence_parallel=True", problem, hint)
        sharded = next(iter(self.token_modes), self.tokens_sharded)
        taken = [self.runtime.group(one) for one in sums if sharded or not one.if_tokens_sharded]
        return [group for group in taken if group is not None]

    def _over_dp(self, p: Any, grad: Tensor, is_leaf: bool) -> Tensor:
        """Return the gradient `grad` of `p`, averaged over dp; unchanged if a bucket will average `p.grad` later.

        `is_leaf` is False if `p` is a computed tensor that `functional_call` put in a parameter's place.
        """
        bucket = self.bucket_of.get(id(p))
        if is_leaf and not is_taken(p) and (bucket or p in self.beyond):
            if bucket and bucket.work is not None:  # its all-reduce still reads the gradients
                bucket.wait()
                self.waiting.append(bucket)
            self.latest = p, p.grad, p.grad is not None and p.grad._version
            self.stored = bool(self.stored)
            return grad
        group, factor = self.mesh.group("loss"), 1.0 / self.mesh.size("loss")
        refuse_graph()
        if is_leaf and p.grad is not None:  # accumulated within `no_sync`
            all_reduce_(p.grad.mul_(factor), group)
        return summed(grad * factor, group)

    def _count_stored(self) -> None:
        """Look whether autograd has added the gradient of `self.latest`, the parameter whose hook ran last, to `.grad`;
        called when the next hook runs or the backward ends. If so, start the all-reduce of each bucket that is complete
        now. If `.grad` is as before, `torch.autograd.grad` has returned the gradient: do nothing.
        """
        if self.latest is None:
            return
        (p, before, version), self.latest = self.latest, None
        if p.grad is before and (before is None or before._version == version):
            return  # `torch.autograd.grad` returned the gradient, `.grad` is unchanged
        self.stored = True
        if p in self.beyond:
            self.reached[self.beyond[p]] = p
            return
        self.bucket_of[id(p)].missing.discard(id(p))
        while self.waiting and not self.waiting[0].missing:
            self.waiting.pop(0).start()

    def close(self) -> bool:
        """End a backward: wait for its all-reduces over dp; return True if the backward stored any gradient in `.grad`."""
        self._count_stored()
        if self.stored is False and not self.in_step:
            dims = self.mesh.named("loss")
            problem = f"this call returns the gradients of this rank's part of the loss, not their average over {dims}"
            raise MeshError("backward", f"torch.autograd.grad with {dims} > 1", problem, _OWN_HINT)
        if met := bool(self.stored):
            for bucket in self.waiting:  # in the same order on every rank
                bucket.start()
            somewhere = self._have_grad([p for bucket in self.buckets for p in bucket.parameters])
            for bucket in self.buckets:
                bucket.wait(somewhere)
        reached = [p for _, p in sorted(self.reached.items())]
        all_reduce_gradients(reached, self.mesh.group("loss"), 1.0 / self.mesh.size("loss"))
        self.averaged = self.averaged or met
        self.forget()
        return met

    def _have_grad(self, parameters: list[nn.Parameter]) -> set[int] | None:
        """Return the id() of each parameter that has a gradient on some dp rank, which the ranks exchange over a CPU
        process group; None in a step without this exchange (if `asks_hosts` is False).
        """
        here = [p.grad is not None for p in parameters]
        self.missed = not all(here) and parameters[0].device.type != "cpu"
        asks, self.asks_hosts = self.asks_hosts and self.in_step, False
        if not asks:
            return None
        held = torch.tensor(here, dtype=torch.int32, device="cpu")
        dist.all_reduce(held, dist.ReduceOp.MAX, self.mesh.group_of_hosts("loss"))
        return {id(p) for p, some in zip(parameters, held.tolist(), strict=True) if some}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backwards accumulate gradients without averaging over dp; the next one outside averages."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def last_backward(self, _outputs: Any) -> None:
        """Switch `no_sync` off before a stage's last backward, so that this backward averages gradients over dp. The
        pipeline calls this method with the outputs of the stage, which are ignored.
        """
        self.paused = False

    @contextmanager
    def one_step(self, at_once: bool) -> Iterator[None]:
        """Context of forward and backward of all micro-batches of a training step.

        With `at_once` each gradient is summed over tp as soon as it is computed, not after the step, for a user's hook
        that takes gradients before the step ends.
        """
        before, self.at_once, self.in_step, self.averaged = self.at_once, at_once, True, False
        try:
            yield
        except BaseException:
            self.runtime.calls.abandon()
            raise
        finally:
            self.at_once, self.in_step = before, False

    def average(self) -> None:
        """Average the model's gradients over dp after a step, unless a backward of the step has averaged them already."""
        if self.over_dp and not self.averaged:
            self.open()
            self.stored = True
            self.close()

    def finish(self, named: Mapping[str, nn.Parameter]) -> None:
        """Sum gradients of `named` (name --> parameter) over tp, tied ones over pp; not if hooks did so (`at_once`)."""
        sharded, plan = self.runtime.schedule.state.forward.tokens_divided, self.runtime.plan
        sums = plan.sums_of(named, TIED, REPLICAS, PARTIAL, tokens_sharded=sharded)
        for one, names in () if self.at_once else sums.items():
            all_reduce_gradients([named[name] for name in names], self.runtime.group(one))


def is_taken(p: Any) -> bool:
    """Return whether parameter `p` has a post-accumulate-grad hook, which may update `p` and clear `p.grad` at once."""
    return bool(p._post_accumulate_grad_hooks)
