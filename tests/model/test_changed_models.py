"""Changes that users make to the modules of a loaded model: gradients and files equal the plain model's, or an error."""

import copy
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, prune

from slapo_zoo import AutoScheduledModel, SlapoError, emulate

CONFIG = transformers.GPT2Config(
    n_embd=32, n_head=4, n_layer=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, architectures=["GPT2LMHeadModel"],
)  # fmt: skip
IDS = torch.arange(32).reshape(4, 8) * 5 % 64
LAYOUTS = {
    "tp2": ((2, 1, 1), {}), "sp": ((2, 1, 1), {"sequence_parallel": True}), "dp2": ((1, 1, 2), {}),
    "rows": ((1, 1, 2), {"dp_shard": 2}), "pp2": ((1, 2, 1), {}),
}  # fmt: skip

CELLS = [(layout, by_hand) for layout in LAYOUTS for by_hand in (False, True)
         if (layout, by_hand) != ("pp2", True)]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(3)
    place = tmp_path_factory.mktemp("plain")
    transformers.GPT2LMHeadModel(CONFIG).save_pretrained(place)
    return place


class Around(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *args, **kwargs):
        return self.block(*args, **kwargs)


def compiled(model):
    for i, block in enumerate(model.transformer.h):
        model.transformer.h[i] = torch.compile(block, backend="eager")


def recomputed(model):
    for i, block in enumerate(model.transformer.h):
        model.transformer.h[i] = checkpoint_wrapper(block)


def hooked(model):
    """Hook a block so that its output is doubled, on the rank that holds it."""

    def double(_module, _inputs, output):
        return output * 2 if isinstance(output, torch.Tensor) else (output[0] * 2, *output[1:])

    model.transformer.h[0].register_forward_hook(double)


def hooked_parameter(model):
    model.transformer.wpe.weight.register_hook(lambda grad: 3 * grad)


def tied(model):
    model.tie_weights()


def within(model):
    model.transformer.h[0] = Around(model.transformer.h[0])


def without_sum(model):
    model.transformer.h[0].attn.c_proj = nn.Identity()


def another_head(model):
    model.lm_head = nn.Linear(32, 64, bias=False)


def untied(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def another_table(model):
    model.set_input_embeddings(nn.Embedding(64, 32))


def weight_norm(model):
    parametrizations.weight_norm(model.lm_head)


def spectral_norm(model):
    parametrizations.spectral_norm(model.lm_head)


def pruned(model):
    prune.l1_unstructured(model.transformer.h[0].mlp.c_fc, "weight", 0.5)


def drawn(model):
    model.init_weights()


def cut(model):
    model.transformer.h = model.transformer.h[:1]


def swapped(model):
    h = model.transformer.h
    h[0], h[1] = h[1], h[0]


def shared(model):
    model.transformer.h[1] = model.transformer.h[0]


def swapped_within(model):
    one, other = model.transformer.h
    one.mlp, other.mlp = other.mlp, one.mlp


def loaded_whole(folder, layout, strict):
    (tp, pp, dp), options = LAYOUTS[layout]
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp, dp=dp, **options)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    plain = transformers.GPT2LMHeadModel(copy.deepcopy(model.config)).state_dict()
    with pytest.raises(SlapoError, match="this rank's shard has the shape"):
        model.load_state_dict(plain, strict=strict)
    return all(torch.equal(before[name], x) for name, x in model.state_dict().items())


@pytest.mark.parametrize(
    ("layout", "strict"), [("tp2", True), ("tp2", False), ("rows", False), ("pp2", True)]
)
def test_load_state_dict_of_unsharded_tensors_into_a_sharded_model_is_refused(
    folder, layout, strict
):
    assert all(emulate(loaded_whole, folder, layout, strict, mesh=LAYOUTS[layout][0]))


def train(folder, place, change, layout, by_hand):
    mesh, options = LAYOUTS[layout]
    tp, pp, dp = mesh
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp, dp=dp, **options).train()
    change(model)
    ids = IDS.tensor_split(dp)[model.mesh.coord("dp")]
    for batch in [{"input_ids": ids, "labels": ids}]:
        if by_hand:
            model(**batch).loss.backward()
        else:
            model.train_step(batch)
    grads = model.consolidated_state_dict(grads=True)
    model.save_pretrained(place)
    return grads


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize(("layout", "by_hand"), CELLS)
@pytest.mark.parametrize("change", [hooked, recomputed, hooked_parameter, tied])
def test_user_modified_model_has_the_gradients_and_saved_files_of_plain_transformers(
    folder, tmp_path, change, layout, by_hand
):
    _equal(folder, tmp_path, change, layout, by_hand, emulate)


def _equal(folder, tmp_path, change, layout, by_hand, run):
    plain = transformers.GPT2LMHeadModel.from_pretrained(folder)
    change(plain)
    plain(input_ids=IDS, labels=IDS).loss.backward()
    grads = run(train, folder, tmp_path, change, layout, by_hand, mesh=LAYOUTS[layout][0])[0]
    for name, p in plain.named_parameters():
        name = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-4, atol=1e-6)
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], x) for name, x in before.items())


def in_silence(*args):
    """Context without the warnings of torch's compiler."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(*args)


@pytest.mark.one_in(3, 2)
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize(("layout", "by_hand"), CELLS)
def test_models_with_compiled_blocks_save_the_parameter_names_of_plain_transformers(
    folder, tmp_path, layout, by_hand, ranks
):
    def run(_function, *args, mesh):
        return ranks.run(in_silence, mesh[0] * mesh[1] * mesh[2], *args)

    _equal(folder, tmp_path, compiled, layout, by_hand, run)


REFUSED = {
    within: ("tp2", "sp", "rows"), without_sum: ("tp2", "sp"), another_head: LAYOUTS, untied: ("tp2", "dp2", "rows"), another_table: LAYOUTS,
    weight_norm: ("tp2", "rows"), spectral_norm: ("tp2", "sp", "rows"), pruned: ("tp2", "rows"),
    drawn: LAYOUTS, cut: ("sp", "pp2"), swapped: ("sp", "pp2"), shared: ("sp", "pp2"), swapped_within: ("rows",),
}  # fmt: skip


def evaluated(folder, change):
    model = AutoScheduledModel.from_pretrained(folder, tp=2, sequence_parallel=True)
    change(model)
    with torch.no_grad():
        return model.eval()(input_ids=IDS, labels=IDS).loss


@pytest.mark.parametrize("change", [cut, swapped, shared])
def test_blocks_moved_or_shared_by_the_user_are_refused_in_evaluation_with_sequence_parallelism(
    folder, change
):
    """The first block shards the tokens and the last gathers them, so a moved block would change the loss."""
    with pytest.raises(
        SlapoError,
        match=r"transformer.h.\d: the block was replaced or removed since the load.*\n.*sequence_parallel",
    ):
        emulate(evaluated, folder, change, mesh=(2, 1, 1))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("change", "layout"), [(change, layout) for change, all_ in REFUSED.items() for layout in all_]
)
def test_unsupported_user_change_of_the_model_is_refused_before_training(
    folder, tmp_path, change, layout
):
    with pytest.raises(SlapoError) as raised:
        emulate(train, folder, tmp_path, change, layout, False, mesh=LAYOUTS[layout][0])
    assert "hint:" in str(raised.value)
    assert "replicas" not in str(raised.value), "the first forward names the change"
    assert not list(tmp_path.iterdir())


def head_alone(folder):
    model = AutoScheduledModel.from_pretrained(folder, tp=2)
    return model.lm_head(model.transformer(IDS).last_hidden_state).tolist()  # on all ranks alike


def test_lm_head_called_directly_on_a_sharded_model_returns_unsharded_logits(folder):
    """docs/your_own_loop.md recommends this call instead of reading the head's weight, which is a shard."""
    plain = transformers.GPT2LMHeadModel.from_pretrained(folder)
    for found in emulate(head_alone, folder, mesh=(2, 1, 1)):
        torch.testing.assert_close(torch.tensor(found), plain(IDS).logits)
