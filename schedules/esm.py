"""Sharding rules for ESM-2: pre-norm BERT with rotary positions and a bias on the logits.

In shapes: D hidden, F ffn, V vocabulary, P positions; n is the number of tp ranks. A head is never split,
so ranks may have unequal numbers of heads.
"""

from slapo_zoo.zoo.rules import attention, column, enter, enter_once, row, vocab, vocab_bias, vocab_head, whole
from slapo_zoo.zoo.table import Table, register

ESM = register(
    Table(
        model_type="esm",
        source="transformers 5.23.0, models/esm/modeling_esm.py",
        dims={"num_heads": "num_attention_heads", "head_dim": "hidden_size // num_attention_heads"},
        body=(
            # module                                     rule                     per rank
            ("embeddings.word_embeddings",               vocab),                # [ceil(V/n), D], y summed over tp
            ("embeddings.position_embeddings",           whole),                # [P, D], where positions are not rotary
            ("embeddings.layer_norm",                    whole),                # [D]
            ("encoder.layer.*.*ttention.LayerNorm",      whole),                # [D]
            ("encoder.layer.*.*ttention.self",           enter),                # dx summed over tp
            ("encoder.layer.*.*ttention.self",           attention("num_heads", ("num_attention_heads", ""), ("all_head_size", "head_dim"))),
            ("encoder.layer.*.crossattention.self.key",  enter_once),           # d(encoder states) summed over tp
            ("encoder.layer.*.crossattention.self.value", enter_once),
            ("encoder.layer.*.*ttention.self.query",     column(0, "head_dim")),  # [D/n, D]
            ("encoder.layer.*.*ttention.self.key",       column(0, "head_dim")),  # [D/n, D]
            ("encoder.layer.*.*ttention.self.value",     column(0, "head_dim")),  # [D/n, D]
            ("encoder.layer.*.*ttention.output.dense",   row(1, "head_dim")),   # [D, D/n], y summed over tp
            ("encoder.layer.*.LayerNorm",                whole),                # [D]
            ("encoder.layer.*.intermediate",             enter),                # dx summed over tp
            ("encoder.layer.*.intermediate.dense",       column(0)),            # [F/n, D]
            ("encoder.layer.*.output.dense",             row(1)),               # [D, F/n], y summed over tp
            ("encoder.emb_layer_norm_after",             whole),                # [D]
            ("pooler.dense",                             whole),                # [D, D]
            ("contact_head.regression",                  whole),                # [1, heads of all layers]; no loss trains it
        ),
        heads=(
            ("lm_head",                                  vocab_bias("decoder")),  # bias [ceil(V/n)]
            ("lm_head.dense",                            whole),                # [D, D]
            ("lm_head.layer_norm",                       whole),                # [D]
            ("lm_head.decoder",                          vocab_head),           # [ceil(V/n), D], tied to word_embeddings
        ),
        blocks=("encoder.layer.*",),
        cut_tokens={"EsmForMaskedLM": "counted real"},
        defaults={
            "vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "token_dropout": True, "position_embedding_type": "rotary",
        },
        renames=(("encoder.layer.*.attention.self.rotary_embeddings.", "rotary_embeddings."),),  # each layer had its own
    )
)  # fmt: skip
