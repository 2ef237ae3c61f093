"""Work at the start and at the end of each backward through a scheduled model.

When a backward begins, the state of its forward call is restored, so that recomputation sees the same padding and draws
the same dropout masks. When the backward ends, all gradients are summed over ranks, and checked.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from slapo_zoo.errors import MeshError, SlapoError
from slapo_zoo.language.directive import ForwardContext
from slapo_zoo.model.gradients import of_models, optimizers, step_guard
from slapo_zoo.model.gradients.batch_check import check_peers
from slapo_zoo.model.gradients.gradient_reducer import GradientReducer
from slapo_zoo.model.gradients.input_gradients import nodes_of, trained_inputs
from slapo_zoo.model.gradients.module_changes import (
    refuse_ddp,
    refuse_fsdp,
    require_known_weights,
)
from slapo_zoo.model.gradients.parameter_hooks import take_over
from slapo_zoo.model.gradients.step_guard import StepGuard
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.rank_plan import PARTIAL, REPLICAS
from slapo_zoo.parallel.thread_sums import runs_a_rank


class Calls:
    """Gradient hooks of one scheduled model, and the state of a forward call that its backward restores.

    Attributes:
        reducer: GradientReducer that sums the gradients over ranks.
        guard: StepGuard that checks the gradients before an optimizer steps.
        divided_parameters: True if an engine (FSDP2) trains parameters of its own, so that our gradient hooks on the
            model's parameters never run.
        named: (name, parameter) pairs of the trained leaf parameters; tensors of `functional_call` are left out.
        known: the same of all leaf parameters, trained or frozen, a tied one by each name, as of the last `prepare`.
        outside: settings (padding, sharded tokens) that the running backward has replaced by those of its forward, to
            restore afterwards; None if no backward runs.
        count: number of training calls in the user's own loop (without `train_step`).
    """

    def __init__(self, runtime: Any, mesh: Mesh) -> None:
        self.runtime, self.mesh = runtime, mesh
        self.reducer, self.guard = GradientReducer(runtime, mesh), StepGuard(mesh)
        optimizers.watch_steps()
        step_guard.watch_steps()
        self.divided_parameters, self.count = False, 0
        self.named: list[tuple[str, nn.Parameter]] = []
        self.known: list[tuple[str, nn.Parameter]] = []
        self.checked: list[tuple[str, int]] = []
        self.task = -1
        self.outside: tuple[ForwardContext, Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Calls":
        """Return a new state without hooks, for a copied model; the copy's next call hooks its own parameters."""
        memo[id(self)] = new = Calls(memo.get(id(self.runtime), self.runtime), self.mesh)
        new.reducer.over_dp, new.divided_parameters = self.reducer.over_dp, self.divided_parameters
        return new

    def prepare(self, model: Any, own_loop: bool = False) -> list[tuple[str, nn.Parameter]]:
        """Register gradient hooks on the model's parameters that lack them, at the load and before a forward; return
        all (name, parameter) pairs. `own_loop` is True if the user's own loop, not `train_step`, will run the backward.
        """
        if torch._C._current_graph_task_id() < 0:  # none runs now: drop a failed one
            self.abandon()
        self.task = -1
        every = list(model.named_parameters())
        names = list(model.named_parameters(remove_duplicate=False))
        if (here := [(name, id(p)) for name, p in names]) != [(n, id(p)) for n, p in self.known]:
            of_models.note(self.runtime, every)
            self.known = [(name, p) for name, p in names if p.is_leaf]
        partial = self._partial()
        if self.divided_parameters and own_loop and partial:
            problem = f"with FSDP2, which shards parameters itself, only train_step sums {min(partial)}.grad over tp"
            raise MeshError("backward", "a loop of your own", problem, "call train_step(batch)")
        if self.divided_parameters or (self.mesh.world_size == 1 and own_loop):
            return every
        trained = [(name, p) for name, p in every if p.requires_grad]
        self.named = [(name, p) for name, p in trained if p.is_leaf]
        if self.mesh.world_size > 1:
            refuse_ddp(model)
            self.guard.interval, self.guard.device = model.input_check_interval, model.device
            if here != self.checked:
                refuse_fsdp(model)
                require_known_weights(model, "forward")
                self.checked = here
            summed = every if self.reducer.over_dp else [(n, p) for n, p in every if n in partial]
            for name, p in summed:
                self.reducer.hook(name, p)
        take_over(self.reducer, self.named)
        return every

    def _partial(self) -> set[str]:
        """Return the names of all parameters whose gradients tp ranks sum, always or only with sequence parallelism."""
        rows = self.runtime.plan.tensors.values() if self.mesh.tp > 1 else ()
        return {row.name for row in rows if row.sums(True, PARTIAL, REPLICAS)}

    def begin(self, model: Any, batch: Mapping[str, Any], trains: bool) -> None:
        """Prepare a forward call of the model or a submodule in the user's own loop: register gradient hooks.

        `batch` holds the call's arguments; parameters outside the model in its autograd graph (a soft prompt) are
        hooked too. In training mode, if `trains`, raise MeshError if hashes of `batch` differ between tp or cp ranks.
        """
        if not torch.is_grad_enabled():
            return
        self.prepare(model, own_loop=True)
        if trains:
            self.count += 1
            number = self.runtime.schedule.state.random.step
            check_peers(self.mesh, batch, self.count, model.input_check_interval, number)
        if self.mesh.world_size > 1:
            for p in trained_inputs(self.mesh, batch, self.reducer.beyond):
                self.reducer.hook("", p)

    def watch(self, output: Any) -> None:
        """Hook the `output` of a forward: its backward begins by restoring the forward's settings and dropout seeds."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        state, reducer = self.runtime.schedule.state, self.reducer
        sharded = reducer.tokens_sharded = state.forward.tokens_divided
        call = state.forward, state.random.position()
        for node in nodes_of(output):
            node.register_prehook(lambda _grads: self._begin_backward(*call))
        if self.mesh.tp > 1 and not reducer.in_step:  # `train_step` uses `count_once` instead
            rows = [(self.runtime.plan.of(name), p) for name, p in self.named]
            summed = {id(p) for row, p in rows if row and row.sums(sharded, PARTIAL, REPLICAS)}
            reducer.uses.note(output, summed)

    def _begin_backward(self, forward: ForwardContext, position: tuple[int, int, int]) -> None:
        """Begin the backward of a forward call: until `_end`, the model has the call's settings, for recomputation.

        `forward` are these settings (padding, sharded tokens); `position` is (step, first row, number of rows) of the
        call, from which its dropout masks are drawn again.
        """
        if self.task != torch._C._current_graph_task_id():
            self.open()
        self.reducer.token_modes.add(forward.tokens_divided)
        state = self.runtime.schedule.state
        self.outside = self.outside or (state.forward, state.random.cut)
        state.forward, state.random.again, state.random.cut = forward, position, forward.cut

    def open(self) -> None:
        """Begin a backward: group parameters into buckets for all-reduces over dp; autograd calls `_end` at its end."""
        if self.guard.on_ranks and not runs_a_rank():  # a collective would wait for ever
            problem = "a term of the loss reads weights of virtual ranks outside their threads"
            hint = "return it from loss_fn of train_step, or use the optimizer's weight_decay"
            raise SlapoError("backward", "exact=", problem, hint)
        self.reducer.open()
        take_over(self.reducer, self.named)
        self.task = torch._C._current_graph_task_id()
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        """End a backward: complete the sums of gradients over ranks; copy some elements for the check before a step."""
        self.task = -1
        try:
            averaged = self.reducer.close()
        finally:
            self._restore_context()
        if not self.reducer.in_step and self.mesh.world_size > 1:
            engine, named = self.runtime.data_parallel, dict(self.named)
            engine.own_backward_ended(list(named.values()), self.mesh, self.reducer.paused)
            self.guard.complete(named, self.runtime.plan, averaged)

    def _restore_context(self) -> None:
        """Restore, after a backward, the settings (padding, sharded tokens) that it had replaced by its forward's."""
        state = self.runtime.schedule.state
        if self.outside is not None:
            state.forward, state.random.cut = self.outside
        state.random.again = self.outside = None

    def abandon(self) -> None:
        """Drop the state that a failed backward left, so that the next one begins afresh."""
        self.task = -1
        self._restore_context()
        self.reducer.forget()
        self.reducer.uses.found.clear()
