"""`slapo-zoo train --exact`: the log of a run has the same digests on every mesh, also of a resumed run."""

import json

import pytest

from cli_runs import failure, run, sentences, write_gpt2

SETS = (
    "batch_size=4", "device=cpu", "seq_len=16", "learning_rate=1e-3", "weight_decay=0.1", "log_digest=true",
    "eval_share=0.2", "eval_steps=2", "eval_batches=2",
)  # fmt: skip
SAME = ("step", "loss", "grad_norm", "tokens", "digest", "eval_loss", "eval_accuracy")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exact")
    write_gpt2(folder / "model")
    (folder / "text.txt").write_text(". ".join(sentences(60)))
    return folder


def words(place, *more):
    sets = [word for one in SETS for word in ("--set", one)]
    return "train", place / "model", "--data", place / "text.txt", *sets, *more


def logged(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: line.get(name) for name in SAME} for line in lines]


def test_train_command_in_bit_exact_mode_resumed_on_other_meshes_logs_equal_weight_digests(
    place, tmp_path, capfd
):
    exact = ("--exact", "tp=2,dp=2")
    run(*words(place, *exact, "--max-steps", 4, "--set", f"log_file={tmp_path / 'one'}"))
    other = (*exact, "--set", f"log_file={tmp_path / 'two'}", "--checkpoint", tmp_path / "kept")
    run(*words(place, *other, "--max-steps", 2, "--tp", 2))
    run(*words(place, *other, "--max-steps", 4, "--dp", 2))
    assert "checkpoint: 2 of 4 steps are done" in capfd.readouterr().out
    one, two = logged(tmp_path / "one"), logged(tmp_path / "two")
    assert two == one
    assert len({line["digest"] for line in one}) == 4
    assert one[-1]["eval_loss"] is not None


REFUSED = {
    ("--exact", "tp=3", "--tp", "2"): "virtual tp=3 is not a multiple of the real tp=2",
    ("--exact", "up=2"): "no such mesh dim: up",
    ("--exact", "tp"): "exact: found 'tp', expected sizes",
    ("--exact", "tp=2", "--engine", "megatron"): "sums gradients in an order of its own",
    ("--exact", "dp=8"): "expected a multiple of dp * micro-batches = 8",
    (): "log_digest: digests of two meshes are equal only with `exact`",
    (
        "--set",
        "log_digest=false",
        "--set",
        "load={exact: {tp: 2}}",
    ): "write `exact:` outside of load",
}


@pytest.mark.parametrize("more", REFUSED, ids=" ".join)
def test_train_command_refuses_invalid_bit_exact_options_before_reading_data(more, place, capsys):
    assert REFUSED[more] in failure(capsys, *words(place, *more))
