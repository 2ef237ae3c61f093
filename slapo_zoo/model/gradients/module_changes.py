"""Changes of a scheduled model's modules after the load: which are allowed, and which raise an error.

Wrappers that compute what their module computes (`torch.compile(block)`, activation checkpointing) are allowed, and do
not change the names of parameters. New parameters in the place of sharded ones raise an error: their gradients would
not be summed over ranks, and a save would write a shard as the unsharded tensor.
"""

import re
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from slapo_zoo.errors import MeshError, SlapoError, WeightsError
from slapo_zoo.parallel.local_tensors import is_divided

_NO_WRAPPER = (
    "load again and leave it out: each backward averages gradients over dp, and dp_shard= shards weights over dp. Or call "
    "init_target_engine(model, 'torch', data_parallel='ddp' or 'fsdp2'); with Accelerate slapo_zoo.prepare"
)
WHOLE = "_slapo_whole"  # attribute of a submodule that may be called alone: function that returns its model
COPIED = "_slapo_copied"  # attribute of a model that is a deep copy of another
WRAPPER = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module)\.")


def own_name(name: str) -> str:
    """Return a parameter's name without the segments that wrappers (`torch.compile`, checkpoint) insert."""
    return WRAPPER.sub("", name) if "_" in name else name


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return {path: module} of a model; at a wrapper's path (`torch.compile`, checkpoint) is the module it wraps."""
    found = model.named_modules(remove_duplicate=False)
    return {own_name(f"{path}.").removesuffix("."): module for path, module in found}


def require_known_weights(model: Any, step: str) -> None:
    """Raise SlapoError if since the load a submodule was replaced by that of a deep copy of the model, or a sharded or
    tied parameter by another one. `step` is the name of the running call ("forward"), for the error.
    """
    runtime, mesh = model._slapo, model.mesh
    for path, module in model.named_modules() if mesh.world_size > 1 else ():
        whole = vars(module).get(WHOLE, lambda: model)()
        if whole is not model and COPIED in vars(whole):
            problem = "the module is that of a deep copy of the model, and computes as that does"
            hint = "copy the weights instead: module.load_state_dict(copy.state_dict())"
            raise SlapoError(step, path, problem, hint)
    by_name = {spec.name: spec for spec in runtime.specs}
    found, groups = dict(model.named_parameters()), runtime.plan.ties()
    rows = any(is_divided(p) for p in found.values())
    sharded = mesh.tp > 1
    parts = {n: spec for n, spec in by_name.items() if rows or (sharded and spec.placement)}
    parts |= {name: parts[n] for names in groups for n in names if n in parts for name in names}
    modules, head = modules_of(model) if parts else {}, model.get_output_embeddings()
    if head is not None and next(head.parameters(), None) is None:  # an Identity, for hidden states
        modules = {path: module for path, module in modules.items() if module is not head}
    for name, spec in parts.items():
        parent, _, leaf = name.rpartition(".")
        wanted = spec.local_shape(mesh.tp, mesh.coord("tp"))
        if problem := _problem(modules.get(parent), name, leaf, wanted, found):
            hint = "a sharded model keeps its modules: change the plain model, save it, and load that"  # fmt: skip
            raise SlapoError(step, name, problem, hint)
    for names in groups if mesh.world_size > 1 else ():
        if len(apart := [name for name in names if name in found]) > 1:
            problem = f"the parameter was tied to {apart[0]}, and is a separate tensor now"
            hint = "tie them again; or, to train both apart, load a model whose config has tie_word_embeddings=False"
            raise SlapoError(step, apart[1], problem, hint)


def refuse_ddp(model: Any) -> None:
    """Raise MeshError if the model runs within a DistributedDataParallel over ranks that hold other shards."""
    ddp: Any = DistributedDataParallel._active_ddp_module
    if ddp is None or all(module is not model for module in ddp.module.modules()):
        return  # none, or that of another model
    mesh, own = model.mesh, ("tp", "pp")
    ranks = dist.get_process_group_ranks(ddp.process_group)
    apart = [r for r in ranks if any(mesh.coord(d, r) != mesh.coord(d) for d in own)]
    if apart or any(is_divided(p) for p in model.parameters()):
        problem = f"DDP has given all of its ranks {ranks} the weights of the first, but they hold different shards"
        raise MeshError("forward", "DistributedDataParallel", problem, _NO_WRAPPER)


def refuse_fsdp(model: Any) -> None:
    """Raise MeshError if the user called torch's `fully_shard` on modules of the model."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: nobody has called it
    if fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in model.modules()):
        problem = "fully_shard has replaced parameters whose gradients this model sums over ranks"
        raise MeshError("forward", "fully_shard", problem, _NO_WRAPPER)


def _problem(
    module: nn.Module | None, name: str, leaf: str, wanted: tuple[int, ...], found: Any
) -> str:
    """Return as text how a parameter was replaced since the load, or "" if the parameter was not replaced.

    Args:
        module: the module that held the parameter, None if the module is gone.
        name: name of the parameter in the model.
        leaf: name of the parameter in `module`.
        wanted: shape of this rank's shard of the parameter.
        found: name --> parameter, of the model as it is now.
    """
    if module is None:  # removed, or wrapped in another module
        within = [other for other in found if _is_within(name, other)]
        return f"the parameter is called {within[0]} now" if within else ""
    held = module._parameters.get(leaf)
    if held is None:
        made = [n for n in (f"{leaf}_orig", "parametrizations") if hasattr(module, n)]
        if not made and not hasattr(module, leaf):
            made = [type(module).__name__]
        return f"the parameter was replaced by {made[0]}" if made else ""
    kept_elsewhere = is_divided(held) or held.is_meta or not held.numel()  # in an engine
    if kept_elsewhere or tuple(held.shape) == wanted:
        return ""
    return f"found a parameter {list(held.shape)}, expected this rank's shard {list(wanted)}"


def _is_within(name: str, other: str) -> bool:
    """Return whether the parameter name `other` is `name` itself, or `name` with names of wrapper modules inserted."""
    parts, way = (re.split(r"\.(?!\d)", path) for path in (name, other))  # a number with its list
    left = iter(way)
    return parts[-1] == way[-1] and all(part in left for part in parts)


def require_known_order(model: Any) -> None:
    """Raise SlapoError if blocks were removed, swapped or shared since the load of a model with sequence parallelism.

    In such a model the first block of a stack shards the tokens over tp, and the last block gathers them.
    """
    state, ends = model.schedule.state, ("divide_tokens", "join_tokens")
    found = [path for path, step in model.schedule.history
             if getattr(step, "sync_op_or_fn", "") in ends]  # fmt: skip
    stacks = {path.rpartition(".")[0] for end in found for path in state.select(end)}
    here = modules_of(model)
    for path in {**state.modules, **here}:
        if path.rpartition(".")[0] in stacks and here.get(path) is not state.modules.get(path):
            problem = "the block was replaced or removed since the load"
            hint = "change the plain model, save it, and load that; or leave sequence_parallel out"
            raise SlapoError("forward", path, problem, hint)


class Unwrapped:
    """Mixin of a model that Trainer and Accelerate must not wrap in DDP, which would overwrite shards by those of rank 0."""

    mesh: Any

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Return True if Accelerate, which reads this property before it wraps a model, is to leave it unwrapped.

        On several ranks raise SlapoError, unless ScheduledTrainer or `slapo_zoo.prepare` has set the property to True.
        """
        found = vars(self).get("_stays_unwrapped", False)
        if self.mesh.world_size > 1 and not found:
            problem = "Trainer and Accelerate would wrap the model, which is sharded over ranks, in DDP"  # fmt: skip
            hint = "use slapo_zoo.ScheduledTrainer, or slapo_zoo.prepare(accelerator, model, optimizer, loader)"
            raise SlapoError(type(self).__name__, "model", problem, hint)
        return found

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        vars(self)["_stays_unwrapped"] = value


class Structure(Unwrapped):
    """Mixin that adapts methods of a model (named_parameters, load_state_dict, tie_weights, ...) to sharded weights."""

    mesh: Any
    _slapo: Any

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter), without the segments that wrappers such as torch.compile insert into names."""
        found = super().named_parameters(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return ((own_name(name), p) for name, p in found)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, buffer), without the segments that wrappers such as torch.compile insert into names."""
        found = super().named_buffers(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return ((own_name(name), x) for name, x in found)

    def get_submodule(self, target: str) -> nn.Module:
        """Return a submodule by path; the input embedding if peft asks for a missing "embeddings.word_embeddings"."""
        try:
            return super().get_submodule(target)  # pyright: ignore[reportAttributeAccessIssue]
        except AttributeError:
            if target != "embeddings.word_embeddings":
                raise
            model: Any = self
            return model.get_input_embeddings()

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of this rank's shards. Raise WeightsError for tensors of other shapes before any is copied."""
        parent: Any = super()
        own = parent.state_dict() if self.mesh.world_size > 1 else {}
        found = {name: list(getattr(x, "shape", ())) for name, x in state_dict.items()}
        here = {name: list(getattr(x, "shape", ())) for name, x in own.items()}
        for name in [*here, *found] if own else ():
            at = here.get(name), found.get(name)
            is_same = at[0] == at[1] or at[0] == [0]  # [0]: an engine holds the values
            if not is_same and (strict or None not in at):
                problem = f"this rank's shard has the shape {at[0]}, the state dict has {at[1]} (None: no such tensor)"
                hint = "load unsharded tensors by model.load_stream(state_dict.items() if model.mesh.rank == 0 else None)"
                raise WeightsError("load_state_dict", name, problem, hint)
        return parent.load_state_dict(state_dict, strict, assign)

    def tie_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Tie weights as `transformers` does; with pp > 1 do nothing, since the load ties weights across stages."""
        return None if self.mesh.pp > 1 else super().tie_weights(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def init_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Initialise weights as `transformers` does; SlapoError on several ranks, whose shards would not fit together."""
        if self.mesh.world_size > 1:
            problem = "each rank would draw its own values, which are not shards of one weight"
            hint = "call AutoScheduledModel.from_config(config, seed=...): it draws what one process would"
            raise SlapoError("init_weights", "model", problem, hint)
        return super().init_weights(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *_: Any, **__: Any) -> Any:
        """Return the input embedding, as `transformers` does; SlapoError if `new_num_tokens` is not the vocabulary size."""
        model: Any = self
        size = model.config.get_text_config().vocab_size
        if new_num_tokens is not None and new_num_tokens != size:
            problem = f"found {new_num_tokens}, expected {size}, the size of the sharded vocabulary"
            hint = "resize the plain transformers model, save it by save_pretrained, and load that folder"
            raise SlapoError("resize_token_embeddings", "new_num_tokens", problem, hint)
        return model.get_input_embeddings()
