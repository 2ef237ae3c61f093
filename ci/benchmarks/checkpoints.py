"""Large checkpoints for benchmarks: configs, and files of cheap random values."""

import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from slapo_zoo.parallel.placement import TensorSpec
from slapo_zoo.weights.file_layout import plan_layout

BLOCK = 4 << 20  # bytes of random values, repeated: drawing all values would take minutes


def gpt2(quick: bool = False) -> Any:
    """Return the config of the 124M GPT-2 in fp32; with `quick` that of a small one."""
    from transformers import GPT2Config

    size: dict[str, Any] = {"n_layer": 12}
    if quick:
        size = {"n_layer": 4, "n_embd": 256, "n_head": 4}
    return GPT2Config(architectures=["GPT2LMHeadModel"], dtype="float32", **size)


def gpt2_1b(quick: bool = False) -> Any:
    """Return the config of a GPT-2 with 1.02 billion parameters in bf16; with `quick` that of a small one."""
    from transformers import GPT2Config

    size: dict[str, Any] = {"n_layer": 24, "n_embd": 1792, "n_head": 28}
    if quick:
        size = {"n_layer": 4, "n_embd": 512, "n_head": 8}
    return GPT2Config(architectures=["GPT2LMHeadModel"], dtype="bfloat16", **size)


def llama_1b(quick: bool = False) -> Any:
    """Return the config of a Llama in bf16 with about as many bytes as `gpt2_1b`; with `quick` that of a small one."""
    from transformers import LlamaConfig

    size: dict[str, Any] = {"hidden_size": 1792, "intermediate_size": 4864, "num_hidden_layers": 24,
            "num_attention_heads": 28, "num_key_value_heads": 28}  # fmt: skip
    if quick:
        size |= {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4}
        size |= {"num_attention_heads": 8, "num_key_value_heads": 8}
    return LlamaConfig(
        architectures=["LlamaForCausalLM"], dtype="bfloat16", vocab_size=50304,
        tie_word_embeddings=True, **size,
    )  # fmt: skip


def llama_70b() -> Any:
    """Return the config of Llama 70B in bf16."""
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"], dtype="bfloat16", vocab_size=128256, hidden_size=8192,
        intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8,
    )  # fmt: skip


def specs_of(config: Any) -> list[TensorSpec]:
    """Return (name, shape, dtype) specs of every tensor in a config's checkpoint, from a model on meta."""
    import transformers

    with torch.device("meta"):
        model: Any = getattr(transformers, config.architectures[0])(config)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    dtype = str(config.dtype).removeprefix("torch.")
    return [
        TensorSpec(name, tuple(tensor.shape), dtype)
        for name, tensor in model.state_dict().items()
        if name not in tied
    ]


def write_checkpoint(
    folder: Path, config: Any, max_shard_size: str, sparse: bool = False
) -> int:  # fmt: skip
    """Write a checkpoint that `transformers` can load, with random weights; return the bytes of its tensors.

    Args:
        folder: new folder.
        config: config of `transformers`.
        max_shard_size: size of the largest file, e.g. "450MB".
        sparse: write only headers and set file sizes; values read as zeros and take no space on disk.
    """
    specs = specs_of(config)
    layout = plan_layout(specs, max_shard_size, {"format": "pt"})
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    for name, text in layout.indexes.items():
        (folder / name).write_text(text)
    if sparse:
        for name, header in layout.headers.items():
            with (folder / name).open("wb") as file:
                file.write(header)
                file.truncate(layout.sizes[name])
        return sum(layout.sizes.values()) - sum(map(len, layout.headers.values()))
    dtype = getattr(torch, specs[0].dtype)
    block = (torch.randn(BLOCK // dtype.itemsize) * 0.02).to(dtype).view(torch.uint8).numpy().data
    for name, header in layout.headers.items():
        left = layout.sizes[name] - len(header)
        with (folder / name).open("wb") as file:
            file.write(header)
            while left > 0:
                left -= file.write(block[:left])
    return sum(math.prod(spec.shape) * dtype.itemsize for spec in specs)


@contextmanager
def scratch() -> Iterator[Path]:
    """Context that yields a new temporary folder and removes it at the end."""
    path = Path(tempfile.mkdtemp(prefix="slapo-zoo-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def warm(folder: Path) -> None:
    """Read all files of a folder once, so that they are in the page cache."""
    buffer = bytearray(16 << 20)
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def describe(config: Any) -> str:
    """Return family, size and dtype of a config's model as text, e.g. `gpt2 1.02B bfloat16`."""
    count = sum(math.prod(spec.shape) for spec in specs_of(config))
    size = f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"
    return f"{config.model_type} {size} {str(config.dtype).removeprefix('torch.')}"
