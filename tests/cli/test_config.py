"""A run's configuration: from a file, from --set, from flags; wrong keys are named."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from cli_runs import failure, run
from slapo_zoo.cli.commands.train import OF_LOAD
from slapo_zoo.cli.main import main, renamed
from slapo_zoo.cli.training.checks import check_batch, check_load, resolved, row_length
from slapo_zoo.cli.training.options import (
    ELSEWHERE,
    LEAST,
    ONE_OF,
    PASSED,
    REFUSED,
    RENAMED,
    ConfigError,
    TrainOptions,
    as_yaml,
    changes,
    checked,
    described,
    make_options,
    read_config,
    read_sets,
)
from slapo_zoo.errors import SlapoError
from slapo_zoo.zoo.options import LoaderOptions

WRONG = {
    "warm_up_steps: 3": "no option has this name\n  hint: did you mean 'warmup_steps'?",
    "lr_scheduler: linear": "use lr_scheduler_type",
    "bf16: true": "use load: {precision: bf16}",
    "label_smoothing_factor: 0.1": "the loss is that of the model's head",
    "trainer: {neftune_noise_alpha: 5}": "neftune_noise_alpha: this option is refused: the loss is",
    "group_by_length: true": "a run makes its own batches",
    "torch_compile: true": "the loader shards, casts and recomputes the model",
    "run_nam: a": "did you mean 'run_name'",
    "eval_delay: many": "found 'many', expected an integer",
    "max_steps: many": "found 'many', expected an integer\n  hint: correct the value; the default is 100",
    "max_steps: true": "found True, expected an integer",
    "max_steps: 0": "found 0, expected at least 1",
    "tp: 2.5": "found 2.5, expected an integer",
    "task: translate": "expected one of causal, masked",
    "columns: text": "found 'text', expected a mapping",
    "model: [a]": "expected a text",
    "- a": "found list, expected keys and values",
    "a: [": "this is not valid YAML: line 1, column 5: while parsing",
    "lerning_rate: 1": "did you mean 'learning_rate'",
    "max_steps: 2\nmax_steps: 3": "found the key 'max_steps' 2 times",
    "load: {seed: 2, seed: 3}": "found the key 'seed' 2 times",
    "learning_rate: .nan": "found nan, expected a finite number",
    "max_grad_norm: .inf": "expected a finite number",
    "eval_share: 1": "found 1.0, expected less than 1",
    "max_steps: 15e-1": "found 1.5, expected an integer",
    "data: [a]": "hint: correct the value of data, which means: a file, a folder",
    "report_to: [[a]]": "expected a list of texts",
    "columns: {text: 3}": "found {'text': 3}, expected a mapping of names",
    "load: {1: 2}": "expected a mapping of names",
    "load: 3\nzero_stage: 2": "load: found 3, expected a mapping",
    "output: ''": "found an empty text",
    "seed: -1": "found -1, expected at least 0",
}


@pytest.mark.parametrize("text", WRONG)
def test_config_file_error_names_the_mistake_and_the_path_of_the_file(text, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config(tmp_path / "run.yaml")
    assert WRONG[text] in str(caught.value)
    assert caught.value.where == str(tmp_path / "run.yaml")


def test_option_names_of_other_training_tools_map_to_existing_config_keys():
    known = set(described())
    assert not known & set(ELSEWHERE)
    for name, ours in ELSEWHERE.items():
        key = ours.split(" ")[0].strip(":;,")
        assert key in known, f"{name}: {key}"


def test_renamed_config_keys_are_accepted_with_a_message_that_names_the_new_key(tmp_path, capsys):
    """An old key works in a file, by --set and as a flag, each with a message that names the new key."""
    (tmp_path / "run.yaml").write_text("model: m\nsteps: 3\nlr: 1e-3\n")
    assert read_config(tmp_path / "run.yaml") == {"model": "m", "max_steps": 3, "learning_rate": 1e-3}  # fmt: skip
    said = capsys.readouterr().err
    assert "run.yaml: steps is called max_steps now, lr is called learning_rate now" in said
    assert read_sets(["best_metric=accuracy"]) == {"metric_for_best_model": "accuracy"}
    with pytest.raises(
        ConfigError, match="max_steps: found steps too, the older name of this option"
    ):
        read_sets(["steps=1", "max_steps=2"])
    for old, new in RENAMED.items():
        assert new in described()
        flag, now = f"--{old}".replace("_", "-"), f"--{new}".replace("_", "-")
        assert renamed(["train", "m", f"{flag}=3"]) == ["train", "m", f"{now}=3"]
        assert f"warning: train: {flag} is called {now} now" in capsys.readouterr().err
    assert renamed(["bench", "m", "--steps", "3"]) == ["bench", "m", "--steps", "3"]


def test_new_names_of_renamed_config_keys_are_fields_of_transformers_training_arguments():
    """Every key that TrainingArguments also has means the same there, and is passed on."""
    from transformers import TrainingArguments

    assert set(RENAMED.values()) <= TrainingArguments.__dataclass_fields__.keys()


def test_every_field_of_transformers_training_arguments_is_an_option_or_refused_with_a_hint():
    """None is ignored in silence; what another release of transformers adds is seen here."""
    from transformers import TrainingArguments

    ways = {"key": TrainOptions.__dataclass_fields__, "passed": PASSED, "elsewhere": ELSEWHERE}
    for name in TrainingArguments.__dataclass_fields__:
        refused = [names for names in REFUSED if name.startswith(names)]
        found = [way for way, names in ways.items() if name in names] + ["refused"] * len(refused)
        assert len(found) == 1, (name, found)
        if found[0] in ("refused", "elsewhere"):
            with pytest.raises(ConfigError) as caught:
                checked({name: True}, "run.yaml")
            assert "hint: use" in str(caught.value) or "docs/trainer.md" in str(caught.value), name
    assert not PASSED.keys() - TrainingArguments.__dataclass_fields__.keys()


def test_transformers_training_arguments_are_accepted_as_config_keys_and_under_trainer(tmp_path):
    """The run.yaml of a checkpoint is read again."""
    given = read_sets(["run_name=a", "trainer.tf32=false", "eval_delay=2e1"])
    assert given == {"trainer": {"run_name": "a", "tf32": False, "eval_delay": 20}}
    options = make_options({"model": "m"}, given, read_sets(["trainer={run_name: b}"]))
    assert options.trainer == {"run_name": "b", "tf32": False, "eval_delay": 20}
    assert make_options(checked(yaml.safe_load(as_yaml(options)), "")) == options
    with pytest.raises(ConfigError, match="tf32: found 3, expected true or false"):
        read_sets(["tf32=3"])


def test_train_command_flags_add_loader_options_to_those_of_the_config_file(
    capsys, tmp_path, monkeypatch
):
    """The flags become entries of `load`, added to those of the file; names and defaults are the loader's."""
    usual = vars(LoaderOptions())
    assert all(usual[name] == default for name, (_, default) in OF_LOAD.items())
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("model: m\nload: {kernels: reference}\n")
    with pytest.raises(SystemExit):
        main(["train", "--config", "run.yaml", "--checkpoint-ratio", "0.5", "--sequence-parallel"])
    said = yaml.safe_load(capsys.readouterr().out.partition("\nreading")[0])
    assert said["load"] == {"kernels": "reference", "checkpoint_ratio": 0.5, "sequence_parallel": True}  # fmt: skip


def test_unknown_train_command_flag_raises_and_names_the_nearest_flag(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "m", "--max-stps", "3"])
    assert ended.value.code == 2
    assert re.search(r"No such option: --max-stps.*--max-steps", capsys.readouterr().err, re.DOTALL)
    said = failure(capsys, "train", "m", "--num_train_epochs", "3")
    assert "--num-train-epochs: found no such option\n  hint: use max_steps" in said
    assert "data: found none" in failure(capsys, "train", "m", "--max_steps", "3")


def test_train_config_values_are_converted_to_the_types_of_their_fields(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "learning_rate: 1e-4\nmax_grad_norm: 1\nreport_to: [a, b]\nsave_total_limit: null\nmax_steps: 1e5\n"
    )
    found = read_config(tmp_path / "run.yaml")
    assert found == {
        "learning_rate": 1e-4,
        "max_grad_norm": 1.0,
        "report_to": ("a", "b"),
        "save_total_limit": None,
        "max_steps": 100_000,
    }
    assert isinstance(found["max_grad_norm"], float)
    assert read_sets(["report_to=a", "columns.text=body", "columns.label=stars"]) == {
        "report_to": ("a",), "columns": {"text": "body", "label": "stars"}
    }  # fmt: skip


def test_command_line_flags_override_set_options_which_override_the_config_file():
    file = {"model": "m", "max_steps": 5, "columns": {"text": "a", "label": "b"}}
    options = make_options(file, read_sets(["columns.text=c", "tp=2"]), {"max_steps": 7})
    assert options == TrainOptions("m", max_steps=7, tp=2, columns={"text": "c", "label": "b"})


def test_train_options_written_to_yaml_and_read_back_are_equal():
    options = TrainOptions("m", learning_rate=1e-5, report_to=("a",), columns={"text": "b"}, dp=2)
    assert make_options(checked(yaml.safe_load(as_yaml(options)), "")) == options


def test_every_config_limit_and_choice_list_belongs_to_an_existing_key():
    assert LEAST.keys() | ONE_OF.keys() <= TrainOptions.__dataclass_fields__.keys()
    checked({k: v for k, v in vars(TrainOptions("m")).items() if v is not None}, "")


def test_docs_page_on_training_lists_every_config_key():
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    found = re.findall(
        r"^\| `(\w+)` \| (?:`(.*)`)? \| (.+) \|$", page.partition("## All keys")[2], re.MULTILINE
    )
    keys = described()
    assert list(keys) == list(TrainOptions.__dataclass_fields__)
    assert {key: said for key, _, said in found} == keys
    for key, default, _ in found[1:]:
        assert (
            yaml.safe_load(default.replace("None", "null"))
            == yaml.safe_load(as_yaml(TrainOptions("")))[key]
        )


def test_init_command_writes_a_training_config_from_four_answers(tmp_path, monkeypatch, capsys):
    from typer.testing import CliRunner

    from slapo_zoo.cli.main import app

    file = tmp_path / "run.yaml"
    result = CliRunner().invoke(
        app,
        ["init", str(file)],
        input="bert\nrows.jsonl\nclassify\n2\n",
        obj=SimpleNamespace(debug=False),
    )
    assert result.exit_code == 0, result.output
    options = make_options(read_config(file))
    assert (options.model, options.data, options.task, options.dp) == (
        "bert",
        "rows.jsonl",
        "classify",
        2,
    )
    assert options.metric_for_best_model == "accuracy"
    assert "# data-parallel replicas" in file.read_text()
    assert "this file exists already" in failure(capsys, "init", file)


def test_init_command_writes_a_batch_size_divisible_by_ranks(tmp_path):
    run("init", tmp_path / "a", "--model", "m", "--data", "d", "--task", "auto", "--ranks", 3)
    check_batch(read_config(tmp_path / "a")["batch_size"], 3, None)


def test_train_command_parses_arguments_without_importing_torch(tmp_path):
    code = "import sys, slapo_zoo.cli.commands.train, slapo_zoo.cli.training.options; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False"]


def test_unknown_key_under_load_in_the_train_config_raises_and_names_the_nearest_key():
    config = SimpleNamespace(resid_pdrop=0.1)
    check_load({"sequence_parallel": True, "resid_pdrop": 0.2}, config)
    with pytest.raises(SlapoError, match=r"nearest: load\.sequence_parallel"):
        check_load({"sequence_paralel": True}, config)
    for name, key in (("tp", "tp"), ("auto_class", "task")):
        with pytest.raises(
            ConfigError,
            match=f"this argument is an option of its own, not an entry of `load`\n.*write `{key}:` outside",
        ):
            check_load({name: 2}, config)
    with pytest.raises(SlapoError, match=r"nearest: load\.resid_pdrop"):
        check_load({"residual_pdrop": 0.1}, config)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"best": "b"}, "nothing to evaluate on"),
        ({"patience": 2}, "nothing to evaluate on"),
        ({"eval_data": "e", "engine": "megatron"}, "expected torch"),
        ({"data": None}, "data: found none"),
        ({"eval_data": "e", "eval_share": 0.1}, "eval_share: found eval_data too"),
        ({"lr_scheduler_type": "cosin"}, "cosin is not a valid"),
        ({"eval_data": "./d.txt"}, "eval_data: found the rows that are trained on"),
        ({"eval_split": "train"}, "found the rows that are trained on"),
        ({"eval_batches": 2}, "eval_batches: there is nothing to evaluate on"),
        ({"save_total_limit": 2}, "save_total_limit: there is no checkpoint"),
        (
            {"lr_scheduler_kwargs": {"num_cycles": 2}},
            "lr_scheduler_kwargs: a constant schedule takes no arguments",
        ),
        ({"trainer": {"eval_delay": 2}}, "eval_delay: there is nothing to evaluate on"),
        (
            {"trainer": {"optim_args": "momentum=0.9"}},
            "optim_args: optim=adamw_torch_fused takes no arguments",
        ),
        (
            {"optim": "sgd", "trainer": {"optim_args": "lr=0.9"}},
            "found lr, expected momentum, dampening or nesterov",
        ),
        ({"log_file": "."}, "log_file: found a folder"),
        ({"log_file": "notes"}, "log_file: found another file"),
        ({"log_file": "d.txt"}, "log_file: found d.txt, which is the path of data"),
        ({"output": "o", "checkpoint": "o"}, "output: found o, which is the path of checkpoint"),
        (
            {"output": "o", "checkpoint": "o/c"},
            "checkpoint: found o/c, which is the path of output or lies in",
        ),
        (
            {"output": "o", "log_file": "o/log"},
            "log_file: found o/log, which is the path of output",
        ),
        ({"output": "m"}, "output: found m, which is the path of model"),
        ({"output": "notes/o"}, "--output: .*notes cannot be written to"),
        ({"output": "."}, "--output: found .* the working directory"),
        ({"output": "old"}, "--output: found a folder that is no checkpoint"),
        ({"log_file": "notes/log"}, "log_file: .*notes cannot be written to"),
    ],
)
def test_train_config_with_conflicting_or_missing_keys_is_refused(
    changes, said, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old" / "step-00000001").mkdir(parents=True)
    for name in ("d.txt", "e", "notes"):
        (tmp_path / name).write_text("d")
    options = TrainOptions("m", **{"data": "d.txt"} | changes)
    with pytest.raises(SlapoError, match=said):
        resolved(options)


def test_default_sequence_length_of_roberta_excludes_positions_reserved_for_padding():
    """RoBERTa has 66 positions, of which the first two are reserved for padding."""
    config = SimpleNamespace(model_type="roberta", max_position_embeddings=66, pad_token_id=1)
    assert row_length(None, config) == row_length(64, config) == 64
    with pytest.raises(
        SlapoError, match="target_len: found 65 tokens, but the model has 64 positions"
    ):
        row_length(65, config, "target_len")


def test_train_command_prints_its_configuration_before_reading_data(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(
        f"model: {tmp_path / 'none'}\nmax_steps: 3\nlearning_rate: 1e-3\n"
    )
    with pytest.raises(SystemExit):
        main(
            [
                "train",
                "--config",
                str(tmp_path / "run.yaml"),
                "--max-steps",
                "4",
                "--set",
                "learning_rate=2e-3",
            ]
        )
    captured = capsys.readouterr()
    said = yaml.safe_load(captured.out.partition("\nreading")[0])
    assert said["max_steps"] == 4
    assert said["learning_rate"] == 2e-3
    assert "data" not in said  # only what differs from the defaults
    assert "data: found none" in captured.err
    assert "found no such file" in failure(capsys, "train", "--config", tmp_path / "gone.yaml")
    assert "model: no model was given" in failure(capsys, "train", "--set", "max_steps=3")
    assert "learning_rate: found inf, expected a finite" in failure(
        capsys, "train", "m", "--learning-rate", "inf"
    )
    assert "write key=value" in failure(capsys, "train", "m", "--set", "steps")
    assert "max_steps=[1: this is not valid YAML" in failure(
        capsys, "train", "m", "--set", "max_steps=[1"
    )


def test_last_of_repeated_set_options_determines_the_value():
    """A later --set replaces an earlier one for the same key."""
    assert read_sets(["columns=null", "columns.text=body"]) == {"columns": {"text": "body"}}
    assert read_sets(["columns.text=a", "columns.label=b", "learning_rate=1", "learning_rate=2"]) == {
        "columns": {"text": "a", "label": "b"}, "learning_rate": 2.0,
    }  # fmt: skip


def test_train_command_prints_only_options_that_differ_from_defaults():
    """The full configuration would be 42 lines at the start of each run."""
    options = TrainOptions("m", max_steps=5, columns={"text": "body"}, report_to=("wandb",))
    assert yaml.safe_load(changes(options)) == {
        "model": "m", "max_steps": 5, "columns": {"text": "body"}, "report_to": ["wandb"],
    }  # fmt: skip


def test_zero_stage_in_the_train_config_sets_the_loader_option_and_warns_with_deepspeed(capsys):
    """zero_stage is the loader's option, as in show, plan and verify; DeepSpeed's meaning still works, with a warning."""
    layout = make_options({"model": "m"}, read_sets(["zero_stage=2", "load.dp_shard=2"]))
    assert layout.load == {"dp_shard": 2, "zero_stage": 2}
    assert not capsys.readouterr().err
    older = make_options({"model": "m", "engine": "deepspeed"}, read_sets(["zero_stage=1"]))
    assert (older.load, older.deepspeed) == ({}, {"zero_optimization": {"stage": 1}})
    assert "is called deepspeed: {zero_optimization: {stage: N}} now" in capsys.readouterr().err
    assert "zero_stage" not in read_sets(["zero_stage=0"])  # as run.yaml of a release before has it
