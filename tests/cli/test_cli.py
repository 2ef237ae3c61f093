"""The command line: quick, readable errors, and `train` on a person's own checkpoint."""

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import demo
import pytest
import torch
import type_coverage
import typer
from safetensors.torch import load_file

from cli_runs import END, failure, tokenizer
from slapo_zoo.cli.main import main
from slapo_zoo.data.tasks import DataError
from slapo_zoo.tune.outcome import Outcome
from slapo_zoo.tune.tuner import Result, Trial

CARD = str(Path(__file__).parents[2] / "hub_cards" / "gpt2")
MASK, CLS, SEP = "[MASK]", "[CLS]", "[SEP]"
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}


def save(folder, model, words):
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    from transformers import GPT2Config, GPT2LMHeadModel

    words = tokenizer(eos_token=END)
    config = GPT2Config(
        n_embd=32, n_head=4, n_layer=2, n_positions=64, vocab_size=len(words),
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return save(tmp_path_factory.mktemp("gpt2"), GPT2LMHeadModel(config), words)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    from transformers import BertConfig, BertForMaskedLM

    words = tokenizer(mask_token=MASK, cls_token=CLS, sep_token=SEP)
    config = BertConfig(
        **SIZES, intermediate_size=64, max_position_embeddings=64, vocab_size=len(words)
    )
    return save(tmp_path_factory.mktemp("bert"), BertForMaskedLM(config), words)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "hamlet.txt"
    path.write_text("to be or not to be, that is the question\n" * 60)
    return str(path)


def train(*arguments):
    main(["train", *map(str, arguments), "--device", "cpu"])


def run_cli(*arguments, **options):
    command = [sys.executable, "-W", "error", "-m", "slapo_zoo.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_command_line_module_imports_without_torch_and_help_lists_every_command():
    code = "import sys, slapo_zoo.cli.main; print('torch' in sys.modules, 'transformers' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False", "False"]
    result = run_cli("--help")
    assert result.returncode == 0
    assert all(name in result.stdout for name in ("train", "list", "bench", "version"))


JSON_COMMANDS = {
    "list": ("slapo_zoo.zoo.features.features", ["list"], lambda: {"a": {}}),
    "version": ("slapo_zoo.cli.commands.families._version", ["version"], None),
    "show": ("slapo_zoo.zoo.survey.survey", ["show", "FOLDER"], None),
    "verify": (
        "slapo_zoo.verify.apart.verify_apart", ["verify", "gpt2"],
        lambda: {"verdict": "verified", "text": "fine"},
    ),
    "derive": ("slapo_zoo.verify.derive.derive", ["derive", "FOLDER"], None),
    "plan": (
        "slapo_zoo.tune.planner.layout_search.Planner.search",
        ["plan", "FOLDER", "--gpus", "1", "--batch", "4"], None,
    ),
    "bench": ("slapo_zoo.cli.training.step_times.time_steps", ["bench", "FOLDER", "--steps", "1", "--seq-len", "8"], None),
    "tune": (
        "slapo_zoo.tune.tuner.Tuner.run",
        ["tune", "gpt2", "--symbol", "batch_size=1", "--no-plan"],
        lambda: Result([Trial(0, {"batch_size": 1}, Outcome("ok", 2.0))]),
    ),
    "check": ("slapo_zoo.weights.training_folder.damages_of", ["check", "FOLDER"], lambda: (3, [])),
    "card verify": (
        "slapo_zoo.verify.card_check.verify_card", ["card", "verify", CARD, "--model", "gpt2"],
        lambda: {"verdict": "verified", "text": "fine"},
    ),
    "train": ("slapo_zoo.cli.training.run.run", ["train", "FOLDER", "--data", __file__, "--seq-len", "8"], lambda: [2.0]),
    "init": (
        "slapo_zoo.cli.commands.init.described",
        ["init", "NEW", "--model", "m", "--data", "d", "--task", "causal", "--ranks", "3"], None,
    ),
    "coverage": ("type_coverage.cover", ["gpt2"], lambda: [type_coverage.Outcome("gpt2", "GPT2Model")]),
    "reshard": ("slapo_zoo.weights.reshard.reshard", ["reshard", "FOLDER", "NEW", "--max-shard-size", "20KB"], None),
    "demo": ("demo.compared", [], lambda: ([2.0], [2.0], True)),
    "card lint": ("slapo_zoo.zoo.cards.resolve_card.load_card", ["card", "lint", CARD], None),
}  # fmt: skip


def of_ci(function):
    """Run a command of ci/run.py by its script."""
    app = typer.Typer()
    app.command()(function)
    return app


OF_CI = {"coverage": of_ci(type_coverage.coverage), "demo": of_ci(demo.demo)}


@pytest.mark.parametrize("command", JSON_COMMANDS)
def test_command_with_json_option_prints_only_json_to_stdout(
    command, gpt2, tmp_path, capfd, monkeypatch
):
    """stdout holds only JSON, also where a library such as DeepSpeed or a child process prints."""
    place, arguments, instead = JSON_COMMANDS[command]
    module, _, name = place.rpartition(".")
    own = getattr(pkgutil.resolve_name(module), name)

    def noisy(*args, **kwargs):
        print("[INFO] Setting ds_accelerator to cpu")
        os.write(1, b"from a child\n")
        return instead() if instead else own(*args, **kwargs)

    monkeypatch.setattr(place, noisy)
    words = {"FOLDER": gpt2, "NEW": str(tmp_path / "new")}
    with pytest.raises(SystemExit) as caught:
        OF_CI.get(command, main)([*(words.get(word, word) for word in arguments), "--json"])
    assert caught.value.code in (0, None)
    captured = capfd.readouterr()
    assert json.loads(captured.out)
    assert "ds_accelerator" in captured.err
    assert "from a child" in captured.err


def test_every_command_with_json_option_has_a_test():
    """Fail where a command with --json is in no list of tests."""
    from typer.main import get_command

    from slapo_zoo.cli.main import app

    def with_json(command, path=""):
        for name, child in getattr(command, "commands", {}).items():
            yield from with_json(child, f"{path} {name}".strip())
        if any("--json" in option.opts for option in command.params):
            yield path

    beside = {"calibrate", *(f"card {name}" for name in ("make", "diff", "push", "pull"))}
    # these in tests/cli/test_cli_mistakes.py
    assert set(with_json(get_command(app))) == (set(JSON_COMMANDS) - set(OF_CI)) | beside


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["demo", "--steps", "3"], "ci/run.py demo"),
        (["coverage", "gpt2"], "ci/run.py coverage"),
        (["bench", "m", "--tp", "2", "--beside", "r"], "ci/run.py beside m r --tp 2"),
    ],
)
def test_removed_command_exits_with_an_error_that_names_its_replacement(old, new, capsys):
    with pytest.raises(SystemExit) as caught:
        main(old)
    assert caught.value.code == 2
    assert new in capsys.readouterr().err


def test_list_command_prints_model_families_and_version_command_prints_package_versions(capsys):
    for arguments, words in ((["list"], ("gpt2", "bert")), (["version"], ("torch 2.", "python"))):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code in (0, None)
        out = capsys.readouterr().out
        assert all(word in out for word in words)


def test_version_command_as_json_lists_the_versions_of_python_torch_and_slapo_zoo(capfd):
    with pytest.raises(SystemExit):
        main(["version", "--json"])
    found = json.loads(capfd.readouterr().out)
    assert found["torch"].startswith("2.")
    assert set(found) > {"python", "slapo-zoo"}


def test_bash_completion_of_a_command_prefix_offers_the_matching_command():
    environment = os.environ | {"_SLAPO_ZOO_COMPLETE": "complete_bash", "COMP_WORDS": "slapo-zoo pl",
                                "COMP_CWORD": "1"}  # fmt: skip
    command = [
        sys.executable,
        "-c",
        "from slapo_zoo.cli.main import app; app(prog_name='slapo-zoo')",
    ]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["plan"], result.stderr


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mesh", [("--tp", 2, "--pp", 2), (), ("--dp", 2)], ids=str)
def test_train_command_saves_a_checkpoint_that_transformers_loads(
    mesh, gpt2, text, tmp_path, capfd
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output = tmp_path / "trained"
    numbers = ("--steps", 3, "--seq-len", 16, "--batch-size", 4, "--lr", 1e-3)
    with pytest.raises(SystemExit) as caught:
        train(gpt2, *mesh, "--data", text, *numbers, "--output", output)
    assert caught.value.code in (0, None)
    out = capfd.readouterr().out
    assert "what each rank read" in out
    assert "step 3/3" in out
    AutoTokenizer.from_pretrained(output)
    AutoModelForCausalLM.from_pretrained(output)


def losses(capfd, *arguments):
    with pytest.raises(SystemExit):
        train(*arguments, "--steps", 3, "--seq-len", 16, "--batch-size", 4, "--lr", 1e-3)
    return [line for line in capfd.readouterr().out.splitlines() if line.startswith("training:")]


@pytest.mark.slow  # test_tasks.py resumes on tp, dp and pp, and test_preemption.py reads what a resumed run prints
def test_train_command_resumed_on_another_mesh_prints_the_losses_of_an_uninterrupted_run(
    gpt2, text, tmp_path, capfd
):
    """Three steps in one run equal two steps with tp=2 and a third in one process; a further start has no step left."""
    numbers = ("--data", text, "--seq-len", 16, "--batch-size", 4, "--lr", 1e-3)
    kept = ("--checkpoint", tmp_path / "kept", "--save-every", 1)

    def run(*arguments):
        with pytest.raises(SystemExit) as caught:
            train(gpt2, *numbers, *arguments)
        assert caught.value.code in (0, None)
        return capfd.readouterr().out

    def told(out):
        return [
            line.partition(": ")[2] for line in out.splitlines() if line.startswith("training:")
        ]

    whole = told(run("--steps", 3))
    first = told(run("--steps", 2, "--tp", 2, *kept))
    rest = run("--steps", 3, *kept, "--output", tmp_path / "trained")
    assert "checkpoint: 2 of 3 steps are done" in rest
    assert [line.split("  ")[1:] for line in first + told(rest)] == [
        line.split("  ")[1:] for line in whole
    ]
    assert "checkpoint: 3 of 3 steps are done" in run("--steps", 3, *kept)
    trained, kept_files = (
        load_file(tmp_path / name / "model.safetensors") for name in ("trained", "kept")
    )
    assert trained.keys() == kept_files.keys()
    assert all(torch.equal(trained[name], kept_files[name]) for name in trained)


def test_train_command_refuses_to_resume_with_another_batch_size(gpt2, text, tmp_path, capsys, monkeypatch):  # fmt: skip
    numbers = ("train", gpt2, "--data", text, "--seq-len", 16, "--checkpoint", tmp_path / "kept")
    with pytest.raises(SystemExit):
        main([*map(str, numbers), "--steps", "1", "--batch-size", "4", "--device", "cpu"])
    capsys.readouterr()
    with pytest.raises(SystemExit):  # keys that do not name the rows may change, and are told
        train(
            *numbers[1:], "--steps", 1, "--batch-size", 4, "--clip", 2, "--set", "warmup_steps=1e1"
        )
    told = capsys.readouterr().err
    assert "warmup_steps: 0 --> 10, max_grad_norm: 1.0 --> 2.0" in told
    assert "batch_size" not in told
    monkeypatch.setattr("slapo_zoo.cli.training.run.run", lambda *args: pytest.fail("work began"))
    err = failure(capsys, *numbers, "--batch-size", 2)
    assert "batch_size=4 (now 2)" in err
    assert "name a new folder" in err
    (tmp_path / "kept" / "training_state.json").unlink()
    err = failure(capsys, *numbers, "--batch-size", 4)
    assert "weights alone are loaded by from_pretrained" in err


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_train_command_prints_the_same_losses_on_every_mesh(family, request, text, capfd):
    folder = request.getfixturevalue(family)
    alone = losses(capfd, folder, "--data", text)
    assert len(alone) == 3
    assert losses(capfd, folder, "--data", text, "--tp", 2) == alone


def test_train_command_refuses_invalid_arguments_before_loading_the_model(
    gpt2, bert, text, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("slapo_zoo.cli.training.run.run", lambda *args: pytest.fail("work began"))
    start = ("train", gpt2, "--data")
    assert "found no file, folder or data set" in failure(capsys, *start, tmp_path / "none")
    assert "expected at least 999 rows" in failure(
        capsys, *start, text, "--seq-len", 16, "--batch-size", 999
    )
    assert "multiple of dp * micro-batches = 6" in failure(
        capsys, *start, text, "--dp", 2, "--micro-batches", 3
    )
    assert "the model has 64 positions" in failure(capsys, *start, text, "--seq-len", 65)
    ahead = failure(capsys, "train", bert, "--data", text, "--task", "causal")
    assert "task=causal: found bert with is_decoder=false" in ahead
    assert "expected auto, cpu or cuda" in failure(capsys, *start, text, "--device", "tpu")
    (tmp_path / "notes.txt").write_text("mine")
    assert "is no checkpoint" in failure(capsys, *start, text, "--output", tmp_path)
    assert "found no such folder" in failure(capsys, "train", "./none", "--data", text)
    assert "found no config.json" in failure(capsys, "train", tmp_path, "--data", text)


def test_command_with_unknown_family_prints_an_error_that_names_it(text, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xlnet"}))
    assert "slapo_zoo has no sharding rules for this model family" in failure(
        capsys, "train", tmp_path, "--data", text
    )


def test_train_command_refuses_a_process_count_unlike_the_mesh_size(
    gpt2, text, capsys, monkeypatch
):
    names = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    err = failure(capsys, "train", gpt2, "--data", text, "--tp", 2)
    assert "found 3 processes, expected tp * pp * dp = 2 * 1 * 1" in err


def test_train_command_prints_an_error_of_a_rank_without_traceback(gpt2, text, capsys):
    own = ("--set", "load.schedule=zoo")  # is not tried before the ranks start
    err = failure(capsys, "train", gpt2, "--data", text, "--pp", 3, "--seq-len", 16, *own)
    assert "pp=3" in err
    assert err.startswith("error: rank ")


def test_debug_option_prints_the_traceback_of_an_error(gpt2, text, tmp_path):
    with pytest.raises(DataError):  # the interpreter prints it; other commands end in SystemExit
        main(["--debug", "train", gpt2, "--data", str(tmp_path / "none")])


@pytest.mark.slow
def test_train_command_under_torchrun_runs_on_the_ranks_of_torchrun(gpt2, text, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "slapo_zoo.cli.main", "train", gpt2, "--tp=2", "--data", text, "--steps=2"]
    command += ["--seq-len=16", "--device=cpu", f"--output={tmp_path / 'trained'}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "trained" / "model.safetensors").exists()
    assert (tmp_path / "trained" / "tokenizer.json").exists()
