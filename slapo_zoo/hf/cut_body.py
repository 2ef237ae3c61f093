"""Shard tokens over cp (context parallelism) in a model's blocks only, for heads that read a whole row (classification).

rewrite:  head(blocks(x))  -->  head(all_gather(blocks(x[tokens of this rank])))

Every cp rank computes the head and the loss for all tokens. The loss of each rank is weighted by 1 / cp, since the
backward of the all-gather sums the gradients of the cp ranks.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any

from torch import Tensor, nn

from slapo_zoo.errors import ArchitectureError, SlapoError
from slapo_zoo.hf.example_inputs import accepts
from slapo_zoo.parallel.known import knowing, known
from slapo_zoo.parallel.token_cut import TokenCut, cutting

SOURCE, SOURCE_MASK = "encoder_hidden_states", "encoder_attention_mask"
Shard = Callable[[TokenCut, dict[str, Tensor], dict[str, Any]], tuple[dict[str, Tensor], dict[str, Any]]]  # fmt: skip


class Body:
    """Forward hooks of a model that, within `sharded(cut)`, give the repeated blocks this cp rank's tokens only, and
    all-gather the hidden states after the last block.

    Args:
        model: a model of `transformers` with a head, on which the family's sharding rules were applied.
        base: path of the base model in `model`, e.g. "bert".
        blocks: paths of the model's repeated blocks, in running order.
        stream: random stream of the model, where dropout and attention read which tokens this rank computes.
        shard: function (TokenCut, tensors, others) --> (tensors with this rank's tokens only, others); both are dicts
            by name, the keyword arguments of the base model (or of its encoder or decoder).

    Raises:
        ArchitectureError: `base` is "" (there is no base model), or only the model itself runs the blocks.
    """

    def __init__(self, model: Any, base: str, blocks: list[str], stream: Any, shard: Shard):
        self.model, self.paths, self.stream, self.shard = model, (base, blocks), stream, shard
        self.run: _Run | None = None
        first = model.get_submodule(base)
        stacks = list({id(stack): stack for stack in map(self._stack, blocks)}.values())
        if not blocks or not base or model in stacks:
            problem = f"{type(model).__name__} has no base model of transformers that holds its blocks"  # fmt: skip
            raise ArchitectureError("from_pretrained", "cp > 1", problem, "use cp=1")
        takes_ids = [stack for stack in stacks if accepts(type(stack), "input_ids")]
        for module in takes_ids or [first]:
            module.register_forward_pre_hook(self._shard, with_kwargs=True)
        stacks[-1].register_forward_hook(self._gather)
        if len(stacks) > 1:
            first.register_forward_hook(self._gather_source)

    def like(self, model: Any, stream: Any, shard: Shard) -> "Body":
        """Return a `Body` (hooks that shard tokens over cp in the blocks only) for another model with the same module
        paths, its random stream `stream`, and `shard`, the function that picks a rank's tokens.
        """
        return Body(model, *self.paths, stream, shard)

    def _stack(self, block: str) -> nn.Module:
        """Return the innermost module above the block at path `block` that has a forward, and so runs the block."""
        while True:
            block = block.rpartition(".")[0]
            module = self.model.get_submodule(block)
            if type(module).forward is not nn.Module.forward or not block:
                return module

    @contextmanager
    def sharded(self, cut: TokenCut) -> Iterator[None]:
        """Context of a forward in which the blocks compute only this cp rank's tokens; `cut` says which these are."""
        with cutting(self.stream, None), ExitStack() as on:
            self.run = _Run(cut, self.stream, on)
            try:
                yield
            finally:
                self.run = None

    def _shard(self, module: nn.Module, args: tuple, given: dict[str, Any]) -> Any:
        """Return, as a forward pre-hook, ((), keyword arguments with this cp rank's tokens only). Return None, which
        changes nothing, outside of the context `self.sharded(...)`.
        """
        if self.run is None:
            return None
        bound = signature(type(module).forward).bind_partial(module, *args).arguments
        batch = {**dict(list(bound.items())[1:]), **given}
        if accepts(type(module), "use_cache"):
            batch["use_cache"] = False  # a cache would lack the keys of other ranks
        return (), self.run.begin(self.shard, batch)

    def _gather(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Run as a forward hook of the module that calls the blocks: all-gather its hidden states [B, s, D] over cp to
        [B, S, D], and return the output with these; outside of `self.sharded(...)` return the output unchanged.
        """
        if self.run is None:
            return output
        first = output if isinstance(output, Tensor) else output[0]
        whole = self.run.end(first)
        if isinstance(output, Tensor | tuple):
            return whole if isinstance(output, Tensor) else (whole, *output[1:])
        output.last_hidden_state = whole
        return output

    def _gather_source(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Run as a forward hook of an encoder-decoder: return its output, in which `encoder_last_hidden_state`
        [B, s, D] was all-gathered over cp to [B, S, D]; outside of `self.sharded(...)` return the output unchanged.
        """
        if self.run is not None and self.run.source:
            x = output.encoder_last_hidden_state
            output.encoder_last_hidden_state = self.run.cut.whole(x, 1).narrow(
                1, 0, self.run.source
            )
        return output


def sharding(state: Any, cut: TokenCut | None) -> AbstractContextManager[None]:
    """Context of a forward whose tokens are sharded over cp as `cut` says, or not sharded if `cut` is None. `state` is
    the State of the model's Schedule. If `state.body` is None, the whole model computes this rank's tokens; if it is a
    `Body` (set for heads that read a whole row), only the blocks do.
    """
    body = state.body
    return cutting(state.random, cut) if body is None or cut is None else body.sharded(cut)


def own_lengths(state: Any, cut: TokenCut | None, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return `batch` with token ids and masks shortened to as many tokens as this cp rank's blocks compute, of which
    only the number is right: it tells whether tp can shard them too. `cut` says how tokens are sharded over cp (None:
    not). Only if `state.body` of the Schedule's `state` is set does `batch` have whole rows; else it is returned as is.
    """
    n = 1 if state.body is None or cut is None else cut.n
    ids = {k: x for k, x in batch.items() if k.endswith(("input_ids", "mask")) and x is not None}
    return {**batch, **{name: x[..., : -(-x.shape[-1] // n)] for name, x in ids.items()}}


class _Run:
    """State of one forward whose blocks compute only this cp rank's tokens, which `cut` tells. Dropout and attention
    read from `stream`, the model's random stream, which tokens these are. `on` is the stack of the contexts in which
    only these are computed, closed after the last block.
    """

    def __init__(self, cut: TokenCut, stream: Any, on: ExitStack):
        self.cut, self.stream, self.on = cut, stream, on
        self.tokens = self.source = 0  # of a row, and of a row of the encoder
        self.source_mask: Tensor | None = None

    def begin(self, shard: Shard, batch: dict[str, Any]) -> dict[str, Any]:
        """Return `batch`, the arguments of the base model, with only this cp rank's tokens, which `shard` chooses. The
        layers compute these tokens until the last block ends; there `end` gathers all tokens.
        """
        states, _ = batch.pop(SOURCE, None), batch.pop(SOURCE_MASK, None)
        if states is not None and not self.source:
            problem = "these states were not sharded over cp by an encoder of this call"
            hint = "pass the encoder's input_ids, or use cp=1"
            raise SlapoError("cp > 1", f"encoder_outputs or {SOURCE}", problem, hint)
        tensors = {name: x for name, x in batch.items() if isinstance(x, Tensor) and x.ndim}
        others = {name: x for name, x in batch.items() if name not in tensors}
        part, others = shard(self.cut, tensors, others)
        self.tokens = tensors["input_ids"].shape[1]
        if states is None:
            self.source, self.source_mask = self.tokens, part.get("attention_mask")
        else:
            others |= {SOURCE: states, SOURCE_MASK: self.source_mask}
        self.on.enter_context(cutting(self.stream, self.cut))
        if self.tokens % self.cut.n:  # then padding was added
            self.on.enter_context(knowing(replace(known(), padded=None)))
        return {**others, **part}

    def end(self, x: Tensor) -> Tensor:
        """Return x [B, s, D], gathered to all tokens [B, S, D]; from here on this rank computes all tokens."""
        self.on.close()
        return self.cut.whole(x, 1).narrow(1, 0, self.tokens)
