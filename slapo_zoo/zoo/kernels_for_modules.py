"""Choice, with reasons, of the kernels that replace a model's modules: the argument `kernels=` of `from_pretrained`.

Whether a kernel can replace a module follows from the module's class, so no family's table names kernels. Whether
the kernel is used follows from measurements on the device (slapo_zoo.dispatch.choose_kernel).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from slapo_zoo.dispatch.benchmark import quick_table
from slapo_zoo.dispatch.choose_kernel import PRIOR, decide, falls_back
from slapo_zoo.dispatch.kernel_registry import Kernel, load_kernels
from slapo_zoo.dispatch.tables import keep
from slapo_zoo.errors import ScheduleError
from slapo_zoo.language.primitives import Replace
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.parallel.paths import nearest
from slapo_zoo.parallel.ranks.agreement import together

WORDS = ("auto", "reference", "measure")
ASKED, NOT_ASKED = "asked for", "not asked for"


@dataclass(frozen=True)
class Choice:
    """Decision whether a kernel replaces the modules of one path pattern, with its reason.

    Args:
        kernel: name of the kernel.
        pattern: pattern of the modules that the kernel could replace.
        accepted: True if the kernel replaces these modules.
        reason: why, or why not.
        by_device: True if measurements on the device decided, with kernels="auto" or "measure".
    """

    kernel: str
    pattern: str
    accepted: bool
    reason: str
    by_device: bool = False

    def __str__(self) -> str:
        return f"{self.kernel} at {self.pattern}: {'yes' if self.accepted else 'no'}, {self.reason}"


def device_name(device: torch.device | str) -> str:
    """Return the name under which measurements of a device are stored: "cpu", or the name of the GPU."""
    kind = torch.device(device)
    return torch.cuda.get_device_name(kind) if kind.type == "cuda" else kind.type


def asked_names(asked: Any) -> list[str] | None:
    """Return the kernel names in `asked`, the argument `kernels=` of `from_pretrained`: [] for "reference"; None for
    "auto" and "measure", with which measurements choose. ScheduleError, which lists all names, for an unknown name.
    """
    if asked in ("auto", "measure"):
        return None
    names = [] if asked == "reference" else [asked] if isinstance(asked, str) else [*asked]
    known = sorted(name for name, kernel in load_kernels().items() if kernel.serves)
    for name in names:
        if name not in known:
            problem = f"no such kernel, there are {', '.join((*WORDS, *known))}"
            hint = f"nearest: {nearest(str(name), (*WORDS, *known)) or known}"
            raise ScheduleError("from_pretrained", f"kernels={name!r}", problem, hint)
    return names


def kernels_of(value: Any) -> Any:
    """Turn a tuner's text into an argument `kernels=` of `from_pretrained`: "a+b" --> ["a", "b"], "" --> "reference".

    >>> kernels_of("geglu+rms_norm"), kernels_of(""), kernels_of("auto")
    (['geglu', 'rms_norm'], 'reference', 'auto')
    """
    names = [name for name in str(value or "reference").split("+") if name]
    return names[0] if len(names) == 1 else names


def choose(
    sch: Schedule, asked: Any, device: str, attention: str | None = None, tuned: Any = None
) -> list[Choice]:
    """Return a decision for every kernel that could replace a module of the model.

    Args:
        sch: schedule of the model; it is not changed.
        asked: `kernels=` of `from_pretrained`: "auto", "measure", "reference", a kernel's name, or a list of names.
        device: "cpu", or the name of the GPU.
        attention: attention back end that the user asked for, or None; with one, "auto" replaces no attention.
        tuned: kernels that a search found fastest for this very model, "geglu+rms_norm", taken for "auto"; or None.
    """
    names, by_device = asked_names(asked), asked in ("auto", "measure")
    if asked == "auto" and tuned is not None:
        names = asked_names(kernels_of(tuned))
    found: list[Choice] = []
    for kernel in load_kernels().values():
        places = _paths_by_pattern(sch, kernel)
        if names and kernel.name in names and not places:
            problem = f"the model has no module that this kernel serves ({', '.join(sorted(kernel.serves))})"
            hint = 'kernels="auto" picks what applies'
            raise ScheduleError("from_pretrained", f"kernels={kernel.name!r}", problem, hint)
        for pattern, paths in places.items():
            verdict = _verdict(sch, kernel, paths, names, device)
            if by_device and names is not None and verdict[1] in (ASKED, NOT_ASKED):
                verdict = verdict[0], f"a search found {tuned!r} fastest for this model here"
            if names is None and attention and any(n.endswith("Attention") for n in kernel.serves):
                verdict = False, f"attention={attention!r} was asked for"
            found.append(Choice(kernel.name, pattern, *verdict, by_device))
    return _outermost(sch, found)


def _paths_by_pattern(sch: Schedule, kernel: Kernel) -> dict[str, list[str]]:
    """Return {"**:GPT2MLP" (class): paths of modules that `kernel` serves}; {path: [path]} if `kernel.sites` is set."""
    if kernel.sites is not None:
        return {path: [path] for path in kernel.sites(sch.model)}
    served = {cls for cls in {type(m) for m in sch.state.modules.values()}
              if any(base.__name__ in kernel.serves for base in cls.__mro__)}  # fmt: skip
    places: dict[str, list[str]] = {}
    if served:
        for path, module in sch.state.modules.items():
            if type(module) in served:
                places.setdefault(f"**:{type(module).__name__}", []).append(path)
    return places


def _verdict(
    sch: Schedule, kernel: Kernel, paths: Sequence[str], names: list[str] | None, device: str
) -> tuple[bool, str]:
    if names is not None and kernel.name not in names:
        return False, NOT_ASKED
    reasons = (kernel.refuses(sch.state.modules[path]) for path in paths)
    if refusal := next(filter(None, reasons), ""):
        return False, refusal
    if names is None:
        return measured(sch, kernel, device)
    instead = falls_back(kernel, _dtype(sch), _size(sch.model.config, kernel), device)
    return True, f"{ASKED}, but torch operations run: {instead}" if instead else ASKED


def measured(sch: Schedule, kernel: Kernel, device: str) -> tuple[bool, str]:
    """Return (whether to use a kernel on a device in the model of `sch`, the reason). Measurements at the size of this
    model decide, or an estimate where none exist.
    """
    dtype, size = _dtype(sch), _size(sch.model.config, kernel)
    found = decide(kernel.name, str(dtype).removeprefix("torch."), size, device)
    instead = falls_back(kernel, dtype, size, device) if kernel.name not in PRIOR else ""
    return (False, instead) if found.runs and instead else (found.runs, found.reason)


def _dtype(sch: Schedule) -> torch.dtype:
    return sch.state.compute_dtype or next(sch.model.parameters()).dtype


def _size(config: Any, kernel: Kernel) -> int:
    """Return the size by which a kernel's measurements are looked up: head size for attentions, else hidden size."""
    width = getattr(config, "hidden_size", None) or 1024
    if not any(name.endswith("Attention") for name in kernel.serves):
        return width
    own = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    heads = getattr(config, "num_attention_heads", None) or 1
    return own or width // (heads if isinstance(heads, int) else heads[-1])  # Swin: one per stage


def _outermost(sch: Schedule, choices: Sequence[Choice]) -> list[Choice]:
    """Return `choices`, with a kernel rejected if all its modules lie inside modules that another accepted kernel replaces.

    The inner kernel might never run. There are two exceptions: an outer kernel with `runs_inside` calls the modules
    inside and rejects no kernel, and an inner one with `innermost` (for linears, which outer kernels call) is kept.
    """
    hiding = [c for c in choices if c.accepted and not load_kernels()[c.kernel].runs_inside]
    served = {path: c for c in hiding for path in sch[c.pattern].paths}
    found = []
    for choice in choices:
        outer = [_outer(path, served) for path in sch[choice.pattern].paths]
        if choice.accepted and all(outer) and not load_kernels()[choice.kernel].innermost:
            inside = f"inside a module that {outer[0].kernel if outer[0] else ''} serves"
            choice = replace(choice, accepted=False, reason=inside)
        found.append(choice)
    return found


def _outer(path: str, served: dict[str, Choice]) -> Choice | None:
    while path:
        path = path.rpartition(".")[0]
        if path in served:
            return served[path]
    return None


def measure_here(sch: Schedule, device: str) -> None:
    """Time the kernels that the model of `sch` could use on this device, unless this user has timed them before.

    A collective call: rank 0 measures for some seconds and stores the results in the user's cache folder;
    all ranks use these results.
    """
    served = sorted(k.name for k in load_kernels().values() if _paths_by_pattern(sch, k))

    def action() -> Any:
        return quick_table(served, device) if sch.mesh.rank == 0 else None

    keep(device, together(sch.mesh, 'kernels="measure"', action)[0])


def apply_kernels(
    sch: Schedule, asked: Any, device: str, attention: str | None = None, tuned: Any = None
) -> None:
    """Replace modules of `sch.model` by faster kernels; write all choices, rejected ones too, to `sch.kernels`.

    `asked` is `kernels=` of `from_pretrained`: kernel names, "auto" (by stored measurements), "measure" (measure first)
    or "reference" (do nothing). `device` is "cpu" or the GPU's name, `attention` the back end that the user asked for.
    `tuned` are the kernels that a search found fastest, e.g. "geglu+rms_norm", taken for "auto"; None: no search.
    """
    if asked == "reference":
        return
    if asked == "measure":
        measure_here(sch, device)
    sch.kernels = choose(sch, asked, device, attention, tuned)
    for choice in sch.kernels:
        if choice.accepted:
            sch.do(choice.pattern, Replace(choice.kernel))
