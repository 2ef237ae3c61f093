"""Sharding rules for Mixtral: Mistral's attention; experts are sharded over ranks, and every rank routes all tokens.

In shapes: D hidden, E experts, F ffn of an expert; n is the number of tp ranks. Files hold the experts one by one,
as w1 (gate), w2 (down) and w3 (up).
"""

from slapo_zoo.zoo.rules import experts, whole
from slapo_zoo.zoo.table import extend, register
from slapo_zoo.weights.keys import Pieces

MIXTRAL = register(
    extend(
        "mistral",
        model_type="mixtral",
        source="transformers 5.23.0, models/mixtral/modeling_mixtral.py",
        without=("layers.*.mlp", "layers.*.mlp.gate_proj", "layers.*.mlp.up_proj", "layers.*.mlp.down_proj"),
        body=(
            # module                 rule                                       per rank
            ("layers.*.mlp.gate",    whole),                                  # [E, D]
            ("layers.*.mlp.experts", experts("gate_up_proj", "down_proj")),   # [E/n, 2 F, D], [E/n, D, F]
        ),
        all_tokens=("layers.*.mlp",),  # the router and the experts
        whole_batch=("output_router_logits",),  # its loss multiplies two means, over all tokens of all layers
        renames=((".block_sparse_moe.", ".mlp."),),
        pieces=(
            Pieces(".experts.gate_up_proj", (".experts.{}.w1.weight", ".experts.{}.w3.weight")),
            Pieces(".experts.down_proj", (".experts.{}.w2.weight",)),
        ),
    )
)
