"""Options of the loader (`from_pretrained`), each defined once: default, help, type and values for the tuner.

The arguments of `from_pretrained` and `from_config`, the flags of the commands and the options that a tuner may try
have the names and defaults of the fields of `LoaderOptions`; tests/zoo/test_loader_options.py compares them.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from slapo_zoo.errors import SlapoError
from slapo_zoo.hf.attention_backends import BACKENDS
from slapo_zoo.parallel.paths import nearest
from slapo_zoo.parallel.token_cut import WAYS
from slapo_zoo.weights.load_rank_slices import SHORT


@dataclass(frozen=True)
class Precision:
    """Dtypes that one value of `precision=` stands for.

    Args:
        parameters: dtype of parameters, gradients and checkpoints.
        compute: dtype of forward and backward.
        scales: True if the loss is scaled, so that small gradients do not underflow.
    """

    parameters: torch.dtype
    compute: torch.dtype
    scales: bool = False


PRECISIONS = {
    "fp32": Precision(torch.float32, torch.float32),
    "bf16": Precision(torch.float32, torch.bfloat16),
    "bf16-pure": Precision(torch.bfloat16, torch.bfloat16),
    "fp16": Precision(torch.float32, torch.float16, scales=True),
}
TARGETS = {"deepspeed": '"bf16" or "fp16": {"enabled": true} in its config', "megatron": "dtype="}


def precision_name(value: Any) -> Any:
    """Return "fp32" for torch.float32 or "float32", and any other value unchanged."""
    return "fp32" if str(value).removeprefix("torch.") == "float32" else value


def check_precision(name: str | None, dtype: Any, device: torch.device | str, target: Any) -> None:
    """Raise SlapoError for a precision that is unknown, or that the device, the dtype or the training engine excludes.

    Args:
        name: "fp32", "bf16", "fp16", "bf16-pure" or another key of PRECISIONS; None is always allowed.
        dtype: the user's `dtype=`: "auto", or one that must agree with the precision.
        device: device of the model.
        target: name of the library that steps the model: "torch", "deepspeed" or "megatron".
    """
    if name is None:
        return
    where, what = "from_pretrained", f"precision={name!r}"
    if name not in PRECISIONS:
        raise SlapoError(where, what, "no such precision", f"choose one of {', '.join(PRECISIONS)}")
    kept = str(PRECISIONS[name].parameters).removeprefix("torch.")
    given = str(dtype).removeprefix("torch.")
    if SHORT.get(given, given) not in ("auto", kept):
        problem = f"this precision keeps parameters in {kept}, found dtype={dtype!r}"
        raise SlapoError(where, what, problem, "leave dtype= out")
    if target in TARGETS and name != "fp32":
        problem = f"{target} keeps fp32 master weights of its own"
        raise SlapoError(where, what, problem, f"leave precision= out and pass {TARGETS[target]}")
    is_cuda = torch.device(device).type == "cuda"
    if is_cuda and name.startswith("bf16") and not torch.cuda.is_bf16_supported(False):
        problem = f"{torch.cuda.get_device_name()} does not support bfloat16"
        raise SlapoError(where, what, problem, 'the nearest that fits is precision="fp16"')


@dataclass(frozen=True)
class Knob:
    """One option of the loader: its help, its type, and the values that a tuner may try.

    Args:
        help: description in one sentence.
        expected: type and range, in words.
        fits: function: value --> True if the value has that type and range.
        tries: values that a tuner may try; empty for options that do not affect speed.
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


def _knob(default: Any, *known: Any) -> Any:
    return dataclasses.field(default=default, metadata={"knob": Knob(*known)})


COUNT = "an integer of at least 1"
MESH = ("tp", "pp", "dp", "cp")  # the mesh checks its own sizes


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Arguments of `from_pretrained` that say how a model is sharded and run; for those not below see their definition.

    Args:
        schedule: "zoo" (the family's sharding rules), "auto" (derive rules if the family has none), a Table of rules, a
            card (published schedule), a .json of `Schedule.to_json`, a Schedule or its directives, a function used
            instead of the family's rules, or `extend(function)`, which is applied after the family's rules.
        device: device of the model, for which kernels="auto" chooses. None: the CPU, or in a load this rank's GPU.
    """

    schedule: Any = "zoo"
    device: torch.device | str | None = None
    # fmt: off
    sequence_parallel: bool = _knob(False, "tp ranks shard the tokens too", "True or False", _flag, (False, True))
    pipeline_order: str = _knob("1f1b", "how stages interleave micro-batches", "a name", _name, ("1f1b", "gpipe", "interleaved_1f1b"))
    stages_per_rank: int | None = _knob(None, "number of stages on each rank, for an interleaved order", f"{COUNT}, or None", _optional(_count))
    checkpoint_ratio: float = _knob(0.0, "share of the blocks that are recomputed", "a number from 0 to 1", _number, (0.0, 0.25, 0.5, 0.75, 1.0))
    checkpoint_policy: str | Sequence[str] = _knob("", "what a recomputed block keeps", "a name, or a list of one name per block", _kernels, ("", "save_matmuls"))
    attention: str | None = _knob(None, "the attention back end", f"None or one of {', '.join(BACKENDS)}", _optional(_name), tuple(BACKENDS))
    kernels: Any = _knob("reference", "which fast kernels replace modules", "auto, reference, the name of a kernel or a list of them", _kernels, ("auto", "reference"))  # noqa: RUF009
    seed: int | None = _knob(None, "seed of dropout masks and of new weights", "an integer, or None", _optional(_integer))
    dp_shard: int = _knob(1, "dp ranks that divide parameters, gradients and optimizer states", COUNT, _count)
    zero_stage: int = _knob(3, "1: gradients are summed over dp once a step, 2: once a micro-batch, 3: and a block is whole only while it runs", "1, 2 or 3", lambda value: value in (1, 2, 3))
    cp_attention: str = _knob(WAYS[0], "how attention sees the tokens of all cp ranks", f"one of {', '.join(WAYS)}", lambda value: value in WAYS)
    precision: str | None = _knob(None, "fp32 masters and 16-bit compute, or one dtype", "fp32, bf16, bf16-pure, fp16, or None", _optional(_name))
    # fmt: on

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", precision_name(self.precision))

    def but(self, **changes: Any) -> Self:
        """Return a copy of these options in which the given fields are changed."""
        return dataclasses.replace(self, **changes)

    @property
    def place(self) -> torch.device:
        """Return the model's device, the CPU if `device` is None; a load sets `device` before it builds the model."""
        return torch.device(self.device or "cpu")

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Return the dtype of forward and backward; None if it is the dtype of the parameters."""
        found = PRECISIONS.get(self.precision or "")
        return found.compute if found and found.compute != found.parameters else None

    def parameter_dtype(self, asked: Any) -> Any:
        """Return the dtype of the parameters: the one that `precision` fixes, else `asked` (the user's `dtype=`)."""
        found = PRECISIONS.get(self.precision or "")
        return found.parameters if found else asked


@dataclass(frozen=True, kw_only=True)
class LoaderOptions(BuildOptions):
    """All arguments that `from_pretrained` and `from_config` share; the docstring of `from_pretrained` describes them."""

    # fmt: off
    tp: int = _knob(1, "ranks that shard each layer", COUNT, _count, (1, 2, 4, 8))
    pp: int = _knob(1, "ranks that shard the layers into stages", COUNT, _count, (1, 2, 4, 8))
    dp: int | None = _knob(None, "ranks that shard the batch", f"{COUNT}, or None for all that are left", _optional(_count))
    cp: int = _knob(1, "ranks that shard the tokens of each row", COUNT, _count)
    micro_batches: int | None = _knob(None, "equal parts of a batch", f"{COUNT}, or None", _optional(_count), (1, 2, 4, 8, 16))
    dtype: Any = _knob("auto", "dtype of the parameters", "a torch dtype, its name, or auto", lambda value: True, ("float32", "bfloat16"))  # noqa: RUF009
    # fmt: on
    kernels: Any = dataclasses.field(
        default="auto", metadata=BuildOptions.__dataclass_fields__["kernels"].metadata
    )
    auto_class: Any = None
    exact: bool | Mapping[str, int] = False
    activation_memory: int | str | None = None
    micro_batch_shape: tuple[int, int] | None = None
    trust_remote_code: bool = False
    verify: str = "quick"
    target: str | None = "torch"
    target_options: Mapping[str, Any] | None = None


KNOBS: dict[str, Knob] = {
    field.name: field.metadata["knob"]
    for field in dataclasses.fields(LoaderOptions) if "knob" in field.metadata
}  # fmt: skip
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
    **dict.fromkeys(("quantization_config", "load_in_8bit", "load_in_4bit"), "leave it out; quantized weights cannot be trained"),
    **dict.fromkeys(("use_kernels", "kernel_config"), "pass kernels="),
    "key_mapping": "rename the tensors in the files of the checkpoint",
    "gguf_file": "load the file by transformers, save the model, and load that folder",
    "output_loading_info": "leave it out; model.ledger says what was read",
}  # fmt: skip


def tunable(**changes: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    """Return {option of the loader: values that a tuner tries}; `changes` replaces values, and `()` excludes an option."""
    if unknown := sorted(changes.keys() - KNOBS):
        raise unknown_knob("tunable", unknown[0], KNOBS)
    space = {name: knob.tries for name, knob in KNOBS.items() if knob.tries} | changes
    return {name: values for name, values in space.items() if values}


def check_knobs(where: str, options: LoaderOptions) -> None:
    """Raise SlapoError for the first option whose value has the wrong type or range; `where` names the caller."""
    for name, knob in KNOBS.items():
        value = getattr(options, name)
        if name not in MESH and not knob.fits(value):
            problem = f"found {value!r}, expected {knob.expected}"
            hint = f"pass a value that fits {name}=, which means: {knob.help}"
            raise SlapoError(where, name, problem, hint)


def unknown_knob(where: str, name: str, known: Iterable[str]) -> SlapoError:
    """Return the error for an argument `name` that is not among the `known` ones; `where` names the called function."""
    if name in INSTEAD:
        return SlapoError(where, f"{name}=", "this argument has no effect here", INSTEAD[name])
    near = nearest(name, known) or sorted(KNOBS)
    problem = "no such argument, and the config has no such field"
    return SlapoError(where, f"{name}=", problem, f"nearest: {', '.join(near)}")
