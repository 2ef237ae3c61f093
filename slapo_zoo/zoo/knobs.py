"""The knobs of a zoo schedule: their types, their defaults, and what a tuner may try."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slapo_zoo.errors import SlapoError
from slapo_zoo.hf.attention_backends import BACKENDS
from slapo_zoo.parallel.paths import nearest


@dataclass(frozen=True)
class Knob:
    """One argument of `AutoScheduledModel.from_pretrained`.

    Args:
        help: what it does, in one sentence.
        expected: its type and range, in words.
        fits: whether a value is of that type and range.
        tries: values that a tuner may try; empty when it is no matter of speed.
    """

    help: str
    expected: str
    fits: Callable[[Any], bool]
    tries: tuple[Any, ...] = ()


def _count(value: Any) -> bool:
    return _integer(value) and value >= 1


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _optional(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _name(value: Any) -> bool:
    return isinstance(value, str)


def _kernels(value: Any) -> bool:
    several = isinstance(value, list | tuple) and all(map(_name, value))
    return _name(value) or several


COUNT = "an integer of at least 1"
# One line per knob; the argument of the same name in `auto.py` says the rest.
KNOBS = {
    "tp": Knob("ranks that shard each layer", COUNT, _count, (1, 2, 4, 8)),
    "pp": Knob("ranks that shard the layers into stages", COUNT, _count, (1, 2, 4, 8)),
    "dp": Knob("ranks that shard the batch", f"{COUNT}, or None for all that are left", _optional(_count)),
    "sequence_parallel": Knob("tp ranks shard the tokens too", "True or False", _flag, (False, True)),
    "pipeline_order": Knob("how stages interleave micro-batches", "a name", _name, ("1f1b", "gpipe", "interleaved_1f1b")),
    "stages_per_rank": Knob("of an interleaved order", f"{COUNT}, or None", _optional(_count)),
    "micro_batches": Knob("equal parts of a batch", f"{COUNT}, or None", _optional(_count), (1, 2, 4, 8, 16)),
    "checkpoint_ratio": Knob("share of the blocks that are recomputed", "a number from 0 to 1", _number, (0.0, 0.25, 0.5, 0.75, 1.0)),
    "checkpoint_policy": Knob("what a recomputed block keeps", "a name, or a list of one name per block", _kernels, ("", "save_matmuls")),
    "attention": Knob("the attention back end", f"None or one of {', '.join(BACKENDS)}", _optional(_name), tuple(BACKENDS)),
    "kernels": Knob("the fast paths", "auto, reference, the name of a kernel or a list of them", _kernels, ("auto", "reference")),
    "seed": Knob("of dropout masks and of new weights", "an integer, or None", _optional(_integer)),
    "dp_shard": Knob("dp ranks that divide parameters, gradients and optimizer states", COUNT, _count),
    "zero_stage": Knob("1: gradients are summed over dp once a step, 2: once a micro-batch, 3: and a block is whole only while it runs", "1, 2 or 3", lambda value: value in (1, 2, 3)),
    "precision": Knob("fp32 masters and 16-bit compute, or one dtype", "fp32, bf16, bf16-pure, fp16, or None", _optional(_name)),
    "dtype": Knob("of the parameters", "a torch dtype, its name, or auto", lambda value: True, ("float32", "bfloat16")),
}  # fmt: skip
MESH = ("tp", "pp", "dp")  # the mesh checks its own sizes
# Arguments of plain `transformers` --> what stands for them here.
INSTEAD = {
    "device_map": "pass device=; ranks are placed by tp, pp and dp",
    "tp_plan": "pass tp=",
    "tp_size": "pass tp=",
    "pp_size": "pass pp=",
    "distributed_config": "pass tp=, pp= and dp=",
    "gradient_checkpointing": "pass checkpoint_ratio=1.0",
    "use_safetensors": "leave it out; allow_pickle=True reads .bin files",
    "max_memory": "pass max_load_memory=",
    "offload_folder": "leave it out; a rank never holds more than its part",
    "state_dict": "leave it out: weights come from the files of the checkpoint",
    "quantization_config": "leave it out; quantized weights cannot be trained",
}


def tunable(**changes: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    """The space of a table: knob --> values to try; a family's own where given, `()` for none."""
    if unknown := sorted(changes.keys() - KNOBS):
        raise unknown_knob("tunable", unknown[0], KNOBS)
    space = {name: knob.tries for name, knob in KNOBS.items() if knob.tries} | changes
    return {name: values for name, values in space.items() if values}


def check_knobs(where: str, values: Mapping[str, Any]) -> None:
    """SlapoError for the first value that is not of its knob's type; other names are passed over."""
    for name, knob in KNOBS.items():
        value = values.get(name)
        if name in values and name not in MESH and not knob.fits(value):
            problem = f"found {value!r}, expected {knob.expected}"
            raise SlapoError(where, name, problem, f"{name}: {knob.help}")


def unknown_knob(where: str, name: str, known: Iterable[str]) -> SlapoError:
    """The error for an argument that is neither a knob nor a field of the config."""
    if name in INSTEAD:
        return SlapoError(where, f"{name}=", "it has no effect here", INSTEAD[name])
    near = nearest(name, known) or sorted(KNOBS)
    problem = "no such argument, and the config has no such field"
    return SlapoError(where, f"{name}=", problem, f"nearest: {', '.join(near)}")
