"""Experts sharded over tp: one file key per expert, the default kernel, and the auxiliary loss."""

from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from parity import LAYOUTS, Case, batch_of, checkpoint, tiny_config
from slapo_zoo import AutoScheduledModel
from slapo_zoo.errors import MeshError, SlapoError

CASE = Case("MixtralForCausalLM", ("tokens",))
AUX = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "experts_implementation": "eager"}
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint(CASE, tmp_path_factory.mktemp("mixtral"))


def load(folder, layout=(1, 1, 1), **options):
    tp, pp, dp = layout[:3]
    return AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp, dp=dp, **options)


def load_and_save(folder, layout, out):
    model = load(folder, layout)
    model.save_pretrained(out)
    return model.ledger


@pytest.mark.parametrize("layout", ["1x1x1", "4x1x1", "2x2x1", "2x1x2"])
def test_mixtral_saved_on_a_mesh_has_the_expert_tensors_of_plain_transformers(
    folder, layout, ranks, tmp_path
):
    sizes = LAYOUTS[layout]
    ledgers = ranks.run(
        load_and_save, sizes[0] * sizes[1] * sizes[2], folder, sizes, tmp_path / "o"
    )
    want, found = load_file(folder / FILE), load_file(tmp_path / "o" / FILE)
    assert found.keys() == want.keys()
    assert any(".block_sparse_moe.experts.4.w2." in key for key in found)
    assert all(torch.equal(found[key], want[key]) for key in want)
    for ledger in ledgers:  # no byte of another rank's experts; a padded vocabulary is never read
        assert ledger.bytes_read <= ledger.shard_bytes
        assert not ledger.newly_initialized
        assert not ledger.unexpected


def test_checkpoint_with_experts_fused_into_one_tensor_loads_with_equal_parameters(
    folder, tmp_path
):
    """The file holds experts as `state_dict()` does, fused into one tensor."""
    plain = tiny_config(CASE)[1].from_pretrained(folder)
    save_file({k: v.contiguous() for k, v in plain.state_dict().items()}, tmp_path / FILE)
    plain.config.save_pretrained(tmp_path)
    model = load(tmp_path, auto_class=CASE.cls)
    assert not model.ledger.unexpected
    for name, parameter in plain.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_load_of_a_checkpoint_with_a_missing_expert_raises(folder, tmp_path):
    weights = load_file(folder / FILE)
    gone = next(key for key in weights if ".experts.3.w3" in key)
    save_file({key: tensor for key, tensor in weights.items() if key != gone}, tmp_path / FILE)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(SlapoError, match=r"experts\.3\.w3"):
        load(tmp_path)


def one_step(folder, layout, options, batch):
    model = load(folder, layout, **options).train()
    loss = float(model.train_step(batch))
    return loss, model.consolidated_state_dict(grads=True)


@cache
def plain_step(folder, options):
    cls = tiny_config(CASE)[1]
    model = cls.from_pretrained(folder, **dict(options)).train()
    loss = model(**batch_of(CASE)).loss
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


def compare(folder, options, threads, layout):
    loss, grads = plain_step(folder, tuple(options.items()))
    results = threads.run(one_step, layout[0] * layout[1], folder, layout, options, batch_of(CASE))
    assert [found for found, _ in results] == pytest.approx([loss] * len(results), rel=1e-5)
    for name, grad in grads.items():
        torch.testing.assert_close(results[0][1][name], grad, rtol=1e-4, atol=2e-5, msg=name)


def test_router_auxiliary_loss_on_tp_2_equals_plain_transformers(folder, threads):
    assert plain_step(folder, tuple(AUX.items()))[0] > plain_step(folder, (*AUX.items(),)[2:])[0]
    compare(folder, AUX, threads, (2, 1, 1))


def test_router_auxiliary_loss_with_micro_batches_is_refused(folder):
    model = load(folder, **AUX).train()
    with pytest.raises(MeshError, match=r"output_router_logits=True.*micro_batches=2"):
        model.train_step(batch_of(CASE), micro_batches=2)
    model.train_step({**batch_of(CASE), "output_router_logits": False}, micro_batches=2)


@pytest.mark.parametrize("layout", [(2, 1, 1), (2, 2, 1)])
def test_default_grouped_mm_experts_have_the_gradients_of_plain_transformers(
    folder, threads, layout
):
    """The default of transformers, grouped_mm, gives the plain model's results."""
    assert load(folder).config._experts_implementation == "grouped_mm"
    compare(folder, {}, threads, layout)


def lonely_tokens(folder, layout):
    """Train on one token per row: most ranks have an expert without tokens."""
    model = load(folder, layout, experts_implementation="eager").train()
    ids = torch.tensor([[5, 6]])
    model.train_step({"input_ids": ids, "labels": ids})
    return [name for name, p in model.named_parameters() if p.grad is None]


def test_experts_that_no_token_is_routed_to_get_zero_gradients(folder, threads):
    assert threads.run(lonely_tokens, 4, folder, (4, 1, 1)) == [[]] * 4


def test_more_tp_ranks_than_experts_are_refused(folder):
    from slapo_zoo.parallel.mesh import Mesh
    from slapo_zoo.zoo.outline import Outline

    config = tiny_config(CASE)[0]
    config.num_local_experts = 3
    with pytest.raises(SlapoError, match="3 units of 1 cannot be sharded over tp=4"):
        Outline(config, CASE.cls, Mesh(tp=4), torch.float32)
