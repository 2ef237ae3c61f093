"""Helpers for tests of bad input: two checkpoints, and the parts of the error on every rank."""

import torch.distributed as dist

from parity import Case
from slapo_zoo import AutoScheduledModel, SlapoError

GPT2 = Case("GPT2LMHeadModel", ("tokens",))
BERT = Case("BertForMaskedLM", ("tokens",))


def attempt(folder, options):
    """Return the parts of the error of from_pretrained on this rank."""
    if dist.is_initialized():
        dist.barrier()  # a rank that fails at once must not leave before all have met
    try:
        AutoScheduledModel.from_pretrained(folder, **options)
    except SlapoError as error:
        return type(error), error.where, str(error.what), error.problem, error.hint
    return None


def refused(kind, folder, ranks=None, n=1, **options):
    """Run it and expect the same error on every rank; return its text parts joined."""
    found = ranks.run(attempt, n, folder, options) if n > 1 else [attempt(folder, options)]
    for parts in found:
        assert parts is not None, "it was accepted"
        assert issubclass(parts[0], kind), parts
        assert all(parts[1:4]), parts  # where, what, problem
        assert parts[4], f"no hint: {parts}"
    return " | ".join(found[0][1:])
