"""Measure the table of published bugs in docs/verification.md: `python3 ci/run.py corpus`.

Every bug of tests/corpus runs, about ten minutes on two cores. A test compares the page with the bugs; only the
seconds depend on the machine.
"""

import re
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, MARK, END = ROOT / "docs" / "verification.md", "<!-- corpus -->\n", "<!-- end -->"
HEADS = ("bug", "published as", "where users met it", "found by", "names", "s")
NEVER = "-"  # seconds of a bug that was not measured


def thread(name: str) -> str:
    """Return a Markdown link for a GitHub thread `owner/name#number`; any other text is returned unchanged."""
    found = re.fullmatch(r"([\w.-]+/([\w.-]+))#(\d+)( .*)?", name)
    if found is None:
        return name
    repository, short, number, more = found.groups()
    return f"[{short}#{number}{more or ''}](https://github.com/{repository}/issues/{number})"


def row(bug: Any, seconds: str) -> list[str]:
    """Return the table cells of a bug."""
    named = f"`{bug.named}`" if bug.checker else NEVER
    kind = {"schedule": "", "loop": " (loop)", "file": " (file)"}[bug.fault.kind]
    published = ", ".join(map(thread, bug.threads))
    return [f"{bug.name}{kind}", published, bug.met, bug.checker or "nothing", named, seconds]


def table(bugs: Sequence[Any], seconds: Mapping[str, str]) -> str:
    """Return the table of all bugs as Markdown, with a summary above it; `seconds` maps a bug's name to its time."""
    rows = [row(bug, seconds.get(bug.name, NEVER)) for bug in bugs]
    lines = ["| " + " | ".join(cells) + " |" for cells in (HEADS, *rows)]
    return "\n".join(
        [summary(bugs, seconds), "", lines[0], "|:--|:--|:--|:--|:--|--:|", *lines[1:]]
    )


def summary(bugs: Sequence[Any], seconds: Mapping[str, str]) -> str:
    """Return one sentence: how many bugs are found, by which check, and the median seconds."""
    found = [bug for bug in bugs if bug.checker]
    by = {name: sum(bug.checker == name for bug in found) for name in dict.fromkeys(b.checker for b in found)}  # fmt: skip
    measured = [float(seconds[b.name]) for b in found if seconds.get(b.name, NEVER) != NEVER]
    median = f"{statistics.median(measured):.1f} s" if measured else NEVER
    kinds = ", ".join(f"{count} by {name}" for name, count in sorted(by.items(), key=lambda x: -x[1]))  # fmt: skip
    return f"{len(found)} of {len(bugs)} are found and named: {kinds}; median {median}."


def measured(page: str) -> dict[str, str]:
    """Return {name of a bug: its seconds} from the table on a page."""
    _, _, rest = page.partition(MARK)
    cells = [line.split(" | ") for line in rest.partition(END)[0].splitlines() if line[:2] == "| "]
    return {re.sub(r" \((loop|file)\)$", "", c[0][2:]): c[-1].rstrip(" |") for c in cells[1:]}


def rendered(page: str, bugs: Sequence[Any], seconds: Mapping[str, str]) -> str:
    """Return the text of the page with its table replaced by that of `bugs`."""
    before, mark, rest = page.partition(MARK)
    _, end, after = rest.partition(END)
    return before + mark + "\n" + table(bugs, seconds) + "\n\n" + end + after


def main() -> int:
    """Measure every bug and rewrite the page; return 1 if a bug is not found by the check that its entry names."""
    sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "corpus")]
    from corpus_all import BUGS
    from corpus_checks import first_to_find

    wrong, seconds = 0, {}
    with tempfile.TemporaryDirectory() as root:
        for bug in BUGS:
            found = first_to_find(bug, Path(root))
            right = found.checker == bug.checker and found.says(bug.named)
            wrong += bool(bug.checker) and not right
            seconds[bug.name] = f"{found.seconds:.1f}" if found.checker else NEVER
            print("ok " if right else "NO ", bug.name, found.checker, seconds[bug.name], flush=True)
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8"), BUGS, seconds), encoding="utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
