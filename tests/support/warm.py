"""Imports and first dry runs of the server that workers are forked from, so that no worker has to repeat them.

A worker's first dry run on fake tensors takes seconds, because torch registers its operators'
rules then. Nothing here may start a thread, e.g. by a backward: forked workers would lack it.
"""

import os

import pytest  # noqa: F401
import torch
import torch.distributed.device_mesh  # noqa: F401
import torch.distributed.pipelining  # noqa: F401

import slapo_zoo.model.checkpoints.resume  # noqa: F401
import slapo_zoo.model.integrations.dialects.torch  # noqa: F401
import slapo_zoo.model.load.auto  # noqa: F401
import slapo_zoo.model.mixin  # noqa: F401
import slapo_zoo.pipeline.in_flight  # noqa: F401
import slapo_zoo.pipeline.stage  # noqa: F401
from parity import Case, batch_of, tiny_config
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.pipeline.dry_run import dry_run
from slapo_zoo.pipeline.pipeline_runtime import fake_schedule
from slapo_zoo.zoo.outline import Outline

torch.set_num_threads(1)
threads = len(os.listdir("/proc/self/task"))
for name in ("GPT2LMHeadModel", "LlamaForCausalLM"):
    case = Case(name, ("tokens",))
    outline = Outline(*tiny_config(case), Mesh(tp=2, pp=2), torch.float32)
    mode, schedule = fake_schedule(outline.schedule, outline.cls)
    dry_run(schedule.model, outline.units, mode, batch_of(case))
assert len(os.listdir("/proc/self/task")) == threads, "a thread would be lost in the workers"
