"""Canonical name and argument list of an operation, which can be written in many ways.

`x + y`, `torch.add(x, y)`, `x.add(y)` and `x += y` are all "add"; `nn.GELU()(x)` and `F.gelu(x)` are "gelu". So
patterns match what is computed, not how it is spelt.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from slapo_zoo.language.graph.pattern import ANY
from slapo_zoo.language.graph.traced import original_class

COMMUTATIVE = {"add", "mul", "eq", "ne", "and_", "or_", "maximum", "minimum"}
ALIASES = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "truediv": "div",
           "imatmul": "matmul", "multiply": "mul", "subtract": "sub", "divide": "div",
           "true_divide": "div", "iand": "and_", "ior": "or_", "ipow": "pow"}  # fmt: skip
TORCH = ("torch", "_operator", "math")

# name -> parameters with defaults; the result does not depend on those in IGNORED.
REQUIRED = object()
SIGNATURES: dict[str, dict[str, Any]] = {
    "add": {"input": REQUIRED, "other": REQUIRED, "alpha": 1},
    "sub": {"input": REQUIRED, "other": REQUIRED, "alpha": 1},
    "mul": {"input": REQUIRED, "other": REQUIRED},
    "div": {"input": REQUIRED, "other": REQUIRED, "rounding_mode": None},
    "matmul": {"input": REQUIRED, "other": REQUIRED},
    "relu": {"input": REQUIRED},
    "silu": {"input": REQUIRED},
    "gelu": {"input": REQUIRED, "approximate": "none"},
    "softmax": {"input": REQUIRED, "dim": None, "dtype": None},
    "dropout": {"input": REQUIRED, "p": 0.5},
    "transpose": {"input": REQUIRED, "dim0": REQUIRED, "dim1": REQUIRED},
    "masked_fill": {"input": REQUIRED, "mask": REQUIRED, "value": REQUIRED},
    "linear": {"input": REQUIRED, "weight": REQUIRED, "bias": None},
    "layer_norm": {"input": REQUIRED, "normalized_shape": REQUIRED, "weight": None, "bias": None,
                   "eps": 1e-5},
    "scaled_dot_product_attention": {"query": REQUIRED, "key": REQUIRED, "value": REQUIRED,
                                     "attn_mask": None, "dropout_p": 0.0, "is_causal": False,
                                     "scale": None, "enable_gqa": False},
}  # fmt: skip
IGNORED = {"_stacklevel", "inplace", "training", "train", "cudnn_enable"}
DIMS = {"dim", "dim0", "dim1"}


@dataclass(frozen=True)
class ModuleTensor:
    """Reference to a submodule's parameter, e.g. a Linear's bias, as the value that an argument of a pattern matches.

    Args:
        target: path of the submodule, relative to the traced module.
        name: name of the parameter.
    """

    target: str
    name: str


@dataclass
class Operation:
    """Operation of a graph node in a canonical form, in which different spellings of one operation are equal.

    Args:
        name: canonical name such as "add", or the function or module class itself.
        arguments: name of an argument --> the argument; its position, if SIGNATURES has no names for the operation.
    """

    name: Any
    arguments: dict[Any, Any]


def _tensor(target: str, module: nn.Module, name: str) -> Any:
    return None if getattr(module, name, None) is None else ModuleTensor(target, name)


def _weighted(name: str, *more: str) -> Callable[[str, Any], Operation]:
    def describe(target: str, m: Any) -> Operation:
        tensors = {n: _tensor(target, m, n) for n in ("weight", "bias")}
        return Operation(name, {**tensors, **{key: getattr(m, key) for key in more}})

    return describe


MODULES: dict[type, Callable[[str, Any], Operation]] = {
    nn.Linear: _weighted("linear"),
    nn.LayerNorm: _weighted("layer_norm", "normalized_shape", "eps"),
    nn.GELU: lambda _, m: Operation("gelu", {"approximate": m.approximate}),
    nn.ReLU: lambda _, m: Operation("relu", {}),
    nn.SiLU: lambda _, m: Operation("silu", {}),
    nn.Tanh: lambda _, m: Operation("tanh", {}),
    nn.Sigmoid: lambda _, m: Operation("sigmoid", {}),
    nn.Softmax: lambda _, m: Operation("softmax", {"dim": m.dim, "dtype": None}),
    nn.Dropout: lambda _, m: Operation("dropout", {"p": m.p}),
}
# Sizes and rates of submodules of a pattern are not compared.
FREE = {"weight", "bias", "normalized_shape", "eps", "p"}


def describe(node: fx.Node, owner: nn.Module, in_pattern: bool = False) -> Operation:
    """Return the name and arguments of a call node's operation, equal for `x + y`, `torch.add(x, y)` and `x.add(y)`.

    Args:
        node: call node in the graph of `owner`; the name of an unknown operation is its function or module class.
        owner: module whose submodules the graph calls.
        in_pattern: True for a node of a pattern: its module's weights, eps and dropout rate become ANY (any value).
    """
    if node.op == "call_module":
        return _describe_module(node, owner, in_pattern)
    name = node.target if node.op == "call_method" else _function_name(node.target)
    if isinstance(name, str):
        name = name if name in COMMUTATIVE else name.rstrip("_")  # add_ is add, and_ is and_
        name = ALIASES.get(name, name)
    kwargs = {key: value for key, value in node.kwargs.items() if key not in IGNORED}
    signature = SIGNATURES.get(name) if isinstance(name, str) else None
    if signature is None:
        return Operation(name, {**dict(enumerate(_flat(name, node.args))), **kwargs})
    given = {**dict(zip(signature, node.args, strict=False)), **kwargs}
    complete = {**signature, **given}  # in signature order: the first two of add may swap
    return Operation(name, {k: v for k, v in complete.items() if v is not REQUIRED})


def _function_name(target: Any) -> Any:
    """Return the name of `target` if it is a function of torch, math or operator; otherwise return `target` itself."""
    module = getattr(target, "__module__", None) or "torch"
    name = getattr(target, "__name__", None)
    return name if name and module.split(".")[0] in TORCH else target


def _flat(name: Any, args: tuple) -> tuple:
    """Return `args` of operation `name`; for permute, view and the like unpack sizes: (x, (0, 2)) --> (x, 0, 2)."""
    if name in ("permute", "view", "reshape", "expand") and len(args) == 2:
        return (args[0], *args[1]) if isinstance(args[1], (tuple, list)) else args
    return args


def _describe_module(node: fx.Node, owner: nn.Module, in_pattern: bool) -> Operation:
    target = str(node.target)
    module = owner.get_submodule(target)
    kind = original_class(module)
    values = [*node.args, *node.kwargs.values()]
    if kind not in MODULES or module._forward_hooks or module._forward_pre_hooks:
        # Literals such as use_cache=False are not compared; with hooks it is no plain operation.
        edges = [v for v in values if isinstance(v, (fx.Node, tuple, list))]
        return Operation(kind, dict(enumerate(edges)))
    found = MODULES[kind](target, module)
    if in_pattern:
        found.arguments = {k: ANY if k in FREE else v for k, v in found.arguments.items()}
    return Operation(found.name, {_first(found.name): values[0], **found.arguments})


def _first(name: str) -> Any:
    return next(iter(SIGNATURES[name])) if name in SIGNATURES else 0
