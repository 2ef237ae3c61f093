"""After any backward each rank's `.grad` is its shard of the gradient that one process would compute.

The plan of a rank lists the ranks over which the gradient of each parameter is summed. In a user's own loop a hook sums
it over tp before autograd adds it to `.grad`, so that the user's hooks see the sum; over dp `.grad` is averaged as in
DDP, bucket by bucket while the backward continues. In `train_step` that is the last micro-batch's; sums follow it.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from slapo_zoo.errors import MeshError
from slapo_zoo.model.gradients.weight_terms import Uses
from slapo_zoo.parallel.collectives import all_reduce_, summed
from slapo_zoo.parallel.gradient_buckets import Buckets, all_reduce_gradients
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.once import refuse_graph
from slapo_zoo.parallel.rank_plan import PARTIAL, REPLICAS, TIED
from slapo_zoo.parallel.replaced import replaced


class GradientReducer:
    """Reducer that sums the gradients of one model over tp and averages them over dp, during or after its backwards.

    Attributes:
        over_dp: True if gradients are averaged over dp here, not by an engine.
        in_step: True within `train_step`; `averaged` is True when one of its backwards has averaged over dp.
        at_once: True if each gradient is summed over tp as soon as it is computed; else `finish` sums after a step.
        paused: True while `no_sync` is active.
        tokens_sharded: True if the last call sharded its tokens over tp.
        beyond: parameter outside the model that makes inputs (a soft prompt) --> its number, by which ranks order sums.
        missed: True if some parameter had no gradient on this rank in the last step; always False on a CPU.
        asks_hosts: True if `missed` is True on some dp rank: in this step they exchange which, over a CPU group.
    """

    def __init__(self, runtime: Any, mesh: Mesh) -> None:
        self.runtime, self.mesh, self.uses = runtime, mesh, Uses()
        self.over_dp, self.factor = mesh.size("loss") > 1, 1.0 / mesh.size("loss")
        self.at_once, self.averaged = True, False
        self.paused = self.in_step = self.tokens_sharded = self.missed = self.asks_hosts = False
        self.hooked, self.beyond = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self.forget()

    def forget(self, stored: bool = False) -> None:
        """Drop all state of the last backward (buckets, gradients seen), so that the next one can begin."""
        self.buckets = Buckets([], None, 1.0)
        self.reached: dict[int, nn.Parameter] = {}  # those of `beyond` with a gradient
        self.replaced: set[str] = set()  # names with a `functional_call` tensor
        self.token_modes: set[bool] = set()  # `tokens_sharded` of the calls of this backward
        self.due, self.stored = False, stored  # a gradient to average was computed; is in `.grad`
        self.latest: Any = None  # the last such (parameter, `.grad` before, its version)

    def hook(self, name: str, p: Any) -> None:
        """Register a hook on the parameter `p`, once, that sums its gradient over the ranks that the plan has for `name`."""
        if p in self.hooked or not p.is_floating_point() or p.is_inference():
            return
        mine, parameter, is_leaf, trains = ref(self), ref(p), p.is_leaf, p.requires_grad

        def hook(grad: Tensor | None) -> Tensor | None:
            reducer = mine()
            if reducer is None or grad is None:  # the model was deleted, its parameter not
                return None
            return reducer.gradient(name, parameter(), grad, is_leaf)

        hook.__torch_unserializable__ = True  # torch.save says nothing of it  # pyright: ignore[reportFunctionMemberAccess]
        p.requires_grad_()  # register_hook needs it; a frozen one may be trained later
        p.register_hook(hook)
        p.requires_grad_(trains)
        self.hooked[p] = True

    def open(self) -> None:
        """Begin a backward (see `close`): finish all-reduces of an outer one; group parameters into buckets for dp."""
        self._note_stored()
        for bucket in self.buckets.every:
            bucket.wait()
        self.forget(self.stored)
        named = self.runtime.calls.named if self.over_dp else []
        wanted = [p for _, p in reversed(named) if p.requires_grad and not is_taken(p)]
        self.buckets = Buckets(wanted, self.mesh.group("loss"), self.factor)

    def gradient(self, name: str, p: Any, grad: Tensor, is_leaf: bool) -> Tensor:
        """Return the gradient that goes on to `.grad` of parameter `p`: `grad`, this rank's, summed over the tp ranks that
        the plan lists for `name`. It is averaged over dp here unless an engine, a bucket or `close` does so later.
        `is_leaf` is False if `p` is a computed tensor that `functional_call` put in the parameter's place.
        """
        if self.runtime.calls.task < 0:
            self.runtime.calls.open()
        self._note_stored()
        groups = self._groups(name) if self.at_once and name not in self.replaced else []
        grad, term = self.uses.split(p, grad) if groups and not self.in_step else (grad, None)
        for group in groups:
            refuse_graph()
            grad = summed(grad, group)
        grad = grad if term is None else grad + term
        if not is_leaf:
            self.replaced.add(name)
        own = self.mesh.size("loss") > 1 and not self.in_step if p in self.beyond else self.over_dp
        return self._over_dp(p, grad, is_leaf) if own and not self.paused else grad

    def _groups(self, name: str) -> list[Any]:
        """Return the process groups, without dp's, over which the running backward sums parameter `name`'s gradient."""
        row, modes = self.runtime.plan.of(name), self.token_modes or {self.tokens_sharded}
        sums = {tuple(row.sums(mode, REPLICAS, PARTIAL)) if row else () for mode in modes}
        if len(sums) > 1:
            problem = "this backward goes through a forward with sharded tokens and one without"
            hint = "pad both batches to a multiple of tp (pad_to_multiple_of of the tokenizer)"
            raise MeshError("backward", "sequence_parallel=True", problem, hint)
        return [group for one in sums.pop() if (group := self.runtime.group(one)) is not None]

    def _over_dp(self, p: Any, grad: Tensor, is_leaf: bool) -> Tensor:
        """Return the gradient `grad` of `p`, averaged over dp; unchanged if `p.grad` will be averaged later."""
        if is_leaf and not is_taken(p) and (p in self.beyond or id(p) in self.buckets.bucket_of):
            self.buckets.expect(p)
            self.latest, self.due = (p, p.grad, p.grad is not None and p.grad._version), True
            return grad
        refuse_graph()
        group = self.mesh.group("loss")
        if is_leaf and p.grad is not None:  # accumulated within `no_sync`
            all_reduce_(p.grad.mul_(self.factor), group)
        return summed(grad * self.factor, group)

    def _note_stored(self) -> None:
        """Look, in the next hook or at the end of a backward, whether autograd has added the `latest` gradient to `.grad`,
        and start the all-reduces that are complete. If `.grad` is as before, `torch.autograd.grad` has returned it.
        """
        if self.latest is None:
            return
        (p, before, version), self.latest = self.latest, None
        if p.grad is before and (before is None or before._version == version):
            return
        self.stored = True
        if p in self.beyond:
            self.reached[self.beyond[p]] = p
        else:
            self.buckets.add(p)

    def close(self) -> bool:
        """End a backward: wait for its all-reduces over dp; return True if the backward stored any gradient in `.grad`."""
        self._note_stored()
        if self.due and not self.stored and not self.in_step:
            dims = self.mesh.named("loss")
            problem = f"this call returns the gradients of this rank's part of the loss, not their average over {dims}"
            hint = "call loss.backward(); or call grad within model.no_sync(), and average gradients over model.mesh.group('loss')"
            raise MeshError("backward", f"torch.autograd.grad with {dims} > 1", problem, hint)
        if met := self.stored:
            asks = self.asks_hosts and self.in_step
            self.missed = self.buckets.finish(self.mesh.group_of_hosts("loss") if asks else None)
        reached = [p for _, p in sorted(self.reached.items())]
        all_reduce_gradients(reached, self.mesh.group("loss"), self.factor)
        self.averaged = self.averaged or met
        self.forget()
        return met

    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which backwards accumulate gradients without averaging over dp; the next one outside averages."""
        return replaced(self, "paused", True)

    def last_backward(self, _outputs: Any) -> None:
        """End `no_sync` before a stage's last backward, for which the pipeline calls this with the stage's outputs."""
        self.paused = False

    def finish(self, named: Mapping[str, nn.Parameter]) -> None:
        """Complete gradients of `named` (name --> parameter) after a step if hooks did not: sums over dp, tp, tied stages."""
        if self.over_dp and not self.averaged:
            self.open()
            self.stored = True
            self.close()
        sharded, plan = self.runtime.schedule.state.forward.tokens_divided, self.runtime.plan
        sums = plan.sums_of(named, TIED, REPLICAS, PARTIAL, tokens_sharded=sharded)
        for one, names in () if self.at_once else sums.items():
            all_reduce_gradients([named[name] for name in names], self.runtime.group(one))


def is_taken(p: Any) -> bool:
    """Return whether parameter `p` has a post-accumulate-grad hook, which may update `p` and clear `p.grad` at once."""
    return bool(p._post_accumulate_grad_hooks)
