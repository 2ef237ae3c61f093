"""Seven journeys of a new user by the pages alone; results are compared with one process."""

import json
import math
import re
import signal
import time

import pytest

from pages import Desk, blocks, commands, page

pytestmark = pytest.mark.slow
SEQUENCE = "--data text.txt --seq-len 16 --batch-size 8 --lr 0.001 --device cpu"
MAIN = "\nif __name__ == '__main__':\n    print(train('checkpoint', tp=2, pp=2))\n"


@pytest.fixture
def desk(tmp_path):
    """Return a folder with the checkpoint and the text that the first page makes."""
    found = Desk(tmp_path)
    _, make = next(blocks("python", page("docs/index.md")))
    (tmp_path / "make.py").write_text(make)
    found.type("python make.py")
    return found


def losses(path):
    """Step --> loss of a log."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def same(found, expected):
    assert found.keys() == expected.keys()
    assert all(math.isclose(found[k], expected[k], rel_tol=1e-4) for k in expected)


def test_code_of_the_first_docs_page_runs_on_one_rank_emulated_ranks_and_torchrun(desk):
    """The first page's code runs on one rank, on four emulated ranks, under torchrun, and by the command line alone."""
    _, train, four, broken = (text for _, text in blocks("python", page("docs/index.md")))
    (desk.folder / "train.py").write_text(train + four + broken)
    alone, *errors = desk.type("python train.py").splitlines()
    assert sum("  hint: " in line for line in errors) == 4
    function = train.partition("\nalone =")[0]
    (desk.folder / "train.py").write_text(function + MAIN)
    ranks = desk.type("torchrun --nproc-per-node 4 train.py").splitlines()
    assert len(ranks) == 4
    for rank in ranks:
        same(dict(enumerate(json.loads(rank))), dict(enumerate(json.loads(alone))))
    for words in commands(page("docs/index.md")):
        desk.type(" ".join(words))
    show = "from transformers import AutoModelForCausalLM as A; A.from_pretrained('trained')"
    desk.type(f'python -c "{show}"')


def test_train_command_interrupted_by_ctrl_c_resumes_on_another_layout(desk):
    """Ctrl-C on 2x2; the same command on two ranks goes on; the losses are those of one process."""
    job = f"slapo-zoo train checkpoint {SEQUENCE} --checkpoint"
    desk.type(f"{job} whole --steps 60 --set log_file=whole.jsonl")
    log, more = desk.folder / "cut.jsonl", "cut --steps 60 --set log_file=cut.jsonl"
    process = desk.start(f"{job} {more} --tp 2 --pp 2 --set save_steps=5")
    while process.poll() is None and (not log.exists() or len(losses(log)) < 7):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    (step,) = re.findall(r"stopped after step (\d+) of 60; the same command resumes", out + err)
    assert 7 <= int(step) < 60, "the interruption came in time"
    assert f"checkpoint: {step} of 60 steps are done" in desk.type(f"{job} {more} --tp 2")
    same(losses(log), losses(desk.folder / "whole.jsonl"))
    assert list(losses(log)) == list(range(1, 61))


def test_program_on_the_trainer_page_has_equal_evaluation_loss_on_one_and_four_ranks(desk):
    """The program of docs/trainer.md, with data from a csv file: four processes get the evaluation loss of one."""
    program = "".join(text for _, text in blocks("python", page("docs/trainer.md")))
    rows = "data = datasets.Dataset.from_dict(rows)"
    assert rows in program
    csv = (
        'if "RANK" not in os.environ:\n    datasets.Dataset.from_dict({"text": '
        '[" ".join(map(str, r)) for r in rows["input_ids"]], "labels": rows["labels"]})'
        '.to_csv("rows.csv")\n'
        'table = datasets.load_dataset("csv", data_files="rows.csv", split="train")\n'
        "data = table.map(lambda r: {'input_ids': [int(w) for w in r['text'].split()]}, "
        "remove_columns=['text'])"
    )
    program = program.replace(rows, csv).replace(
        "trainer.save_model(",
        "open(f'eval{os.environ.get(\"RANK\", \"\")}', 'w').write(str(found['eval_loss']))\n"
        "trainer.save_model(",
    )
    (desk.folder / "program.py").write_text(program)
    desk.type("python program.py")
    desk.type("torchrun --nproc-per-node 4 program.py")
    alone, *found = (float((desk.folder / f"eval{rank}").read_text()) for rank in ("", *range(4)))
    assert all(math.isclose(each, alone, rel_tol=1e-3) for each in found)


def test_schedule_extended_by_the_user_loads_from_json_and_from_a_card_with_equal_loss(desk):
    """Print a schedule, change an option, add a directive, save it as JSON and as a card, and load both."""
    desk.type("slapo-zoo show checkpoint --tp 2 --pp 2")
    (desk.folder / "look.py").write_text(
        "import torch\nfrom slapo_zoo import AutoScheduledModel as A, extend\n"
        "ids = torch.arange(32).view(2, 16)\n"
        "batch = {'input_ids': ids, 'labels': ids}\n"
        "def loss(**more): return float(A.from_pretrained('checkpoint', seed=0, **more).eval()(**batch).loss)\n"
        "knob = A.from_pretrained('checkpoint', checkpoint_ratio=1.0)\n"
        "more = extend(lambda sch: sch['transformer.h.0'].checkpoint())\n"
        "model = A.from_pretrained('checkpoint', schedule=more)\n"
        "open('sched.json', 'w').write(model.schedule.to_json())\n"
        "first = loss()\n"
        "for schedule in (more, 'sched.json', 'card'): assert loss(schedule=schedule) == first, schedule\n"
    )
    desk.type("slapo-zoo card make checkpoint card --tp 1 --checkpoint-ratio 0.5")
    desk.type("slapo-zoo card make checkpoint other --tp 1")
    desk.type("python look.py")
    desk.type("slapo-zoo card lint card")
    assert "checkpoint" in desk.type("slapo-zoo card diff card other")
    assert "verified" in desk.type("slapo-zoo card verify card")
    assert json.loads((desk.folder / "card" / "verify.json").read_text())["verdict"] == "verified"
    assert "without a network" not in desk.type("slapo-zoo card lint card --json")


def test_model_type_without_a_table_is_derived_verified_and_trains_as_one_process(desk):
    """A model type without a table is derived and proven, written to a file, verified, and trains as in one process."""
    (desk.folder / "made.py").write_text(
        "from transformers import ConvBertConfig as C, ConvBertForMaskedLM as M\n"
        "M(C(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=64,"
        " vocab_size=64, embedding_size=32)).save_pretrained('made')\n"
    )
    desk.type("python made.py")
    table = desk.type("slapo-zoo derive made --tp 2")
    assert "Table(" in table
    proof = json.loads(desk.type("slapo-zoo derive made --tp 2 --json"))
    assert proof["source"] in table
    assert 0 < proof["share"] < 1
    assert "slapo-zoo derive" in desk.type("slapo-zoo verify made --tp 2 --schedule auto", code=2)
    (desk.folder / "train.py").write_text(
        "import torch\nfrom slapo_zoo import AutoScheduledModel, emulate\n"
        "ids = torch.arange(32).view(2, 16)\nbatch = {'input_ids': ids, 'labels': ids}\n"
        "def train(**mesh):\n"
        "    model = AutoScheduledModel.from_pretrained('made', schedule='auto', seed=0, **mesh).train()\n"
        "    return float(model.train_step(batch))\n"
        "alone, each = train(), emulate(train, tp=2, mesh=(2, 1, 1))\n"
        "assert all(abs(one - alone) < 1e-4 * alone for one in each), (alone, each)\n"
    )
    desk.type("python train.py")


def test_commands_on_the_tuning_page_exit_without_error(desk):
    for words in commands(page("docs/tuning.md")):
        desk.type(" ".join(words))


MISTAKES = [
    "train nosuch --data text.txt", "train checkpoint --data nosuch.txt", "show gptt2",
    "train checkpoint --tp 8 --data text.txt",
    "train checkpoint --data text.txt --seq-len 4096", "plan checkpoint --gpus 2 --memory 80",
    "plan gpt3", "verify checkpoint --tp 200", "verify checkpoint --schedule nosuch.json",
    "card push card me/x", "card lint nosuch", "reshard nosuch out", "tune checkpoint --symbol tpp=1,2",
    "derive nosuch", "bench nosuch", "show checkpoint --pp 0", "train --config nosuch.yaml",
    "train checkpoint --data text.txt --set stepz=3", "show checkpoint --kernels bias_gleu",
]  # fmt: skip


def test_mistyped_commands_and_arguments_print_hints_and_exit_with_2(desk):
    """Each mistake prints one readable error with exit status 2; every command has -h and --help."""
    desk.type("slapo-zoo card make checkpoint card --tp 1")
    for line in MISTAKES:
        err = desk.type(f"slapo-zoo {line}", code=2)
        assert 10 < len(err) < 2500, f"{line}: {err}"
    listed = desk.type("slapo-zoo --help")
    names = re.findall(r"^│ ([a-z]+) ", listed, re.MULTILINE)
    assert len(names) > 12
    for name in names:
        assert (
            desk.type(f"slapo-zoo {name} -h").strip()
            == desk.type(f"slapo-zoo {name} --help").strip()
        )
    assert re.search(r"\d+\.\d+", desk.type("slapo-zoo --version"))
