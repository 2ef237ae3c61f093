"""Tables exported as a `transformers` tp_plan train with its own tensor parallelism."""

import pytest
import torch
import transformers

from parity import Case, batch_of, checkpoint, tiny_config
from slapo_zoo.errors import ArchitectureError
from slapo_zoo.zoo.table import table_for

EVEN = (
    ("num_attention_heads", 4),
    ("hidden_size", 32),
)  # their styles shard no odd number of heads
SAID = {
    "LlamaForCausalLM": (),
    "MistralForCausalLM": (),
    "Qwen3ForCausalLM": (),
    "GPTNeoXForCausalLM": EVEN,
}


def plan_of(case):
    config, cls = tiny_config(case)
    with torch.device("meta"):
        model = cls(config)
    return table_for(config.model_type).tp_plan(model)


def losses(model, case, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**batch_of(case, step)).loss
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def by_their_tp(folder, case, plan):
    options = transformers.DistributedConfig(tp_size=2, tp_plan=plan)
    cls = getattr(transformers, case.cls)
    return losses(cls.from_pretrained(folder, distributed_config=options).train(), case)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("cls", SAID)
def test_transformers_with_the_exported_tp_plan_has_the_losses_of_one_process(cls, ranks, tmp_path):
    case = Case(cls, ("tokens",), SAID[cls])
    folder = checkpoint(case, tmp_path)
    want = losses(getattr(transformers, cls).from_pretrained(folder).train(), case)
    assert want[0] != want[-1]
    for found in ranks.run(by_their_tp, 2, folder, case, plan_of(case), timeout=200):
        assert found == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        ("GPT2LMHeadModel", "num_heads, a number of heads"),
        ("MixtralForCausalLM", "MixtralExperts"),
    ],
)
def test_export_of_a_tp_plan_with_rules_that_transformers_lacks_is_refused(cls, words):
    with pytest.raises(ArchitectureError, match=words):
        plan_of(Case(cls, ("tokens",)))
