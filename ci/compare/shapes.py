"""Models of well-known widths with random weights, for comparisons without a download."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

MASKED = 0.15  # share of masked tokens


@dataclass(frozen=True)
class Work:
    """Task of every compared library: the same checkpoint and batch.

    Args:
        folder: folder of the checkpoint.
        batch_size: rows of the batch.
        seq_len: tokens of a row.
        tp: ranks of the contenders that shard model or batch, and threads of the others.
        seed: seed of weights and tokens.
    """

    folder: str
    batch_size: int
    seq_len: int
    tp: int = 2
    seed: int = 0

    def batch(self, config: Any) -> dict[str, Any]:
        """Return random tokens [batch_size, seq_len] with labels: all tokens, or 15 % of them for a masked-language
        model.
        """
        import torch

        generator = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(config.vocab_size, (self.batch_size, self.seq_len), generator=generator)
        labels = ids.clone()
        if (config.architectures or [""])[0].endswith("ForMaskedLM"):
            order = torch.rand(ids.shape, generator=generator).argsort(-1)  # equally many per row
            labels[order >= max(round(MASKED * self.seq_len), 1)] = -100
        return {"input_ids": ids, "labels": labels}


def shape(name: str, quick: bool) -> Any:
    """Return a config with the widths of a known model and 4 layers, without dropout.

    Args:
        name: "bert", "gpt2" or "llama".
        quick: take tiny widths, to see whether the comparison runs at all.
    """
    import transformers

    if name == "bert":
        config: Any = transformers.BertConfig(
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
        config.architectures = ["BertForMaskedLM"]
        config.num_hidden_layers = 4
    elif name == "gpt2":
        config = transformers.GPT2Config(embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
        config.architectures, config.n_layer = ["GPT2LMHeadModel"], 4
    else:
        config = transformers.LlamaConfig(
            hidden_size=768, intermediate_size=2048, num_attention_heads=12, num_key_value_heads=4,
            num_hidden_layers=4, max_position_embeddings=512,
        )  # fmt: skip
        config.architectures = ["LlamaForCausalLM"]
    return _tiny(config) if quick else config


def _tiny(config: Any) -> Any:
    sizes = {"vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 2}
    sizes["n_inner" if config.model_type == "gpt2" else "intermediate_size"] = 96
    for name, value in sizes.items():
        setattr(config, name, value)
    if config.model_type == "llama":
        config.head_dim = 4
    config.bos_token_id, config.eos_token_id = 1, 2
    return config


def write(config: Any, folder: Path, seed: int) -> None:
    """Write a checkpoint with random weights from `seed`, saved by plain `transformers`."""
    import torch
    import transformers

    torch.manual_seed(seed)
    getattr(transformers, config.architectures[0])(config).save_pretrained(folder)
