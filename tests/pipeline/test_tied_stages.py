"""What several stages share stays one: equal after every step, saved once; shards cross as shards."""

import pytest
import torch
from safetensors.torch import load_file

from parity import Case, batch_of, checkpoint, tiny_config
from slapo_zoo import AutoScheduledModel
from slapo_zoo.language.directive import ForwardContext
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.pipeline.dry_run import dry_run
from slapo_zoo.pipeline.runtime import fake_schedule
from slapo_zoo.pipeline.stages import StagePlan
from slapo_zoo.zoo.outline import Outline

T5 = Case("T5ForConditionalGeneration", ("tokens",), (("num_layers", 4), ("num_decoder_layers", 4)))
ALBERT = Case("AlbertForMaskedLM", ("tokens",), (("num_hidden_layers", 8),))
GPT2 = Case("GPT2LMHeadModel", ("tokens",), (("n_layer", 4),))
T5_NAMES = (
    "shared.weight",
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
    "lm_head.weight",
)
BLOCK = "albert.encoder.albert_layer_groups.0."
CASES = [(T5, T5_NAMES, 3), (ALBERT, (BLOCK,), 4)]  # case, names of what is shared, its owners


def train_and_save(case, folder, names, out):
    """What this rank holds of the shared tensors after each step; then all save."""
    model = AutoScheduledModel.from_pretrained(folder, pp=4, auto_class=case.cls).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = []
    for step in range(3):
        optimizer.zero_grad()
        model.train_step(batch_of(case, step))
        model.clip_grad_norm_(1.0)
        optimizer.step()
        shared = [p for n, p in model.named_parameters() if n.startswith(names)]
        states = [optimizer.state[p]["exp_avg"].clone() for p in shared]
        steps.append(([p.detach().clone() for p in shared], states))
    model.save_pretrained(out)
    return steps


@pytest.mark.parametrize(("case", "names", "owners"), CASES, ids=lambda x: getattr(x, "cls", None))
def test_shared_weights_stay_equal_and_are_saved_once(case, names, owners, tmp_path, ranks):
    folder = checkpoint(case, tmp_path)
    results = ranks.run(train_and_save, 4, case, folder, names, tmp_path / "out")
    holders = [steps for steps in results if steps[0][0]]
    assert len(holders) == owners
    for step in range(3):
        first, *others = (steps[step] for steps in holders)
        for other in others:  # values, and the optimizer's state of them
            assert all(map(torch.equal, first[0], other[0]))
            assert all(map(torch.equal, first[1], other[1]))
        assert step == 0 or not torch.equal(first[0][0], holders[0][step - 1][0][0])
    want, found = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert found.keys() == want.keys()
    saved = [tensor for name, tensor in found.items() if name.startswith(names)]
    assert len(saved) == len(holders[0][-1][0])
    assert {t.sum().item() for t in saved} == {t.sum().item() for t in holders[0][-1][0]}


@pytest.mark.parametrize(("sequence_parallel", "tokens"), [(False, 12), (True, 6)])
def test_shards_of_tokens_cross_a_cut_as_shards(sequence_parallel, tokens):
    config, cls = tiny_config(GPT2)
    outline = Outline(config, cls, Mesh(tp=2, pp=2), torch.float32,
                      sequence_parallel=sequence_parallel)  # fmt: skip
    mode, schedule = fake_schedule(outline.schedule, outline.cls)
    schedule.state.forward = ForwardContext(sequence_parallel)
    calls = dry_run(schedule.model, outline.units, mode, batch_of(GPT2))
    plan = StagePlan.make(calls, outline.state.cuts, 0)
    hidden = [shape.shape for shape in map(plan.shape, plan.crossing(1)) if shape.requires_grad]
    assert hidden == [(GPT2.rows, tokens, 30)]
