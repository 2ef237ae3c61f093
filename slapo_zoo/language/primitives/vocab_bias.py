"""vocab_bias: add the sharded bias of a head to each rank's shard of the logits."""

from dataclasses import dataclass
from typing import Any

from slapo_zoo.language.directive import Directive, Site, primitive
from slapo_zoo.language.primitives.seen import Seen


@primitive("vocab_bias")
@dataclass(frozen=True)
class VocabBias(Directive):
    """Add a head's sharded bias to each rank's shard of the logits, before they are gathered.

    rewrite:  y = linear(x) + b  -->  y_r = linear_r(x) + b_r; the head's own forward then adds 0 in place of b
    why:      ESM-2 keeps the bias of its logits beside the linear; a shard of it fits no unsharded logits
    errors:   no such child; the bias is not sharded; the module's forward was replaced

    Args:
        linear: name of the child that computes the logits; this directive precedes its
            `sync("fwd_post", "vocab_logits")`.
        param_name: name of the bias.
        mesh_dim: name of the mesh dim that the bias is sharded over.
    """

    linear: str
    param_name: str = "bias"
    mesh_dim: str = "tp"

    def check(self, site: Site) -> None:
        if self.linear not in dict(site.module.named_children()):
            has = ", ".join(name for name, _ in site.module.named_children()) or "none"
            raise self.fail(site, f"no child {self.linear!r}", f"choose one of: {has}")
        if site.placed(self.param_name) is None:
            hint = f"call shard({self.param_name!r}, 0, pad=True) first"
            raise self.fail(site, f"the parameter {self.param_name} is not sharded", hint)
        if "forward" in vars(site.module):
            hint = "move this directive before the one that replaced the forward"
            raise self.fail(site, "an earlier directive replaced the forward", hint)

    def apply(self, site: Site) -> None:
        if site.mesh.size(self.mesh_dim) == 1:
            return
        head: Any = site.module
        rest, own = Seen(head, {self.param_name: 0.0}), type(head).forward
        linear = head.get_submodule(self.linear)
        linear.register_forward_hook(lambda _m, _a, y: y + getattr(head, self.param_name))
        head.forward = lambda *args, **kwargs: own(rest, *args, **kwargs)
