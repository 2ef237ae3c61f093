"""`slapo-zoo train` with every engine under every launcher has the losses of one process."""

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import warnings

import pytest

from cli_runs import END, failure, tokenizer
from slapo_zoo.cli.main import main
from slapo_zoo.parallel.ranks.launch import prepare_rank
from slapo_zoo.parallel.ranks.process_group import is_distributed_launch, world_size_of_launch
from slapo_zoo.parallel.ranks.slurm import first_host, slurm_environment, tasks_per_node

NUMBERS = [
    "--max-steps",
    "2",
    "--seq-len",
    "16",
    "--batch-size",
    "4",
    "--learning-rate",
    "1e-3",
    "--device",
    "cpu",
]
ENGINES = {
    "torch": ["--engine", "torch", "--tp", "2"],
    "torch, cut tokens": ["--engine", "torch", "--cp", "2", "--cp-attention", "ulysses"],
    "deepspeed": [
        *("--engine", "deepspeed", "--dp", "2"),
        "--set",
        "deepspeed={zero_optimization: {stage: 2}}",
    ],
    "megatron": ["--engine", "megatron", "--tp", "2"],
}
SRUN = {  # all variables that srun sets for two tasks on one node
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}  # fmt: skip
OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # fmt: skip


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """Remove launcher variables, which earlier tests in this process may have set."""
    for name in [*OF_LAUNCHERS, *SRUN, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODELIST"]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """(arguments of a training, the losses that one process prints)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder, words = tmp_path_factory.mktemp("job"), tokenizer(eos_token=END)
    config = GPT2Config(
        n_embd=32, n_head=4, n_layer=2, n_positions=64, vocab_size=len(words), bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    for part in (GPT2LMHeadModel(config), words):
        part.save_pretrained(folder / "gpt2")
    (folder / "hamlet.txt").write_text("to be or not to be, that is the question\n" * 60)
    arguments = ["train", str(folder / "gpt2"), "--data", str(folder / "hamlet.txt"), *NUMBERS]
    (expected,) = forked([({}, arguments)], folder)
    assert len(expected) == 2
    return arguments, expected


def losses(text):
    return [line for line in text.splitlines() if line.startswith("training:")]


def forked(processes, folder):
    """Return what each (variables, arguments) prints, in processes as a launcher starts them."""
    context, started = multiprocessing.get_context("fork"), []
    for number, process in enumerate(processes):
        started.append(context.Process(target=run_cli, args=(*process, folder / str(number))))
        with warnings.catch_warnings():  # fork warns about pytest's threads
            warnings.simplefilter("ignore")
            started[-1].start()
    for process in started:
        process.join(120)
        assert process.exitcode == 0
    return [losses((folder / str(number)).read_text()) for number in range(len(processes))]


def run_cli(variables, arguments, file):
    warnings.simplefilter("ignore")  # DeepSpeed's own
    prepare_rank(threads=1)
    os.environ.update(variables)
    with file.open("w") as out, contextlib.redirect_stdout(out):
        main(arguments)


def launched(arguments, **variables):
    """The losses that a real launcher's job prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return losses(done.stdout)


@pytest.mark.parametrize("engine", ENGINES)
def test_train_command_on_local_ranks_has_the_losses_of_one_process(engine, job, capfd):
    arguments, expected = job
    warnings.simplefilter("ignore")  # DeepSpeed's own; pytest puts the filters back
    with pytest.raises(SystemExit) as caught:
        main([*arguments, *ENGINES[engine]])
    assert caught.value.code in (0, None)
    assert losses(capfd.readouterr().out) == expected


def test_train_command_with_cp_saves_a_checkpoint_that_resumes_on_another_mesh(
    job, tmp_path, capfd
):
    """Two steps on cp=2 and two on tp=2, with evaluations, have the losses of four steps of one process."""
    from transformers import GPT2LMHeadModel

    folder, found = str(tmp_path / "out"), []
    runs = [("4",), ("2", "--cp", "2"), ("4", "--tp", "2", "--output", folder)]
    for i, (steps, *mesh) in enumerate(runs):
        words = [
            *job[0],
            "--json",
            "--max-steps",
            steps,
            "--eval-share",
            "0.2",
            "--checkpoint",
            str(tmp_path / f"{i > 0}"),
            *mesh,
        ]
        with pytest.raises(SystemExit) as caught:
            main(words)
        out, err = capfd.readouterr()
        assert caught.value.code in (0, None), err
        found.append(json.loads(out[out.index("{") :])["losses"])
    assert [len(each) for each in found] == [4, 2, 2]
    assert found[1] + found[2] == pytest.approx(found[0], rel=2e-6)
    assert GPT2LMHeadModel.from_pretrained(folder).config.n_layer == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "deepspeed"], "--engine deepspeed: not supported together with cp=2"),
        (["--cp-attention", "ulises"], "found 'ulises', expected one of gather, ulysses, ring"),
        (["--cp-attention", "ulysses", "--tp", "4"], "cp=2 does not divide the 1 heads of a rank"),
        (["--exact", "tp=2"], "exact: not supported together with cp=2"),
        (
            ["--checkpoint-policy", "save_matmuls"],
            "checkpoint_policy='save_matmuls': not supported together with cp=2",
        ),
        (
            ["--set", "load={kernels: [linear]}"],
            "kernels=['linear']: not supported together with cp=2",
        ),
    ],
)
def test_train_command_with_cp_refuses_unsupported_options_before_reading_data(
    words, said, job, capsys
):
    assert said in failure(capsys, *job[0], "--cp", "2", *words)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("deepspeed", "megatron")]


@pytest.mark.parametrize("engine", ["torch", *SLOW])
def test_train_command_under_srun_has_the_losses_of_one_process(engine, job, tmp_path):
    """The processes have only srun's variables, which include no MASTER_ADDR."""
    arguments, expected = job
    ranks = [(of_srun(rank), [*arguments, *ENGINES[engine]]) for rank in range(2)]
    assert forked(ranks, tmp_path) == [expected, []]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_train_command_under_torchrun_has_the_losses_of_local_ranks(engine, job):
    arguments, expected = job
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert launched([*run, "-m", "slapo_zoo.cli.main", *arguments, *ENGINES[engine]]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_train_command_under_the_deepspeed_launcher_has_the_losses_of_local_ranks(engine, job):
    """DeepSpeed's launcher puts --local_rank before the name of the command."""
    arguments, expected = job
    run = ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", "29511"]
    run += ["--module", "slapo_zoo.cli.main", *arguments, *ENGINES[engine]]
    assert launched(run, DS_ACCELERATOR="cpu") == expected


def test_train_command_accepts_the_local_rank_option_of_the_deepspeed_launcher(job, capsys):
    """The option that the launcher adds is accepted, also where another argument is wrong."""
    err = failure(capsys, "--local_rank=1", *job[0], "--engine", "horovod")
    assert "found 'horovod'" in err


WRONG = {
    "engine": ("--engine horovod", "found 'horovod', expected one of"),
    "zero-of-nothing": ("--zero-stage 1", "nothing is sharded"),
    "entries-of-another": ("--set deepspeed.fp16=1", "for DeepSpeed, found --engine torch\n  hint: add --engine"),
    "zero-in-stages": (
        "--engine deepspeed --zero-stage 2 --pp 2", "DeepSpeed's pipeline takes stage 0 and 1"
    ),
    "stages": ("--pp 9", "9 stages, but the model has 2 blocks"),
    "heads": ("--tp 7", "heads cannot be sharded over tp=7"),
    "stages-of-an-order": ("--pp 2 --set load.pipeline_order=zbv", "choose pp and stages_per_rank with a product between 1 and 2"),
    "rows": ("--dp 3", "expected a multiple of dp * micro-batches = 3"),
    "pp-of-megatron": ("--engine megatron --pp 2", "found pp=2, expected 1"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_train_command_with_wrong_engine_options_exits_with_an_error_and_a_hint(
    wrong, job, capsys, monkeypatch
):
    monkeypatch.setattr("slapo_zoo.cli.training.run.run", lambda *args: pytest.fail("work began"))
    options, message = WRONG[wrong]
    err = failure(capsys, *job[0], *options.split())
    assert message in err
    assert "hint:" in err


@pytest.mark.parametrize("engine", ["deepspeed", "megatron"])
def test_train_command_with_a_missing_engine_package_names_the_pip_install_command(
    engine, job, capsys, monkeypatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    err = failure(capsys, *job[0], "--engine", engine)
    assert f"pip install slapo-zoo[{engine}]" in err


def of_srun(rank):
    return SRUN | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}


def srun(monkeypatch, rank=0, **changes):
    for name, value in (of_srun(rank) | changes).items():
        monkeypatch.setenv(name, value)


def test_train_command_under_srun_with_a_task_count_unlike_the_mesh_size_is_refused(
    job, capsys, monkeypatch
):
    srun(monkeypatch, SLURM_STEP_NUM_TASKS="3")
    assert world_size_of_launch() == 3
    err = failure(capsys, *job[0], "--tp", 2)
    assert "found 3 processes, expected tp * pp * dp = 2 * 1 * 1" in err


def test_slurm_variables_are_converted_to_torchrun_variables(monkeypatch):
    changes = {"SLURM_STEP_NODELIST": "gpu[003-004]", "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
               "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1"}  # fmt: skip
    srun(monkeypatch, rank=9, **changes)
    assert slurm_environment() == {
        "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "gpu003", "MASTER_PORT": "14711",
    }  # fmt: skip
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert "MASTER_ADDR" not in slurm_environment(), "what the user says stays"
    assert is_distributed_launch()


def test_slurm_batch_script_and_srun_shell_are_not_treated_as_a_distributed_run(monkeypatch):
    """A batch script has the variables of the job but of no step; `srun --pty` is a step of one task."""
    srun(monkeypatch)
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    assert not is_distributed_launch()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert not is_distributed_launch()


def test_slurm_node_lists_are_expanded_to_host_names():
    hosts = ["a", "a,b", "gpu[003-005,9],login", "gpu[7,9]", "r[1-2]-ib,x", "n1.cluster,n2.cluster"]
    assert [first_host(x) for x in hosts] == ["a", "a", "gpu003", "gpu7", "r1-ib", "n1.cluster"]
    assert tasks_per_node("8(x2),4") == [8, 8, 4]
    assert tasks_per_node("3") == [3]
