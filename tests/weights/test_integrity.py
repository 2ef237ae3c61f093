"""Checksums of a save: a flipped bit is detected, and named by file and tensor."""

import itertools
import json
import random
import zlib
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from parity import Case, batch_of, checkpoint
from shards import local_tensors, model
from slapo_zoo import AutoScheduledModel, load_checkpoint, save_checkpoint
from slapo_zoo.cli.main import app
from slapo_zoo.errors import WeightsError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.weights import crc
from slapo_zoo.weights.reshard import reshard
from slapo_zoo.weights.safetensors_file import SAVE_ID
from slapo_zoo.weights.save import save_folder
from slapo_zoo.weights.training_folder import damages_of

CASE = Case("GPT2LMHeadModel", ("tokens",))
FLIPS = 150


def trained(folder, **mesh):
    made = AutoScheduledModel.from_pretrained(folder, seed=3, **mesh).train()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
    made.train_step(batch_of(CASE))
    optimizer.step()
    optimizer.zero_grad()
    return made, optimizer


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return checkpoint(CASE, tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def saved(source, tmp_path_factory):
    """Return a training checkpoint of several files, and its model."""
    out = tmp_path_factory.mktemp("saved") / "out"
    made, optimizer = trained(source)
    save_checkpoint(made, out, optimizer, step=1, max_shard_size="60KB")
    return out, made, optimizer


def test_checksums_of_column_slices_combine_to_the_zlib_crc32_of_all_bytes():
    draw = random.Random(1)
    data = draw.randbytes(37 * 1000)
    for columns in ((0, 1000), (0, 300, 600, 900, 1000), (0, 1, 999, 1000)):
        sums = []
        for start, stop in itertools.pairwise(columns):
            rows = b"".join(data[i * 1000 + start : i * 1000 + stop] for i in range(37))
            part = crc.of_rows(memoryview(rows), 37, stop - start, 1000)
            sums.append(crc.times(part, crc.shift(1000 - stop)))
        assert crc.combined(sums, len(data)) == zlib.crc32(data)
    assert crc.combined([], 12) == zlib.crc32(bytes(12))


def save_divided(folder, tp, pp, dp):
    mesh = Mesh(tp, pp, dp, torch.distributed.get_rank())
    specs, full = model(mesh.pp)
    save_folder(folder, specs, local_tensors(specs, full, mesh), mesh, max_shard_size=300)


def test_checksums_saved_by_several_ranks_equal_those_of_the_unsharded_tensors(ranks, tmp_path):
    ranks.run(save_divided, 4, tmp_path / "out", 2, 2, 1)
    count, found = damages_of(tmp_path / "out")
    assert count > 5
    assert not found
    specs, full = model(1)
    save_folder(tmp_path / "one", specs, full, Mesh(), max_shard_size=300)
    ids = set()
    for path in (*tmp_path.glob("o*/*.safetensors"),):
        with safe_open(path, "pt") as file:
            ids.add(file.metadata()[SAVE_ID])
    assert len(ids) == 1  # the same state, the same id


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def flips(folder, count, seed=0):
    """Yield random flipped bits of random files; each is undone."""
    draw = random.Random(seed)
    files = sorted(path for path in folder.iterdir() if path.name != "generation_config.json")
    for number in range(count):
        path = files[number % len(files)]
        bit = draw.randrange(path.stat().st_size * 8)
        flip(path, bit)
        yield path, bit
        flip(path, bit)


def check_flips(folder, count):
    for path, bit in flips(folder, count):
        try:
            _, found = damages_of(folder)
        except WeightsError as error:
            found = [error]
        assert found, f"bit {bit} of {path.name} is flipped and nobody says so"
        assert any(path.name in str(error) for error in found), (path.name, bit, str(found[0]))


def test_checkpoint_checksums_detect_every_flipped_bit(saved):
    check_flips(saved[0], FLIPS)


@pytest.mark.slow
def test_checkpoint_checksums_detect_a_thousand_random_flipped_bits(saved):
    check_flips(saved[0], 1000)


def test_resume_from_a_checkpoint_with_a_flipped_bit_is_refused_and_changes_nothing(saved):
    out, made, optimizer = saved
    before = [p.detach().clone() for p in made.parameters()]
    for path, bit in flips(out, 40, seed=5):
        if path.name == "config.json":
            continue  # a person may edit it; a resume does not read it
        with pytest.raises(WeightsError, match=r"(?i)crc-32|found|damaged"):
            load_checkpoint(made, out, optimizer)
        del bit
    assert all(torch.equal(a, b) for a, b in zip(before, made.parameters(), strict=True))
    assert load_checkpoint(made, out, optimizer).step == 1


def resume(folder, out):
    made, optimizer = trained(folder, tp=2)
    return load_checkpoint(made, out, optimizer).step


def test_resume_from_a_checkpoint_with_a_flipped_bit_is_refused_on_every_rank(
    ranks, source, saved, tmp_path
):
    out = saved[0]
    path = min(out.glob("model*.safetensors"))
    bit = (path.stat().st_size - 3) * 8
    flip(path, bit)
    with pytest.raises(Exception, match="it was damaged or changed"):
        ranks.run(resume, 2, source, out)
    flip(path, bit)
    assert ranks.run(resume, 2, source, out) == [1, 1]


def test_check_command_on_a_damaged_checkpoint_names_the_file_and_the_tensor(saved):
    out = saved[0]
    run = CliRunner().invoke
    assert run(app, ["check", str(out)], obj=SimpleNamespace()).exit_code == 0
    path = min(out.glob("optimizer*.safetensors"))
    bit = (path.stat().st_size - 1) * 8
    flip(path, bit)
    found = run(app, ["check", str(out)], obj=SimpleNamespace())
    flip(path, bit)
    assert found.exit_code == 2
    assert f"{path.name}: tensor 'transformer." in found.output.replace("\n", "")


def test_checkpoint_with_files_mixed_from_two_saves_is_refused(source, saved, tmp_path):
    out, made, optimizer = saved
    other = tmp_path / "other"
    save_checkpoint(made, other, optimizer, step=2, max_shard_size="60KB")
    one = min(other.glob("model*.safetensors"))
    one.write_bytes((out / one.name).read_bytes())  # the same tensors, of another save
    with pytest.raises(WeightsError, match=r"safetensors: this file has the save id"):
        AutoScheduledModel.from_pretrained(other)
    with pytest.raises(WeightsError, match=r"CRC-32|has the save id"):
        load_checkpoint(made, other, optimizer)
    (other / "checksums.json").unlink()
    with pytest.raises(WeightsError, match=r"training_state.json: save: found"):
        load_checkpoint(made, other, optimizer)


def test_reshard_command_refuses_a_damaged_checkpoint(saved, tmp_path):
    out, made, optimizer = saved
    reshard(out, tmp_path / "again", "30KB")
    assert not damages_of(tmp_path / "again")[1]
    assert load_checkpoint(made, tmp_path / "again", optimizer).step == 1
    path = min(out.glob("model*.safetensors"))
    bit = (path.stat().st_size - 1) * 8
    flip(path, bit)
    with pytest.raises(WeightsError, match="CRC-32"):
        reshard(out, tmp_path / "third")
    flip(path, bit)
    assert not (tmp_path / "third").exists()


def test_damaged_checksum_file_raises_and_is_named(saved):
    path = saved[0] / "checksums.json"
    text = path.read_text()
    for broken in ("{", "[]", json.dumps({"format": "x"}), text.replace("save", "sav", 1)):
        path.write_text(broken)
        with pytest.raises(WeightsError, match=r"checksums.json"):
            load_checkpoint(saved[1], saved[0], saved[2])
    path.write_text(text)
