"""Results of `slapo-zoo tune --card` for a model on this device, which `from_pretrained` applies.

Only kernels and attention back end are taken, which change neither results nor planned memory, and only for the same
model, dtype and device.
"""

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from slapo_zoo.parallel.digests import digest

CARDS = Path(__file__).parent / "hub_cards"
TUNING = "tuning.json"
USED = ("attention", "kernels")
# names, words for people and for generation: they change no shape and no operation of a training step
SAYS_NOTHING = ("transformers_version", "dtype", "torch_dtype", "id2label", "label2id", "architectures",
                "bos_token_id", "eos_token_id", "task_specific_params", "use_cache")  # fmt: skip


def cpu_name() -> str:
    """Return model name and number of cores of this machine's processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [x.partition(":")[2].strip() for x in file if x.startswith("model name")]
    except OSError:
        lines = []
    name = lines[0] if lines else platform.processor() or platform.machine()
    return f"{name} x{os.cpu_count()}"


def machine_name(device: torch.device | str) -> str:
    """Return the name under which a device's measurements are stored: the GPU, or the processor and its core count."""
    kind = torch.device(device)
    return torch.cuda.get_device_name(kind) if kind.type == "cuda" else cpu_name()


def model_name(config: Any) -> str:
    """Return the family and a digest of the config fields that shape the model: "gpt2 0a1b2c3d4e5f"."""
    fields = {
        name: value for name, value in json.loads(config.to_json_string(use_diff=False)).items()
        if not name.startswith("_") and name not in SAYS_NOTHING
    }  # fmt: skip
    text = json.dumps(fields, sort_keys=True)
    return f"{config.model_type} {digest(text)[:12]}"


SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
         "encoder_layers", "decoder_layers", "num_decoder_layers", "ffn_dim", "encoder_ffn_dim", "d_ff", "d_kv",
         "image_size", "patch_size", "num_local_experts")  # fmt: skip


def shape_name(config: Any) -> str:
    """Return a model's family and sizes except its vocabulary, "gpt2 hidden_size=1600 ...", the name of its stored plans."""
    parts = {"": config} | {
        f"{name}.": part for name in ("text_config", "vision_config") if (part := getattr(config, name, None))
    }  # fmt: skip
    sizes = {f"{at}{n}": getattr(part, n, None) for at, part in parts.items() for n in SHAPE}
    found = [f"{name}={size}" for name, size in sizes.items() if type(size) is int]
    return " ".join((config.model_type, *found))


def tuned_knobs(config: Any, dtype: torch.dtype, device: torch.device | str) -> dict[str, Any]:
    """Return {argument: tuned value} for `attention` and `kernels` of a model; {} if this very model was not tuned.

    If the model was tuned for several row lengths, the result of the longest is returned.

    Args:
        config: config of the model.
        dtype: dtype in which the model computes.
        device: device of the model.
    """
    file = CARDS / str(config.model_type) / TUNING
    if not file.exists():
        return {}
    found = json.loads(file.read_text(encoding="utf-8")).get(machine_name(device), {})
    if not found:
        return {}
    wanted = {"model": model_name(config), "dtype": str(dtype).removeprefix("torch.")}
    fits = [e for e in found.values() if wanted.items() <= {**e, **e.get("setting", {})}.items()]
    best = max(fits, key=lambda e: e["setting"].get("seq_len", 0), default={"point": {}})
    return {name: best["point"][name] for name in USED if name in best["point"]}
