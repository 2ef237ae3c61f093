"""Import of deepspeed by the server that workers are forked from: `save_pretrained` and its engine would import it in each.

It writes to standard output, so it is not part of `warm`.
"""

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - by `deepspeed.initialize`
import torch
from accelerate.utils import extract_model_from_parallel

extract_model_from_parallel(torch.nn.Identity())
