"""stream_weights and load_stream: the tensors of save_pretrained, bucket by bucket, from any mesh."""

import gc

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel

from parity import Case, changes_of, checkpoint
from slapo_zoo import AutoScheduledModel, SlapoError

CASES = {
    "gpt2": Case("GPT2LMHeadModel", ("tokens",)),
    "mixtral": Case("MixtralForCausalLM", ("tokens",)),
    "kv1": Case("LlamaForCausalLM", ("tokens",), (("num_key_value_heads", 1),)),
    "bert": Case("BertForMaskedLM", ("tokens",)),
}
LAYOUTS = {
    "one": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "tp2-pp2": {"tp": 2, "pp": 2},
    "tp2-dp2": {"tp": 2, "dp": 2},
}  # fmt: skip
CELLS = [("gpt2", name) for name in LAYOUTS] + [
    ("mixtral", "tp2-pp2"), ("kv1", "tp2"), ("bert", "tp2-pp2"),
]  # fmt: skip


def size(layout):
    return layout.get("tp", 1) * layout.get("pp", 1) * layout.get("dp", 1)


def streamed(folder, case, layout, out, dtype, ranks):
    """Stream the weights, save them, and stream them into a model of other weights."""
    load = AutoScheduledModel.from_pretrained
    options = {**layout, **changes_of(case)}
    model = load(folder, **options)
    model.save_pretrained(out)
    found = dict(model.stream_weights(dtype=dtype, bucket=4000, ranks=ranks))
    other = load(folder, **options).train()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(-2)  # the padding of a vocabulary stays 0
    other.load_stream(model.stream_weights() if model.mesh.world_size == 1 else _given(model))
    state = model.state_dict()
    assert all(torch.equal(t, state[name]) for name, t in other.state_dict().items())
    return found


def _given(model):
    """Collect the stream on rank 0 in a dict, then load it: both calls are collective."""
    return dict(model.stream_weights())


@pytest.mark.one_in(2, 2)
@pytest.mark.parametrize(("family", "layout"), CELLS)
def test_streamed_weights_equal_saved_files(family, layout, tmp_path, threads):
    case, options, out = CASES[family], LAYOUTS[layout], tmp_path / "out"
    folder, n = checkpoint(case, tmp_path), size(options)
    found = threads.run(streamed, n, folder, case, options, out, None, (0,))
    want = load_file(out / "model.safetensors")
    assert found[0].keys() == want.keys()
    assert all(torch.equal(found[0][key], want[key]) for key in want)
    assert all(not each for each in found[1:])


def test_stream_weights_sends_bfloat16_tensors_to_two_ranks(tmp_path, ranks):
    case, out = CASES["gpt2"], tmp_path / "out"
    folder = checkpoint(case, tmp_path)
    found = ranks.run(streamed, 4, folder, case, {"tp": 2, "pp": 2}, out, "bfloat16", (1, 2))
    want = load_file(out / "model.safetensors")
    assert found[0] == found[3] == {}
    for each in found[1:3]:
        assert each.keys() == want.keys()
        assert all(torch.equal(each[key], want[key].bfloat16()) for key in want)


def test_stream_weights_with_bad_arguments_raises(tmp_path):
    model = AutoScheduledModel.from_pretrained(checkpoint(CASES["gpt2"], tmp_path))
    with pytest.raises(SlapoError, match="ranks"):
        next(model.stream_weights(ranks=(1,)))
    with pytest.raises(SlapoError, match="no tensor of this name"):
        model.load_stream([("strange", torch.zeros(2))])
    with pytest.raises(SlapoError, match=r"the model has \[99, 30\]"):
        model.load_stream([("transformer.wte.weight", torch.zeros(2))])
    with pytest.raises(SlapoError, match="missing from the stream"):
        model.load_stream(list(model.stream_weights())[1:])
    with pytest.raises(SlapoError, match=r"save_pretrained: dtype='float8_e4m3fn': not a floating"):
        model.save_pretrained(tmp_path / "out", dtype="float8_e4m3fn")


def test_load_stream_takes_the_state_dict_of_the_plain_model_with_each_name_of_a_tied_tensor(
    tmp_path,
):
    folder = checkpoint(CASES["gpt2"], tmp_path)
    plain = GPT2LMHeadModel.from_pretrained(folder).state_dict()
    assert "lm_head.weight" in plain
    model = AutoScheduledModel.from_pretrained(folder).train()
    model.load_stream({name: tensor + 1 for name, tensor in plain.items()})
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, plain[name] + 1)


def alive():
    """Storages of float tensors in this process, but for frozen ones --> their bytes."""
    gc.collect()
    return {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if type(t) is torch.Tensor and t.dtype == torch.float32
    }


def most_held(folder, bucket):
    """Return the most bytes of tensors that a stream holds at once on each rank, beyond those before."""
    model = AutoScheduledModel.from_pretrained(folder, tp=2, map_weights=False)
    own = {t.untyped_storage().data_ptr() for t in model.state_dict().values()} | alive().keys()
    most = 0
    gc.freeze()  # all that is older than the stream: to look through it takes most of the time
    for _ in model.stream_weights(bucket=bucket):
        most = max(most, sum(n for at, n in alive().items() if at not in own))
    return most


def test_stream_weights_holds_at_most_one_bucket_in_memory(tmp_path, ranks):
    """The largest tensor takes 39600 bytes, the model 166 kB."""
    case = Case("GPT2LMHeadModel", ("tokens",), (("vocab_size", 330),))
    folder = checkpoint(case, tmp_path)
    assert 20_000 < ranks.run(most_held, 2, folder, 48_000)[0] <= 56_000
