"""Decide which graph nodes dead-code elimination must keep although no node uses their result."""

import re

from torch import fx

from slapo_zoo.language.graph.guards import GUARDS

WRITING_OPERATORS = {"setitem", "iadd", "isub", "imul", "itruediv", "ipow", "iand", "ior", "ixor"}
WRITING_OPERATORS |= {"imatmul"}


def has_effect(node: fx.Node) -> bool:
    """Return whether a node must stay although its result is unused: a check, a write, a random draw, a module call."""
    if node.op in ("placeholder", "output", "call_module"):
        return True
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    if node.op != "call_function" or node.target in GUARDS:
        return node.op == "call_function"
    name = getattr(node.target, "__name__", "")
    if getattr(node.target, "__module__", "") == "_operator":
        return name in WRITING_OPERATORS
    random = re.match(r"rand|dropout|bernoulli|normal|multinomial", name)
    return bool(random) or name.endswith("_")
