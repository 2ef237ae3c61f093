"""Promises of docs/security.md about the sources: nothing on a load path executes what it reads."""

import ast
import re

import pytest

from sources import CODE, ROOT, files, label, tree

FORBIDDEN = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load", "pickle.Unpickler",
    "pickle.loads", "marshal.load", "marshal.loads", "shelve.open", "yaml.load", "dill.loads",
    "joblib.load", "tempfile.mktemp", "subprocess.getoutput", "loader.exec_module",
    "numpy.load", "np.load",
}  # fmt: skip
# file --> what it may use, and why
ALLOWED = {
    "slapo_zoo/parallel/ranks/launch.py": {
        "pickle.loads"
    },  # between a parent and the ranks that it forked
    "slapo_zoo/zoo/cards/resolve_card.py": {
        "loader.exec_module"
    },  # trusted by the user, pinned to a sha
}


def called(node):
    """Return the last two parts of the dotted name of a call; the result of another call counts as `()`."""
    parts, f = [], node.func
    while isinstance(f, ast.Attribute):
        parts.append(f.attr)
        f = f.value
    parts.append(f.id if isinstance(f, ast.Name) else "()")
    return ".".join(reversed(parts[:2] if len(parts) > 1 else parts))


def offences(syntax):
    """Forbidden calls, and calls whose arguments are forbidden."""
    for node in ast.walk(syntax):
        if not isinstance(node, ast.Call):
            continue
        name = called(node)
        arguments = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
        if name in FORBIDDEN or name.endswith(".extractall"):
            yield name
        if name == "torch.load" and arguments.get("weights_only") is not True:
            yield "torch.load without weights_only=True"
        if arguments.get("shell"):
            yield f"{name} through a shell"
        if "trust_remote_code" in arguments and arguments["trust_remote_code"] is True:
            yield f"{name} with trust_remote_code=True"


def test_source_code_contains_no_eval_pickle_or_other_unsafe_calls():
    found = {label(path): set(offences(tree(path))) for path in files(*CODE)}
    wrong = {name: uses - ALLOWED.get(name, set()) for name, uses in found.items()}
    assert not {name: uses for name, uses in wrong.items() if uses}


@pytest.mark.parametrize(
    "text",
    ["eval(x)", "pickle.loads(x)", "torch.load(f)", "torch.load(f, weights_only=False)",
     "subprocess.run(x, shell=True)", "a.b.os.system(x)", "spec.loader.exec_module(m)",
     "tarfile.open(x).extractall()", "AutoModel.from_pretrained(x, trust_remote_code=True)"],
)  # fmt: skip
def test_unsafe_call_checker_detects_forbidden_calls(text):
    assert list(offences(ast.parse(text)))


def test_unsafe_call_checker_does_not_report_model_eval():
    assert not list(offences(ast.parse("f(x).eval(); model.eval()")))


def test_unsafe_calls_on_the_allow_list_still_exist_in_the_source():
    for name, uses in ALLOWED.items():
        assert uses <= set(offences(ast.parse((ROOT / name).read_text()))), name


def test_every_test_file_named_on_the_security_page_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "docs" / "security.md").read_text())
    assert len(named) > 8
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_every_package_in_the_ci_constraints_has_a_pinned_sha256_hash():
    def named(file):
        lines = (ROOT / "ci" / file).read_text().splitlines()
        return {line.split()[0].lower(): line for line in lines if line[:1] not in ("#", "")}

    pinned, hashed = named("constraints.txt"), named("hashes.txt")
    assert {name for name in pinned if not name.startswith("torch==")} == set(hashed)
    bad = [x for x in hashed.values() if not re.fullmatch(r"\S+ --hash=sha256:[0-9a-f]{64}", x)]
    assert not bad
