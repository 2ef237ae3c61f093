"""Cost estimates and dry runs that run two of many equal blocks equal those that run all."""

import pytest
import transformers

from slapo_zoo.hf.example_inputs import training_batch
from slapo_zoo.language.directive import ForwardContext
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.paths import select_paths
from slapo_zoo.pipeline import dry_run
from slapo_zoo.pipeline import unit_costs as costs
from slapo_zoo.pipeline.pipeline_runtime import fake_schedule
from slapo_zoo.pipeline.stages import leaf_units
from slapo_zoo.zoo.outline import Outline
from slapo_zoo.zoo.table import base_prefix, table_for
from tiny_models import MODELS

LAYERS = {"n_layer": 6, "num_layers": 6, "num_hidden_layers": 6}
FAMILIES = ("albert", "bert", "gpt2", "gpt_neo", "llama", "mixtral", "opt", "t5", "vit")


def deep(family):
    """Return the class of a family, and a config of six blocks."""
    name, fields, *_ = MODELS[family]
    cls = getattr(transformers, name)
    more: dict = {key: LAYERS[key] for key in fields if key in LAYERS}
    if family == "gpt_neo":
        more["attention_types"] = [[["global", "local"], 3]]
    return cls, cls.config_class(**{**fields, **more})


def costs_of(family):
    cls, config = deep(family)
    with costs.torch.device("meta"):
        model = cls(config)
    table = table_for(config.model_type)
    prefix = base_prefix(model)
    paths = dict(model.named_modules())
    blocks = [path for b in table.blocks for path in select_paths(prefix + b, paths)]
    late = [prefix + path for path in table.after_blocks]
    costs._unit_costs.cache_clear()
    return costs.unit_costs(model, leaf_units(model, blocks, late), 16)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_cost_estimate_that_skips_repeated_blocks_equals_the_estimate_of_all_blocks(
    family, monkeypatch
):
    short = costs_of(family)
    monkeypatch.setattr(costs, "skip_repeated", lambda *_: None)
    whole = costs_of(family)
    costs._unit_costs.cache_clear()
    assert len(short) == len(whole) > 6
    assert short == whole


def test_cost_estimate_runs_the_forward_of_two_of_twelve_equal_blocks(monkeypatch):
    """Count the calls: without the skip all twelve blocks would run."""
    ran = []
    block = transformers.models.gpt2.modeling_gpt2.GPT2Block
    forward = block.forward
    monkeypatch.setattr(block, "forward", lambda self, *a, **k: ran.append(self) or forward(self, *a, **k))  # fmt: skip
    costs_of("gpt2")
    assert len(ran) == 2


def calls_in_stages(family, sequence_parallel):
    """Return the calls of a dry run over tp=2 pp=2, and whether the fake model is as before."""
    cls, config = deep(family)
    changes = {"sequence_parallel": sequence_parallel}
    outline = Outline(config, cls, Mesh(tp=2, pp=2), costs.torch.float32, **changes)
    mode, schedule = fake_schedule(outline.schedule, outline.cls)
    before = [vars(module).get("forward") for module in schedule.model.modules()]
    schedule.state.forward = ForwardContext(sequence_parallel)
    calls, _ = dry_run.dry_run(
        schedule.model, outline.units, mode, training_batch(schedule.model, 2, 16)
    )
    return calls, before == [vars(module).get("forward") for module in schedule.model.modules()]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "mixtral"])  # its experts read data
def test_dry_run_that_skips_repeated_blocks_records_the_calls_of_a_full_dry_run(
    family, monkeypatch
):
    for sequence_parallel in (False, True)[: 1 if family == "vit" else 2]:
        short, restored = calls_in_stages(family, sequence_parallel)
        with monkeypatch.context() as patch:
            patch.setattr(dry_run, "skip_repeated", lambda *args, **options: None)
            whole, _ = calls_in_stages(family, sequence_parallel)
        assert restored
        assert len(short) == len(whole) > 6
        assert short == whole


def test_dry_run_executes_the_forward_of_only_two_of_many_equal_blocks(monkeypatch):
    ran = []
    block = transformers.models.gpt2.modeling_gpt2.GPT2Block
    forward = block.forward
    monkeypatch.setattr(block, "forward", lambda self, *a, **k: ran.append(self) or forward(self, *a, **k))  # fmt: skip
    costs._unit_costs.cache_clear()
    calls_in_stages("gpt2", False)
    assert len(ran) == 2 + 2  # of the cost estimate, of the dry run
