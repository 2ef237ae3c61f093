"""Imports of the server that workers are forked from, so that no worker has to repeat them.

A worker's first dry run on fake tensors takes seconds, because torch registers its operators'
rules then. Nothing here may start a thread, e.g. by a backward: forked workers would lack it.
"""

import os

import pytest  # noqa: F401
import torch
import torch.distributed.device_mesh  # noqa: F401
import torch.distributed.pipelining  # noqa: F401
import transformers.models.auto.modeling_auto  # noqa: F401
import transformers.models.bert.modeling_bert  # noqa: F401
from transformers import GPT2Config, GPT2LMHeadModel

import slapo_zoo.load.auto  # noqa: F401
import slapo_zoo.model.mixin  # noqa: F401
from slapo_zoo.hf.models import build_fake

torch.set_num_threads(1)
threads = len(os.listdir("/proc/self/task"))
config = GPT2Config(
    n_layer=1,
    n_embd=8,
    n_head=2,
    vocab_size=16,
    n_positions=8,
    loss_type="ForCausalLMLoss",
    bos_token_id=1,
    eos_token_id=2,
)
mode, model = build_fake(GPT2LMHeadModel, config, torch.float32)
with mode, torch.enable_grad():
    ids = torch.zeros(2, 4, dtype=torch.long)
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
assert len(os.listdir("/proc/self/task")) == threads, "a thread would be lost in the workers"
