"""Commands `slapo-zoo plan --gpus N`, which simulates all layouts, and `slapo-zoo calibrate`, which measures the speeds
of this machine for such simulations.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from slapo_zoo.cli.arguments import Device, command, device_named
from slapo_zoo.cli.readable_errors import check_new_file
from slapo_zoo.errors import SlapoError


def make_planner(
    model: str, seq_len: int | None, device: tuple[str, str | None, str, str], padding: bool = True
) -> Any:  # fmt: skip
    """Return the `Planner` of a model and device, which simulates a training step and searches for the fastest layout.
    `model` is a checkpoint folder, a Hub id or a family, `seq_len` the tokens per row (None: a default that fits the
    model). `device` has the values of --hardware, --memory, --precision, --runtime, e.g. ("a100", "80GiB", "bf16",
    "eager"); `padding` says whether batches carry an attention mask.
    """
    from slapo_zoo.pipeline.unit_costs import row_length
    from slapo_zoo.tune.planner.hardware import find_hardware, with_memory
    from slapo_zoo.tune.planner.layout_search import Planner
    from slapo_zoo.weights.load_rank_slices import parse_size
    from slapo_zoo.zoo.argument_values import config_of, usual_head
    from slapo_zoo.zoo.table import table_for

    hardware, memory, precision, runtime = device
    config, head = config_of(model)
    head = usual_head(config, head)
    table_for(config.model_type)
    found = with_memory(find_hardware(hardware), parse_size(memory, "--memory"))
    planner = Planner(config, found, row_length(config, seq_len), precision, runtime, head, padding)
    if planner.family.cls.main_input_name == "pixel_values":  # a row is an image
        planner.seq_len = planner.family.lengths(1)[-1]
    return planner


def search(
    planner: Any, gpus: int, batch: int, explain: bool, write: Path | None, most: int
) -> Any:
    """Simulate a training step of all layouts of `gpus` devices with `planner`, and write the schedule of the fastest
    that fits into memory to the file `write` (None: nowhere). Return (data for --json, text to print); if no layout
    fits, also an error, which the command raises after printing. A step has `batch` rows over all replicas; `most`
    layouts are listed; with `explain` the text says why others do not fit.
    """
    from slapo_zoo.tune.planner import layout_report as show
    from slapo_zoo.tune.planner.search_result import require_feasible

    check_new_file(write, "--write")
    cut, why = _may_cut(planner, write)
    found = planner.search(gpus, batch, cut=cut)
    found.refused.extend([("cp > 1", why)] * bool(why))
    data, text = show.as_json(planner, found, most), show.as_text(planner, found, most, explain)
    try:
        require_feasible(found, f"--gpus {gpus}")
    except SlapoError as error:
        return data, text, error
    if write is not None:
        best = show.write_schedule(planner, found, write)
        call = show.call_of(best, ("checkpoint_ratio", "checkpoint_policy", "sequence_parallel"))
        data["call"] = call
        text += f"\n{write}: from_pretrained(..., schedule={str(write)!r}, {call})"
    return data, text


def _may_cut(planner: Any, write: Path | None) -> tuple[bool, str]:
    """Return (True, "") if a layout search with `planner` may try cp > 1, else (False, the reason why not). `write` is
    None, or the file for the schedule of the fastest layout: a schedule in a file has cp=1.
    """
    from slapo_zoo.model.context_parallel import require_cp_support

    if write is not None:
        return False, "--write: the schedule of a file runs with cp=1"
    try:
        require_cp_support(planner.family.table, planner.family.cls, planner.family.config)
    except SlapoError as error:
        return False, error.problem
    return True, ""


@command
def calibrate(
    output: Annotated[Path, typer.Argument(help="JSON file to write.")],
    device: Device = "auto",
    ranks: Annotated[
        int, typer.Option(min=1, help="Local processes that measure the link between them.")
    ] = 2,
) -> Any:
    """Measure the speed of matrix products, memory, launches and links on this machine, for `plan --hardware FILE`."""
    from slapo_zoo.tune.planner.calibrate import measure

    check_new_file(output, "output")
    found = measure(device_named(device), ranks)
    found.write(output)
    rates = ", ".join(f"{name} {rate / 1e9:.3g} GFLOP/s" for name, rate in found.matmul.items())
    links = f"memory {found.bandwidth / 1e9:.3g} GB/s, links {found.link / 1e9:.3g} GB/s"
    return json.loads(output.read_text()), f"{found.name}: {rates}; {links}; written to {output}"
