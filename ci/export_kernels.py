"""Write the kernels in the layout of the HuggingFace `kernels` package: `ci/run.py export-kernels [FOLDER]`.

FOLDER/build/torch-cuda and FOLDER/build/torch-cpu hold the same Python and Triton sources, which import nothing but
torch, Triton and each other. Every layer is a module without parameters, whose `forward` `kernelize` puts into a
model. This script needs the standard library only.
"""

import ast
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME, VERSION = "slapo-zoo-kernels", 1
VARIANTS = {"torch-cuda": "cuda", "torch-cpu": "cpu"}
# class -> (kernel, arguments of its forward)
LAYERS = {
    "LayerNorm": ("layer_norm", "input"),
    "T5LayerNorm": ("rms_norm", "hidden_states"),
    "LlamaRMSNorm": ("rms_norm", "hidden_states"),
    "LlamaMLP": ("swiglu", "x"),
    "GELUActivation": ("bias_gelu", "input"),
    "NewGELUActivation": ("bias_gelu", "input"),
    "BertSelfOutput": ("bias_dropout_residual_layer_norm", "hidden_states, input_tensor"),
    "BertOutput": ("bias_dropout_residual_layer_norm", "hidden_states, input_tensor"),
    "RobertaSelfOutput": ("bias_dropout_residual_layer_norm", "hidden_states, input_tensor"),
    "RobertaOutput": ("bias_dropout_residual_layer_norm", "hidden_states, input_tensor"),
    "T5DenseActDense": ("relu_dropout", "hidden_states"),
    "T5DenseGatedActDense": ("geglu", "hidden_states"),
}
FUNCTIONS = [
    "bias_gelu", "bias_relu", "relu_dropout", "geglu", "swiglu", "layer_norm", "rms_norm",
    "bias_dropout_residual_layer_norm", "embedding_layer_norm", "linear_cross_entropy",
    "sparse_mlm_head_loss", "local_causal_attention", "t5_attention", "batch_norm_relu_add",
]  # fmt: skip
CLASS = '''

class {name}(nn.Module):
    """Puts {kernel} into a {name}."""

    has_backward = True
    can_torch_compile = True

    def forward(self, {arguments}):
        """As {name}."""
        return KERNELS["{kernel}"].serves["{name}"](self, {arguments})
'''


def source_of(module: str) -> Path:
    """Return the file of a module named below slapo_zoo, such as "kernels.layer_norm" or "dispatch.tables"."""
    place = ROOT / module.replace(".", "/") if module.startswith("kernels.") else None
    return (place or ROOT / "slapo_zoo" / module.replace(".", "/")).with_suffix(".py")


def imported(text: str) -> set[str]:
    """Return the modules of slapo_zoo that a source text imports, at its top or inside a function, named below
    slapo_zoo.
    """
    names = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("slapo_zoo"):
            continue
        package = str(node.module).removeprefix("slapo_zoo").removeprefix(".")
        inside = {f"{package}.{alias.name}" for alias in node.names}
        modules = {name for name in inside if source_of(name).exists()}
        names |= modules or {package}
    return names


def relative(text: str) -> str:
    """Rewrite imports of slapo_zoo in a source text as relative imports of one flat folder, and return the text."""
    text = re.sub(r"Path\(__file__\)\.parents\[\d\]", "Path(__file__).parent", text)
    inside = (ROOT / "slapo_zoo").glob("**/__init__.py")
    packages = {".".join(path.parent.relative_to(ROOT).parts) for path in inside} | {
        "slapo_zoo.kernels",
        "slapo_zoo.kernels.loss",
    }

    def flat(found: re.Match[str]) -> str:
        return f"from .{'' if found[1] in packages else found[1].rpartition('.')[2]} import "

    return re.sub(r"from (slapo_zoo[\w.]*) import ", flat, text)


def sources() -> dict[str, str]:
    """Return {file name: text} of all modules that the exported functions need, with relative imports."""
    texts, todo = {}, {f"kernels.{name}" for name in FUNCTIONS}
    while todo:
        module = todo.pop()
        text = source_of(module).read_text(encoding="utf-8")
        texts[f"{module.rpartition('.')[2]}.py"] = text
        todo |= {n for n in imported(text) if f"{n.rpartition('.')[2]}.py" not in texts}
    return {name: relative(text) for name, text in sorted(texts.items())}


def generated() -> dict[str, str]:
    """Return {file name: text} of the generated files: the layers, and `__init__.py` of the package."""
    layers = '"""Layers for `kernelize`."""\n\nfrom torch import nn\n\nfrom .kernel_registry import KERNELS\n'
    for name, (kernel, arguments) in LAYERS.items():
        layers += CLASS.format(name=name, kernel=kernel, arguments=arguments)
    lines = [f"from .{name} import {name}" for name in FUNCTIONS]
    package = '"""Kernels for the classic families of transformers."""\n\nfrom . import layers\n'
    package += "\n".join(lines) + f"\n\n__all__ = {[*FUNCTIONS, 'layers']!r}\n"
    return {"layers.py": layers, "__init__.py": package}


def write_variant(folder: Path, backend: str, texts: dict[str, str]) -> None:
    """Write the build for one `backend` ("cuda", "cpu") into a new folder: sources, measured tables, metadata.

    `texts` is {file name: source}; the metadata hold a digest of every file.
    """
    digest = hashlib.sha256("".join(texts.values()).encode()).hexdigest()
    own = (
        f"slapo_zoo_kernels_{backend}_{digest[:8]}"  # operators of two loaded versions do not meet
    )
    folder.mkdir(parents=True)
    for name, text in texts.items():
        text = text.replace('NAMESPACE = "slapo_zoo"', f'NAMESPACE = "{own}"')
        (folder / name).write_text(text, encoding="utf-8")
    for table in sorted((ROOT / "hub_cards" / "bench").glob("*.json")):
        place = folder / "hub_cards" / "bench" / table.name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(table, place)
    files = {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    metadata = {
        "id": f"_{own}", "name": NAME, "version": VERSION, "license": "apache-2.0",
        "python-depends": [], "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": files},
    }  # fmt: skip
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")


def export(folder: Path) -> None:
    """Write all build variants below `folder`, in place of an older build."""
    build = folder / "build"
    if build.exists():
        shutil.rmtree(build)
    texts = sources() | generated()
    for variant, backend in VARIANTS.items():
        write_variant(build / variant, backend, texts)
    print(f"{len(texts)} files each in {', '.join(str(build / name) for name in VARIANTS)}")


if __name__ == "__main__":
    export(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "runs" / "hub_kernels")
