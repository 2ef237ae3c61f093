"""`activation_memory=`: the recomputation that holds activations within so many bytes, chosen at the load."""

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from slapo_zoo.errors import SlapoError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.weights.load import parse_size
from slapo_zoo.zoo.options import FROM_TABLE, BuildOptions


def within_budget(
    options: BuildOptions, config: Any, mesh: Mesh, dtype: torch.dtype, given: Mapping[str, Any]
) -> BuildOptions:
    """The options with a policy for each block, where a budget was given.

    Args:
        options: of the model.
        config: of it.
        mesh: of it.
        dtype: of its parameters.
        given: arguments of the loader: activation_memory, micro_batch_shape, auto_class, micro_batches.

    Raises:
        SlapoError: the budget holds nothing that is possible, or contradicts another argument.
    """
    asked = given["activation_memory"]
    if asked is None:
        return options
    budget = parse_size(asked, "activation_memory")
    where, what = "from_pretrained", f"activation_memory={asked!r}"
    if options.checkpoint_ratio or options.checkpoint_policy:
        problem = (
            "it chooses what is recomputed, and checkpoint_ratio= and checkpoint_policy= say it"
        )
        raise SlapoError(where, what, problem, "pass one of them")
    if options.kind not in FROM_TABLE:
        problem = "the schedule that you pass says itself what is recomputed"
        raise SlapoError(where, what, problem, 'leave it out, or use schedule="zoo"')
    # on a higher floor, and found at run time as the tables are
    planner = importlib.import_module("slapo_zoo.tune.planner.budget")
    shape = planner.require_shape(given["micro_batch_shape"])
    policies = planner.policies_within(
        budget, repr(asked), config, given["auto_class"], mesh, options, dtype, shape,
        given["micro_batches"],
    )  # fmt: skip
    return options if set(policies) == {"keep"} else options.but(checkpoint_policy=policies)
