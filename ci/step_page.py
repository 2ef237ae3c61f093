"""Write the tables of docs/training_steps.md from the measurements in hub_cards/bench/cpu.json.

`python3 ci/step_page.py` writes the page; a test compares it with the measurements.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, MEASURED = ROOT / "docs" / "training_steps.md", ROOT / "hub_cards" / "bench" / "cpu.json"
Row = dict[str, Any]


def _number(value: Any, form: str = ".2f") -> str:
    return value if isinstance(value, str) else format(value, form)


def _name(row: Row) -> str:
    return row["model"] if row["model"].endswith("layers") else f"{row['model']} (cut)"


def steps(content: Row) -> str:
    """Return the Markdown table of whole training steps, by model; `content` is the JSON of the measurements."""
    heads = ("model", "dtype", "B x S", "threads", "ours, ms", "plain / ours", "compile / ours", "wanted",
             "in matrix products", "most of the rest")  # fmt: skip
    rows = sorted(content["steps"], key=lambda r: (r["model"], r["dtype"] != "float32"))
    cells = [
        (_name(r), r["dtype"], r["B x S"], str(r["threads"]), _number(r["ours ms"], ".0f"),
         _number(r["plain / ours"]), _number(r["compile / ours"]), _number(r["wanted"]),
         f"{100 * r['GEMM share']:.0f} %", r["rest"].replace("_scaled_dot_product_flash_attention_for_cpu", "sdpa"))
        for r in rows
    ]  # fmt: skip
    return _table(heads, cells, right=range(3, 9))


def memory(content: Row) -> str:
    """Return the Markdown table of the peak memory of the language models."""
    heads = ("model", "dtype", "ours, GiB", "plain, GiB", "ours / plain", "wanted")
    rows = sorted(content.get("memory", []), key=lambda r: r["model"])
    cells = [(_name(r), r["dtype"], *(_number(r[k]) for k in ("ours GiB", "plain GiB", "ours / plain", "wanted")))
             for r in rows]  # fmt: skip
    return _table(heads, cells, right=range(2, 6))


def kernels(content: Row) -> str:
    """Return the Markdown table of single kernels."""
    heads = (
        "kernel",
        "shape",
        "dtype",
        "ours, ms",
        "eager / ours",
        "compiled / ours",
        "on by default",
    )
    chosen = content["dispatch"]
    rows = sorted(content["rows"], key=lambda r: (r["what"], r["dtype"], r["shape"]))
    cells = [(f"`{r['what']}`", r["shape"], r["dtype"], _number(r["p50 ms"], ".1f"), _number(r["eager / ours"]),
              _number(r["compile / ours"]), "yes" if chosen[r["bucket"]] == "ours" else "no") for r in rows]  # fmt: skip
    return _table(heads, cells, right=range(3, 6))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: range) -> str:
    rule = ["--:" if i in right else ":--" for i in range(len(heads))]
    return "\n".join(
        "| " + " | ".join(row) + " |" for row in (heads, *rows)
    ).replace("\n", "\n|" + "|".join(rule) + "|\n", 1)  # fmt: skip


TABLES: dict[str, Callable[[Row], str]] = {"steps": steps, "memory": memory, "kernels": kernels}


def rendered(page: str, content: Row) -> str:
    """Return the page with the tables of `content` between `<!-- NAME -->` and `<!-- end -->`."""
    for name, table in TABLES.items():
        before, mark, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        page = before + mark + "\n" + table(content) + "\n\n" + end + after
    return page


if __name__ == "__main__":
    found = json.loads(MEASURED.read_text(encoding="utf-8"))
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
