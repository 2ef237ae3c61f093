"""Search for the stacks of a model: lists of repeated blocks between which a pipeline may be cut."""

from collections.abc import Iterable, Iterator

from torch import nn

from slapo_zoo.language.directive import join
from slapo_zoo.zoo.derivation.observe import NEVER, Observation

LEAST = 0.05  # share of the parameters beside embeddings that a list holds to count as a stack


def find_stacks(model: nn.Module, seen: Observation | None = None) -> list[str]:
    """Return patterns of the repeated blocks, e.g. "model.layers.*".

    Args:
        model: a model without a schedule, on any device.
        seen: observed forward of a tiny model; lists whose modules ran several times are left out. None: no list is.
    """
    tables = {p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    total = sum(p.numel() for p in model.parameters() if p not in tables) or 1
    return _larger(model, seen, LEAST * total) or _larger(model, seen, 0)


def _larger(model: nn.Module, seen: Observation | None, least: float) -> list[str]:
    """Return the patterns of the lists of blocks, e.g. "model.layers.*", that hold more than `least` parameters; lists
    whose modules run several times in the observed forward `seen` are left out.
    """
    found: list[str] = []
    for path, module in model.named_modules():
        inside = any(star(path) == f[:-2] or star(path).startswith(f) for f in found)
        if not inside and _is_list(module) and _numel(module) > least and _once(path, seen):
            found += _deepest(path, module)
    return list(dict.fromkeys(found))


def _is_list(module: nn.Module) -> bool:
    children = list(module.children())
    names = all(name.isdigit() for name, _ in module.named_children())
    return names and len(children) > 1 and all(_numel(child) for child in children)


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _once(path: str, seen: Observation | None) -> bool:
    return seen is None or not seen.calls or seen.calls.get(f"{path}.0", 0) == 1


def _deepest(path: str, module: nn.Module) -> Iterator[str]:
    """Yield a pattern for the list `module` of blocks: "path.*", or "path.*.layers.*" if most of each item is a list."""
    inner = {}
    for name, stage in module.named_children():
        lists = [(n, m) for n, m in stage.named_children() if _is_stack(m)]
        if len(lists) == 1 and _numel(lists[0][1]) >= 0.5 * _numel(stage):
            inner[name] = lists[0][0]
    if inner and len(set(inner.values())) == 1:
        yield join(path, f"*.{next(iter(inner.values()))}.*")
    else:
        yield join(path, "*")


def _is_stack(module: nn.Module) -> bool:
    """Return whether a module is an nn.ModuleList or nn.Sequential whose children are all of one class."""
    kinds = {type(child) for child in module.children()}
    names = all(name.isdigit() for name, _ in module.named_children())
    return isinstance(module, nn.ModuleList | nn.Sequential) and names and len(kinds) == 1


def order_of(model: nn.Module, seen: Observation, stacks: Iterable[str]) -> tuple[str, ...]:
    """Return the modules beside and above the block lists `stacks` ("model.layers.*"), e.g. ("model.embed",
    "model.layers", "model.norm"), in the order of first use in the forward `seen`; () if the model defines them so.
    """
    containers = {""}
    for stack in stacks:
        parts = stack.split(".")
        containers |= {".".join(parts[:i]) for i in range(1, len(parts))}
    order: list[str] = []
    same = True
    for path, module in model.named_modules():
        if star(path) not in containers or star(path) in {o.rpartition(".")[0] for o in order}:
            continue
        names = [name for name, child in module.named_children() if _numel(child)]
        if not names or all(name.isdigit() for name in names):
            continue
        at = {name: seen.first_use(join(path, name)) for name in names}
        for name, after in zip(names[-2::-1], names[:0:-1], strict=True):
            at[name] = (
                at[after] if at[name] == NEVER else at[name]
            )  # a tower: before the text model
        ran = sorted(names, key=at.__getitem__)
        same = same and ran == names
        order += [star(join(path, name)) for name in ran]
    return () if same else tuple(order)


def star(path: str) -> str:
    """Return the pattern of a path: its numbers become stars.

    >>> star("model.layers.3.mlp")
    'model.layers.*.mlp'
    """
    return ".".join("*" if part.isdigit() else part for part in path.split("."))
