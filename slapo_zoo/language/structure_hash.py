"""Digest of a model's structure: equal for two models with the same module tree, classes and shapes."""

from torch import nn

from slapo_zoo.parallel.digests import digest


def structure_hash(model: nn.Module) -> str:
    """Return "sha256:..." over the paths and classes of all modules and the names and shapes of all parameters."""
    lines = [f"{path} {type(module).__name__}" for path, module in model.named_modules()]
    named = model.named_parameters(remove_duplicate=False)
    lines += [f"{name} {tuple(p.shape)}" for name, p in named]
    return "sha256:" + digest(*sorted(lines))
