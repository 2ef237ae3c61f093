"""Models whose training has the same bits on every mesh: `from_pretrained(..., exact={"tp": 4, "dp": 2})`.

`exact` gives the sizes of a virtual mesh, the largest mesh on which the run can continue. Each process runs an equal
number of the virtual ranks as threads ("hosts" them). A virtual rank holds the same shards, runs the same products and
takes part in the same collectives in any process; so the bits do not depend on the number of processes.
"""

import atexit
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.utils._pytree import tree_leaves, tree_map

from slapo_zoo.errors import MeshError, SlapoError
from slapo_zoo.hf.attention import CACHES
from slapo_zoo.model.gradients.module_changes import Unwrapped
from slapo_zoo.model.load.exact_optimizer import give_back, narrowed, split_over_ranks, without
from slapo_zoo.model.load.exact_output import computed, joined
from slapo_zoo.model.load.exact_trace import ExactTrace, Recorder, Row
from slapo_zoo.model.step.runtime import count_rows
from slapo_zoo.parallel.digests import digest, digest_of_tensor
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.parallel.ranks.emulation import HostedRanks
from slapo_zoo.parallel.ranks.killed_rank import default_store
from slapo_zoo.parallel.ranks.process_group import timeout_of
from slapo_zoo.parallel.replaced import replaced
from slapo_zoo.parallel.thread_sums import runs_a_rank
from slapo_zoo.zoo.argument_values import make_mesh, pick_device
from slapo_zoo.zoo.options import LoaderOptions

WHERE = "from_pretrained"
BUILT = "load without exact=, or use model(**batch), train_step, clip_grad_norm_, save_checkpoint, load_checkpoint, save_pretrained"
_HOSTS: dict[tuple[Mesh, Mesh], HostedRanks] = {}  # (real mesh, virtual mesh) --> threads
memory: Any = torch.utils.deterministic  # its attribute is in the class that stands for the module
_WITHIN = ExitStack()  # contexts that are active while the process hosts ranks


def exact_model(options: LoaderOptions, load: Callable[[LoaderOptions], Any]) -> "ExactModel":
    """Load and return an ExactModel, which trains with the same bits on every mesh whose sizes divide the virtual ones.

    `options.exact` gives the sizes of the virtual mesh, whose ranks are threads; each process runs an equal number.

    Args:
        options: options of the loader; tp, pp and dp are the mesh of the processes.
        load: loads the model of one rank of the virtual mesh; called once per rank, in the thread of that rank.
    """
    if options.cp > 1:
        problem = f"not supported together with cp={options.cp}"
        raise MeshError(WHERE, "exact", problem, "leave exact= out, or use cp=1")
    real = make_mesh(**{name: getattr(options, name) for name in Mesh().sizes})
    virtual = virtual_mesh(real, options.exact)
    _check(options)
    is_first, host = not _HOSTS, _host(real, virtual)
    own = replace(options, exact=False, **virtual.sizes)
    try:
        return ExactModel(host, real, virtual, host.run(lambda _rank: load(own)))
    except BaseException:
        if is_first:  # no other model needs the threads
            close()
        raise


def virtual_mesh(real: Mesh, asked: Any) -> Mesh:
    """Return the virtual mesh: the largest mesh, whose results are reproduced bit by bit on every smaller one. Its
    sizes are those in `asked` (`exact=`); a dim not named there, or `asked=True`, keeps the size of `real`.
    """
    if asked is not True and not isinstance(asked, Mapping):
        problem = f'found {asked!r}, expected True, or sizes as in {{"tp": 4, "dp": 2}}'
        hint = "name the largest mesh that the run will ever have"
        raise SlapoError(WHERE, "exact", problem, hint)
    given = {} if asked is True else dict(asked)
    if unknown := sorted(given.keys() - real.sizes.keys()):
        problem = f"no such mesh dim: {unknown[0]}"
        raise SlapoError(WHERE, "exact", problem, f"choose among {', '.join(real.sizes)}")
    sizes = real.sizes | given
    for name, size in real.sizes.items():
        _check_size(name, size, sizes[name])
    return replace(Mesh(), **sizes)


def _check_size(name: str, real: int, virtual: Any) -> None:
    """Raise MeshError if the virtual size of the mesh dim `name` is no positive multiple of the real size."""
    if not isinstance(virtual, int) or virtual < 1:
        problem = f"found {name}={virtual!r}, expected a positive integer"
        raise MeshError(WHERE, "exact", problem, f"pass a multiple of the real {name}={real}")
    if virtual % real:
        problem = f"virtual {name}={virtual} is not a multiple of the real {name}={real}"
        hint = f"use a {name} that divides {virtual}, or a multiple of {real} in exact="
        raise MeshError(WHERE, "exact", problem, hint)


def _check(options: LoaderOptions) -> None:
    """Raise SlapoError for a device that is no CPU, kernels="measure" (timings choose), or an engine in `target`."""
    device = pick_device(options.device)
    if device.type != "cpu":
        problem = f"found device {device}: virtual ranks talk by gloo, which is built for the CPU"
        raise SlapoError(WHERE, "exact", problem, 'pass device="cpu"')
    if options.kernels == "measure":
        problem = 'kernels="measure" chooses by timings, which differ from run to run'
        raise SlapoError(WHERE, "exact", problem, 'pass kernels="auto" or kernels="reference"')
    if options.target not in (None, "torch"):
        problem = f"the engine {options.target} sums gradients in another order"
        raise SlapoError(WHERE, "exact", problem, "leave target= out")


def _host(real: Mesh, virtual: Mesh) -> HostedRanks:
    """Return the threads that run this process's ranks of the mesh `virtual`; the first call starts them. `real` is the
    mesh of the processes. The threads live until `close` or the end of the process.
    """
    key = real, virtual
    if key in _HOSTS:
        return _HOSTS[key]
    if _HOSTS:
        ((_, other),) = _HOSTS
        problem = f"this process hosts ranks of the virtual mesh {other.sizes} already"
        hint = "use one virtual mesh for all models of a process, or call close() of the earlier models first"
        raise MeshError(WHERE, "exact", problem, hint)
    steps = {name: virtual.sizes[name] // size for name, size in real.sizes.items()}
    first = {name: real.coord(name) * step for name, step in steps.items()}
    ranks = sorted(
        virtual.at(**{name: first[name] + i for name, i in zip(steps, offsets, strict=True)})
        for offsets in product(*map(range, steps.values()))
    )
    store = default_store() or dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    # each start has keys of its own, as those of ranks that were closed name addresses that nobody listens at
    start = (store.add("slapo_zoo/exact/starts", 1) - 1) // real.world_size
    world = PrefixStore(f"slapo_zoo/exact/{start}", store)
    host = HostedRanks(world, ranks, virtual.world_size, timeout_of(None), stays=True)
    _HOSTS[key] = _WITHIN.enter_context(host)
    _WITHIN.enter_context(_deterministic())
    atexit.register(close)
    return host


def close() -> None:
    """Stop the threads, one per virtual rank, that run models loaded with `exact=`; all processes must call this."""
    _HOSTS.clear()
    _WITHIN.close()


@contextmanager
def _deterministic() -> Iterator[None]:
    """Context in which torch refuses operations that have no deterministic algorithm."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warns, fills = torch.is_deterministic_algorithms_warn_only_enabled(), memory.fill_uninitialized_memory  # fmt: skip
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = fills and before  # filling takes time and changes no result
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)
        memory.fill_uninitialized_memory = fills


class NotBuiltError(SlapoError, AttributeError):
    """Error for an attribute that models of several virtual ranks (`exact=`) lack; `hasattr` then gives False."""


class ExactModel(Unwrapped, nn.Module):
    """Model loaded with `exact=`: it trains with the same bits on each mesh whose sizes divide those of a virtual mesh.

    The ranks of the virtual mesh are threads. Each process runs an equal number of these virtual ranks, with a model
    each. Methods are collective calls of all processes; `parameters()` are those of all virtual ranks of the process.

    Attributes:
        mesh: mesh of the processes.
        virtual: the virtual mesh, the largest on which the run can continue.
        hosted: models of the virtual ranks of this process.
    """

    def __init__(self, host: HostedRanks, real: Mesh, virtual: Mesh, models: Sequence[Any]):
        super().__init__()
        self.mesh, self.virtual, self._host = real, virtual, host
        self.hosted = nn.ModuleList(models)
        self._gradients: dict[Tensor, tuple[int, int]] = {}
        self._tracing: dict[int, list[Row]] | None = None  # virtual rank --> its rows
        self._last: tuple[float, float] = (0.0, 0.0)  # loss and norm of the step
        self._stepping = False  # True while the optimizers of single ranks step
        for model in models:
            model._slapo.calls.guard.on_ranks = self._before_step

    @property
    def _slapo(self) -> Any:
        """Raise SlapoError: `_slapo` is the state of one rank's model, and this object has models of several ranks."""
        problem = "a function that works on one rank (an optimizer wrapper, a schedule, an engine) got a model with exact=,"
        problem += " whose process runs several ranks"
        raise SlapoError("ExactModel", "exact", problem, BUILT)

    def __getattr__(self, name: str) -> Any:
        """Return config, device or dtype of the first of the models that `exact=` runs in this process, one thread
        each. Raise NotBuiltError for an attribute, such as `generate`, that only models without `exact=` have.
        """
        models = self.__dict__.get("_modules", {}).get("hosted", ())
        if name in ("config", "device", "dtype") and models:
            return getattr(models[0], name)
        if name not in ("on_each_rank", "hosted") and any(hasattr(type(m), name) or name in m._modules for m in models):  # fmt: skip
            problem = "only a model loaded without exact= has this attribute"
            raise NotBuiltError("ExactModel", name, problem, BUILT)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; set `loss_function` and `input_check_interval` (steps from one check that ranks have
        fitting batches to the next) also on each model in `hosted`, one for each rank that is a thread of this process.
        """
        for model in self.hosted if name in ("loss_function", "input_check_interval") else ():
            setattr(model, name, value)
        super().__setattr__(name, value)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Return (name, parameter) pairs of all virtual ranks of this process; within a loss_fn, which runs in the
        thread of one virtual rank, only the pairs of that rank.
        """
        own: Any = self._of(dist.get_rank()) if runs_a_rank() else super()
        return own.named_parameters(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        """Raise NotBuiltError: the threads that run a model of `exact=` cannot be copied with it."""
        problem, hint = "a model loaded with exact= cannot be copied", "copy weights by model.consolidated_state_dict(), or load without exact="  # fmt: skip
        raise NotBuiltError("ExactModel", "copy.deepcopy", problem, hint)

    def forward(self, *args: Any, **batch: Any) -> Any:
        """Return the model's own output for this process's rows; its tensors have gradients as usual. A scalar, such as
        the loss, is the mean over the dp ranks that this process runs as threads.
        """
        names = list(inspect.signature(type(self.hosted[0]).forward).parameters)[1:]
        batch |= dict(zip(names, args, strict=False))
        if runs_a_rank():  # in a loss_fn, whose rows are this rank's
            return tree_map(computed, self._of(dist.get_rank())(**batch))
        is_graded = torch.is_grad_enabled()  # in this thread; each thread has its own

        def call(rank: int) -> Any:
            with self._recorded(rank), torch.set_grad_enabled(is_graded):
                return tree_map(computed, self._of(rank)(**self._rows_of(rank, batch)))

        outputs = dict(zip(self._host.ranks, self._host.run(call), strict=True))
        return joined(outputs, self._host, self.virtual, self._note_gradients)

    def close(self) -> None:
        """End the threads of this and all other models of `exact=`, which then cannot run; a collective call."""
        close()

    def on_each_rank(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `function(model, *args, **kwargs)` in the thread of each virtual rank of this process; return the first
        rank's result. An optimizer among the arguments is replaced by a copy that has the rank's parameters only.
        """

        def call(rank: int) -> Any:
            model = self._of(rank)
            given = [narrowed(arg, model) for arg in args]
            named = {name: narrowed(arg, model) for name, arg in kwargs.items()}
            with self._recorded(rank):
                found = function(model, *given, **named)
            for old, new in zip([*args, *kwargs.values()], [*given, *named.values()], strict=True):
                give_back(old, new)
            return found

        return self._host.run(call)[0]

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Step the parameters of all models in `hosted`, one per rank that is a thread of this process, each in its
        thread; return (args, kwargs) with which `optimizer.step` then steps the parameters outside these models. Return
        None, and leave all parameters to `optimizer.step`, if the optimizer cannot be split over the threads, or if
        this is already the step of one thread. A hook of `optimizer.step` calls this.

        Args:
            optimizer: optimizer over the parameters of all ranks of this process.
            args: positional arguments of its `step`, the optimizer first.
            kwargs: named arguments of its `step`.

        Raises:
            SlapoError: gradients were changed after `train_step` by anything but `clip_grad_norm_`. A norm over the
                parameters of several ranks would count replicated parameters several times.
        """
        if self._stepping:
            return None
        if self._versions() != self._gradients:
            problem = "gradients were changed after train_step, but not by model.clip_grad_norm_"
            hint = "call model.clip_grad_norm_(max_norm), which counts replicated parameters once"
            raise SlapoError("optimizer.step", "exact=", problem, hint)
        self.on_each_rank(lambda model: model._slapo.calls.guard.before_step())
        own = split_over_ranks(optimizer, (*args[1:], *kwargs.values()), self.hosted)
        if own is None:
            return None
        with replaced(self, "_stepping", True):
            self._host.run(lambda rank: own[self._host.ranks.index(rank)].step() and None)
        for each in own:
            give_back(optimizer, each)
        return (without(optimizer, self.hosted), *args[1:]), kwargs

    def _versions(self) -> dict[Tensor, tuple[int, int]]:
        """Return {parameter: (address, version) of its gradient}; in-place changes of a gradient raise its version."""
        found = ((p, p.grad) for p in self.parameters())
        return {p: (grad.data_ptr(), grad._version) for p, grad in found if grad is not None}

    def _of(self, rank: int) -> Any:
        return self.hosted[self._host.ranks.index(rank)]

    def train_step(self, batch: Mapping[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Run `Scheduled.train_step` on the virtual ranks of this process, which `exact=` runs as threads; return the
        mean loss over all processes, or with `return_logits` an output with it and this process's logits.

        Args:
            batch: rows of this process; its dp ranks in the mesh `virtual` (`virtual.dp / mesh.dp`) get equal slices.
            *args: `micro_batches` (of one virtual rank), `return_logits`, `targets` (numbers of labels in this
                process's rows), `loss_fn`, `scaler` and `batch_is_sharded`, in this order.
            **kwargs: the same by name.
        """

        names = "micro_batches", "return_logits", "targets", "loss_fn", "scaler", "batch_is_sharded"
        kwargs |= dict(zip(names, args, strict=False))
        parts, targets = self.virtual.dp // self.mesh.dp, kwargs.get("targets")

        def call(rank: int) -> Any:
            counts = self.virtual.coord("dp", rank) % parts == 0  # one rank counts its process's
            own = {} if targets is None else {"targets": [n * counts for n in targets]}
            with self._recorded(rank):
                return self._of(rank).train_step(self._rows_of(rank, batch), **kwargs | own)

        found = dict(zip(self._host.ranks, self._host.run(call), strict=True))
        output = found[self._host.ranks[0]]
        loss = output if isinstance(output, Tensor) else output["loss"]
        self._last, self._gradients = (float(loss), 0.0), self._versions()
        return loss if loss is output else joined(found, self._host, self.virtual, self._note_gradients)  # fmt: skip

    def _rows_of(self, rank: int, batch: Any) -> Any:
        """Return the slice of `batch` for virtual rank `rank`; virtual dp ranks of a process get equally many rows."""
        if not isinstance(batch, Mapping):
            return batch  # `Scheduled.train_step` refuses it
        parts, rows = self.virtual.dp // self.mesh.dp, count_rows(batch)
        leaves = tree_leaves(dict(batch))
        if any(batch.get(n) is not None for n in CACHES) or any(isinstance(x, Tensor) and x.requires_grad for x in leaves):  # fmt: skip
            problem = "an entry is a KV cache or requires a gradient, and the virtual ranks of this process would all change it"
            raise SlapoError("ExactModel", "batch", problem, "leave it out, or leave exact= out")
        if rows % parts:
            problem = f"found {rows} rows for {parts} virtual dp ranks (exact=) in this process"
            raise SlapoError("ExactModel", "batch", problem, f"pass a multiple of {parts} rows")
        first = self.virtual.coord("dp", rank) % parts * (rows // parts)
        part = slice(first, first + rows // parts)
        return tree_map(lambda x: x[part] if isinstance(x, Tensor) and x.ndim and len(x) == rows else x, dict(batch))  # fmt: skip

    def _note_gradients(self) -> None:
        self._gradients = self._versions()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global 2-norm is at most `max_norm`; return the norm before."""
        norm = self.on_each_rank(lambda model: model.clip_grad_norm_(max_norm))
        self._last, self._gradients = (self._last[0], float(norm)), self._versions()
        return norm

    @contextmanager
    def tracing(self) -> Iterator[ExactTrace]:
        """Context that records every operation of forwards, steps and clipping; yields an ExactTrace, which is complete
        at the end, on every process with the operations of all virtual ranks. Steps take many times as long.
        """
        found, self._tracing = ExactTrace(), {rank: [] for rank in self._host.ranks}
        try:
            yield found
        finally:
            rows, self._tracing = self._tracing, None
        every = self._host.run(
            lambda rank: together(self._of(rank).mesh, "tracing", lambda: (rank, rows[rank]))
        )
        found.rows.update(dict(every[0]))

    @contextmanager
    def _recorded(self, rank: int) -> Iterator[None]:
        if self._tracing is None:
            yield
            return
        with Recorder(self._of(rank), self._tracing[rank]):
            yield

    def step_digest(self) -> str:
        """Return a SHA-256 of last loss, gradient norm and weights of all ranks; equal bits give equal digests."""

        def own(model: Any) -> str:
            tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            mine = digest(*(f"{name} {digest_of_tensor(t)}" for name, t in sorted(tensors.items())))
            return digest(*together(model.mesh, "step_digest", lambda: mine))

        return digest(*self._last, self.on_each_rank(own))

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Write a checkpoint as `Scheduled.save_pretrained` does, which describes the arguments."""
        self.on_each_rank(lambda model: model.save_pretrained(save_directory, **kwargs))

    def consolidated_state_dict(self, grads: bool = False) -> dict[str, Tensor]:
        """Return {HuggingFace name: unsharded tensor, or with `grads` its gradient} on process 0, {} elsewhere."""
        return self.on_each_rank(lambda model: model.consolidated_state_dict(grads))
