"""Changes that people make to a model of `transformers` between two steps before they save it."""

import pytest
import torch
import transformers
from torch import nn

from parity import Case, batch_of, checkpoint

GPT2 = Case("GPT2LMHeadModel", ("tokens",))
LLAMA = Case("LlamaForCausalLM", ("tokens",))
LAYOUTS = {"one": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2": {"dp": 2}}


def load(folder, layout):
    from slapo_zoo import AutoScheduledModel

    return AutoScheduledModel.from_pretrained(folder, seed=0, **layout).train()


def world(layout):
    return 2 if layout else 1


def step(model, batch, optimizer=None):
    rows = 4 // model.mesh.dp
    part = slice(model.mesh.coord("dp") * rows, (model.mesh.coord("dp") + 1) * rows)
    loss = model.train_step({k: v[part] for k, v in batch.items()})
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss)


# --- another dtype -------------------------------------------------------------------------------


def cast(folder, layout, out, resume):
    from slapo_zoo import load_checkpoint, save_checkpoint

    model, batch = load(folder, layout), batch_of(GPT2)
    first = step(model, batch)
    model.zero_grad()
    model.to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [step(model, batch, optimizer) for _ in range(2)]
    model.save_pretrained(out)
    save_checkpoint(model, resume, optimizer)
    again = load(folder, layout).to(torch.bfloat16)
    load_checkpoint(again, resume, torch.optim.SGD(again.parameters(), lr=0.1))
    mine, theirs = model.consolidated_state_dict(), again.consolidated_state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    return first, losses, mine


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_model_cast_to_bfloat16_trains_to_a_lower_loss_and_saves_bfloat16_weights(
    layout, tmp_path, threads
):
    folder, options = checkpoint(GPT2, tmp_path), LAYOUTS[layout]
    plain = transformers.GPT2LMHeadModel.from_pretrained(folder).to(torch.bfloat16).train()
    want = [plain(**batch_of(GPT2)).loss.item()]
    out = tmp_path / "out"
    found = threads.run(cast, world(options), folder, options, out, tmp_path / "resume")
    saved = transformers.GPT2LMHeadModel.from_pretrained(out)
    for first, losses, _ in found:
        assert abs(losses[0] - want[0]) < 0.05
        assert losses[1] < losses[0]
        assert abs(first - losses[0]) < 0.05
    for name, p in saved.named_parameters():
        assert p.dtype == torch.bfloat16
        assert torch.equal(p, found[0][2][name]), name


# --- a module of one's own -----------------------------------------------------------------------


def with_value_head(folder, layout, out):
    from slapo_zoo import SlapoError

    model, batch = load(folder, layout), batch_of(LLAMA)
    model.value_head = nn.Linear(32, 1)
    nn.init.ones_(model.value_head.weight)  # ranks that are threads draw unlike numbers
    nn.init.ones_(model.value_head.bias)
    model.register_buffer("seen", torch.tensor(3))
    if model.mesh.pp > 1:
        with pytest.raises(SlapoError, match="was added") as caught:
            model.save_pretrained(out)
        return str(caught.value), None
    step(model, batch, torch.optim.SGD(model.parameters(), lr=0.1))
    model.save_pretrained(out)
    return model.value_head.weight.detach(), model.consolidated_state_dict()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_module_that_the_user_adds_to_the_model_is_saved(layout, tmp_path, threads):
    from safetensors.torch import load_file

    folder, options, out = checkpoint(LLAMA, tmp_path), LAYOUTS[layout], tmp_path / "out"
    weight, whole = threads.run(with_value_head, world(options), folder, options, out)[0]
    if layout == "pp2":
        assert "stages saves it" in weight
        return
    found = load_file(out / "model.safetensors")
    for name in ("value_head.weight", "value_head.bias", "seen"):
        assert torch.equal(found[name], whole[name])
    assert torch.equal(found["value_head.weight"], weight)
