"""max_load_memory: a shard that is too large is refused before it is allocated."""

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from slapo_zoo import AutoScheduledModel
from slapo_zoo.errors import RankError, WeightsError

CONFIG = GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=20, n_positions=4, bos_token_id=1, eos_token_id=2)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    GPT2LMHeadModel(CONFIG).save_pretrained(path)
    return path


def test_max_load_memory_argument_below_the_shard_size_is_refused(folder):
    size = AutoScheduledModel.from_pretrained(folder).ledger.shard_bytes
    AutoScheduledModel.from_pretrained(folder, max_load_memory=size)
    with pytest.raises(WeightsError, match=r"max_load_memory: found .*: 1 B more[\s\S]*more ranks"):
        AutoScheduledModel.from_pretrained(folder, max_load_memory=size - 1)


def load(folder, limit):
    with pytest.raises((WeightsError, RankError), match=r"rank 0[\s\S]*max_load_memory: found"):
        AutoScheduledModel.from_pretrained(folder, pp=2, max_load_memory=limit)


def test_max_load_memory_argument_exceeded_on_one_rank_raises_on_all_ranks(ranks, folder):
    """The first stage holds the embeddings, the second only a head tied to them."""
    plain = AutoScheduledModel.from_pretrained(folder)
    sizes = {name: p.nbytes for name, p in plain.named_parameters()}
    block = sum(size for name, size in sizes.items() if ".h.0." in name)
    first = block + sizes["transformer.wte.weight"] + sizes["transformer.wpe.weight"]
    ranks.run(load, 2, folder, first - 1)


def load_shared(folder):
    options = {"dp_shard": 2, "precision": "bf16", "dtype": "auto"}
    size = AutoScheduledModel.from_pretrained(folder, **options).ledger.shard_bytes
    AutoScheduledModel.from_pretrained(folder, max_load_memory=size, **options)
    with pytest.raises((WeightsError, RankError), match=r"max_load_memory: found[\s\S]*dp_shard"):
        AutoScheduledModel.from_pretrained(folder, max_load_memory=size - 1, **options)
    return size


def test_max_load_memory_argument_counts_only_the_dp_shard_of_a_rank(ranks, folder):
    """Each of two ranks holds half of the fp32 master weights."""
    plain = sum(p.nbytes for p in GPT2LMHeadModel(CONFIG).parameters())
    for size in ranks.run(load_shared, 2, folder):
        assert plain / 2 <= size <= 1.1 * plain / 2
