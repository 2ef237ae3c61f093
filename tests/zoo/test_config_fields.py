"""Fields of a config that change what a model computes, on layouts of two ranks, against one process in fp64."""

import pytest
import torch
import transformers

from parity import Case, batch_of, cast, changes_of, checkpoint, plain
from slapo_zoo import ArchitectureError, AutoScheduledModel
from slapo_zoo.zoo.table import image_tokens

TOKENS = ("tokens",)
LAYOUTS = {
    "1": {}, "tp2": {"tp": 2}, "sp": {"tp": 2, "sequence_parallel": True}, "dp_shard": {"dp": 2, "dp_shard": 2},
    "cp2": {"cp": 2}, "unpadded": {"kernels": ["unpadded_encoder"]},
}  # fmt: skip


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("fields")


def step(folder, case, layout):
    """Train one step; return its loss and the gradients, on rank 0."""
    options = {
        "dtype": "float64",
        "seed": 7,
        "auto_class": case.cls,
        **changes_of(case),
        **LAYOUTS[layout],
    }
    model = AutoScheduledModel.from_pretrained(folder, **options).train()
    batch = cast(batch_of(case), torch.float64)
    part, of = model.mesh.coord("batch"), model.mesh.size("batch")
    loss = model.train_step({k: v.tensor_split(of)[part] for k, v in batch.items()})
    return float(loss), model.consolidated_state_dict(grads=True)


def assert_same(found, want):
    losses, grads = zip(found, want, strict=True)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    largest = max(float(grad.abs().max()) for grad in grads[1].values())
    for name, grad in grads[1].items():
        torch.testing.assert_close(grads[0][name], grad, rtol=0, atol=1e-6 * largest, msg=name)


FIELDS = {
    "trained activation": (Case("GPT2LMHeadModel", TOKENS, (("activation_function", "prelu"),)), "sp"),
    "absolute positions": (Case("EsmForMaskedLM", TOKENS, (("position_embedding_type", "absolute"), ("token_dropout", False))), "cp2"),
    "chunks": (Case("BertForMaskedLM", TOKENS, (("chunk_size_feed_forward", 4),)), "unpadded"),
}  # fmt: skip


@pytest.mark.parametrize(("case", "layout"), FIELDS.values(), ids=FIELDS)
def test_models_with_nondefault_config_fields_have_the_gradients_of_plain_transformers(
    case, layout, root, threads
):
    folder = checkpoint(case, root)
    truth, ranks = plain(case, folder, torch.float64, "sdpa"), 2 - (layout == "unpadded")
    found = threads.run(step, ranks, folder, case, layout)[0]
    assert_same(found, (truth.losses[0], truth.grads))


def step_of_images(folder, layout):
    options = {"dtype": "float64", "auto_class": "ViTForImageClassification", **LAYOUTS[layout]}
    model = AutoScheduledModel.from_pretrained(folder, **options).train()
    pixels = torch.linspace(-1, 1, 4 * 3 * 12 * 16, dtype=torch.float64).sin().view(4, 3, 12, 16)
    batch = {"pixel_values": pixels, "labels": torch.arange(4) % 3}
    loss = model.train_step({**batch, "interpolate_pos_encoding": True})
    return float(loss), model.consolidated_state_dict(grads=True)


@pytest.mark.filterwarnings("ignore:.*not a multiple of tp")
def test_images_of_another_size_than_the_config_train_with_sequence_parallelism(root, threads):
    """The config's images have 10 tokens, which two ranks divide; those of the batch have 13."""
    case = Case("ViTForImageClassification", ("class",), (("num_labels", 3),))
    folder = checkpoint(case, root)
    assert_same(threads.run(step_of_images, 2, folder, "sp")[0], step_of_images(folder, "1"))


@pytest.mark.parametrize("sizes", [{"image_size": (12, 20), "patch_size": 4}, {"image_size": 20, "patch_size": (5, 4)}])  # fmt: skip
def test_token_count_of_a_non_square_image_uses_its_height_and_width(sizes):
    config = transformers.ViTConfig(
        **sizes, hidden_size=4, num_attention_heads=1, num_hidden_layers=1, intermediate_size=4
    )
    assert image_tokens(config) == transformers.ViTModel(config).embeddings.position_embeddings.shape[1]  # fmt: skip


LAYERDROP = {
    "opt": Case("OPTForCausalLM", TOKENS, (("layerdrop", 0.5), ("num_hidden_layers", 5))),
    "m2m_100": Case(
        "M2M100ForConditionalGeneration", TOKENS,
        (("encoder_layerdrop", 0.5), ("decoder_layerdrop", 0.5), ("encoder_layers", 4)),
    ),
    "jitter": Case("MixtralForCausalLM", TOKENS, (("router_jitter_noise", 0.5),)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layout"), [("opt", "tp2"), ("m2m_100", "dp_shard"), ("jitter", "tp2")]
)
def test_layerdrop_and_router_noise_on_two_ranks_equal_those_of_one_process(
    name, layout, root, threads
):
    """Ranks that skip different layers would wait for each other in different collectives."""
    case = LAYERDROP[name]
    folder = checkpoint(case, root)
    want = step(folder, case, "1")
    assert_same(threads.run(step, 2, folder, case, layout)[0], want)


@pytest.mark.parametrize("layout", ["sp", "cp2"])
def test_chunked_feed_forward_is_refused_where_ranks_shard_the_tokens(layout, root, threads):
    case = Case("BertForMaskedLM", TOKENS, (("chunk_size_feed_forward", 4),))
    with pytest.raises(ArchitectureError, match="chunk_size_feed_forward=0"):
        threads.run(step, 2, checkpoint(case, root), case, layout)
