"""Shards of a derived table, compared with those of the table written by hand for the family.

A derived table gathers what heads make, so that the product after an attention is divided by its outputs, not
its inputs. All else that it divides in another way, or not at all, is named here with its reason.
"""

import copy

import pytest
import torch
import transformers
from type_coverage import default_config, model_types

from slapo_zoo.hf import models as hf
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.verify.tiny_case import tiny_case
from slapo_zoo.zoo.apply import apply_table
from slapo_zoo.zoo.derivation.stacks import star
from slapo_zoo.zoo.derivation.table_rows import derive_table
from slapo_zoo.zoo.table import families, table_for
from slapo_zoo.zoo.tiny_config import Sizes

WIDERESNET = "wideresnet"  # a model of our own, in none of the lists of transformers
T5 = ("relative_attention_bias", "embed_tokens", "shared", "lm_head")
# family --> what only the hand-written table divides, by a part of its name
WHOLE = {
    "esm": ("lm_head.bias",),  # a parameter beside the product that it is added to
    "falcon": ("mlp.dense", "self_attention."),  # linears with a forward of their own
    "m2m_100": ("embed_tokens", "shared", "lm_head"),  # an embedding with a forward of its own, and small here
    "mamba": ("mixer.A_log", "mixer.D", "mixer.conv1d", "mixer.dt_proj"),  # channels between two products
    "mt5": T5, "t5": T5, "umt5": T5,  # a number per head; tied embeddings that are small here
    "olmo2": ("_norm.weight",), "olmo3": ("_norm.weight",),  # norms over the columns of all heads
    "swin": ("relative_position_bias_table",),  # a number per head
}  # fmt: skip
# family --> what is divided along another axis, beside what ends an attention
GATHERED = {
    "mamba": ("mixer.out_proj", "mixer.x_proj"),  # the operations before them are not recognised as elementwise
    "modernbert": ("mlp.Wo",), "phi3": ("mlp.down_proj",),  # behind halves of one product
}  # fmt: skip
ATTENTION = ("attn", "attention", "Attention")


def divided(config, cls, table):
    """Return parameter pattern --> the axis that is sharded over two ranks."""
    model = hf.build_on_meta(cls, copy.deepcopy(config), torch.float32, table.seam)
    sch = apply_table(Schedule(model, Mesh(2)), table)
    return {star(name): placed.placement.axis for name, placed in sch.state.placed.items()}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("family", sorted(set(families()) - {WIDERESNET}))
def test_automatically_derived_schedule_shards_the_weights_of_the_hand_written_schedule(
    family, tmp_path
):
    name = family if family in model_types() else family.replace("_", "-")
    cls = getattr(transformers, model_types()[name][0])
    case = tiny_case(default_config(name, cls), cls, tmp_path, Sizes())
    by_hand = divided(case.config, cls, table_for(family))
    model = hf.build_on_meta(cls, copy.deepcopy(case.config), torch.float32, False)
    found = divided(case.config, cls, derive_table(case.config, model, case.seen, {}))

    missing = by_hand.keys() - found.keys()
    assert [n for n in missing if not any(part in n for part in WHOLE.get(family, ()))] == []
    assert missing or family not in WHOLE, "no difference is left to explain"
    turned = [n for n in by_hand.keys() & found.keys() if by_hand[n] != found[n]]
    known = (*ATTENTION, *GATHERED.get(family, ()))
    assert [n for n in turned if not any(part in n for part in known)] == []
