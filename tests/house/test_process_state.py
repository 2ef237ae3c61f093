"""Process-wide state: all of it is listed, with its reason, in docs/decisions/0019-what-a-process-shares.md."""

import ast
import re

from sources import CODE, ROOT, files, label, tree

PAGE = ROOT / "docs" / "decisions" / "0019-what-a-process-shares.md"
CHANGES = {
    "append",
    "add",
    "update",
    "setdefault",
    "pop",
    "clear",
    "insert",
    "extend",
    "discard",
    "remove",
}
KINDS = (
    "local",
    "ContextVar",
    "WeakKeyDictionary",
    "WeakIdKeyDictionary",
    "WeakSet",
    "defaultdict",
)


def named(target):
    """Return the name in `NAME[...]`, or None."""
    inner = target.value if isinstance(target, ast.Subscript) else None
    return inner.id if isinstance(inner, ast.Name) else None


def assigned(node):
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []


def kept_by(path):
    """Return the names of mutable objects that a module makes when it is imported.

    Functions under @cache are left out: they are functions of their arguments, and only faster.
    """
    body = tree(path).body
    own = {t.id for node in body for t in assigned(node) if isinstance(t, ast.Name)}
    own |= {
        n.asname or n.name for node in body if isinstance(node, ast.ImportFrom) for n in node.names
    }
    for node in body:
        value = getattr(node, "value", None)
        if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in KINDS:
            yield from (t.id for t in assigned(node) if isinstance(t, ast.Name))
    functions = [n for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef)]
    for node in (inner for function in functions for inner in ast.walk(function)):
        if isinstance(node, ast.Global):
            yield from node.names
        yield from (name for t in assigned(node) if (name := named(t)) in own)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if node.func.attr in CHANGES and isinstance(owner, ast.Name) and owner.id in own:
                yield owner.id


def test_docs_page_on_global_state_lists_every_global_of_the_package():
    found = {f"{path.stem}.{name}" for path in files(*CODE) for name in kept_by(path)}
    rows = [
        line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")
    ]
    told = {name for row in rows for name in re.findall(r"`(\w+\.\w+)`", row.split(" | ")[0])}
    assert found <= told, f"say on {label(PAGE)} why a process has them: {sorted(found - told)}"
    assert told <= found, (
        f"gone, or no state any more; take them off {label(PAGE)}: {sorted(told - found)}"
    )
