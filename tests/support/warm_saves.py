"""Import of deepspeed by the server that workers are forked from: `save_pretrained` of each worker would import it.

It writes to standard output, so it is not part of `warm`.
"""

import torch
from accelerate.utils import extract_model_from_parallel

extract_model_from_parallel(torch.nn.Identity())
