"""Run a benchmark: `ci/run.py bench NAME [--quick] [--out FILE]`; each is a file in ci/benchmarks/.

The tables are printed, and every figure is written as JSON to FILE (default runs/NAME.json). The exit status is 1 if
a figure is beyond its limit.
"""

import argparse
import importlib
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "ci" / "benchmarks"


def names() -> list[str]:
    """Return the names of the benchmarks: files of ci/benchmarks that define `run`."""
    files = sorted(BENCHMARKS.glob("*.py"))
    return [file.stem for file in files if "\ndef run(" in file.read_text(encoding="utf-8")]


def machine() -> dict[str, Any]:
    """Return the hardware and software that the figures depend on: device, cores, memory and versions."""
    import torch
    import transformers

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": os.cpu_count(), "memory_gib": round(memory / 2**30, 1), "kernel": platform.release(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(),
    }  # fmt: skip


def show(title: str, rows: list[dict[str, Any]]) -> bool:
    """Print `rows` as a table; return False if a row names columns in its entry "beyond" (beyond their limits)."""
    table = Table(title=title, title_justify="left")
    columns = list(dict.fromkeys(name for row in rows for name in row if name != "beyond"))
    for name in columns:
        table.add_column(name, justify="left" if name in ("model", "layout", "what") else "right")
    for row in rows:
        beyond = row.get("beyond", [])
        cells = [_cell(row.get(name)) for name in columns]
        table.add_row(*(f"[bold red]{cell} ![/]" if name in beyond else cell
                        for name, cell in zip(columns, cells, strict=True)))  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return not any(row.get("beyond") for row in rows)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> int:
    """Run the benchmark that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=names())
    parser.add_argument("--out", type=Path, help="JSON file; runs/NAME.json by default")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    parser.add_argument("--only", help="a part of the benchmark; see its file", default="")
    options = parser.parse_args()
    begin = time.perf_counter()
    module: Any = importlib.import_module(f"benchmarks.{options.name}")
    if options.only and not hasattr(module, "ONLY"):
        parser.error(f"{options.name} has no parts: leave --only out")
    module.ONLY = options.only
    tables: dict[str, list[dict[str, Any]]] = module.run(options.quick)
    kept = [show(title, rows) for title, rows in tables.items()]
    out = options.out or ROOT / "runs" / f"{options.name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    seconds = round(time.perf_counter() - begin, 1)
    result = {"benchmark": options.name, "machine": machine(), "seconds": seconds, "tables": tables}
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{seconds} s; written to {out}")
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
