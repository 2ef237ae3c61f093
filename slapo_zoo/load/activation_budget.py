"""The argument `activation_memory=`: choose the recomputation that keeps activations within a budget."""

from typing import Any

import torch

from slapo_zoo.errors import SlapoError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.tune.planner.budget import policies_within, require_shape
from slapo_zoo.weights.load import parse_size
from slapo_zoo.zoo.options import LoaderOptions
from slapo_zoo.zoo.schedule_source import FROM_TABLE, kind_of


def within_budget(
    options: LoaderOptions, config: Any, mesh: Mesh, dtype: torch.dtype
) -> LoaderOptions:
    """Return the options with a recompute policy per block, chosen for `activation_memory=`; unchanged without it.

    Args:
        options: options of the model.
        config: config of the model.
        mesh: mesh of the model.
        dtype: dtype of the parameters.

    Raises:
        SlapoError: no policy fits the budget, or the budget contradicts another argument.
    """
    asked = options.activation_memory
    if asked is None:
        return options
    budget = parse_size(asked, "activation_memory")
    where, what = "from_pretrained", f"activation_memory={asked!r}"
    if options.checkpoint_ratio or options.checkpoint_policy:
        problem = (
            "it chooses what is recomputed, and checkpoint_ratio= and checkpoint_policy= say it"
        )
        raise SlapoError(where, what, problem, "pass one of them")
    if kind_of(options.schedule) not in FROM_TABLE:
        problem = "the schedule that you pass says itself what is recomputed"
        raise SlapoError(where, what, problem, 'leave it out, or use schedule="zoo"')
    width = getattr(config.get_text_config(), "hidden_size", 0)
    least = width * (options.compute_dtype or dtype).itemsize // mesh.tp
    if budget < least:  # whatever the rows: said before they are asked for
        problem = f"a block keeps {least} bytes for one token, even where it is recomputed"
        raise SlapoError(where, what, problem, 'give gigabytes, e.g. activation_memory="8GiB"')
    shape = require_shape(options.micro_batch_shape)
    policies = policies_within(
        budget, repr(asked), config, options.auto_class, mesh, options, dtype, shape,
        options.micro_batches,
    )  # fmt: skip
    return options if set(policies) == {"keep"} else options.but(checkpoint_policy=policies)
