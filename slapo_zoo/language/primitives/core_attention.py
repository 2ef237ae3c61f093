"""core_attention: give an attention module of transformers a child module for softmax(q k^T) v."""

from dataclasses import dataclass
from typing import Any

from slapo_zoo.hf.attention import ATTRIBUTE, CoreAttention
from slapo_zoo.hf.attention_backends import find_backend, implementation
from slapo_zoo.hf.models import calls_interface
from slapo_zoo.kernels.device_dropout import DEVICE_DROPOUT
from slapo_zoo.language.directive import Directive, Site, primitive
from slapo_zoo.parallel.placement import Placement
from slapo_zoo.parallel.rng.stream_position import SiteName


@primitive("core_attention")
@dataclass(frozen=True)
class CoreAttentionSeam(Directive):
    """Give an attention module a child `core_attn` that `transformers` calls for softmax(q k^T) v.

    rewrite:  attn(x) = o(sdpa(q, k, v))  -->  attn(x) = o(attn.core_attn(q, k, v))
    note:     no key is added to the state dict; a head draws the same dropout mask whichever rank holds it
    errors:   fewer heads than ranks; an unknown back end; an attention of transformers that would not call the child

    Args:
        num_heads: global number of query heads; 0: each rank has all heads, and their number is read from each call.
        together: number of query heads that share a KV head.
        backend: implementation of attention: sdpa, eager, flash, flex or xformers.
        mesh_dim: the mesh dim that the heads are sharded over.
    """

    num_heads: int = 0
    together: int = 1
    backend: str = "sdpa"
    mesh_dim: str = "tp"

    def check(self, site: Site) -> None:
        find_backend(self.backend)
        if not calls_interface(type(site.module)):
            problem = f"{type(site.module).__name__} does not call transformers' AttentionInterface, so it would ignore core_attn"
            raise self.fail(site, problem, "leave core_attention out for this release of the class")
        n = site.mesh.size(self.mesh_dim)
        placement = Placement(0, together=self.together)
        if self.num_heads and placement.problem(self.num_heads, n):
            problem = f"{self.num_heads} heads cannot be sharded over {self.mesh_dim}={n}"
            heads = range(1, self.num_heads + 1)
            legal = [m for m in heads if not placement.problem(self.num_heads, m)]
            raise self.fail(site, problem, f"choose among legal sizes of {self.mesh_dim}: {legal}")

    def apply(self, site: Site) -> None:
        n, r = site.mesh.place(self.mesh_dim)
        runs = Placement(0, together=self.together).runs(self.num_heads, n, r)
        heads = range(*runs[0]) if runs else ()
        # A dry run needs shapes only, and sdpa has the same.
        backend = "sdpa" if site.mesh.dry_run else self.backend
        if backend != "sdpa":
            config: Any = site.module.config
            config._attn_implementation = implementation(backend)
        # Without a number of heads, masks are those that fork_rng draws for torch's fused attention.
        name = SiteName(site.name(ATTRIBUTE)) if runs else SiteName(site.path, "#1")
        core = CoreAttention(site.state.random, name, heads, backend, DEVICE_DROPOUT)
        core.train(site.module.training)
        site.module.add_module(ATTRIBUTE, core)
        site.state.modules[site.name(ATTRIBUTE)] = core
