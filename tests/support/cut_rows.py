"""Rows for tests of context parallelism, and a short training on them."""

import pytest
import torch

from parity import TOKENS, Case, batch_of, tiny_config
from slapo_zoo import AutoScheduledModel

CLOSE = {"rtol": 1e-5, "atol": 1e-8}  # in fp64, but for the logits of the loss
SINGLE = {
    "rtol": 1e-4,
    "atol": 1e-6,
}  # of GPT-Neo (scores) and Apertus (norms), which compute these in fp32


def closeness(case):
    """Tolerances of a family in fp64."""
    return SINGLE if case.cls.startswith(("GPTNeo", "Apertus")) else CLOSE


def _bare(batch):
    """Rows without padding and without a mask."""
    return {k: v for k, v in batch.items() if k != "attention_mask"}


def _left(batch):
    """Padding before the tokens."""
    return {k: v.flip(1) for k, v in batch.items()}


def _packed(batch):
    """Several sequences in each row, told by their positions alone; none ends where tokens are cut."""
    starts = torch.tensor([[0] * 5 + [5] * 4 + [9] * 3, [0] * 7 + [7] * 5])[[0, 1, 0, 1]]
    return {**_bare(batch), "position_ids": torch.arange(TOKENS) - starts}


def _whole_mask(batch):
    """A mask of one's own [rows, 1, tokens, tokens]: each token sees those before it, and the last but one."""
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    seen[:, -2] = True
    return {**batch, "attention_mask": seen.expand(4, 1, TOKENS, TOKENS).contiguous()}


MASKS = {
    "padded": lambda batch: batch, "bare": _bare, "left": _left, "packed": _packed, "4-D": _whole_mask,
}  # fmt: skip
CAUSAL = ("padded", "bare", "left", "packed", "4-D")
BOTH_WAYS = ("padded", "bare", "left", "4-D")
# class --> (labels, kinds of rows, changes of the config)
FAMILIES = {
    "GPT2LMHeadModel": ("tokens", CAUSAL, {}),
    "GPTNeoForCausalLM": ("tokens", CAUSAL, {}),
    "LlamaForCausalLM": ("tokens", CAUSAL, {}),
    "BertForMaskedLM": ("tokens", BOTH_WAYS, {}),
    "BertForTokenClassification": ("tags", ("padded",), {"num_labels": 3}),
    "RobertaForMaskedLM": ("tokens", BOTH_WAYS, {}),
    "OPTForCausalLM": ("tokens", CAUSAL[:4], {}),
    "MistralForCausalLM": ("tokens", CAUSAL, {}),
    "Qwen3ForCausalLM": ("tokens", CAUSAL, {}),
    "ModernBertForMaskedLM": ("tokens", BOTH_WAYS[:3], {}),
    "EsmForMaskedLM": ("tokens", BOTH_WAYS[:3], {"token_dropout": False}),
    "T5ForConditionalGeneration": ("tokens", BOTH_WAYS[:3], {}),
    "BartForConditionalGeneration": ("tokens", BOTH_WAYS[:3], {}),
}
SMALL = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 131, "intermediate_size": 64,
    "max_position_embeddings": 64,
}  # fmt: skip
# without a table of rules: class --> (labels, kinds of rows, changes of the config)
DERIVED = {
    "BioGptForCausalLM": ("tokens", CAUSAL[:3], SMALL),
    "ApertusForCausalLM": ("tokens", CAUSAL[:4], SMALL | {"num_key_value_heads": 2}),
}


def case_of(cls, dropout=0.1, **changes):
    labels, _, config = (FAMILIES | DERIVED)[cls]
    return Case(cls, (labels,), tuple((config | changes).items()), dropout=dropout)


def rows_of(case, mask, step=0):
    """A batch whose first rank of cp4 has no target in its first row, and of more ignored labels."""
    batch = MASKS[mask](batch_of(case, step))
    batch["labels"][0, :4] = -100
    return batch


def trained(case, mask, micro_batches=1, steps=2, folder=None, **layout):
    """Losses of each step, gradients of the first and weights after the last, with AdamW; `folder` has the weights."""
    load, name = AutoScheduledModel.from_config, tiny_config(case)[0]
    if folder is not None:
        load, name = AutoScheduledModel.from_pretrained, folder
    layout = {"dp": 1, "dtype": torch.float64, "seed": 3, "kernels": "reference", **layout}
    model = load(name, auto_class=case.cls, **layout).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    losses, first = [], None
    for step in range(steps):
        batch, dp = rows_of(case, mask, step), model.mesh.place("dp")
        part = {k: v.tensor_split(dp[0])[dp[1]] for k, v in batch.items()}
        optimizer.zero_grad()
        losses.append(float(model.train_step(part, micro_batches=micro_batches)))
        if first is None:
            first = model.consolidated_state_dict(grads=True)
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
    return losses, first, float(norm), model.consolidated_state_dict()


def require_equal(found, expected, **close):
    """Fail where losses, norm, gradients or weights differ; `close` changes the tolerances of CLOSE."""
    losses, grads, norm, weights = found
    assert losses == pytest.approx(expected[0], rel=1e-6)
    assert norm == pytest.approx(expected[2], rel=1e-6)
    for ours, one in ((grads, expected[1]), (weights, expected[3])):
        assert ours.keys() == one.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(ours[name], tensor, **{**CLOSE, **close}, msg=lambda m, n=name: f"{n}: {m}")  # fmt: skip
