"""Journeys of a newcomer by the pages alone: eight of them, each program and line taken from the page that shows it.

The README and docs/index.md (journey 1), the page of a linear (8) and every other page with Python are run by test_readme.py too;
tests/cli/test_user_workflows.py goes on from them.
"""

import ast
import importlib
import json
import math
import os
import re
import signal
import sys
import time

import pytest

import slapo_zoo
from pages import Desk, blocks, commands, page
from slapo_zoo import ScheduleError, emulate


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path)


def python_of(name, first=0, last=None):
    """Python blocks of a page, joined to one program."""
    return "\n".join(text for _, text in [*blocks("python", page(name))][first:last])


def close(found, wanted, tolerance=1e-4):
    return len(found) == len(wanted) and all(
        math.isclose(a, b, rel_tol=tolerance) for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.slow
def test_readme_commands_run_without_error_after_its_python_blocks(desk):
    (desk.folder / "start.py").write_text(python_of("README.md"))
    desk.type("python start.py")
    lines = [words for words in commands(page("README.md")) if words[0] == "slapo-zoo"]
    assert len(lines) >= 4
    for words in lines:
        desk.type(" ".join(words))


@pytest.mark.slow
def test_classifier_training_from_csv_stopped_by_a_signal_resumes(desk):
    """docs/training.md with its data as csv, on tp=2: Ctrl-C, the same command, plain transformers reads `best`."""
    (desk.folder / "make.py").write_text(python_of("docs/training.md"))
    desk.type("python make.py")
    rows = [json.loads(line) for line in (desk.folder / "reviews.jsonl").read_text().splitlines()]
    lines = [f"{row['review']},{row['label']}" for row in rows]
    (desk.folder / "reviews.csv").write_text("\n".join(["review,label", *lines]) + "\n")
    ((_, config),) = blocks("yaml", page("docs/training.md"))
    config = config.replace("reviews.jsonl", "reviews.csv").replace("steps: 40", "steps: 400")
    (desk.folder / "run.yaml").write_text(
        config + "tp: 2\nsave_every: 5\ntrackers: [tensorboard]\noutput: out\n"
    )
    line, log = "slapo-zoo train --config run.yaml --device cpu", desk.folder / "log.jsonl"
    process = desk.start(line)
    while process.poll() is None and (not log.exists() or log.read_text().count("\n") < 25):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    (step,) = map(int, re.findall(r"stopped after step (\d+) of 400", out + err))
    desk.type(f"{line} --set steps={step + 15}")
    assert [json.loads(each)["step"] for each in log.read_text().splitlines()] == [
        *range(1, step + 16)
    ]
    assert list((desk.folder / "out-logs").rglob("*tfevents*"))
    check = "import transformers as t; print(t.pipeline('text-classification', 'best')('a great film')[0]['label'])"
    assert desk.type(f'python -c "{check}"').strip() == "good"


@pytest.mark.slow
def test_trl_training_with_lora_on_two_ranks_prints_the_results_of_one_rank(desk):
    (desk.folder / "lora.py").write_text(python_of("docs/lora.md"))
    alone, two = (
        [float(number) for number in desk.type(f"{start} lora.py").splitlines()[-1].split()]
        for start in ("python", "torchrun --nproc-per-node 2")
    )
    assert close(two, alone)


MISTAKES = {
    "a path": ('sch["query.upp"].shard("weight", 0)', "nearest paths: .*query"),
    "an axis": ('sch["query"].shard("weight", 2)', "axis"),
    "a primitive": ('sch["query"].shrad("weight", 0)', "no primitive 'shrad'"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_invalid_directive_in_a_user_schedule_raises_before_the_model_changes(what):
    """docs/cards.md shows the schedule; a mistake in it raises before the model changes."""
    from torch import nn

    line, words = MISTAKES[what]
    sch = slapo_zoo.create_schedule(nn.ModuleDict({"query": nn.Linear(8, 8)}))
    with pytest.raises((ScheduleError, AttributeError), match=words):
        exec(line, {"sch": sch})
    assert sch.history == []


NEOX = """from transformers import GPTNeoXConfig
GPTNeoXConfig(num_hidden_layers=40, hidden_size=5120, num_attention_heads=40, intermediate_size=20480,
              architectures=["GPTNeoXForCausalLM"]).save_pretrained("neox13b")"""


@pytest.mark.slow
def test_plan_for_13b_model_on_32_gpus_prints_a_valid_python_call(desk):
    (desk.folder / "make.py").write_text(NEOX)
    desk.type("python make.py")
    desk.env["COLUMNS"] = "80"
    said = desk.type("slapo-zoo plan neox13b --gpus 32 --memory 80GiB --batch 512 --seq 2048")
    assert "13.1B parameters on NVIDIA A100 SXM 80GB" in said, "the hardware that it assumes"
    assert max(map(len, said.splitlines())) <= 80
    (call,) = re.findall(r"^from_pretrained\(.*?\)$", said, re.MULTILINE | re.DOTALL)
    names = {keyword.arg for keyword in ast.parse(call).body[0].value.keywords}
    assert {"tp", "pp"} & names


@pytest.mark.slow
@pytest.mark.parametrize("family", ["biogpt", "convbert"])
def test_derive_command_writes_an_importable_python_file(family, desk):
    """Run the page's command for another family: the file that it writes is imported, and lists the sharded weights."""
    line = "slapo-zoo derive convbert --tp 2 --pp 2 > convbert.py"
    assert line in page("docs/adding_an_architecture.md")
    desk.type(line.replace("convbert", family))
    tree = ast.parse((desk.folder / f"{family}.py").read_text())
    calls = [
        n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "Table"
    ]
    (keywords,) = [{keyword.arg for keyword in call.keywords} for call in calls]
    assert {"model_type", "body", "blocks"} <= keywords


@pytest.fixture
def loop(tmp_path, monkeypatch):
    """The whole program of docs/your_own_loop.md as a module, in an empty folder."""
    (tmp_path / "loop.py").write_text(python_of("docs/your_own_loop.md", 0, 1))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("loop")
    del sys.modules["loop"]


def test_hand_written_loop_resumed_on_another_mesh_has_the_losses_of_one_run(loop, tmp_path):
    """Ten steps on tp=2 dp=2, then ten in one process, give the losses and learning rates of one process."""
    whole, rate = loop.train()
    os.rename("last", "of_whole")
    halves = emulate(loop.train, 2, 10, mesh=(2, 1, 2))
    means = [(a + b) / 2 for a, b in zip(halves[0][0], halves[2][0], strict=True)]
    rest, rate_then = loop.train()
    assert close(means + rest, whole)
    assert rate_then == rate == 0


@pytest.mark.slow
def test_hand_written_loop_killed_during_training_resumes_from_its_checkpoint(desk):
    """Run the page's command, kill its ranks after a checkpoint, and resume in one process."""
    program = python_of("docs/your_own_loop.md", 0, 1)
    (desk.folder / "loop.py").write_text(program)
    whole = ast.literal_eval(desk.type("python loop.py"))[0]
    os.rename(desk.folder / "last", desk.folder / "of_whole")
    line = "torchrun --nproc-per-node 4 loop.py 2"
    assert line in page("docs/your_own_loop.md")
    killed = desk.start(line)
    while killed.poll() is None and not (desk.folder / "last").exists():
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    rest = ast.literal_eval(desk.type("python loop.py"))[0]
    assert len(rest) in (5, 10, 15), "it went on from a checkpoint"
    assert close(rest, whole[-len(rest) :])


def test_docs_page_on_sharded_linears_mentions_loading_backward_and_saving():
    """The page covers reading slices, forward, backward and saving; test_readme.py runs its code."""
    text = page("docs/how_a_linear_is_sharded.md")
    for word in ("safetensors", "from_pretrained", "backward", "save_pretrained", "bit for bit"):
        assert word in text, word
    assert "pictures/" in text
