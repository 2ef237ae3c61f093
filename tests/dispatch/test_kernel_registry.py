"""The kernel registry: kernels of a module, the choice on a device with its reason, Triton only when needed."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from slapo_zoo.dispatch import kernel_registry as kernel
from slapo_zoo.dispatch import tables
from slapo_zoo.dispatch.choose_kernel import force, implementation, runs_triton
from slapo_zoo.dispatch.kernel_registry import KERNELS, bucket
from slapo_zoo.dispatch.tables import slug
from slapo_zoo.errors import ScheduleError
from slapo_zoo.kernels import layer_norm  # noqa: F401 - registers itself


def test_replace_with_a_kernel_name_installs_the_kernel_and_keeps_the_output():
    from slapo_zoo import create_schedule

    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    x = torch.randn(3, 4)
    want = model(x)
    sch = create_schedule(model)
    sch["1"].replace("layer_norm")
    assert model[1].forward.__wrapped__ is KERNELS["layer_norm"].serves["LayerNorm"]
    torch.testing.assert_close(model(x), want)
    with pytest.raises(
        ScheduleError, match="found Linear, but the kernel layer_norm serves only LayerNorm"
    ):
        sch["0"].replace("layer_norm")


def test_layer_norm_kernel_on_cpu_runs_torch_layer_norm():
    assert implementation(KERNELS["layer_norm"], "cpu") == (
        "F.layer_norm",
        "the best of what runs on a CPU",
    )
    assert not runs_triton("layer_norm", torch.zeros(2, 8))


def test_layer_norm_kernel_runs_torch_operations_on_an_unmeasured_gpu():
    path, why = implementation(KERNELS["layer_norm"], "Some GPU 9000")
    assert path == "torch"
    assert why == "unmeasured on Some GPU 9000"


def test_layer_norm_kernel_runs_triton_on_a_gpu_where_triton_was_measured_faster(
    monkeypatch, tmp_path
):
    table = {"layer_norm:bfloat16:1024": "triton", "layer_norm:float32:1024": "torch"}
    (tmp_path / "some-gpu-9000.json").write_text(json.dumps({"dispatch": table}))
    monkeypatch.setattr(tables, "MEASURED", tmp_path)
    monkeypatch.setattr(tables, "_kept", {})
    assert implementation(KERNELS["layer_norm"], "Some GPU-9000")[0] == "triton"
    assert bucket("layer_norm", torch.zeros(5, 768, dtype=torch.bfloat16)) in table


def test_registering_a_kernel_under_an_existing_name_is_refused():
    assert slug("NVIDIA H200") == "nvidia-h200"
    assert bucket("x", torch.zeros(3, 1025)) == "x:float32:2048"
    with pytest.raises(ScheduleError, match="already registered"):
        kernel.kernel("layer_norm", len, dict, [])(len)


def test_every_kernel_imports_and_runs_without_triton_installed():
    """Each kernel imports, and runs on a CPU, without Triton."""
    code = (
        "import importlib, pathlib, sys, torch\n"
        "import slapo_zoo.dispatch.kernel_registry as k\n"
        "folder = pathlib.Path(k.__file__).parents[1] / 'kernels'\n"
        "sys.modules['triton'] = None\n"
        "for f in sorted(folder.glob('*.py')):\n"
        "    if 'triton' not in f.stem: importlib.import_module('slapo_zoo.kernels.' + f.stem)\n"
        "for kernel in k.KERNELS.values():\n"
        "    out = kernel.entry(**kernel.inputs(*kernel.shapes[1]))\n"
        "assert len(k.KERNELS) >= 15\n"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_kernel_benchmark_keeps_stored_results_that_were_measured_in_training_steps(
    tmp_path, monkeypatch
):
    from slapo_zoo.dispatch import benchmark as kernel_times

    older = {"dispatch": {"unpadded_encoder:float32:1024": "ours", "geglu:float32:64": "ours"},
             "ratios": {"unpadded_encoder:float32:1024": 1.8, "geglu:float32:64": 1.1}}  # fmt: skip
    (tmp_path / "cpu.json").write_text(json.dumps(older))
    row = {"what": "geglu", "shape": "1x2", "dtype": "float32", "bucket": "geglu:float32:2",
           "eager / ours": 0.9, "liger / ours": "unmeasured"}  # fmt: skip
    found = json.loads(kernel_times.write("cpu", [row], tmp_path).read_text())
    assert found["dispatch"] == {
        "unpadded_encoder:float32:1024": "ours",
        "geglu:float32:2": "torch",
    }
    assert found["ratios"]["unpadded_encoder:float32:1024"] == 1.8


def test_operator_runs_while_the_device_of_its_first_tensor_is_current(monkeypatch):
    """Triton launches on the current device, which may be another than that of the tensors."""
    current, seen = [None], []

    class Guard:
        def __init__(self, x):
            self.x = x

        def __enter__(self):
            current.append(self.x)

        def __exit__(self, *_):
            current.pop()

    @kernel.operator("first_device", lambda x, n: x.new_empty(x.shape))
    def add(x: torch.Tensor, n: int) -> torch.Tensor:
        seen.append(current[-1])
        return x + n

    monkeypatch.setattr(torch.cuda, "device_of", Guard)
    x = torch.ones(3)
    assert torch.equal(add(x, 2), x + 2)
    assert [one.data_ptr() for one in seen] == [x.data_ptr()]
    assert current == [None]


@pytest.mark.parametrize("dynamic", [False, True])
def test_kernel_choice_from_timings_causes_no_graph_break_under_torch_compile(dynamic):
    """Compilers can trace neither the name of a GPU nor files of timings."""

    def chosen(x):
        return x[:1] if runs_triton("rms_norm", x) else x * 2

    x = torch.ones(2, 8, device="meta")
    whole = torch.compile(chosen, backend="eager", fullgraph=True, dynamic=dynamic)
    assert whole(x).shape == (2, 8)
    with force("triton"):
        assert whole(x).shape == (1, 8)
