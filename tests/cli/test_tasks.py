"""Full runs from a configuration file: every layout equals one process, resumes on another, and loads in transformers."""

import json
import shutil
from pathlib import Path

import datasets
import pytest
import torch
import yaml
from safetensors.torch import load_file

from cli_runs import run, sentences, write_bert, write_gpt2, write_t5
from slapo_zoo.cli.training.inputs import read_inputs
from slapo_zoo.cli.training.options import make_options, read_config
from slapo_zoo.data.batches import divided

COMMON = {"batch_size": 4, "max_steps": 4, "eval_steps": 2, "save_steps": 1, "save_total_limit": 9, "learning_rate": 1e-3,
          "lr_scheduler_type": "linear", "warmup_steps": 1, "device": "cpu", "seed": 3}  # fmt: skip
LAYOUTS = {"tp2_pp2": {"tp": 2, "pp": 2}, "dp2": {"dp": 2}}


def classification(folder):
    rows = [{"text": one, "label": ("short", "long")[len(one) > 30]} for one in sentences(40)]
    datasets.Dataset.from_list(rows).to_json(folder / "rows.jsonl")
    return {"model": write_bert(folder / "bert"), "data": str(folder / "rows.jsonl"), "task": "classify",
            "eval_share": 0.2, "metric_for_best_model": "accuracy"}  # fmt: skip


def packed(folder):
    data = datasets.Dataset.from_list([{"body": one} for one in sentences(60)])
    parts = data.train_test_split(0.2, shuffle=False)
    for name in parts:
        parts[name].to_parquet(folder / f"{name}.parquet")
    return {"model": str(write_gpt2(folder / "gpt2")), "data": str(folder / "train.parquet"),
            "eval_data": str(folder / "test.parquet"), "columns": {"text": "body"}, "seq_len": 32}  # fmt: skip


def masked(folder):
    (folder / "text.txt").write_text(". ".join(sentences(60)))
    return {"model": write_bert(folder / "bert"), "data": str(folder / "text.txt"), "task": "masked", "seq_len": 32,
            "eval_share": 0.1}  # fmt: skip


def spans(folder):
    (folder / "text.txt").write_text(". ".join(sentences(60)))
    return {"model": write_t5(folder / "t5"), "data": str(folder / "text.txt"), "seq_len": 32, "eval_share": 0.1}  # fmt: skip


def retrieval(folder):
    rows = [{"query": one, "passage": one.upper()} for one in sentences(40)]
    datasets.Dataset.from_list(rows).to_csv(folder / "pairs.csv")
    return {"model": write_bert(folder / "bert"), "data": str(folder / "pairs.csv"), "task": "pairs",
            "eval_share": 0.2}  # fmt: skip


def words_tagged(folder):
    rows = [{"tokens": one.split(), "tags": [int(len(w) > 3) for w in one.split()]} for one in sentences(40)]  # fmt: skip
    datasets.Dataset.from_list(rows).to_parquet(folder / "rows.parquet")
    return {"model": write_bert(folder / "bert"), "data": str(folder / "rows.parquet"), "task": "tag", "eval_share": 0.2}  # fmt: skip


def translation(folder):
    rows = [{"source": one, "target": one.title()} for one in sentences(40)]
    datasets.Dataset.from_list(rows).to_json(folder / "rows.jsonl")
    return {"model": write_t5(folder / "t5"), "data": str(folder / "rows.jsonl"), "task": "seq2seq", "eval_share": 0.2}  # fmt: skip


def streamed(folder):
    keys = packed(folder)
    return {**keys, "stream": True, "shuffle_rows": 8}


TASKS = {
    "classify": classification, "packed": packed, "masked": masked, "span": spans, "pairs": retrieval,
    "tag": words_tagged, "seq2seq": translation, "stream": streamed,
}  # fmt: skip
FAST = {("classify", "dp2"), ("packed", "tp2_pp2"), ("pairs", "dp2"), ("span", "dp2")}
GRID = [
    pytest.param(task, layout, marks=() if (task, layout) in FAST else pytest.mark.slow)
    for task in TASKS
    for layout in LAYOUTS
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """task --> (folder with its configuration, the log of an uninterrupted run in one process)."""
    made = {}

    def of(task):
        if task not in made:
            folder = tmp_path_factory.mktemp(task)
            datasets.config.HF_DATASETS_CACHE = folder / "cache"
            (folder / "run.yaml").write_text(yaml.safe_dump(COMMON | TASKS[task](folder)))
            made[task] = folder, trained(folder, folder / "one")
        return made[task]

    before = datasets.config.HF_DATASETS_CACHE
    yield of
    datasets.config.HF_DATASETS_CACHE = before


def trained(folder, place, **changes):
    """The log of a run whose checkpoints go to a place."""
    sets = {"checkpoint": place, "log_file": f"{place}.jsonl", "best": f"{place}.best", **changes}
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    run("train", "--config", folder / "run.yaml", *words)
    return lines_of(f"{place}.jsonl")


def lines_of(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def assert_same(found, expected, rel=2e-5):
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for mine, theirs in zip(found, expected, strict=True):
        for name in {"loss", "grad_norm", "lr", "eval_loss", "eval_accuracy"} & theirs.keys():
            assert mine[name] == pytest.approx(theirs[name], rel=rel), (name, mine["step"])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("task", "layout"), GRID)
def test_training_task_on_every_layout_has_the_losses_of_one_process_also_when_resumed(
    task, layout, whole, tmp_path
):
    folder, expected = whole(task)
    assert {"eval_loss", "eval_accuracy"} <= expected[-1].keys()
    mesh = LAYOUTS[layout]
    if layout != "dp2":  # the test below resumes on dp too
        shutil.copytree(folder / "one" / "step-00000002", tmp_path / "rest")
        rest = trained(folder, tmp_path / "rest", keep="null", **mesh)
        assert_same(rest, expected[2:])
    assert_same(trained(folder, tmp_path / "mesh", **mesh), expected)


SLOW = [pytest.param(task, marks=pytest.mark.slow) for task in ("packed", "classify")]


@pytest.mark.parametrize("task", ["masked", *SLOW])
def test_training_interrupted_and_resumed_on_several_meshes_equals_an_uninterrupted_run(
    task, whole, tmp_path
):
    """One process is interrupted after step 1, tp=2 after step 2, dp=2 after step 3; pp=2 ends it."""
    folder, expected = whole(task)
    before, end = folder / "one", weights_of(folder / "one")
    for step, mesh in enumerate(({"tp": 2}, {"dp": 2}, {"pp": 2}), start=1):
        place = tmp_path / f"after-{step}"
        shutil.copytree(before / f"step-{step:08}", place / f"step-{step:08}")
        assert_same(trained(folder, place, **mesh), expected[step:], rel=1e-6)
        for name, tensor in weights_of(place).items():
            torch.testing.assert_close(tensor, end[name], rtol=0, atol=1e-6)
        before = place


def weights_of(place):
    return load_file(place / f"step-{COMMON['max_steps']:08}" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["packed", "pairs", "stream"])
def test_training_on_spawned_ranks_has_the_losses_of_one_process(
    task, whole, tmp_path, monkeypatch
):
    """Ranks are spawned where each has several threads or a GPU: all that a rank reads is pickled for it."""
    folder, expected = whole(task)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert_same(trained(folder, tmp_path / "mesh", dp=2), expected)


def test_best_checkpoint_loaded_in_transformers_has_the_recorded_loss_and_accuracy(whole):
    """Evaluate the best checkpoint with plain transformers on the held-out rows."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder, log = whole("classify")
    best = max(
        (line for line in log if "eval_loss" in line), key=lambda line: line["eval_accuracy"]
    )
    place = f"{folder / 'one'}.best"
    model = AutoModelForSequenceClassification.from_pretrained(place).eval()
    assert model.config.id2label == {0: "long", 1: "short"}
    words = AutoTokenizer.from_pretrained(place)
    options = make_options(read_config(folder / "run.yaml"), {"seq_len": 64, "dp": 1})
    held = read_inputs(options, model.config).held_out.rows
    rows = [*divided(datasets.Dataset.from_list(lines_of(folder / "rows.jsonl")), 0.2, 3)[1]]
    assert len(rows) == len(held)
    batch = words([row["text"] for row in rows], padding=True, return_tensors="pt")
    labels = torch.tensor([model.config.label2id[row["label"]] for row in rows])
    with torch.no_grad():
        output = model(**batch, labels=labels)
    assert float(output.loss) == pytest.approx(best["eval_loss"], rel=1e-5)
    assert float((output.logits.argmax(-1) == labels).float().mean()) == pytest.approx(
        best["eval_accuracy"]
    )
