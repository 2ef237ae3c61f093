"""Wording: pages, docstrings and names of tests use the field's words, such as sharded, dry run, speed-up."""

import ast
import re

from sources import ROOT, files, label, statements, text

OTHER_WORDS = {
    r"rehears": "dry run (on fake tensors)",
    r"\bon paper\b": "simulated",
    r"times of ours": "speed-up, or the ratio to ours",
    r"\blaps\b": "virtual stages",
    r"goes on where": "resumes",
    r"told apart": "distinguished",
    r"\bdivided (tensor|parameter|weight|model)s?\b": "sharded",
}


def test_pages_and_sources_use_no_project_slang():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    code = files("slapo_zoo", "kernels", "schedules", "ci")
    found = [
        f"{label(path)}: {match[0]!r}, say {better}"
        for path in [*pages, *code] for pattern, better in OTHER_WORDS.items()
        for match in re.finditer(pattern, text(path), re.IGNORECASE)
    ]  # fmt: skip
    assert not found, found


OPENINGS = r"(Of|What|Whether|Which|Where|How|Why|As|In which)\b"


def test_docstrings_do_not_begin_with_of_what_whether_or_how():
    """CONTRIBUTING, How we write."""
    paths = files("slapo_zoo", "kernels", "schedules", "ci", "tests", "examples")
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = [
        f"{label(path)}: {text!r}" for path in paths for node in statements(path)
        if isinstance(node, kinds) and re.match(OPENINGS, text := ast.get_docstring(node) or "")
    ]  # fmt: skip
    assert not found, found


PRIVATE = r"test_(an?|the)_|\w*_(anew|asked|knobs?|pieces?|said|seam|told)(_|$)"


def test_names_of_tests_have_three_words_and_no_project_slang():
    """CONTRIBUTING, How we write: a name says subject, verb and outcome, without words of our own."""
    found = [
        f"{label(path)}: {node.name}" for path in files("tests") for node in statements(path)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        and (re.match(PRIVATE, node.name) or node.name.count("_") < 3)
    ]  # fmt: skip
    assert not found, found
