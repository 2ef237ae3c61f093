"""The exported kernels: loadable without slapo_zoo, layers as the `kernels` package wants them."""

import hashlib
import importlib.util
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[2]
LOAD = """
import importlib.util, sys
sys.modules["triton"] = None  # as if it were not installed
spec = importlib.util.spec_from_file_location("exported", sys.argv[1] + "/__init__.py",
                                              submodule_search_locations=[sys.argv[1]])
package = importlib.util.module_from_spec(spec)
sys.modules["exported"] = package
spec.loader.exec_module(package)
import torch
x = torch.randn(3, 8, requires_grad=True)
package.linear_cross_entropy(x, torch.randn(5, 8), torch.tensor([1, 4, 0])).backward()
assert x.grad.abs().sum() > 0
foreign = [name for name in ("slapo_zoo", "transformers") if name in sys.modules]
assert not foreign, foreign
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    command = [sys.executable, str(ROOT / "ci" / "export_kernels.py"), str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def test_exported_kernels_run_without_slapo_zoo_and_without_triton(hub):
    """The exported kernels import neither slapo_zoo nor, on a CPU, Triton."""
    command = [sys.executable, "-P", "-c", LOAD, str(hub / "build" / "torch-cpu")]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd="/", env={"PATH": ""}
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("variant", ["torch-cpu", "torch-cuda"])
def test_metadata_of_exported_kernels_lists_the_sha256_of_every_source_file(hub, variant):
    folder = hub / "build" / variant
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["backend"]["type"] == variant.removeprefix("torch-")
    for name, digest in metadata["digest"]["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    sources = [file.name for file in folder.glob("*.py")]
    assert set(sources) == {name for name in metadata["digest"]["files"] if name.endswith(".py")}
    assert "import slapo_zoo" not in "".join(file.read_text() for file in folder.glob("*.py"))


def load(folder):
    name = f"exported_{folder.name.replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def test_exported_kernel_layers_have_no_state_and_the_forward_signature_of_the_original(hub):
    from transformers import activations
    from transformers.models.bert import modeling_bert
    from transformers.models.llama import modeling_llama
    from transformers.models.roberta import modeling_roberta
    from transformers.models.t5 import modeling_t5

    layers = load(hub / "build" / "torch-cpu").layers
    homes = (nn, activations, modeling_bert, modeling_llama, modeling_roberta, modeling_t5)
    found = [cls for _, cls in inspect.getmembers(layers, inspect.isclass)]
    assert len(found) == 12
    for cls in found:
        target = next(getattr(home, cls.__name__) for home in homes if hasattr(home, cls.__name__))
        assert cls.__init__ is nn.Module.__init__
        kinds = [
            [p.kind for p in inspect.signature(c.forward).parameters.values()]
            for c in (cls, target)
        ]
        assert kinds[0] == kinds[1], cls
    norm, x = nn.LayerNorm(8), torch.randn(3, 8)
    assert torch.equal(layers.LayerNorm.forward(norm, x), norm(x))


KERNELIZE = """
import sys, torch
from pathlib import Path
from torch import nn
try:
    from kernels import use_kernel_forward_from_hub
    import kernels
except ImportError:
    sys.exit(77)  # absent, or a folder of that name
from transformers.models.t5.modeling_t5 import T5LayerNorm

class Norm(T5LayerNorm):
    pass

Norm = use_kernel_forward_from_hub("T5LayerNorm")(Norm)
model = nn.Sequential(Norm(8), Norm(8)).train()
x = torch.randn(3, 8)
want = model(x)
layer = kernels.LocalLayerRepository(Path(sys.argv[1]), layer_name="T5LayerNorm")
mapping = {"T5LayerNorm": {"cpu": {kernels.Mode.TRAINING: layer}}}
with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
    fast = kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu", use_fallback=False)
assert "slapo_zoo_kernels" in fast[0].forward.__func__.__module__
torch.testing.assert_close(fast(x), want)
"""


def test_hugging_face_kernels_package_loads_the_exported_kernels(hub):
    """Run in a new process, whose path does not contain this project's folder `kernels`."""
    command = [sys.executable, "-P", "-c", KERNELIZE, str(hub)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    if result.returncode == 77:
        pytest.skip("the package `kernels` is not installed")
    assert result.returncode == 0, result.stderr
