"""Cost estimates that run two of many equal blocks equal those that run all."""

import pytest
import transformers

from slapo_zoo.parallel.paths import select_paths
from slapo_zoo.pipeline import unit_costs as costs
from slapo_zoo.pipeline.stages import leaf_units
from slapo_zoo.zoo.table import base_prefix, table_for
from tiny_models import MODELS

LAYERS = {"n_layer": 6, "num_layers": 6, "num_hidden_layers": 6}
FAMILIES = ("albert", "bert", "gpt2", "gpt_neo", "llama", "mixtral", "opt", "t5", "vit")


def costs_of(family):
    name, fields, *_ = MODELS[family]
    cls = getattr(transformers, name)
    more: dict = {key: LAYERS[key] for key in fields if key in LAYERS}
    if family == "gpt_neo":
        more["attention_types"] = [[["global", "local"], 3]]
    config = cls.config_class(**{**fields, **more})
    with costs.torch.device("meta"):
        model = cls(config)
    table = table_for(config.model_type)
    prefix = base_prefix(model)
    paths = dict(model.named_modules())
    blocks = [path for b in table.blocks for path in select_paths(prefix + b, paths)]
    late = [prefix + path for path in table.after_blocks]
    costs._unit_costs.cache_clear()
    return costs.unit_costs(model, leaf_units(model, blocks, late), 16)


@pytest.mark.parametrize("family", FAMILIES)
def test_estimated_costs_with_repeated_blocks_skipped_equal_a_full_run(family, monkeypatch):
    short = costs_of(family)
    monkeypatch.setattr(costs, "skip_repeated", lambda *_: None)
    whole = costs_of(family)
    costs._unit_costs.cache_clear()
    assert len(short) == len(whole) > 6
    assert short == whole


def test_cost_estimate_runs_only_two_of_many_equal_blocks(monkeypatch):
    """Count the calls: without the skip all twelve blocks would run."""
    ran = []
    block = transformers.models.gpt2.modeling_gpt2.GPT2Block
    forward = block.forward
    monkeypatch.setattr(block, "forward", lambda self, *a, **k: ran.append(self) or forward(self, *a, **k))  # fmt: skip
    costs_of("gpt2")
    assert len(ran) == 2
