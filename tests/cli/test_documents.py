"""Packed documents do not attend to each other, in every family that `train` packs."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slapo_zoo import AutoScheduledModel
from slapo_zoo.cli.training.inputs import TELL_APART
from slapo_zoo.data.tasks import Causal
from tiny_models import BASE, MODELS

LENGTHS = (5, 7, 3, 9)


def small(family):
    settings = BASE if family == "gpt_neox" else MODELS[family][1]
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).eval()


@pytest.mark.parametrize("family", sorted(TELL_APART))
@pytest.mark.parametrize("trains", [True, False], ids=["train", "evaluate"])
def test_packed_documents_with_document_masks_have_the_loss_of_separate_documents(
    family, trains, tmp_path
):
    plain = small(family)
    plain.config.update({name: 0.0 for name in vars(plain.config) if "dropout" in name or "pdrop" in name})  # fmt: skip
    plain.save_pretrained(tmp_path)
    ids = torch.randint(3, 99, (sum(LENGTHS),))
    total = count = 0.0
    for document in ids.split(LENGTHS):
        with torch.no_grad():
            loss = plain(input_ids=document[None], labels=document[None], use_cache=False).loss
        total, count = total + float(loss) * (len(document) - 1), count + len(document) - 1
    rows = {"input_ids": [ids], "lengths": [LENGTHS]}
    batch = Causal(None, sum(LENGTHS), document_masks=True).collate(rows, torch.Generator())
    model = AutoScheduledModel.from_pretrained(tmp_path)
    if trains:
        found = model.train().train_step(batch)
    else:
        with torch.no_grad():
            found = model.eval()(**batch, use_cache=False).loss
    assert float(found) == pytest.approx(total / count, rel=1e-5)
