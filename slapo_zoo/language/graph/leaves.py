"""Decide which modules stay a single `call_module` node (a leaf) in a traced graph."""

from collections.abc import Callable

from torch import fx, nn

from slapo_zoo.language.directive import join

Leaf = str | type | Callable[[nn.Module, str], bool]
CORE_ATTENTION = "core_attn"  # slapo_zoo.hf.attention.ATTRIBUTE
LEAF_CLASSES = {"Conv1D"}  # the linear layer of GPT-2


def leaf_test(leaves: tuple[Leaf, ...], flatten: bool) -> Callable[[nn.Module, str], bool]:
    """Return a function (module, path below the traced root) --> True if the module stays a single node.

    Args:
        leaves: leaves chosen by the user, as paths, class names, classes or predicates.
        flatten: the trace enters children; then modules with hooks are leaves, too.
    """

    def given(module: nn.Module, path: str, leaf: Leaf) -> bool:
        if isinstance(leaf, str):
            return leaf in (path, type(module).__name__)
        if isinstance(leaf, type):
            return isinstance(module, leaf)
        return bool(leaf(module, path))

    def is_leaf(module: nn.Module, path: str) -> bool:
        own = type(module).__module__
        if own.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(module, nn.Sequential):
            return True
        changed = "forward" in module.__dict__ or isinstance(module, fx.GraphModule)
        hooked = flatten and bool(module._forward_hooks or module._forward_pre_hooks)
        hooked = hooked or (flatten and bool(module._backward_hooks))
        named = path.endswith(CORE_ATTENTION) or type(module).__name__ in LEAF_CLASSES
        return changed or hooked or named or any(given(module, path, x) for x in leaves)

    return is_leaf


def leaf_below(path: str, leaf: Leaf) -> Leaf:
    """Translate a leaf (path, class or predicate) from paths below the root to paths below `path`."""
    if isinstance(leaf, str):
        return leaf.removeprefix(path + ".")
    if isinstance(leaf, type):
        return leaf
    return lambda module, p: leaf(module, join(path, p))
