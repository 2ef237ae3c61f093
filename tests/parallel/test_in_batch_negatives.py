"""In-batch negatives over dp: loss and gradients equal plain transformers on the full batch."""

import pytest
import torch
from torch.nn import functional

from slapo_zoo import AutoScheduledModel
from slapo_zoo.cli.training.options import ConfigError, TrainOptions
from slapo_zoo.parallel.losses.in_batch_negatives import InBatchNegatives
from tiny_models import BASE

QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def test_contrastive_training_with_one_pair_per_batch_is_refused():
    from slapo_zoo.cli.training.checks import check_pairs

    with pytest.raises(ConfigError, match="--batch-size: found 1, expected more"):
        check_pairs(TrainOptions("m", batch_size=1))


def pairs():
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 99, (8, 12), generator=g)  # four pairs
    mask = (torch.arange(12) < torch.randint(4, 13, (8, 1), generator=g)).long()
    return {"input_ids": ids, "attention_mask": mask}


def plain(folder):
    """Return loss and gradients of plain transformers, written without this package."""
    from transformers import BertModel

    model, batch = BertModel.from_pretrained(folder).train(), pairs()
    hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
    texts = functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    scores = 20.0 * texts[0::2] @ texts[1::2].T
    loss = functional.cross_entropy(scores, torch.arange(4))
    loss.backward()
    return float(loss.detach()), {
        n: p.grad for n, p in model.named_parameters() if p.grad is not None
    }


def scheduled(folder, tp, pp):
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp, auto_class="AutoModel").train()
    mesh = model.mesh
    batch = {k: v.chunk(mesh.dp)[mesh.coord("dp")] for k, v in pairs().items()}
    loss = model.train_step(batch, micro_batches=1, loss_fn=InBatchNegatives(mesh))
    return float(loss), model.consolidated_state_dict(grads=True)


@pytest.mark.parametrize(
    ("tp", "pp", "world"),
    [
        (1, 1, 2), (2, 1, 4), (1, 2, 4),
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in ((1, 1, 4), (2, 2, 4))),
    ],
)  # fmt: skip
def test_contrastive_loss_over_dp_has_the_gradients_of_the_full_batch(
    tp, pp, world, tmp_path, threads
):
    from transformers import BertConfig, BertModel

    BertModel(BertConfig(**BASE, **QUIET)).save_pretrained(tmp_path)
    loss, gradients = plain(tmp_path)
    found = threads.run(scheduled, world, str(tmp_path), tp, pp)
    assert [one for one, _ in found] == pytest.approx([loss] * world, rel=1e-5)
    mine = found[0][1]
    assert gradients.keys() <= mine.keys()
    for name, grad in mine.items():
        wanted = gradients.get(name)
        if wanted is None:
            assert grad is None or not grad.any(), name
        else:
            torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-6, msg=name)
