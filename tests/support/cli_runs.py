"""Helpers for tests of the command line: a tokenizer without a download, and the error of a command."""

import pytest

from slapo_zoo.cli.main import main

END = "<|endoftext|>"
WORDS = [
    "to",
    "be",
    "or",
    "not",
    "that",
    "is",
    "the",
    "question",
    "whether",
    "nobler",
    "in",
    "mind",
    "suffer",
    "slings",
    "arrows",
]


def tokenizer(more=(), **special):
    """Make a byte tokenizer, with special tokens by role, and `more` without one."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.train_from_iterator(
        ["to be or not to be"],
        trainers.BpeTrainer(
            special_tokens=[*special.values(), *more], show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=raw, **special)


class Letters:
    """A tokenizer of bytes."""

    def __init__(self, eos=None, cls=None, sep=None):
        self.eos_token_id, self.cls_token_id, self.sep_token_id = eos, cls, sep
        self.mask_token, self.mask_token_id = "[MASK]", 2

    def __len__(self):
        return 1000

    def __call__(self, texts, **options):
        return {"input_ids": [list(text.encode()) for text in texts]}

    def get_special_tokens_mask(self, ids, already_has_special_tokens):
        return [int(token < 3) for token in ids]

    def convert_tokens_to_ids(self, token):
        return self.mask_token_id


def failure(capsys, *arguments):
    """Return what a command that must fail prints on stderr."""
    with pytest.raises(SystemExit) as caught:
        main(list(map(str, arguments)))
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err


def run(*arguments):
    """Run a command that must succeed, in this process."""
    with pytest.raises(SystemExit) as caught:
        main(list(map(str, arguments)))
    assert not caught.value.code


def write_gpt2(folder, **changes):
    """Save a small GPT-2 with a byte tokenizer; return the folder."""
    from transformers import GPT2Config, GPT2LMHeadModel, set_seed

    set_seed(0)
    words = tokenizer(eos_token=END)
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": len(words),
             "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
    for part in (GPT2LMHeadModel(GPT2Config(**sizes | changes)), words):
        part.save_pretrained(folder)
    return folder


def sentences(count):
    """Sentences of 3 to 11 words, which differ from row to row."""
    return [" ".join(WORDS[(i * 7 + j * j) % len(WORDS)] for j in range(3 + i % 9)) for i in range(count)]  # fmt: skip


def write_bert(folder):
    """A small BERT with a tokenizer of bytes; returns the folder."""
    from transformers import BertConfig, BertModel, set_seed

    set_seed(0)
    words = tokenizer(cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]", pad_token="[PAD]")
    config = BertConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=48,
        max_position_embeddings=64, vocab_size=len(words), pad_token_id=words.pad_token_id,
    )  # fmt: skip
    for part in (BertModel(config), words):
        part.save_pretrained(folder)
    return str(folder)


def write_t5(folder):
    """A small T5 with sentinels and a tokenizer of bytes; returns the folder."""
    from transformers import T5Config, T5ForConditionalGeneration, set_seed

    set_seed(0)
    marks = [f"<extra_id_{i}>" for i in range(10)]
    words = tokenizer(marks, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    config = T5Config(
        d_model=32, num_heads=4, d_kv=8, d_ff=48, num_layers=2, vocab_size=len(words),
        decoder_start_token_id=words.pad_token_id, pad_token_id=words.pad_token_id,
        eos_token_id=words.eos_token_id,
    )  # fmt: skip
    for part in (T5ForConditionalGeneration(config), words):
        part.save_pretrained(folder)
    return str(folder)
