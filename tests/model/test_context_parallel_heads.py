"""Context parallelism under heads that read a whole row: the blocks are sharded, the head and its loss get all tokens."""

import pytest
import torch
import transformers

from parity import Case, batch_of, tiny_config
from slapo_zoo import AutoScheduledModel, SlapoError, emulate

# head --> (labels, changes of the config, choices); how it reads a row
HEADS = {
    "BertForSequenceClassification": (("class",), {}, 0),  # by its first token, after a pooler
    "GPT2ForSequenceClassification": (("class",), {"pad_token_id": 0}, 0),  # by its last real token
    "ModernBertForSequenceClassification": (("class",), {"classifier_pooling": "mean"}, 0),
    "BartForSequenceClassification": (("class",), {}, 0),  # by the token that ends the text
    "GPT2ForQuestionAnswering": (("span",), {}, 0),  # by a softmax over all tokens
    "BertForPreTraining": (("tokens", "next"), {}, 0),
    "RobertaForMultipleChoice": (("choice",), {}, 3),
    "LlamaForSequenceClassification": (("number",), {"pad_token_id": 0, "num_labels": 1}, 0),
    "OPTForSequenceClassification": (("class",), {"pad_token_id": 0}, 0),
    "T5ForSequenceClassification": (("class",), {}, 0),
    "EsmForSequenceClassification": (("class",), {"token_dropout": False}, 0),
}  # fmt: skip
ONE_END = ("BartForSequenceClassification", "T5ForSequenceClassification")


def case_of(cls, dropout=0.1):
    labels, config, choices = HEADS[cls]
    config = (
        config if "num_labels" in config or "class" not in labels else {**config, "num_labels": 3}
    )
    config |= {"num_attention_heads": 4, "hidden_size": 32} if cls.startswith("Bert") else {}
    variant = ("eos",) if cls in ONE_END else ()
    return Case(cls, labels, tuple(config.items()), choices, dropout, variant=variant)


def of_outputs(output, _batch=None):
    """A loss of the outputs of all tokens beside the model's own."""
    shown = (x for x in output.values() if torch.is_tensor(x) and x.ndim > 1)
    rows = [x for x in shown if x.is_floating_point()]
    return output.loss + sum(x.square().mean() for x in rows)


def step(model, case, way, number):
    """Loss of one step; gradients are in .grad."""
    dp = model.mesh.place("dp")
    batch = {name: x.tensor_split(dp[0])[dp[1]] for name, x in batch_of(case, number).items()}
    if way in ("train_step", "loss_fn"):
        return float(model.train_step(batch, loss_fn=of_outputs if way == "loss_fn" else None))
    output = model(**batch)
    loss = of_outputs(output) if way == "outputs" else output.loss
    loss.backward()
    return float(loss.detach())


def trained(case, way="train_step", **layout):
    """Losses of two AdamW steps, first gradients, last norm and weights, then outputs in training and evaluation."""
    layout = {"dp": 1, "dtype": torch.float64, "seed": 3, "kernels": "reference", **layout}
    model = AutoScheduledModel.from_config(
        tiny_config(case)[0], auto_class=case.cls, **layout
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    losses, first = [], None
    for number in range(2):
        optimizer.zero_grad()
        losses.append(step(model, case, way, number))
        first = model.consolidated_state_dict(grads=True) if first is None else first
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
    shown = model.train_step(batch_of(case, 3), return_logits=True) if model.mesh.dp == 1 else {}
    with torch.no_grad():
        evaluated = model.eval()(**batch_of(case, 4))
    outputs = [
        x.detach() for each in (shown, evaluated) for x in each.values() if torch.is_tensor(x)
    ]
    return losses, first, float(norm), model.consolidated_state_dict(), outputs


def require_equal(found, expected):
    losses, grads, norm, weights, outputs = found
    assert losses == pytest.approx(expected[0], rel=1e-6)
    assert norm == pytest.approx(expected[2], rel=1e-6)
    for ours, one in ((grads, expected[1]), (weights, expected[3])):
        assert ours.keys() == one.keys()
        for name, x in one.items():
            torch.testing.assert_close(ours[name], x, rtol=1e-5, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")  # fmt: skip
    assert len(outputs) == len(expected[4]) > 1
    for ours, one in zip(outputs, expected[4], strict=True):
        torch.testing.assert_close(ours, one, rtol=1e-5, atol=1e-6)


QUICK = ("BertForSequenceClassification", "BartForSequenceClassification")


@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "cls", [cls if cls in QUICK else pytest.param(cls, marks=pytest.mark.slow) for cls in HEADS]
)
def test_models_with_a_pooling_head_and_cp_have_the_losses_of_one_process(cls, cp):
    case = case_of(cls)
    found = emulate(trained, case, mesh=(1, 1, cp), cp=cp)
    require_equal(found[0], trained(case))
    assert all(each[0] == found[0][0] for each in found)


# head, way to train, sizes of the mesh, options of the loader; the first three run always: cp beside tp, pp and dp
TOGETHER = [
    ("GPT2ForSequenceClassification", "train_step", {"cp": 2, "pp": 2}, {"micro_batches": 2}),
    ("BertForSequenceClassification", "loss", {"cp": 2, "tp": 2}, {"sequence_parallel": True}),
    ("BartForSequenceClassification", "outputs", {"cp": 2}, {"dp_shard": 2}),
    ("GPT2ForQuestionAnswering", "train_step", {"cp": 2, "dp": 2}, {"checkpoint_ratio": 1.0}),
    ("OPTForSequenceClassification", "loss_fn", {"cp": 2, "dp": 2}, {"micro_batches": 2}),
    ("BertForSequenceClassification", "train_step", {"cp": 2}, {"cp_attention": "ulysses"}),
    ("LlamaForSequenceClassification", "outputs", {"cp": 2, "tp": 2}, {"cp_attention": "ring"}),
    ("T5ForSequenceClassification", "train_step", {"cp": 2, "pp": 2, "tp": 2}, {"checkpoint_ratio": 0.5}),
    ("BertForPreTraining", "train_step", {"cp": 2, "dp": 2}, {"micro_batches": 2}),
    ("BartForSequenceClassification", "loss_fn", {"cp": 2, "pp": 2}, {"sequence_parallel": True}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "way", "sizes", "options"),
    [pytest.param(*row, marks=pytest.mark.slow if i > 2 else ()) for i, row in enumerate(TOGETHER)],
)
def test_pooling_heads_with_cp_and_tp_pp_or_dp_have_the_losses_of_one_process(
    cls, way, sizes, options
):
    case = case_of(cls)
    rows = sizes.get("dp", 1) * sizes["cp"]
    found = emulate(
        trained, case, way, mesh=(sizes.get("tp", 1), sizes.get("pp", 1), rows), **sizes, **options
    )
    if sizes.get("dp", 1) > 1:  # the last step's logits are those of a part of the rows there
        expected = trained(case, way)
        require_equal(
            (*found[0][:4], found[0][4] * 2), (*expected[:4], expected[4][-len(found[0][4]) :] * 2)
        )
    else:
        require_equal(found[0], trained(case, way))


@pytest.mark.parametrize(
    "cls",
    [
        "BartForSequenceClassification",
        pytest.param("BertForSequenceClassification", marks=pytest.mark.slow),
    ],
)
def test_pooling_heads_on_sequences_that_cp_does_not_divide_have_the_losses_of_one_process(cls):
    """cp=5 does not divide the twelve tokens: padding is added before the blocks and taken off before the head."""
    case = case_of(cls, dropout=0.0)
    require_equal(emulate(trained, case, mesh=(1, 1, 5), cp=5)[0], trained(case))


def refused(case, **options):
    """Errors of a load and of a step with cp."""
    try:
        model = AutoScheduledModel.from_config(
            tiny_config(case)[0], auto_class=case.cls, cp=2, dp=1
        )
        model.train()(**batch_of(case), **options)
    except SlapoError as error:
        return str(error)
    return "no error"


def test_pooling_head_with_cp_refuses_output_hidden_states_and_a_base_model_without_loss():
    hidden = emulate(refused, case_of("BertForSequenceClassification"), mesh=(1, 1, 2), output_hidden_states=True)  # fmt: skip
    assert "output_hidden_states" in hidden[0]
    assert "eval()" in hidden[0]
    base = Case("BertModel", ("class",))
    assert "no mean over tokens" in emulate(refused, base, mesh=(1, 1, 2))[0]


class LayersForSequenceClassification(transformers.BertForSequenceClassification):
    """Classifies by the mean of the last two layers, as users' heads do."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **options):
        found = self.bert(input_ids, attention_mask=attention_mask, output_hidden_states=True)
        states = torch.stack(found.hidden_states[-2:]).mean(0).mean(1)
        logits = self.classifier(states)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=logits)


def said(cls, batch, auto_class=None):
    """Text of the error of a step with cp."""
    config = tiny_config(case_of(cls))[0]
    model = AutoScheduledModel.from_config(config, auto_class=auto_class or cls, cp=2, dp=1).train()
    try:
        model.train_step(batch)
    except SlapoError as error:
        return str(error)
    return "no error"


def test_head_that_reads_hidden_states_of_inner_layers_is_refused_with_cp():
    """With cp the hidden states of inner layers cover only the tokens of the rank."""
    batch = batch_of(case_of("BertForSequenceClassification"))
    for found in emulate(said, "BertForSequenceClassification", batch, LayersForSequenceClassification, mesh=(1, 1, 2)):  # fmt: skip
        assert "a batch with cp > 1: output_hidden_states=True" in found
        assert "cp=1" in found


def test_pooling_head_with_cp_refuses_encoder_outputs_passed_in_the_batch():
    batch = batch_of(case_of("BartForSequenceClassification"))
    states = torch.zeros(*batch["input_ids"].shape, 30)
    for found in emulate(said, "BartForSequenceClassification", {**batch, "encoder_outputs": (states,)}, mesh=(1, 1, 2)):  # fmt: skip
        assert "encoder_outputs" in found
        assert "cp=1" in found


def test_position_ids_with_cp_and_a_pooling_head_work_for_one_document_and_raise_for_packed_ones():
    """A mask that hides the padding makes transformers ignore the positions that separate documents."""

    def loss_of(size, **layout):
        case = case_of("GPT2ForSequenceClassification", dropout=0.0)
        layout = {"dp": 1, "dtype": torch.float64, "seed": 3, "kernels": "reference", **layout}
        model = AutoScheduledModel.from_config(tiny_config(case)[0], auto_class=case.cls, **layout)
        batch = batch_of(case)
        del batch["attention_mask"]
        ids = batch.pop("input_ids").clamp(min=3)
        places = (torch.arange(ids.shape[1]) % size).expand(ids.shape).contiguous()
        try:
            return float(model.train().train_step({"input_ids": ids, "position_ids": places, **batch}))  # fmt: skip
        except SlapoError as error:
            return str(error)

    one_document = emulate(loss_of, 12, cp=5, mesh=(1, 1, 5))
    assert one_document == pytest.approx([loss_of(12)] * 5, rel=1e-6)
    for found in emulate(loss_of, 7, cp=5, mesh=(1, 1, 5)):
        assert "lets packed documents see each other" in found
        assert "pad the rows to a multiple of 5" in found
