"""Bytes that a training step moves, scheduled against plain transformers with fused sdpa, on meta tensors.

Of every operation that is no view, all inputs and outputs are counted once; of this package's kernels, all arguments
of each launch. Time on a GPU cannot be below these bytes over its bandwidth. No device is needed.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.recorded import MODULES

ONLY = ""  # a family
VIEWS = frozenset((
    "view", "_unsafe_view", "transpose", "t", "detach", "expand", "unsqueeze", "slice", "select", "split", "permute",
    "as_strided", "alias", "squeeze", "lift_fresh", "unbind", "split_with_sizes", "narrow", "reshape", "unfold",
    "view_as", "is_same_size", "new_empty", "empty", "empty_like", "_reshape_alias", "empty_strided",
    "new_empty_strided", "sym_size", "diagonal",
))  # fmt: skip
SHORT = {"GPT2": 1.05, "Bert": 1.05}  # largest ratio to plain with default dropout; others: 1.0
SCALARS = 1e-4  # ratio of small tensors, such as counts of targets, that is ignored
NO_DROPOUT = (
    "embd_pdrop", "attn_pdrop", "resid_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout",
    "attention_dropout", "embed_dropout", "resid_dropout", "dropout_rate", "classifier_dropout_prob",
)  # fmt: skip
KERNELS = {  # kernels that move fewer bytes, whether or not they are faster
    "BertForMaskedLM": ["bias_dropout_residual_layer_norm", "sparse_mlm_head_loss"],
    "RobertaForMaskedLM": ["bias_dropout_residual_layer_norm", "sparse_mlm_head_loss"],
    "AlbertForMaskedLM": ["sparse_mlm_head_loss"],
    "GPT2LMHeadModel": ["linear_cross_entropy"],
    "OPTForCausalLM": ["linear_cross_entropy"],
    "LlamaForCausalLM": ["linear_cross_entropy", "rms_norm", "swiglu"],
    "GPTNeoForCausalLM": ["linear_cross_entropy", "local_causal_attention"],
    "T5ForConditionalGeneration": ["linear_cross_entropy", "t5_attention", "rms_norm", "relu_dropout"],
    "WideResNetForImageClassification": ["batch_norm_relu_add"],
}  # fmt: skip


class Bytes(TorchDispatchMode):
    """Mode that counts the bytes which operations read and write; `moved` maps the name of an operation to its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: Counter[str] = Counter()
        self.launched = 0

    def add(self, name: str, *values: Any) -> None:
        """Count one launch of operation `name`, with the bytes of all tensors in `values`, its inputs and outputs."""
        self.launched += 1
        tensors = (t for t in tree_leaves(values) if isinstance(t, Tensor))
        self.moved[name] += sum(t.numel() * t.itemsize for t in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        space, name = func.name().split(".")[0].split("::")
        if name == "_local_scalar_dense":  # meta has no values: one with which the step runs on
            return not args[0].dtype.is_floating_point or 1.0
        if name == "nonzero":  # one in seven, as in masked language modelling
            shape = (max(args[0].numel() // 7, 1), args[0].ndim)
            return args[0].new_empty(shape, dtype=torch.int64)
        out = func(*args, **kwargs)
        if space == "slapo_zoo":
            self._inside(func, args, kwargs)
        elif name not in VIEWS:
            self.add(name, args, kwargs, out)
        return out

    def _inside(self, func: Any, args: Any, kwargs: Any) -> None:
        """Count the launches and operations that an operator of this package, `func`, makes on a GPU."""
        from torch._library.custom_ops import OPDEFS

        body = OPDEFS[func.name().split(".")[0]]._init_fn
        with self, launches_counted(self), torch.no_grad():
            body(*args, **kwargs)


@contextmanager
def launches_counted(counter: Bytes) -> Iterator[None]:
    """Context in which this package's operators take their Triton path, whose launches `counter` counts instead of
    running.
    """
    before: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    for module in MODULES:
        owner = import_module(f"slapo_zoo.kernels.{module}")
        for name in [name for name in vars(owner) if name.endswith("_kernel")]:
            put(owner, name, _Counted(name, counter))
    for name in ("norm", "activation", "loss.cross_entropy", "loss.lm_loss", "blocked_attention",
                 "dropout", "batch_norm_relu_add"):  # fmt: skip
        put(import_module(f"slapo_zoo.kernels.{name}"), "in_triton", lambda x: True)
    try:
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


class _Counted:
    def __init__(self, name: str, counter: Bytes):
        self.name, self.counter = f"our{name}", counter

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.counter.add(self.name, args)


class _Fused(torch.autograd.Function):
    """Autograd function in place of fused attention: it counts the bytes of inputs and outputs, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, counter: Bytes, mask: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        ctx.counter, ctx.mask = counter, mask
        ctx.save_for_backward(q, k, v, out)
        counter.add("fused sdpa", q, k, v, out, mask)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        found = tuple(torch.empty_like(t) for t in ctx.saved_tensors[:3])
        ctx.counter.add("fused sdpa", *ctx.saved_tensors, g, *found, ctx.mask)
        return None, None, *found


@contextmanager
def fused_sdpa(counter: Bytes) -> Iterator[None]:
    """Context in which torch's attention counts as fused, with or without dropout: scores are never written to
    memory.
    """
    real = nn.functional.scaled_dot_product_attention

    def attention(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, *args: Any, **kwargs: Any
    ):
        return _Fused.apply(counter, attn_mask, q, k, v)

    nn.functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = real


def on_meta(model: Any) -> Any:
    """Move the parameters and buffers of a model to meta; tied weights stay tied. Return the model in training mode."""
    known: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in known:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    known[id(tensor)] = nn.Parameter(empty) if is_parameter else empty
                if tensor is not None:
                    tensors[name] = known[id(tensor)]
    return model.train()


def moved(model: Any, batch: dict[str, Tensor], ours: bool) -> Bytes:
    """Count the bytes of one training step (without optimizer) of a model; `ours`: it has `train_step`."""
    from slapo_zoo.dispatch.choose_kernel import force

    run = model.train_step if ours else lambda batch: model(**batch).loss.backward()
    counters = Bytes(), Bytes()  # the first step of a model sets up what later ones reuse
    for counter in counters:
        with counter, fused_sdpa(counter), force("triton"):
            run(batch)
    return counters[1]


def row(name: str, config: Any, batch: dict[str, Tensor], most: float) -> dict[str, Any]:
    """Return the table row that compares the bytes of scheduled and plain model; the ratio may be at most `most`."""
    import transformers

    import slapo_zoo
    from slapo_zoo.hf.own import wideresnet

    cls = config.architectures[0]
    with torch.device("meta"):
        plain = getattr(transformers, cls, None) or getattr(wideresnet, cls)
        plain = plain._from_config(config, dtype=torch.bfloat16)
    theirs = moved(plain.train(), batch, False)
    kernels = KERNELS[cls]
    scheduled = slapo_zoo.AutoScheduledModel.from_config(
        config, dtype=torch.bfloat16, seed=0, kernels=kernels
    )
    ours = moved(on_meta(scheduled), batch, True)
    gb = [sum(each.moved.values()) / 1e9 for each in (ours, theirs)]
    found = {"model": cls, "what": name, "ours_gb": gb[0], "plain_gb": gb[1], "ratio": gb[0] / gb[1],
             "most": most, "our_launches": ours.launched, "plain_launches": theirs.launched,
             "largest": ", ".join(f"{k} {v / 1e9:.1f}" for k, v in ours.moved.most_common(4))}  # fmt: skip
    return found | ({"beyond": ["ratio"]} if found["ratio"] > most + SCALARS else {})


def cases(quick: bool) -> Iterator[tuple[str, Any, dict[str, Tensor]]]:
    """Yield (class name, config, batch on meta) of each family, as wide as its base checkpoint; with `quick` tiny."""
    import transformers

    from slapo_zoo.hf.own.wideresnet import WideResNetConfig

    rows, tokens, layers = (2, 64, 2) if quick else (8, 1024, 12)
    width = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128} if quick else {}
    words = {"vocab_size": 1000} if quick else {}
    ids = torch.zeros(rows, tokens, dtype=torch.int64, device="meta")
    causal = {"input_ids": ids, "labels": ids}
    half = torch.zeros(rows, tokens // 2, dtype=torch.int64, device="meta")
    masked = {"input_ids": half, "labels": half}
    made = (
        ("GPT2LMHeadModel", {"n_layer": layers, **({"n_embd": 64, "n_head": 2} if quick else {}), **words}, causal),
        ("BertForMaskedLM", {"num_hidden_layers": layers, **width, **words}, masked),
        ("RobertaForMaskedLM", {"num_hidden_layers": layers, "max_position_embeddings": 514, **width, **words}, masked),
        ("AlbertForMaskedLM", {"num_hidden_layers": layers, "hidden_size": 768, "num_attention_heads": 12,
                               "intermediate_size": 3072, **width, **words}, masked),
        ("OPTForCausalLM", {"num_hidden_layers": layers, **({**width, "ffn_dim": 128, "word_embed_proj_dim": 64} if quick else {}), **words}, causal),
        ("GPTNeoForCausalLM", {"hidden_size": 768, "num_heads": 12, "num_layers": layers,
                               "attention_types": [[["global", "local"], layers // 2]],
                               **({"hidden_size": 64, "num_heads": 2} if quick else {}), **words}, causal),
        ("T5ForConditionalGeneration", {"num_layers": layers, "num_decoder_layers": layers, "d_model": 768, "d_ff": 3072,
                                        "num_heads": 12, "decoder_start_token_id": 0,
                                        **({"d_model": 64, "num_heads": 1, "d_ff": 128} if quick else {}), **words}, masked),
        ("LlamaForCausalLM", {"num_hidden_layers": layers, "hidden_size": 2048, "num_attention_heads": 32,
                              "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256,
                              **({**width, "num_key_value_heads": 1} if quick else {}), **words}, causal),
    )  # fmt: skip
    for cls, options, batch in made:
        config = getattr(transformers, cls).config_class(**options)
        config.architectures = [cls]
        yield cls, config, batch
    config = WideResNetConfig()
    config.architectures = ["WideResNetForImageClassification"]
    pixels = torch.zeros(rows, 3, 224, 224, dtype=torch.bfloat16, device="meta")
    labels = torch.zeros(rows, dtype=torch.int64, device="meta")
    yield "WideResNetForImageClassification", config, {"pixel_values": pixels, "labels": labels}


def without_dropout(config: Any) -> Any:
    """Set every dropout of a config to 0, and return the config."""
    for name in NO_DROPOUT:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    return config


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Return two tables of bytes per family: with the default dropout of the config, and without dropout."""
    default, none = [], []
    for cls, config, batch in cases(quick):
        if ONLY not in cls:
            continue
        most = next((most for name, most in SHORT.items() if cls.startswith(name)), 1.0)
        default.append(row("its own dropout", config, batch, most))
        none.append(row("no dropout", without_dropout(config), batch, 1.0))
    return {"bytes of a step, default dropout": default, "bytes of a step, dropout 0": none}
