"""Mistakes on the command line: exit status 2 and an error in four parts, never a traceback, before any work."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from slapo_zoo.cli.main import main
from slapo_zoo.tune.planner.hardware import find_hardware
from slapo_zoo.tune.planner.layout_report import COLUMNS
from slapo_zoo.zoo.cards import hub

pytestmark = pytest.mark.usefixtures("shared_dry_runs")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """Return the folder of a checkpoint without a tokenizer."""
    config = GPT2Config(
        n_embd=32, n_head=4, n_layer=2, n_positions=64, vocab_size=101, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("gpt2")
    GPT2LMHeadModel(config).save_pretrained(folder)
    return str(folder)


def run(capfd, *words):
    with pytest.raises(SystemExit) as caught:
        main(list(map(str, words)))
    captured = capfd.readouterr()
    return caught.value.code or 0, captured.out, captured.err


CARD = str(Path(__file__).parents[2] / "hub_cards" / "gpt2")
MISTAKES = {
    "plan MODEL --dp 4 --dp-shard 3": "does not divide dp=4",
    "plan MODEL --zero-stage 1": "zero_stage=1: with dp_shard=1 (the default) nothing is sharded",
    "verify gpt2 --zero-stage 2": "zero_stage=2: with dp_shard=1",
    "show gpt2 --dp 4 --dp-shard 3": "does not divide dp=4",
    "calibrate none/here.json": "found no folder",
    "plan MODEL --gpus 2 --batch 4 --write none/plan.json": "found no folder",
    "card make gpt2 FILE": "card: FILE: the card cannot be written: File exists",
    "tune gpt2 --card FILE": "card: FILE: no such folder",
    "plan MODEL --seq 65": "the model has 64 positions",
    "bench MODEL --seq-len 65": "the model has 64 positions",
    "plan MODEL --pp 2 --pipeline-order 1fb": "no such order",
    "plan MODEL --write plan.json": "--write: this option is for a search over layouts",
    "tune MODEL --gpus 3 --symbol tp=2": "no tp * pp * dp * cp equals this number",
    "plan MODEL --gpus 4 --tp 2": "found tp=2 pp=1 dp=1, but a search tries every layout",
    "plan nobody": "for a family without weights use --gpus",
    "verify gtp2": "nearest families: gpt2",
    "verify gpt2 --tp 200": "legal sizes of tp: [1, 2, 3",
    "show gpt2 --device tpu": "--device: tpu",
    "bench kernels --only nobody": "found no kernel whose name begins with this",
    "tune gpt2 --symbol batch_size=a": "found 'a', expected an integer",
    "tune gpt2 --symbol batch_size=1 --change n_layr=1": "nearest: n_layer",
    "train MODEL --data FILE --seq-len 8": "save the tokenizer beside the weights",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_command_line_mistake_exits_with_2_and_prints_an_error_without_traceback(
    line, gpt2, tmp_path, capfd, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        huggingface_hub.constants, "HF_HUB_OFFLINE", True
    )  # with or without a network
    (tmp_path / "FILE").write_text("to be or not to be " * 50)
    code, out, err = run(capfd, *(gpt2 if word == "MODEL" else word for word in line.split()))
    assert code == 2
    assert MISTAKES[line] in err
    assert "hint: " in err
    assert "Traceback" not in err
    assert out == "" or line.startswith("train")  # it says what it will do first


def test_plan_command_as_json_contains_reads_and_memory_of_each_rank(gpt2, capfd):
    code, out, _ = run(capfd, "plan", gpt2, "--tp", 2, "--pp", 2, "--json")
    found = json.loads(out)
    assert code == 0
    assert len(found["weights"]["ranks"]) == 4
    assert [rank["rank"] for rank in found["training"]["ranks"]] == [0, 1]
    _, out, _ = run(capfd, "plan", gpt2, "--no-training", "--json")
    assert json.loads(out)["training"] is None
    shared = ("--dp", 4, "--dp-shard", 4, "--no-weights", "--json")
    _, out, _ = run(capfd, "plan", gpt2, *shared)
    states = sum(rank["optimizer"] for rank in found["training"]["ranks"])
    assert json.loads(out)["training"]["ranks"][0]["optimizer"] < states


def test_card_and_calibrate_commands_print_json_with_their_documented_keys(
    gpt2, tmp_path, capfd, monkeypatch
):
    def data(*words):
        code, out, _ = run(capfd, *words, "--json")
        assert code == 0
        return json.loads(out)

    card, other = tmp_path / "card", tmp_path / "other"
    made = data("card", "make", gpt2, card, "--checkpoint-ratio", 0.5)
    assert made.keys() == {"folder", "steps", "hash"}
    data("card", "make", gpt2, other)
    assert data("card", "diff", card, card) == {"same": True, "diff": ""}
    assert "checkpoint" in data("card", "diff", card, other)["diff"]
    sha = "0123456789abcdef" * 2 + "01234567"
    at = hub.Reference("me/x", sha)
    monkeypatch.setattr(hub, "push", lambda *args, **options: at)
    monkeypatch.setattr(
        hub, "pull", lambda *args: SimpleNamespace(folder=card, root=card, reference=at)
    )
    assert data("card", "push", card, "me/x") == {"card": f"me/x@{sha}"}
    fetched = data("card", "pull", f"me/x@{sha}", tmp_path / "here")
    assert fetched == {"card": f"me/x@{sha}", "folder": str(tmp_path / "here")}
    found = find_hardware("a100")
    monkeypatch.setattr("slapo_zoo.tune.planner.calibrate.measure", lambda *args: found)
    assert data("calibrate", tmp_path / "a.json") == json.loads((tmp_path / "a.json").read_text())


def test_bench_kernels_command_prints_its_rows_as_json(capfd, monkeypatch):
    row = {
        "what": "bias_relu",
        "shape": "8x8",
        "dtype": "float32",
        "p50 ms": 0.1,
        "eager / ours": 1.5,
    }
    monkeypatch.setattr(
        "slapo_zoo.dispatch.benchmark.run", lambda quick, only, output, again: {"title": [row]}
    )
    _, out, _ = run(capfd, "bench", "kernels", "--only", "bias_relu", "--json")
    assert json.loads(out) == [row]


def test_command_writes_to_a_closed_stdout_or_one_of_another_encoding_without_traceback(
    tmp_path, monkeypatch
):
    """A pipe that its reader has closed ends the command with status 1, as in other programs."""
    reader, writer = os.pipe()
    os.close(reader)
    bytes_written = io.BytesIO()
    for raw, code in ((None, 0), (bytes_written, 0), (io.FileIO(writer, "w"), 1)):
        out = None if raw is None else io.TextIOWrapper(raw, encoding="koi8-r")
        monkeypatch.setattr(sys, "stdout", out)
        words = ("--model", "m", "--data", "d", "--task", "causal", "--ranks", "1")
        with pytest.raises(SystemExit) as caught:
            main(["init", str(tmp_path / f"é{code}{raw is None}.yaml"), *words])
        assert (caught.value.code or 0) == code
    assert b"\\xe90False.yaml is written" in bytes_written.getvalue()


HEADS = {
    "kernel",
    "modules",
    "used",
    "reason",
}  # headings of a table that may be empty and is then not printed as a list
SCREENS = [
    "plan MODEL --gpus 1 --batch 4 --explain", "plan MODEL --pp 2", "list", "show MODEL --tp 2 --pp 2",
    "show MODEL --tp 2 --rank 1", f"card lint {CARD}", "card make MODEL CARD --tp 2",
]  # fmt: skip


@pytest.mark.parametrize("line", SCREENS)
def test_command_output_fits_terminal_width_without_broken_words(
    line, gpt2, capfd, monkeypatch, tmp_path
):
    places = {"MODEL": gpt2, "CARD": tmp_path / "card"}
    words = [places.get(word, word) for word in line.split()]
    shown = {}
    for width in (80, 120, 500):
        monkeypatch.setenv("COLUMNS", str(width))
        _, shown[width], _ = run(capfd, *words)
        lines = [text for text in shown[width].splitlines() if " " in text.strip()]  # else one word
        assert max(map(len, lines)) <= width
    wide = {word for word in shown[500].split() if len(word) > 3 and set(word) != {"-"}}
    for width in (80, 120):
        seen = shown[width]
        assert [w for w in wide if w not in seen and w not in COLUMNS and w not in HEADS] == []


def test_plan_command_prints_count_of_configurations_and_hardware(gpt2, capfd):
    """Earlier output counted more fitting configurations than it had tried, and showed two values of the bubble."""
    tight = ("--batch", 64, "--memory", "1537MiB", "--explain", "--hardware", "h100")
    _, out, _ = run(capfd, "plan", gpt2, "--gpus", 1, *tight)
    out = " ".join(out.split())
    fit, of = map(int, re.search(r"on NVIDIA H100 SXM: (\d+) of (\d+) config", out).groups())
    assert 0 < fit < of
    assert re.search(r"tp=1 pp=1 dp=1.*: stage 0 needs 1.5 GiB of 1.5", out)
    _, out, _ = run(capfd, "plan", gpt2, "--pp", 2, "--no-weights")
    out = " ".join(out.split())
    assert "on NVIDIA A100 SXM 80GB" in out
    share = float(re.search(r"predicted bubble: ([\d.]+)%", out).group(1))
    assert f"bubble {share:.0f}%" in out


def test_renamed_command_line_option_gives_the_same_output_with_a_warning(gpt2, capfd):
    line = ("plan", gpt2, "--no-weights", "--json")
    _, new, _ = run(capfd, *line, "--precision", "fp32")
    _, old, err = run(capfd, *line, "--dtype=float32")
    assert old == new
    assert "warning: plan: --dtype is called --precision now" in err


@pytest.mark.parametrize("line", ["plan gpt3", *(pytest.param(line, marks=pytest.mark.slow) for line in ("show nosuch", "card push CARD me/x"))])  # fmt: skip
def test_unreachable_hub_prints_one_error_without_traceback(line):
    """The endpoint is a port without a listener: one request is sent, the error has four parts."""
    words = [CARD if word == "CARD" else word for word in line.split()]
    environment = os.environ | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    command = [sys.executable, "-m", "slapo_zoo.cli.main", *words]
    found = subprocess.run(
        command, env=environment | {"HF_TOKEN": "hf_x"}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 2, found.stderr
    assert "no answer of the Hub: [Errno 111] Connection refused" in found.stderr
    assert "hint: " in found.stderr
    assert "Retry" not in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("word", ["--version", "-h"])
def test_help_and_version_options_of_the_main_command_exit_with_0(word, capfd):
    code, out, _ = run(capfd, word)
    assert code == 0
    assert ("slapo-zoo 0." if word == "--version" else "Usage") in out


def test_show_command_limits_default_sequence_length_to_model_positions(gpt2, capfd):
    code, out, err = run(capfd, "show", gpt2)
    assert code == 0, err
    assert "1 x 64" in out


def test_log_lines_of_other_libraries_do_not_reach_stdout_of_the_command_line(tmp_path):
    """DeepSpeed, which transformers imports, once wrote its warning as line 1 of `slapo-zoo derive X > x.py`."""
    (tmp_path / "deepspeed.py").write_text(
        "import logging, sys\n"
        "logger = logging.getLogger('DeepSpeed')\n"
        "logger.addHandler(logging.StreamHandler(sys.stdout))\n"
        "logger.warning('Setting accelerator to CPU.')\n"
        "logger.warning('something else')\n"
    )
    code = "from slapo_zoo.cli.main import main; import sys; sys.argv = ['slapo-zoo', 'list']\n"
    code += "try: main()\nfinally: import deepspeed"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert "albert" in done.stdout
    assert "accelerator" not in done.stdout + done.stderr
    assert "something else" in done.stderr
    assert "something else" not in done.stdout
