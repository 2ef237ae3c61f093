"""Models of one program share a dry run: ranks that are threads, and later models; other programs make their own."""

import pytest
import torch
import transformers
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from slapo_zoo import AutoScheduledModel, emulate, extend
from slapo_zoo.pipeline import dry_run, pipeline_runtime

CONFIG = transformers.GPT2Config(
    n_embd=16, n_head=2, n_layer=2, vocab_size=17, n_positions=16, bos_token_id=0, eos_token_id=0,
    architectures=["GPT2LMHeadModel"],
)  # fmt: skip


@pytest.fixture
def runs(monkeypatch):
    """Return the list of dry runs that were made, one entry each."""
    made, run = [], pipeline_runtime.dry_run
    monkeypatch.setattr(dry_run, "_calls", {})
    monkeypatch.setattr(
        pipeline_runtime, "dry_run", lambda *args: (made.append(args[0]), run(*args))[1]
    )
    return made


def loss(tokens=8, tp=1, **options):
    model = AutoScheduledModel.from_config(CONFIG, tp=tp, pp=2, seed=0, **options).train()
    ids = torch.arange(4 * tokens).view(4, tokens) % 17
    return float(model.train_step({"input_ids": ids, "labels": ids}, micro_batches=2))


def test_ranks_run_as_threads_and_later_equal_models_share_one_dry_run(runs):
    first = emulate(loss, mesh=(1, 2, 1))
    assert len(runs) == 1
    assert emulate(loss, mesh=(1, 2, 1)) == first
    assert len(runs) == 1
    emulate(loss, 8, 2, mesh=(2, 2, 1))
    assert len(runs) == 3, "one for each coordinate on tp"


T5 = transformers.T5Config(
    d_model=16, d_kv=8, d_ff=32, num_heads=2, num_layers=2, vocab_size=17, eos_token_id=1, pad_token_id=0, decoder_start_token_id=0, num_labels=3,
    architectures=["T5ForSequenceClassification"],
)  # fmt: skip


def losses_of_t5():
    model = AutoScheduledModel.from_config(T5, pp=2, seed=0).train()
    losses = []
    for step in range(3):
        ids = torch.arange(32).view(4, 8) * (step + 3) % 15 + 2
        ids[:, 3 + step] = 1  # the head reads where each row ends
        batch = {"input_ids": ids, "labels": torch.arange(4) % 3}
        losses.append(float(model.train_step(batch, micro_batches=2)))
    return losses


def test_t5_classifier_whose_head_reads_its_inputs_makes_one_dry_run_for_three_batches(runs):
    assert len(set(emulate(losses_of_t5, mesh=(1, 2, 1))[0])) == 3
    assert len(runs) == 1


def relu(sch):
    sch["transformer.h.*.mlp.act"].replace(torch.nn.ReLU())


def longer(monkeypatch):
    return {"tokens": 6}


def other_code(monkeypatch):
    plain = GPT2Block.forward
    monkeypatch.setattr(
        GPT2Block, "forward", lambda self, *args, **more: plain(self, *args, **more)
    )
    return {}


def other_config(monkeypatch):
    monkeypatch.setattr(CONFIG, "n_inner", 24)
    return {}


@pytest.mark.parametrize("change", [longer, other_code, other_config])
def test_dry_run_is_repeated_if_shapes_code_or_config_of_two_models_differ(
    change, runs, monkeypatch
):
    emulate(loss, mesh=(1, 2, 1))
    options = change(monkeypatch)
    emulate(loss, *options.values(), mesh=(1, 2, 1))
    assert len(runs) == 2


def test_dry_run_is_repeated_if_the_user_schedule_inserts_a_python_module(runs):
    emulate(loss, schedule=extend(relu), mesh=(1, 2, 1))
    assert len(runs) == 2
