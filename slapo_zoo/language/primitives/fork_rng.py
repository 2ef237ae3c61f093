"""fork_rng: give a module random numbers that depend on its path and the step only, not on earlier modules."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slapo_zoo.hf.attention import CoreAttention
from slapo_zoo.kernels.device_dropout import DEVICE_DROPOUT
from slapo_zoo.kernels.dropout import dropout
from slapo_zoo.language.directive import Directive, Site, join, primitive
from slapo_zoo.parallel.compat import ranks_are_threads
from slapo_zoo.parallel.placement import Placement, Run
from slapo_zoo.parallel.rng import layout_independent_random as rng
from slapo_zoo.parallel.rng.seeds import gpu_of, seeded

DRAWS = {
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli",
    "bernoulli_", "uniform_", "normal_", "multinomial", "normal", "rrelu", "gumbel_softmax",
    "scaled_dot_product_attention",
}  # fmt: skip


@primitive("fork_rng")
@dataclass(frozen=True)
class ForkRng(Directive):
    """Make the random numbers of a module independent of the modules that ran before it.

    rewrite:  Dropout:  y = dropout(x)  -->  y = x * mask(seed, step, path, batch row) / (1 - p)
              others:   y = f(x)        -->  y = f(x) under a generator seeded for (step, path, row); F.dropout,
                        fused attention and torch.rand in f seed each row of the batch, as a Dropout does
    note:     a Dropout then draws the same mask for all sizes of the mesh; in eval mode the module runs unchanged

    Args:
        per_rank: for modules other than Dropout: tp ranks draw different numbers, for an activation sharded over tp.
        axis: for a Dropout whose input is sharded over tp: the sharded axis, 1 (heads) or -1 (last); 0: unsharded.
        size: unsharded size of that axis; 0 takes the number of outputs of the linear that `after` names.
        after: name of the column-parallel linear whose output is dropped out (needs `axis=-1`): a child if the module
            calls F.dropout (BART's `fc1`), a sibling if it is a Dropout. A call of the module's dropout that does not
            follow a call of that linear has an unsharded input.
        tokens: True if, in steps with sequence parallelism, the input holds only the tokens of this rank.
        rows: True if axis 0 of the input is the batch; False (DeBERTa's relative positions): every
            micro-batch and dp rank draws the same mask.
    """

    per_rank: bool = False
    axis: int = 0
    size: int = 0
    tokens: bool = False
    after: str = ""
    rows: bool = True

    def check(self, site: Site) -> None:
        if self.after and (self.axis != -1 or self._after_path(site) not in site.state.modules):
            expected = "the name of a child (or, at a Dropout, of a sibling) with axis=-1"
            problem = f"found after={self.after!r} with axis={self.axis}, expected {expected}"
            hint = "correct the name in after=, and pass axis=-1"
            raise self.fail(site, problem, hint)
        if self.axis and self.size < site.mesh.size("tp") and (self.size or not self.after):
            problem = f"found size={self.size}, which cannot be sharded over tp={site.mesh.tp}"
            raise self.fail(site, problem, f"pass size=, the unsharded size of axis {self.axis}")
        if not self.rows and (not isinstance(site.module, nn.Dropout) or self.axis or self.tokens):
            problem = "rows=False fits only an nn.Dropout, without axis= and tokens="
            hint = "select a Dropout with equal inputs on all ranks, and pass rows=False alone"
            raise self.fail(site, problem, hint)

    def apply(self, site: Site) -> None:
        applied = site.state.applied.setdefault(site.path, set())
        if self.name in applied:
            return  # an earlier row that names this dropout wins
        applied.add(self.name)
        module: Any = site.module
        if type(site.module) is nn.Identity:
            return  # some classes use Identity for a rate of 0
        if isinstance(site.module, nn.Dropout):
            module.forward = _dropout(site, site.module, self, self._run(site), self._child(site))
        else:
            module.forward = self._forked(site, module.forward)

    def _after_path(self, site: Site) -> str:
        """Return the path of the linear whose output is dropped out, named by `after`: a child, or for a Dropout a sibling."""
        drops = isinstance(site.module, nn.Dropout | nn.Identity)  # Identity: a rate of 0
        inside = site.path.rpartition(".")[0] if drops else site.path
        return join(inside, self.after)

    def _child(self, site: Site) -> "_AfterChild | None":
        made = site.state.modules[self._after_path(site)] if self.after else None
        return made and _AfterChild(made, self._run(site), self._size(site))

    def _size(self, site: Site) -> int:
        """Return the unsharded size of the axis along which the dropout's input is sharded; 0 when it is unsharded."""
        if self.size or not self.after:
            return int(self.size)
        placed = site.state.placed.get(join(self._after_path(site), "weight"))
        return placed.shape[placed.placement.axis] if placed else 0

    def _run(self, site: Site) -> Run | None:
        """Return this tp rank's range of indices on the sharded axis of the dropout's input; None if unsharded."""
        if not self.axis or not (size := self._size(site)):
            return None
        (run,) = Placement(0).runs(size, site.mesh.tp, site.mesh.coord("tp"))
        return run

    def _forked(self, site: Site, forward: Callable) -> Callable:
        stream, rank = site.state.random, site.mesh.coord("tp") if self.per_rank else 0
        name = rng.SiteName(f"{site.path}@{rank}" if rank else site.path)
        child = self._child(site)

        @wraps(forward)
        def forked(*args: Any, **kwargs: Any) -> Any:
            if not site.module.training:
                return forward(*args, **kwargs)
            own = OwnDropout(site, self.tokens, name, child)
            if torch.compiler.is_compiling():  # graphs hold no torch generator
                with own:
                    return forward(*args, **kwargs)
            place = stream.place(name, 1)
            seed = rng.mix(stream.seed, *place, rng.hash_of(site.path), rank)
            if ranks_are_threads():  # they share one generator
                own.state = seed
                with own:
                    return forward(*args, **kwargs)
            with seeded(seed, gpu_of(site.state.model)), own:
                return forward(*args, **kwargs)

        return forked


class _AfterChild:
    """Hook on the linear `module` that sets `ran` to True when the linear runs; the dropout after it sets False.

    `run` is this rank's range of the linear's output columns, None if unsharded; `size` is their number on all ranks.
    """

    def __init__(self, module: nn.Module, run: Run | None, size: int):
        self.run, self.size, self.ran = run, int(size), False
        module.register_forward_hook(self._ran)

    def _ran(self, *_: Any) -> None:
        self.ran = True


class OwnDropout(TorchFunctionMode):
    """Context in which the k-th random call of a forward (F.dropout, fused attention, torch.rand) draws by a seed made
    from the module's path and k. OPT, for example, calls F.dropout without a Dropout module.

    Args:
        site: the module whose forward runs, with its path.
        tokens: True if, in steps with sequence parallelism, inputs hold only the tokens of this rank.
        name: name hashed into seeds, by default the path; a name with the tp rank in it gives each rank other masks.
        child: hook on a column-parallel linear in the module, or None; the next F.dropout gets this rank's columns.
    """

    def __init__(
        self,
        site: Site,
        tokens: bool,
        name: rng.SiteName | None = None,
        child: _AfterChild | None = None,
    ):
        super().__init__()
        self.site, self.tokens, self.count, self.child = site, tokens, 0, child
        self.name = name or rng.SiteName(site.path)
        self.state: int | Tensor | None = None
        if child:
            child.ran = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch; dropout, fused attention and torch.rand draw from the model's random stream."""
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention and not torch.compiler.is_compiling():
            return self._attention(func, *args, **kwargs)
        if func is not nn.functional.dropout:
            found = self._generated(func, args, kwargs)
            return self._rows(found) if func is torch.rand else found
        x, p, training = _dropout_arguments(*args, **kwargs)
        self.count += 1
        child, name = self.child, rng.SiteName(self.name, f"#{self.count}")
        columns = child.run if child and child.ran else None
        if child:
            child.ran = False
        if not training or p == 0.0:  # no mask, as in torch
            return x
        if child and columns:
            stream = self.site.state.random
            return dropout(x, **stream.drawn(x, p, name, "columns", (columns, child.size)))
        return dropout(x, **_drawn(self.site, x, p, name, self.tokens))

    def _generated(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of torch; random functions of a virtual rank (thread) draw from that rank's own generator."""
        if self.state is None or getattr(func, "__name__", "") not in DRAWS:
            return func(*args, **kwargs)
        with rng.drawn_from(self.state):
            found, self.state = func(*args, **kwargs), torch.get_rng_state()
        return found

    def _attention(
        self, func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Compute `func`, scaled_dot_product_attention (same arguments), with dropout masks drawn by batch row and head."""
        mask = attn_mask
        if not dropout_p or query.ndim not in (3, 4):
            options = {"attn_mask": mask, "dropout_p": dropout_p, "is_causal": is_causal}
            options |= {"scale": scale, "enable_gqa": enable_gqa}
            return self._generated(func, (query, key, value), options)
        self.count += 1
        name, q, k, v = rng.SiteName(self.name, f"#{self.count}"), query, key, value
        if query.ndim == 3:
            q, k, v = (x[:, None] for x in (q, k, v))
            mask = mask[:, None] if mask is not None and mask.ndim == 3 else mask
        learned = mask is not None and mask.requires_grad
        masks = (None, mask) if learned else (mask, None)
        heads, scale = range(q.shape[1]), q.shape[-1] ** -0.5 if scale is None else scale
        core = CoreAttention(self.site.state.random, name, heads, "sdpa", DEVICE_DROPOUT)
        out = core._dropped(q, k, v, *masks, dropout_p, scale, is_causal, None).transpose(1, 2)
        return out.squeeze(1) if query.ndim == 3 else out

    def _rows(self, x: Tensor) -> Tensor:
        """Return other random numbers in place of `x`, a result of `torch.rand`, each row from its own seed.

        A row's seed depends on its index in the global batch. A single number (LayerDrop) is the same for all rows of a
        step, on all ranks. If axis 0 of `x` is not the batch, `x` is returned.
        """
        stream = self.site.state.random
        if not x.ndim:
            self.count += 1
            with stream.without_rows():
                return stream.uniform(x[None], rng.SiteName(self.name, f"#{self.count}"))[0]
        num_rows = stream.position()[2]
        if not (x.ndim and num_rows and x.shape[0] % num_rows == 0):
            return x
        self.count += 1
        return stream.uniform(x, rng.SiteName(self.name, f"#{self.count}"))


def _dropout_arguments(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Tensor, float, bool]:
    """Return (input, p, training) of a call of torch.nn.functional.dropout; `inplace` is dropped."""
    return input, p, training


def _drawn(site: Site, x: Tensor, p: float, name: rng.SiteName, tokens: bool) -> dict[str, Any]:
    """Return how `kernels.dropout` masks x: {"keep": mask} on a CPU; {"seeds", "p"}, from which a GPU hashes the mask.

    Args:
        site: the module that drops; gives the random stream and the mesh.
        x: input of the dropout.
        p: probability of a zero.
        name: name hashed into the seeds: the module's path, with "#k" for the k-th random call in its forward.
        tokens: True if a step with sequence parallelism gives the dropout only this rank's tokens.
    """
    stream, mesh = site.state.random, site.mesh
    if tokens and site.state.forward.tokens_divided:
        return stream.drawn(x, p, name, "tokens", (mesh.tp, mesh.coord("tp")))
    return stream.drawn(x, p, name)


def _is_whole(x: Tensor, child: _AfterChild | None, size: int) -> bool:
    """Return whether the input of a Dropout is unsharded in this call.

    Args:
        x: input of the Dropout.
        child: hook on the linear before the Dropout, or None; x is sharded if `child.ran`, which is then reset.
        size: unsharded size of the last axis; without `child`, x is unsharded if its last axis has this size.
    """
    if child is None:
        return x.shape[-1] == size
    ran, child.ran = child.ran, False
    return not ran


def _dropout(
    site: Site, module: nn.Dropout, directive: ForkRng, run: Run | None, child: _AfterChild | None
) -> Callable[[Tensor], Tensor]:
    stream, path = site.state.random, rng.SiteName(site.path)
    size = directive._size(site)  # a plain integer, for graphs

    def draws(input: Tensor) -> dict[str, Any]:
        """Return how `kernels.dropout` masks `input`: {"keep": mask} on a CPU; {"seeds", "p"} to hash it on a GPU."""
        p = module.p
        if not directive.rows:
            with stream.without_rows():
                return _drawn(site, input, p, path, tokens=False)
        if run is None or (directive.axis == -1 and _is_whole(input, child, size)):
            return _drawn(site, input, p, path, directive.tokens)
        if directive.axis == 1:
            return stream.drawn(input, p, path, part=(range(*run),))
        return stream.drawn(input, p, path, "columns", (run, size))

    def forward(input: Tensor) -> Tensor:
        if not module.training or module.p == 0.0:
            return input
        return dropout(input, **draws(input))

    forward.draws = draws  # pyright: ignore[reportFunctionMemberAccess]
    return forward
