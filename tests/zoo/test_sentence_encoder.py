"""Sentence encoder with its tokenizer, saved as transformers 4 did: equal embeddings in every layout."""

import ast
import importlib.util
import shutil
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slapo_zoo import AutoScheduledModel

LAYOUTS = {"tp1": (1, 1), "tp2": (2, 1), "tp3": (3, 1), "tp4": (4, 1), "pp2": (1, 2), "tp2-pp2": (2, 2)}  # fmt: skip
ENOUGH = 60  # sentences
# A file of transformers 4 holds this buffer, which is non-persistent now.
LEFTOVERS = {"embeddings.position_ids"}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


@cache
def sentences():
    """First lines of the docstrings of standard library modules, in alphabetical order."""
    found = []
    for name in sorted(sys.stdlib_module_names):
        spec = importlib.util.find_spec(name) if not name.startswith("_") else None
        if spec is not None and spec.has_location and spec.origin.endswith(".py"):
            doc = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
            found += [line for line in doc.splitlines()[:1] if " " in line]
        if len(found) == ENOUGH:
            break
    return found


def word_pieces():
    """A tokenizer as BERT has one, trained on the sentences."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    found = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    found.normalizer = normalizers.BertNormalizer()
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=SPECIAL, show_progress=False)
    found.train_from_iterator(sentences(), trainer)
    found.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The checkpoint: six blocks of twelve heads, and words large enough that sentences differ."""
    from transformers import BertConfig, BertModel

    place, words = tmp_path_factory.mktemp("encoder"), word_pieces()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1999, hidden_size=192, num_attention_heads=12, num_hidden_layers=6,
        intermediate_size=768, max_position_embeddings=128, initializer_range=0.05,
    )  # fmt: skip
    model = BertModel(config)
    model.embeddings.word_embeddings.weight.data *= 5
    model.save_pretrained(place)
    words.save(str(place / "tokenizer.json"))
    file = place / "model.safetensors"
    save_file(
        load_file(file) | dict.fromkeys(LEFTOVERS, torch.arange(128)[None]), file, {"format": "pt"}
    )
    return place


@pytest.fixture(scope="module")
def tokens(folder):
    """The sentences as one padded batch."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(128)
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(sentences())
    names = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    return {k: torch.tensor([getattr(e, of) for e in encoded]) for k, of in names.items()}


def embed(model, batch):
    """Mean of the hidden states over the mask, of length 1."""
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


@pytest.fixture(scope="module")
def plain(folder, tokens):
    """Embeddings of plain transformers, and what it saves itself."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    return embed(model, tokens), {*model.state_dict()}


def embed_and_save(folder, out, batch, tp, pp):
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp)
    assert not model.training
    model.save_pretrained(out)
    return embed(model, batch), model.ledger, type(model).__name__


def test_sentences_of_the_encoder_tests_are_padded_and_have_distinct_embeddings(tokens, plain):
    assert len(set(sentences())) == ENOUGH >= 50
    assert tokens["attention_mask"].sum(1).min() < tokens["input_ids"].shape[1]  # padded
    found = plain[0]
    assert torch.allclose(found.norm(dim=-1), torch.ones(ENOUGH))
    similarity = found @ found.T - torch.eye(ENOUGH)
    assert similarity.max() < 0.98  # they differ, or a comparison would tell nothing


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sentence_encoder_on_a_mesh_has_the_embeddings_and_files_of_plain_transformers(
    layout, threads, folder, tokens, plain, tmp_path
):
    tp, pp = LAYOUTS[layout]
    results = threads.run(embed_and_save, tp * pp, folder, tmp_path / "out", tokens, tp, pp)
    want, names = plain
    for found, ledger, name in results:  # the output is on every rank
        assert name == "BertModel"
        assert float((found - want).abs().max()) <= 1e-5
        assert ledger.bytes_read <= 1.02 * ledger.shard_bytes
        assert ledger.newly_initialized == []
        assert ledger.unexpected == []
    _bit_identical(folder, tmp_path / "out", names)
    shutil.rmtree(tmp_path / "out")


def _bit_identical(folder, out, names):
    """All tensors of the source under its keys, but the buffer that transformers 5 drops too."""
    saved = load_file(out / "model.safetensors")
    source = load_file(folder / "model.safetensors")
    assert saved.keys() == names
    assert saved.keys() == source.keys() - LEFTOVERS
    for name, tensor in saved.items():
        assert tensor.dtype == source[name].dtype
        assert torch.equal(tensor, source[name]), name


def test_ranks_loading_a_sentence_encoder_together_read_each_byte_of_the_file_once(ranks, folder):
    """Every rank reads only its own shard: a fourth of the vocabulary rows, its own heads, and so on."""
    source = load_file(folder / "model.safetensors")
    total = sum(tensor.nbytes for name, tensor in source.items() if name not in LEFTOVERS)
    results = ranks.run(ledger_of, 4, folder)
    read = [ledger.bytes_read for ledger in results]
    assert all(size < 0.28 * total for size in read)
    assert total < sum(read) < 1.08 * total  # positions, norms and the pooler are on all ranks


def ledger_of(folder):
    return AutoScheduledModel.from_pretrained(folder, tp=4).ledger
