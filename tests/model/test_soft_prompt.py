"""Soft prompts: a learned prefix of `inputs_embeds` trains on every mesh as in plain transformers."""

import copy
import time

import peft
import pytest
import torch
import transformers
from peft import PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn

from slapo_zoo import AutoScheduledModel, MeshError, SlapoError, emulate

CONFIG = transformers.GPT2Config(
    n_embd=32, n_head=4, n_layer=4, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, architectures=["GPT2LMHeadModel"],
)  # fmt: skip
IDS = torch.arange(32).reshape(4, 8) * 5 % 64
PREFIX = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(3)
    place = tmp_path_factory.mktemp("prompt")
    transformers.GPT2LMHeadModel(CONFIG).save_pretrained(place)
    return place


class Prompted(nn.Module):
    """Module as a user writes it: an embedding table of its own before an unchanged model."""

    def __init__(self, folder, even=False):
        super().__init__()
        self.even = even
        rows = load_file(folder / "model.safetensors")["transformer.wte.weight"]
        self.table = nn.Embedding.from_pretrained(rows)
        drawn = torch.randn(PREFIX, 32, generator=torch.Generator().manual_seed(5))
        self.prompt = nn.Parameter(0.1 * drawn)

    def batch(self, ids):
        rows = self.prompt.expand(len(ids), -1, -1)
        labels = torch.cat([ids.new_full((len(ids), PREFIX), -100), ids], 1)
        if not self.even:
            labels[0, -3:] = -100  # rows of other lengths: a mean of means would be another one
        return {"inputs_embeds": torch.cat([rows, self.table(ids)], 1), "labels": labels}


def train(prompted, step, ids):
    optimizer, losses = torch.optim.SGD([prompted.prompt], lr=1.0), []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(float(step(prompted.batch(ids))))
        optimizer.step()
    return losses, prompted.prompt.detach()


def on_a_mesh(folder, tp, pp, dp, options):
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp, dp=dp, **options)
    model.requires_grad_(False)
    model.input_check_interval = 1  # the stages hold one and the same prompt after each step
    rows = IDS.tensor_split(dp)[model.mesh.coord("dp")]
    return train(Prompted(folder), model.train_step, rows)


def plain(folder, dp, even=False):
    """Train on the rows of all dp ranks in one process."""
    model = transformers.GPT2LMHeadModel.from_pretrained(folder).requires_grad_(False)
    prompted, parts = Prompted(folder, even), IDS.tensor_split(dp)

    def step(_):
        batches = [prompted.batch(part) for part in parts]
        loss = model(**{k: torch.cat([b[k] for b in batches]) for k in batches[0]}).loss
        loss.backward()
        return loss.detach()

    return train(prompted, step, IDS)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("mesh", "options"),
    [((1, 1, 1), {}), ((2, 1, 1), {"sequence_parallel": True}), ((1, 2, 1), {}), ((1, 1, 2), {}),
     ((1, 2, 1), {"pipeline_order": "zbv"}), ((1, 2, 1), {"pipeline_order": "interleaved_zero_bubble"}),
     ((1, 2, 2), {}), ((2, 2, 1), {}), ((1, 1, 2), {"dp_shard": 2}), ((1, 2, 2), {"dp_shard": 2})],
)  # fmt: skip
def test_soft_prompt_training_has_the_losses_and_prompt_of_one_process(folder, mesh, options):
    losses, prompt = plain(folder, mesh[2])
    for found, mine in emulate(on_a_mesh, folder, *mesh, options, mesh=mesh):
        assert found == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(mine, prompt, rtol=1e-4, atol=1e-6)


def by_hand(folder, tp, dp, options):
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, dp=dp, **options).train()
    model.requires_grad_(False)

    def step(batch):
        """Run two backwards, the first without an average over dp."""
        half = {name: x[:1] for name, x in batch.items()}
        rest = {name: x[1:] for name, x in batch.items()}
        with model.no_sync():
            (model(**half).loss / len(batch["labels"])).backward(retain_graph=True)
        loss = model(**rest).loss
        (loss * (1 - 1 / len(batch["labels"]))).backward()
        return loss.detach()

    return train(Prompted(folder, even=True), step, IDS.tensor_split(dp)[model.mesh.coord("dp")])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("tp", "dp", "options"),
    [(1, 2, {}), (2, 1, {"sequence_parallel": True}), (2, 2, {}), (1, 2, {"dp_shard": 2})],
)
def test_soft_prompt_trained_in_a_hand_written_loop_equals_that_of_one_process(
    folder, tp, dp, options
):
    _, want = plain(folder, dp, even=True)
    for _, mine in emulate(by_hand, folder, tp, dp, options, mesh=(tp, 1, dp)):
        torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-6)


def drawn_unlike(folder, tp, dp, by_hand):
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, dp=dp).train()
    prompted = Prompted(folder)
    prompted.prompt.data += model.mesh.rank
    batch = prompted.batch(IDS[:2])
    model(**batch) if by_hand else model.train_step(batch)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2)])
def test_soft_prompt_values_that_differ_between_ranks_raise(folder, tp, dp, by_hand):
    with pytest.raises(MeshError, match=r"\[1\].* \[4, 32\] has other values|fed another batch"):
        emulate(drawn_unlike, folder, tp, dp, by_hand, mesh=(tp, 1, dp))


def with_a_perturbation(folder, dp):
    """Return the gradient of an input perturbation, which is no parameter and belongs to the rows of one rank."""
    model = AutoScheduledModel.from_pretrained(folder, dp=dp).train()
    rows = IDS.tensor_split(dp)[model.mesh.coord("dp")]
    batch = Prompted(folder, even=True).batch(rows)
    added = torch.zeros_like(batch["inputs_embeds"], requires_grad=True)
    model(**{**batch, "inputs_embeds": batch["inputs_embeds"].detach() + added}).loss.backward()
    return added.grad


def test_perturbation_of_input_embeddings_over_dp_gets_the_gradient_of_its_own_rows(folder):
    (whole,) = emulate(with_a_perturbation, folder, 1, mesh=(1, 1, 1))
    parts = emulate(with_a_perturbation, folder, 2, mesh=(1, 1, 2))
    torch.testing.assert_close(torch.cat(parts) / 2, whole)


METHODS = [
    peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16),
    peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, prefix_projection=True),
]


def method(folder, config, tp, pp, dp, options):
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp, dp=dp, **options).train()
    prompted = get_peft_model(model, copy.deepcopy(config))
    trained = {n: p for n, p in prompted.named_parameters() if p.requires_grad}
    for number, p in enumerate(trained.values()):
        generator = torch.Generator().manual_seed(number)
        p.data = 0.1 * torch.randn(p.shape, generator=generator)
    ids = IDS.tensor_split(dp)[model.mesh.coord("dp")]
    prompted(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    return {name: p.grad for name, p in trained.items()}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # by peft
@pytest.mark.parametrize("config", METHODS, ids=lambda config: config.peft_type.value)
@pytest.mark.parametrize(("tp", "dp", "sp"), [(1, 2, False), (2, 1, False), (2, 1, True)])
def test_peft_prompt_tuning_has_the_gradients_of_one_rank(folder, config, tp, dp, sp):
    (whole,) = emulate(method, folder, config, 1, 1, 1, {}, mesh=(1, 1, 1))
    options = {"sequence_parallel": sp}
    if tp > 1 and isinstance(config, peft.PrefixTuningConfig):
        with pytest.raises(SlapoError, match="past_key_values: the cache has all 4 heads"):
            emulate(method, folder, config, tp, 1, dp, options, mesh=(tp, 1, dp))
        return
    for found in emulate(method, folder, config, tp, 1, dp, options, mesh=(tp, 1, dp)):
        assert found.keys() == whole.keys()
        for name, grad in whole.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("pp", "dp", "options"), [(2, 1, {}), (1, 2, {"dp_shard": 2})], ids=["pp", "rows"]
)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_peft_prompt_tuning_with_pipeline_stages_is_refused(folder, pp, dp, options):
    """peft finds the embedding table by its size, and finds none on a later stage."""
    with pytest.raises(SlapoError, match="hint: call the model"):
        emulate(method, folder, METHODS[0], 1, pp, dp, options, mesh=(1, pp, dp))


def embeds_beside_the_model(folder):
    model = AutoScheduledModel.from_pretrained(folder, pp=2).requires_grad_(False)
    prompted = Prompted(folder)
    prompted.table = model.get_input_embeddings()
    model.train_step(prompted.batch(IDS))


def test_embedding_called_outside_its_pipeline_stage_raises_on_all_ranks(folder):
    """The stage that holds the embedding waits for the others, so it must receive their error."""
    began = time.monotonic()
    with pytest.raises(SlapoError, match="for inputs_embeds use an embedding of your own"):
        emulate(embeds_beside_the_model, folder, mesh=(1, 2, 1))
    assert time.monotonic() - began < 20


def with_peft(folder, pp):
    model = AutoScheduledModel.from_pretrained(folder, pp=pp)
    peft = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(SlapoError, match="no parameter and no input requires a gradient"):
        peft.train_step({"input_ids": IDS, "labels": IDS})


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_train_step_through_a_peft_wrapper_that_skips_its_prompt_is_refused(folder, pp):
    emulate(with_peft, folder, pp, mesh=(1, pp, 1))
