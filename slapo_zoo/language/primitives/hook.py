"""hook: register a function that runs before or after a module."""

from collections.abc import Callable
from dataclasses import dataclass

from slapo_zoo.language.directive import Directive, Site, primitive

MODES = {
    "fw_pre": "register_forward_pre_hook",
    "fw_post": "register_forward_hook",
    "bw_post": "register_full_backward_hook",
}


@primitive("hook")
@dataclass(frozen=True)
class Hook(Directive):
    """Register a hook of torch.nn on the module.

    rewrite:  fw_pre:   x --> func(module, (x,)) or x;   fw_post: y --> func(module, (x,), y) or y
              bw_post:  dx --> func(module, (dx,), (dy,)) or dx
    note:     if `func` returns None, the value stays. A schedule with a hook cannot be written as JSON
    errors:   unknown mode; a `func` that cannot be called

    Args:
        mode: "fw_pre", "fw_post" or "bw_post"; "fwd_pre", "fwd_post" and "bwd_post" mean the same.
        func: hook with the arguments of the torch.nn hook of that mode.
    """

    mode: str
    func: Callable

    def check(self, site: Site) -> None:
        if self._mode() not in MODES:
            problem = f"found mode {self.mode!r}, expected one of {tuple(MODES)}"
            hint = "use fw_pre before the forward, fw_post after it, bw_post on gradients"
            raise self.fail(site, problem, hint)
        if not callable(self.func):
            hint = f"pass a function as torch.nn.Module.{MODES[self._mode()]} takes it"
            raise self.fail(site, f"found func {self.func!r}, expected a callable", hint)

    def _mode(self) -> str:
        return self.mode.replace("fwd_", "fw_").replace("bwd_", "bw_")

    def apply(self, site: Site) -> None:
        getattr(site.module, MODES[self._mode()])(self.func)
