"""Plain `transformers` in mixed precision, the reference of a scheduled model."""

import functools
from types import SimpleNamespace

import torch
import transformers

from parity import EPS, LEARNING_RATE, STEPS, Case, batch_of, cast, plain

GPT2 = Case("GPT2LMHeadModel", ("tokens",), (("n_layer", 4),))
BERT = Case("BertForMaskedLM", ("tokens",), (("num_hidden_layers", 4),))
T5 = Case("T5ForConditionalGeneration", ("tokens",))
LLAMA = Case("LlamaForCausalLM", ("tokens",), (("num_hidden_layers", 4),))
CASES = (GPT2, BERT, T5, LLAMA)
COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}


@functools.cache
def plain_mixed(case, folder, precision):
    """Train plain transformers with fp32 masters: gradients of a 16-bit model, accumulated and stepped in fp32."""
    dtype, cls = COMPUTE[precision], getattr(transformers, case.cls)
    scale = 2.0**12 if precision == "fp16" else 1.0
    masters = cls.from_pretrained(folder, dtype=torch.float32).train()
    narrow = cls.from_pretrained(folder, dtype=dtype).train()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=LEARNING_RATE, weight_decay=0.1, eps=EPS)
    losses, named = [], dict(narrow.named_parameters())
    for step in range(STEPS):
        with torch.no_grad():
            for name, p in masters.named_parameters():
                named[name].copy_(p)
                named[name].grad = None
        loss = narrow(**cast(batch_of(case, step), dtype)).loss
        (loss.float() * scale).backward()
        for name, p in masters.named_parameters():
            p.grad = named[name].grad.float() / scale
        if step == 0:
            grads = {n: p.grad.clone() for n, p in masters.named_parameters()}
        torch.nn.utils.clip_grad_norm_(masters.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    weights = {n: p.detach() for n, p in masters.named_parameters()}
    return SimpleNamespace(losses=losses, grads=grads, weights=weights)


def far(found, truth):
    return max(abs(a - b) for a, b in zip(found, truth, strict=True))


def compare(result, case, folder, precision):
    """Fail where a run is more than twice as far from fp64 as plain transformers in the same precision."""
    truth, own = plain(case, folder, torch.float64, "sdpa"), plain_mixed(case, folder, precision)
    eps = torch.finfo(COMPUTE[precision]).eps
    scale = max(truth.losses)
    assert far(result.losses, truth.losses) <= 2 * far(own.losses, truth.losses) + eps * scale / 8
    for what in ("grads", "weights"):
        found, want, plain_ = (getattr(x, what) for x in (result, truth, own))
        assert found.keys() == want.keys()
        largest = max(float(x.abs().max()) for x in want.values())
        error, allowed = (
            max(float((x[n].double() - want[n].double()).abs().max()) for n in want)
            for x in (found, plain_)
        )
        assert error <= 2 * allowed + eps * largest / 8, what
