"""Leak test of context parallelism on two ranks, ours beside torch's `context_parallel` and accelerate: one token is
changed, and the positions whose output changes are compared with those of the plain model.

A position that changes only under cp has seen a token of another document (a leak); one that changes only in the
plain model has lost a token that it should see. Where a peer refuses or fails, its words are the result.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.ranks import import_all
from slapo_zoo.errors import RankError
from slapo_zoo.parallel.ranks.launch import run_local

RANKS, TOKENS, WORDS, LEAST, WAIT_S = 2, 32, 64, 1e-6, 30.0
PACKED = (13, 19)  # tokens of the two documents in a row
SMALL = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OF_BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, **SMALL}  # fmt: skip
OF_BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
           "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, **SMALL}  # fmt: skip
DROPS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout",
    "attention_dropout",
    "activation_dropout",
)
CASES = {  # what --> (class, config, output, documents of a row)
    "Llama, a packed row": ("LlamaForCausalLM", OF_BERT, "logits", PACKED),
    "BART's encoder": ("BartForConditionalGeneration", OF_BART, "encoder_last_hidden_state", (TOKENS,)),
    "BERT": ("BertForMaskedLM", OF_BERT, "logits", (TOKENS,)),
}  # fmt: skip


def write_model(case: str, folder: Path) -> None:
    """Write the checkpoint of a tiny model without dropout."""
    import transformers

    name, sizes, *_ = CASES[case]
    config = getattr(transformers, name).config_class(**sizes)
    for drop in DROPS:
        if hasattr(config, drop):
            setattr(config, drop, 0.0)
    torch.manual_seed(0)
    getattr(transformers, name)(config).save_pretrained(folder)


def batch_of(case: str) -> dict[str, Any]:
    """Return a row, and behind it a copy for each token in which that token is another one."""
    g, documents = torch.Generator().manual_seed(0), CASES[case][3]
    ids = torch.randint(3, WORDS, (1, TOKENS), generator=g).repeat(TOKENS + 1, 1)
    places = torch.arange(TOKENS)
    ids[1 + places, places] = 3 + (ids[0] - 3 + 7) % (WORDS - 3)
    batch: dict[str, Any] = {"input_ids": ids}
    if len(documents) > 1:
        positions = torch.cat([torch.arange(n) for n in documents])
        batch["position_ids"] = positions.repeat(TOKENS + 1, 1)
        batch["use_cache"] = False  # with a cache transformers lets documents see each other
    return batch


def changed(output: Tensor) -> Tensor:
    """Return, as bool [changed token, position], which positions of an output [1 + tokens, tokens, width] change."""
    return (output[1:] - output[:1]).abs().amax(-1) > LEAST


def loaded(case: str, folder: str) -> Any:
    """Return the model of transformers in training mode; of an encoder-decoder the encoder alone."""
    import transformers

    transformers.logging.disable_progress_bar()
    model = getattr(transformers, CASES[case][0]).from_pretrained(folder).train()
    return model.model.encoder if model.config.is_encoder_decoder else model


def plain(case: str, folder: str) -> Tensor:
    """Run the plain model on one process."""
    return loaded(case, folder)(**batch_of(case))[0]


def ours(case: str, folder: str) -> Tensor:
    """Run our model with cp=2; outputs are whole on each rank."""
    from slapo_zoo import AutoScheduledModel

    name = CASES[case][0]
    model: Any = AutoScheduledModel.from_pretrained(folder, auto_class=name, cp=RANKS, dp=1).train()
    batch = batch_of(case)
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = batch["input_ids"][:1].repeat(TOKENS + 1, 1)
    return model(**batch)[CASES[case][2]]


def _cut(case: str, folder: str, hook: bool, balance: bool) -> Tensor:
    """Run the plain model within torch's `context_parallel`; `hook` is accelerate's, which takes masks away."""
    from accelerate.big_modeling import _attach_context_parallel_hooks
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention as options
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    mesh, model = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",)), loaded(case, folder)
    batch = batch_of(case)
    options._cp_options.enable_load_balance = balance
    if hook:
        _attach_context_parallel_hooks(model)
    buffers = [x for x in batch.values() if isinstance(x, Tensor)]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers)):
        found = model(**batch)[0]
        return context_parallel_unshard(mesh, [found.detach()], [1])[0]


def hooked(case: str, folder: str) -> Tensor:
    """Run the plain model with accelerate's hook on one process: what its attention is told under cp."""
    from accelerate.big_modeling import _attach_context_parallel_hooks

    model = loaded(case, folder)
    _attach_context_parallel_hooks(model)
    return model(**batch_of(case))[0]


def said(run: Callable[..., Tensor], case: str, folder: str) -> Any:
    """Return (positions that change, the error's words); one of them is None."""
    logging.disable(logging.CRITICAL)  # torch prints the stacks of its fake tensors
    try:
        return changed(run(case, folder).detach()).tolist(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


WAYS: Mapping[str, tuple[int, Callable[..., Tensor]]] = {
    "slapo_zoo, cp=2": (RANKS, ours),
    "accelerate's hook, one process": (1, hooked),
    "accelerate's hook in torch's context_parallel": (RANKS, partial(_cut, hook=True, balance=True)),
    "torch's context_parallel": (RANKS, partial(_cut, hook=False, balance=True)),
    "torch's context_parallel, no load balance": (RANKS, partial(_cut, hook=False, balance=False)),
}  # fmt: skip


def judged(case: str, way: str, folder: str, expected: Tensor) -> dict[str, Any]:
    """Return one row of the table: leaked and lost positions of a way, or its words."""
    ranks, run = WAYS[way]
    try:
        found, words = run_local(
            said, ranks, (run, case, folder), timeout=WAIT_S, start="fork", threads=1, device="cpu"
        )[0]
    except RankError as error:
        found, words = None, " ".join(str(error).split())[:300]
    row: dict[str, Any] = {"model": case, "what": way, "leaked": None, "lost": None, "of": int(expected.sum())}  # fmt: skip
    if found is not None:
        seen = torch.tensor(found)
        row |= {"leaked": int((seen & ~expected).sum()), "lost": int((expected & ~seen).sum())}
    wrong = way.startswith("slapo_zoo") and (row["leaked"], row["lost"]) != (0, 0)
    return row | {"words": words, "beyond": ["leaked", "lost"] if wrong else []}


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Return the table of all models and ways; with `quick` one model and our way."""
    import_all()
    rows = []
    for case in list(CASES)[: 1 if quick else None]:
        with TemporaryDirectory(prefix="slapo_zoo-leaks-") as folder:
            write_model(case, Path(folder))
            expected = changed(plain(case, folder).detach())
            rows += [judged(case, way, folder, expected) for way in list(WAYS)[: 1 if quick else None]]  # fmt: skip
    names = [f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate")]
    return {f"one token changes, positions that change, {RANKS} ranks on gloo, {', '.join(names)}": rows}  # fmt: skip
