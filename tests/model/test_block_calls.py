"""Blocks of a model sharded over dp, called alone or recomputed by torch's checkpoint."""

import pytest
import torch
import transformers

from mixed_precision import BERT
from parity import batch_of, checkpoint
from slapo_zoo import AutoScheduledModel
from slapo_zoo.errors import MeshError


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return checkpoint(BERT, tmp_path_factory.mktemp("blocks"))


def kept_by_hooks_around(folder, layout):
    """Count the tensors that saved-tensor hooks around a forward keep, in a model whose blocks are sharded over dp."""
    model = AutoScheduledModel.from_pretrained(folder, **layout).train()
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
    batch = batch_of(BERT)
    with hooks:
        loss = model(**batch).loss
    loss.backward()
    return len(kept), loss.item()


def test_saved_tensor_hooks_of_the_user_see_the_activations_of_zero3_blocks(folder, ranks):
    """Hooks such as torch's `save_on_cpu` around a block see all saved tensors but the gathered weights."""
    whole, want = ranks.run(kept_by_hooks_around, 2, folder, {"dp": 2})[0]
    found, loss = ranks.run(kept_by_hooks_around, 2, folder, {"dp": 2, "dp_shard": 2})[0]
    assert loss == want
    assert found > 0.6 * whole, "what blocks keep passed by the hooks"


ALONE = [  # path, words of the refusal
    ("bert.encoder.layer.0.attention", "BertAttention is called outside"),
    ("bert.encoder.layer.0.intermediate", "BertIntermediate is called outside"),
    ("bert.embeddings", "BertEmbeddings is called outside"),
]


def called_alone(folder, stage, path):
    model = AutoScheduledModel.from_pretrained(folder, dp=2, dp_shard=2, zero_stage=stage)
    width = model.config.hidden_size
    x = torch.zeros(1, 4, dtype=torch.int64) if "embed" in path else torch.zeros(1, 4, width)
    try:
        model.get_submodule(path)(x)
    except MeshError as error:
        return str(error)
    return "it ran"


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("path", "words"), ALONE)
def test_direct_call_of_attention_or_embeddings_alone_under_zero_is_refused(
    path, words, stage, folder, threads
):
    for said in threads.run(called_alone, 2, folder, stage, path):
        assert words in said
        assert "hint" in said


def layer_alone(folder, options):
    """Take two SGD steps on one block, then return the loss of a full step, on this dp rank's inputs."""
    if options is None:
        model = transformers.BertForMaskedLM.from_pretrained(folder).train()
    else:
        model = AutoScheduledModel.from_pretrained(folder, **options).train()
        model.input_check_interval = 0  # the ranks get the same rows in the end
    layer, said = model.bert.encoder.layer[1], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(4, 6, model.config.hidden_size, generator=torch.Generator().manual_seed(3))
    mine = inputs if options is None else inputs.chunk(2)[model.mesh.coord("dp")]
    for _ in range(2):
        optimizer.zero_grad()
        out = layer(mine)
        loss = (out[0] if isinstance(out, tuple) else out).square().mean()
        loss.backward()
        optimizer.step()
    batch = batch_of(BERT)
    whole = model.eval()(**batch).loss if options is None else model.eval().train_step(batch)
    said.append(whole.item())
    return said


@pytest.mark.parametrize("stage", [1, 3])
def test_block_trained_by_direct_calls_under_zero_has_the_losses_of_one_process(
    stage, folder, ranks
):
    """Weights that were gathered ahead for a block alone are not read after the optimizer has stepped."""
    want = layer_alone(folder, None)
    for found in ranks.run(layer_alone, 2, folder, {"dp": 2, "dp_shard": 2, "zero_stage": stage}):
        assert found == pytest.approx(want, rel=1e-5)


def with_a_block_of_another_model(folder):
    """Return the error of a forward of a model, one of whose blocks is that of another model."""
    one, other = (AutoScheduledModel.from_pretrained(folder, dp_shard=2).train() for _ in range(2))
    other.bert.encoder.layer[1] = one.bert.encoder.layer[1]
    with pytest.raises(MeshError) as caught:
        other(**batch_of(BERT))
    return str(caught.value)


def test_block_that_two_models_share_is_refused_under_zero(folder, ranks):
    """With tp beside, gradients of its replicated heads would be summed over tp once for each model."""
    for said in ranks.run(with_a_block_of_another_model, 2, folder):
        assert "or a block were replaced since the load" in said


def with_the_encoder_of_another_model(make):
    """Return the losses of two models that share one encoder and train together."""
    one, other = make().eval(), make().eval()
    other.bert.encoder = one.bert.encoder
    optimizer = torch.optim.SGD({*one.parameters(), *other.parameters()}, lr=0.5)
    losses = []
    for _ in range(3):
        loss = one(**batch_of(BERT)).loss + other(**batch_of(BERT)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def loaded_twice(folder, mesh):
    return with_the_encoder_of_another_model(
        lambda: AutoScheduledModel.from_pretrained(folder, **mesh)
    )


def test_encoder_that_two_sharded_models_share_has_the_losses_of_plain_transformers(
    folder, threads
):
    want = with_the_encoder_of_another_model(
        lambda: getattr(transformers, BERT.cls).from_pretrained(folder)
    )
    for found in threads.run(loaded_twice, 2, folder, {"tp": 2}):
        assert found == pytest.approx(want, rel=1e-4)
