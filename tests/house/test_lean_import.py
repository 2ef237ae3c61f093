"""`import slapo_zoo` costs little: its exports are lazy, and no heavy package comes with it."""

import json
import subprocess
import sys

HEAVY = [
    "torch",
    "torch.distributed.pipelining",
    "transformers",
    "triton",
    "deepspeed",
    "xformers",
    "rich",
    "typer",
]


def modules_after(statement):
    """Names in `sys.modules` of a fresh interpreter that ran `statement`."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    # -P: the current folder, with its root folder kernels/, stays off the path
    command = [sys.executable, "-P", "-W", "error", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout))


def test_import_of_slapo_zoo_loads_no_large_optional_package():
    loaded = modules_after("import slapo_zoo")
    assert "slapo_zoo" in loaded
    heavy = [name for name in HEAVY if name in loaded]
    assert not heavy, f"`import slapo_zoo` also imports {heavy}; import them where they are used"


def test_mesh_and_placement_modules_import_without_torch():
    """Ranks of a mesh can be computed without torch, so a laptop can plan for a cluster."""
    loaded = modules_after(
        "import slapo_zoo.parallel.mesh, slapo_zoo.parallel.paths, slapo_zoo.parallel.placement"
    )
    assert "torch" not in loaded
