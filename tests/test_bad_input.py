"""Bad input: an error before any work that says where, what, why and what to do; nothing half-done.

Checkpoints that are old or incomplete but good are here too: what is accepted bounds what is not.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

from parity import Case, batch_of, checkpoint
from slapo_zoo import (
    ArchitectureError,
    AutoScheduledModel,
    MeshError,
    RankError,
    SlapoError,
    WeightsError,
)
from slapo_zoo.launch import run_local
from slapo_zoo.zoo import families

GPT2 = Case("GPT2LMHeadModel", ("tokens",))
BERT = Case("BertForMaskedLM", ("tokens",))


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    return {"gpt2": checkpoint(GPT2, root), "bert": checkpoint(BERT, root)}


@pytest.fixture
def folders(sources, tmp_path):
    """Copies of the checkpoints that a test may spoil."""
    return {name: shutil.copytree(path, tmp_path / name) for name, path in sources.items()}


def attempt(folder, options):
    """The parts of the error of from_pretrained on this rank."""
    if dist.is_initialized():
        dist.barrier()  # a rank that fails at once must not leave before all have met
    try:
        AutoScheduledModel.from_pretrained(folder, **options)
    except SlapoError as error:
        return type(error), error.where, str(error.what), error.problem, error.hint
    return None


def refused(kind, folder, ranks=None, n=1, **options):
    """Run it and expect the same error on every rank; return its text parts joined."""
    found = ranks.run(attempt, n, folder, options) if n > 1 else [attempt(folder, options)]
    for parts in found:
        assert parts is not None, "it was accepted"
        assert issubclass(parts[0], kind), parts
        assert all(parts[1:4]), parts  # where, what, problem
        assert parts[4], f"no hint: {parts}"
    return " | ".join(found[0][1:])


def rewrite(folder, change):
    """Apply `change` to the tensors of a checkpoint."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors = change(dict(tensors)) or tensors
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, {"format": "pt"})


def logits_of(cls, folder, batch, **options):
    model = getattr(transformers, cls).from_pretrained(folder, **options).eval()
    with torch.no_grad():
        return model(**batch).logits


# --- mesh and architecture ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "options", "found"),
    [
        (1, {"tp": 2}, "found 1 process, expected tp * pp * dp = 2 * 1 * 1"),
        (1, {"dp": 3}, "found 1 process, expected tp * pp * dp = 1 * 1 * 3"),
        (2, {"tp": 2, "pp": 2}, "found 2 processes, expected tp * pp * dp = 2 * 2 * 1"),
        (3, {"tp": 2}, "found 3 processes, expected tp * pp * dp = 2 * 1 * 1"),
        (2, {"tp": 1, "dp": 1}, "found 2 processes, expected tp * pp * dp = 1 * 1 * 1"),
    ],
)
def test_world_size(n, options, found, sources, ranks):
    text = refused(MeshError, sources["gpt2"], ranks, n, **options)
    assert "world size" in text
    assert found in text
    assert "torchrun --nproc-per-node" in text


@pytest.mark.parametrize("bad", [0, -2, 1.5, "two"])
@pytest.mark.parametrize("name", ["tp", "pp", "dp"])
def test_sizes_that_are_no_sizes(name, bad, sources):
    text = refused(MeshError, sources["gpt2"], **{name: bad})
    assert f"mesh | {name} | found {bad!r}, expected an integer of at least 1" in text


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_tp_that_the_heads_forbid(name, sources, ranks):
    """Five heads take tp = 1..5: the message lists what is legal."""
    text = refused(SlapoError, sources[name], ranks, 6, tp=6)
    assert "5 heads cannot be divided over tp=6" in text
    assert "legal sizes of tp: [1, 2, 3, 4, 5]" in text
    assert "attn" in text or "attention" in text


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_more_stages_than_blocks(name, sources, ranks):
    text = refused(MeshError, sources[name], ranks, 4, pp=4)
    assert "mesh | pp=4 | 4 stages, but the model has 3 blocks" in text
    assert "choose pp between 1 and 3" in text


def test_unknown_architecture(folders):
    """One that transformers knows and the zoo does not."""
    path = folders["bert"] / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "model_type": "mobilebert", "architectures": ["MobileBertForMaskedLM"]}))  # fmt: skip
    text = refused(ArchitectureError, folders["bert"])
    assert "model_type='mobilebert'" in text
    assert all(name in text for name in families())
    assert "schedules/mobilebert.py" in text
    assert "CONTRIBUTING.md" in text
    with pytest.raises(ArchitectureError, match="schedules/bloom"):
        AutoScheduledModel.from_config(transformers.BloomConfig())


@pytest.mark.parametrize(
    ("auto_class", "problem"),
    [
        ("GPT5LMHeadModel", "transformers has no class of that name"),
        ("AutoModelForMaskedLM", "it has no class for GPT2Config"),
    ],
)
def test_unknown_class(auto_class, problem, sources):
    text = refused(ArchitectureError, sources["gpt2"], auto_class=auto_class)
    assert auto_class in text
    assert problem in text


@pytest.mark.parametrize("dtype", ["float33", "int8", "nn", 16, torch.int64])
def test_unknown_dtype(dtype, sources):
    text = refused(SlapoError, sources["gpt2"], dtype=dtype)
    assert f"dtype={dtype!r}" in text
    assert '"bfloat16"' in text


@pytest.mark.parametrize("ratio", [-0.1, 1.5])
def test_checkpoint_ratio(ratio, sources):
    text = refused(MeshError, sources["gpt2"], checkpoint_ratio=ratio)
    assert f"checkpoint_ratio={ratio} | expected a number from 0 to 1" in text


def test_no_such_folder(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "no such folder" in refused(SlapoError, "no_such_org/no_such_model")
    assert "no such folder" in refused(SlapoError, str(tmp_path / "nowhere"))


# --- keys and shapes ----------------------------------------------------------------------------

BLOCK = {"gpt2": "transformer.h.1.", "bert": "bert.encoder.layer.1."}
PART = {"gpt2": "h.1.mlp.c_fc.bias", "bert": "bert.encoder.layer.1.output.dense.bias"}


def full_name(name, keys):
    return next(key for key in keys if key.endswith(PART[name]))


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_missing_keys(name, folders, ranks):
    """A part of a block, then a whole block: neither is a head that may be new."""
    key = full_name(name, load_file(folders[name] / "model.safetensors"))
    rewrite(folders[name], lambda t: {k: v for k, v in t.items() if k != key})
    text = refused(WeightsError, folders[name], ranks, 2, tp=2)
    assert f"missing: {key}" in text
    assert "1 missing and 0 unexpected" in text
    rewrite(folders[name], lambda t: {k: v for k, v in t.items() if BLOCK[name] not in k})
    text = refused(WeightsError, folders[name], ranks, 2, pp=2)
    assert f"missing: {BLOCK[name]}" in text
    assert str(folders[name]) in text


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_unexpected_keys(name, folders):
    """A block too many, or an odd tensor in a block."""
    extra = {k.replace(".1.", ".3.", 1) for k in load_file(folders[name] / "model.safetensors") if BLOCK[name] in k}  # fmt: skip
    rewrite(folders[name], lambda t: t | {k.replace(".1.", ".3.", 1): v.clone() for k, v in t.items() if BLOCK[name] in k})  # fmt: skip
    text = refused(WeightsError, folders[name])
    # GPT-2's own list of keys that may stay has "attn.bias", a pattern that c_attn.bias matches.
    assert f"0 missing and {len(extra) - (name == 'gpt2')} unexpected" in text
    assert "unexpected: " + min(k for k in extra if "c_attn.bias" not in k) in text
    odd = BLOCK[name] + "gate.weight"
    rewrite(folders[name], lambda t: {k: v for k, v in t.items() if k not in extra} | {odd: torch.ones(2)})  # fmt: skip
    assert f"unexpected: {odd}" in refused(WeightsError, folders[name])


@pytest.mark.parametrize(
    ("name", "changes", "shape"),
    [
        ("gpt2", {"vocab_size": 120}, "found shape [99, 30], expected [120, 30]"),
        ("gpt2", {"n_positions": 32}, "found shape [16, 30], expected [32, 30]"),
        ("bert", {"intermediate_size": 80}, "found shape [70, 30], expected [80, 30]"),
    ],
)
def test_misshaped_keys(name, changes, shape, sources, ranks):
    text = refused(WeightsError, sources[name], ranks, 2, tp=2, **changes)
    assert shape in text
    assert "tensors do not fit the model" in text
    assert "another architecture, size or vocabulary?" in text


def test_of_another_family(sources, folders):
    shutil.copy(sources["bert"] / "model.safetensors", folders["gpt2"] / "model.safetensors")
    text = refused(WeightsError, folders["gpt2"])
    assert "missing" in text


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 4, 100, -1, -4096])
def test_truncated_safetensors(keep, folders, ranks):
    path = folders["gpt2"] / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    parts = ranks.run(attempt, 2, folders["gpt2"], {"tp": 2})
    assert [p[0] for p in parts] == [WeightsError] * 2
    assert all(str(path) in p[1] for p in parts)
    assert all("found" in p[3] for p in parts)


def test_a_text_that_calls_itself_safetensors(folders):
    path = folders["gpt2"] / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    assert attempt(folders["gpt2"], {})[0] is WeightsError


def test_pickles_are_refused_unless_asked_for(folders, ranks):
    folder = folders["gpt2"]
    want = logits_of("GPT2LMHeadModel", folder, batch_of(GPT2))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    found = ranks.run(attempt, 2, folder, {"tp": 2})
    for kind, where, _, problem, hint in found:
        assert kind is WeightsError
        assert where == str(folder / "pytorch_model.bin")
        assert problem == "found a pickle, expected safetensors"
        assert "allow_pickle=True" in hint
    logits = ranks.run(forward, 2, folder, batch_of(GPT2), {"tp": 2, "allow_pickle": True})
    for ours in logits:
        torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-4)


def forward(folder, batch, options):
    return AutoScheduledModel.from_pretrained(folder, **options)(**batch).logits.detach()


def test_an_index_that_names_a_missing_file(folders, ranks):
    model = transformers.GPT2LMHeadModel.from_pretrained(folders["gpt2"])
    (folders["gpt2"] / "model.safetensors").unlink()
    model.save_pretrained(folders["gpt2"], max_shard_size="30KB")
    files = sorted(folders["gpt2"].glob("model-*.safetensors"))
    assert len(files) > 2
    assert attempt(folders["gpt2"], {}) is None
    files[1].unlink()
    text = refused(WeightsError, folders["gpt2"], ranks, 2, pp=2)
    assert "model.safetensors.index.json" in text
    assert files[1].name in text
    assert "it is not there" in text
    assert "fetch the missing file" in text


def test_an_empty_folder(folders):
    (folders["gpt2"] / "model.safetensors").unlink()
    text = attempt(folders["gpt2"], {})
    assert text[0] is WeightsError
    assert "expected model.safetensors" in text[3]
    assert text[4]


# --- checkpoints that lack a head ---------------------------------------------------------------


def new_tensors(folder, options):
    model = AutoScheduledModel.from_pretrained(folder, **options)
    full = model.consolidated_state_dict()
    return model.ledger.newly_initialized, model.ledger.unexpected, full


NEW_HEADS = {
    "BertForSequenceClassification": ("bert", ["bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"]),
    "BertForQuestionAnswering": ("bert", ["qa_outputs.weight", "qa_outputs.bias"]),
    "BertForPreTraining": ("bert", ["bert.pooler.dense.weight", "bert.pooler.dense.bias", "cls.seq_relationship.weight", "cls.seq_relationship.bias"]),
    "GPT2ForSequenceClassification": ("gpt2", ["score.weight"]),
}  # fmt: skip


@pytest.mark.parametrize("cls", NEW_HEADS)
def test_a_missing_head_is_new_and_alike_everywhere(cls, sources, ranks):
    name, new = NEW_HEADS[cls]
    layouts = [(1, 1), (2, 1), (1, 2), (2, 2)]
    fulls = []
    for tp, pp in layouts:
        options = {"tp": tp, "pp": pp, "auto_class": cls, "seed": 3}
        results = ranks.run(new_tensors, tp * pp, sources[name], options)
        for found, unexpected, _ in results:
            assert sorted(found) == sorted(new)  # reported on every rank
            assert all(key.startswith("cls.") for key in unexpected)
        fulls.append(results[0][2])
    source = load_file(sources[name] / "model.safetensors")
    for full in fulls:
        assert full.keys() == fulls[0].keys()
        assert all(torch.equal(full[key], fulls[0][key]) for key in full)
    assert all(torch.equal(fulls[0][key], source[key]) for key in fulls[0].keys() - {*new})
    (other,) = ranks.run(new_tensors, 1, sources[name], {"auto_class": cls, "seed": 4})
    weights = [key for key in new if key.endswith("weight")]
    assert weights
    for key in weights:
        assert 0 < float(fulls[0][key].std()) < 1
        assert not torch.equal(fulls[0][key], other[2][key])  # the seed decides


# --- old layouts of the Hub ---------------------------------------------------------------------


def old_gpt2(tensors):
    """As gpt2 on the Hub: no prefix, causal masks in the file, no head."""
    old = {k.removeprefix("transformer."): v for k, v in tensors.items() if k != "lm_head.weight"}
    for i in range(3):
        old[f"h.{i}.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
        old[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    return old


def old_bert(tensors):
    """As bert-base-uncased on the Hub: gamma and beta, position ids, the bias of the head."""
    old = {
        k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v
        for k, v in tensors.items()
    }  # fmt: skip
    old["bert.embeddings.position_ids"] = torch.arange(20)[None]
    old["cls.seq_relationship.weight"], old["cls.seq_relationship.bias"] = torch.ones(2, 30), torch.ones(2)  # fmt: skip
    return old


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize(
    ("case", "old"), [(GPT2, old_gpt2), (BERT, old_bert)], ids=["gpt2", "bert"]
)
def test_old_layouts(case, old, tp, pp, folders, ranks):
    name = "gpt2" if case is GPT2 else "bert"
    folder, batch = folders[name], batch_of(case)
    want, source = logits_of(case.cls, folder, batch), load_file(folder / "model.safetensors")
    rewrite(folder, old)
    assert any(".gamma" in key or key.startswith("h.0.attn.bias") for key in load_file(folder / "model.safetensors"))  # fmt: skip
    for logits, new, full in ranks.run(old_forward, tp * pp, folder, batch, tp, pp):
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
        assert new == []
        assert all(torch.equal(full[key], source[key]) for key in full)


def old_forward(folder, batch, tp, pp):
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp)
    logits = model(**batch).logits.detach()
    return logits, model.ledger.newly_initialized, model.consolidated_state_dict()


# --- train_step ---------------------------------------------------------------------------------


def bad_step(folder, batch, options, micro_batches):
    """The error of a bad step, whether it left gradients, and the loss of a good step after it."""
    model = AutoScheduledModel.from_pretrained(folder, **options).train()
    good = batch_of(GPT2)
    try:
        model.train_step(batch, micro_batches=micro_batches)
    except SlapoError as error:
        parts = type(error), error.where, str(error.what), error.problem, error.hint
        left = [n for n, p in model.named_parameters() if p.grad is not None]
        return parts, left, float(model.train_step(good))
    return None


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize(
    ("batch", "micro_batches", "what", "problem", "hint"),
    [
        ("good", 3, "micro_batches", "4 rows cannot be divided into 3 equal micro-batches", "[1, 2, 4]"),
        ("good", 8, "micro_batches", "4 rows cannot be divided into 8", "[1, 2, 4]"),
        ("good", -1, "micro_batches", "4 rows cannot be divided into -1", "[1, 2, 4]"),
        ("good", 1.5, "micro_batches", "4 rows cannot be divided into 1.5", "[1, 2, 4]"),
        ("no labels", None, "batch", "no loss", "labels"),
        ("empty", None, "batch", "no tensor", "input_ids"),
    ],
)  # fmt: skip
def test_bad_steps(batch, micro_batches, what, problem, hint, tp, pp, sources, ranks):
    """An error on every rank before any work: no gradient is left and the next step is good."""
    good = batch_of(GPT2)
    without = {k: v for k, v in good.items() if k != "labels"}
    given = {"good": good, "no labels": without, "empty": {}}[batch]
    arguments = (sources["gpt2"], given, {"tp": tp, "pp": pp}, micro_batches)
    results = ranks.run(bad_step, tp * pp, *arguments)
    model = transformers.GPT2LMHeadModel.from_pretrained(sources["gpt2"])
    want = float(model(**good).loss.detach())
    for result in results:
        assert result is not None
        (_, where, found, text, advice), left, loss = result
        assert (where, found) == ("train_step", what)
        assert problem in text
        assert hint in advice
        assert left == []
        assert loss == pytest.approx(want, rel=1e-4)


# --- one rank fails -----------------------------------------------------------------------------


def fail_in_the_middle(folder, tp, pp, guilty, how):
    """Rank `guilty` raises in the second micro-batch; each rank returns what it saw."""
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp).train()
    model.train_step(batch_of(GPT2))
    if dist.get_rank() == guilty:
        sabotage(model, how)
    begin = time.monotonic()
    try:
        model.train_step(batch_of(GPT2), micro_batches=4)
    except (SlapoError, ValueError, RuntimeError) as error:
        if dist.get_backend() is not None:
            dist.destroy_process_group()  # as the end of the process does
        return type(error).__name__, str(error), time.monotonic() - begin
    return None


def sabotage(model, how):
    """The mlp of a block that this rank holds raises when it is called for the second time."""
    blocks = [b for b in model.transformer.h if type(b).__name__ == "GPT2Block"]
    calls = []

    def hook(module, args, *rest):
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("the disk of this node is on fire")

    if how == "forward":
        blocks[-1].mlp.register_forward_pre_hook(hook)
    else:
        blocks[-1].mlp.register_full_backward_hook(hook)


@pytest.mark.parametrize("how", ["forward", "backward"])
@pytest.mark.parametrize(
    ("tp", "pp", "guilty"), [(2, 1, 1), (1, 2, 0), (1, 2, 1), (2, 2, 1), (2, 2, 2)]
)
def test_all_ranks_stop_with_the_error_of_one(tp, pp, guilty, how, sources, ranks):
    results = ranks.run(fail_in_the_middle, tp * pp, sources["gpt2"], tp, pp, guilty, how)
    for rank, (kind, text, seconds) in enumerate(results):
        assert seconds < 60
        assert "the disk of this node is on fire" in text
        if rank != guilty:
            assert kind == "RankError"
            assert text.startswith(f"rank {guilty}: train_step: ")


def train_until_it_fails(folder):
    model = AutoScheduledModel.from_pretrained(folder, tp=2).train()
    if dist.get_rank() == 1:
        sabotage(model, "backward")
    for step in range(4):
        model.train_step(batch_of(GPT2, step))


def test_run_local_raises_the_error_of_one(sources):
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1: .*: ValueError: the disk .* on fire") as caught:
        run_local(train_until_it_fails, 2, (sources["gpt2"],), threads=1)
    assert time.monotonic() - begin < 60
    assert "sabotage" in caught.value.traceback_text or "hook" in caught.value.traceback_text


SCRIPT = """
import sys
sys.path[:0] = sys.argv[2:]
from test_bad_input import train_until_it_fails
train_until_it_fails(sys.argv[1])
"""


def test_torchrun_shows_the_error_of_one(sources, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--redirects=3", f"--log-dir={tmp_path / 'log'}", "train.py"]
    command += [str(sources["gpt2"]), os.path.dirname(__file__)]
    begin = time.monotonic()
    result = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=120, check=False,
        capture_output=True,
    )  # fmt: skip
    assert time.monotonic() - begin < 60
    assert result.returncode != 0
    errors = {p.parent.name: p.read_text() for p in (tmp_path / "log").glob("**/stderr.log")}
    assert "ValueError: the disk of this node is on fire" in errors["1"]
    if "RankError" in errors["0"]:  # or torchrun was faster in stopping it
        assert "rank 1: train_step: " in errors["0"]


# --- saving -------------------------------------------------------------------------------------


def save_on_a_full_disk(folder, out):
    model = AutoScheduledModel.from_pretrained(folder, tp=2)
    model.save_pretrained(out)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    real = os.pwrite
    if dist.get_rank() == 1:
        os.pwrite = no_space
    try:
        model.save_pretrained(out)
    except SlapoError as error:
        return type(error), str(error), {p.name: p.read_bytes() for p in out.iterdir()} == before
    finally:
        os.pwrite = real
    return None


def no_space(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_keeps_the_old_folder(sources, tmp_path, ranks):
    first, second = ranks.run(save_on_a_full_disk, 2, sources["gpt2"], tmp_path / "out")
    assert (first[0], second[0]) == (RankError, WeightsError)
    for _, text, intact in (first, second):
        assert "No space left on device" in text
        assert "bytes of free space" in text
        assert "the folder is as it was before" in text
        assert intact
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    want = load_file(sources["gpt2"] / "model.safetensors")
    assert loaded.keys() == want.keys()
    assert all(torch.equal(loaded[key], want[key]) for key in want)


def test_arguments_of_save_that_we_do_not_have(sources, tmp_path):
    model = AutoScheduledModel.from_pretrained(sources["gpt2"])
    with pytest.raises(SlapoError, match="push_to_hub") as caught:
        model.save_pretrained(tmp_path / "out", push_to_hub=True)
    assert caught.value.hint
    assert not (tmp_path / "out").exists()
