"""Pipeline orders from a CSV file: mistakes are named with their cell, and a valid order trains."""

import csv
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config

from parity import Case, checkpoint, compare, references, scheduled
from slapo_zoo.errors import MeshError
from slapo_zoo.model.same_on_all import facts_of
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.pipeline.csv_order import read_order
from slapo_zoo.pipeline.orders import ORDERS, StageMap
from slapo_zoo.zoo.options import LoaderOptions

GOOD = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"
BLOCKED = "0F0,1F0,0F1,1F1,1B0,0B0,1B1,0B1\n2F0,3F0,3I0,2B0,2F1,3W0,3F1,3B1,2B1\n"


def write(folder, text):
    path = folder / "order.csv"
    path.write_text(text)
    return str(path)


def write_order(folder, name, pp, micro_batches):
    places = StageMap.make(name, pp, None)
    rows = [",".join(map(str, actions)) for actions in places.actions(micro_batches)]
    return write(folder, "\n".join(rows))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (GOOD.replace("0B0", "0B"), r"row 1 \(rank 0\), cell 4: '0B': it is no action"),
        (GOOD.replace("1F0", "1F0x"), r"row 2 \(rank 1\), cell 2: '1F0x': it is no action"),
        (GOOD.replace("1B0", "1SEND_B0"), r"row 2 .* cell 3: .* computes nothing"),
        (GOOD.replace("1F1", "1F0"), r"row 2 .* cell 4: '1F0': it stands twice"),
        (GOOD.replace(",1F0", ",0F5"), r"row 2 .* cell 2: '0F5': stage 0 is on rank 0 already"),
        (GOOD.replace("1B1", ""), "stage 1: found no cell 1B1"),
        (GOOD.replace("1F1", ""), "stage 1: found no cell 1F1"),
        (GOOD.replace("1B1", "1I1"), "stage 1: found no cell 1W1"),
        (GOOD.replace("1B1", "1B1,1W1"), r"row 2 .* cell 6: '1W1': there is a whole backward"),
        (GOOD.replace("1F0,1B0", "1B0,1F0"), r"row 2 .* cell 2: '1B0': what it needs has not run"),
        (GOOD.replace("0F1,,0B0", "0B0,,0F1").replace("1F0,1B0,1F1", "1F0,1F1,1B0"),
         r"row 1 .* cell 2: '0B0': .* rank 1 at 1F1"),
        ("0F0,0F1,0B0,0B1\n1F1,1F0,1B1,1B0\n", r"row 2 .* '1F1': the last stage needs micro-batch 0"),
        (GOOD.splitlines()[0], "found 1 rows, expected one per rank: pp=2"),
        ("0F0,0B0,1F0,1B0\n2F0,2B0\n", r"the ranks hold \[2, 1\] stages"),
        ("0F0,0B0\n2F0,2B0\n", "no cell names stage 1"),
        ("(0F0;0F1)OVERLAP_F_B,\n1F0,1B0\n", "stage 0: found no cell 0B0"),
    ],
)  # fmt: skip
def test_pipeline_order_csv_mistake_raises_and_names_its_cell(text, problem, tmp_path):
    with pytest.raises(MeshError, match=problem):
        read_order(write(tmp_path, text), pp=2)


def test_missing_or_mismatched_pipeline_order_csv_raises(tmp_path):
    with pytest.raises(MeshError, match="No such file"):
        StageMap.make(str(tmp_path / "none.csv"), 2, None)
    places = StageMap.make(write(tmp_path, GOOD), 2, None)
    with pytest.raises(MeshError, match=r"found 3, the order in .* is for 2"):
        places.check_micro_batches(3)
    with pytest.raises(MeshError, match="found 3, the file has 1"):
        StageMap.make(write(tmp_path, GOOD), 2, 3)


@pytest.mark.parametrize("name", ORDERS)
def test_built_in_pipeline_orders_are_valid_as_csv(name, tmp_path):
    places = StageMap.make(name, 4, None)
    custom = StageMap.make(write_order(tmp_path, name, 4, 8), 4, None)
    assert [list(a) for a in custom.custom.actions] == places.actions(8)
    stages = range(places.num_stages)
    assert [custom.rank_of(s) for s in stages] == [places.rank_of(s) for s in stages]


@pytest.mark.parametrize("text", [GOOD, BLOCKED])
def test_pipeline_order_csv_is_read_as_torch_reads_it(text, tmp_path):
    """Compare with torch's `_load_csv`, which is private and may change."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    def stages():
        known = {"num_stages": len(custom.rank_of_stage), "group_size": 2, "group_rank": 0}
        mine = [i for i, rank in enumerate(custom.rank_of_stage) if rank == 0]
        return [SimpleNamespace(**known, stage_index=i, submod=torch.nn.Module()) for i in mine]

    path = write(tmp_path, text)
    custom = read_order(path, 2)
    theirs = _PipelineScheduleRuntime(stages(), custom.micro_batches)
    theirs._load_csv(path)
    ours = StageMap.make(path, 2, None).runtime(stages(), custom.micro_batches)
    assert ours.pipeline_order_with_comms == theirs.pipeline_order_with_comms
    with open(path, newline="") as file:
        assert [[c for c in row if c] for row in csv.reader(file)] == [
            list(map(str, actions)) for actions in custom.actions
        ]


GPT2 = Case("GPT2LMHeadModel", ("tokens",), (("n_layer", 4),))


def train(folder, path):
    return scheduled(GPT2, folder, (1, 2, 1), pipeline_order=path)


@pytest.mark.parametrize("kind", ["blocked", "zbv"])
def test_pipeline_order_from_csv_trains_as_plain_transformers(kind, tmp_path, ranks):
    """Train an order with two neighbouring stages on one rank, which no built-in order has, and a written ZBV."""
    text = BLOCKED if kind == "blocked" else ""
    path = write(tmp_path, text) if text else write_order(tmp_path, "zbv", 2, 4)
    folder = checkpoint(GPT2, tmp_path)
    truth, plains = references(GPT2, folder)
    compare(ranks.run(train, 2, folder, path)[0][0], plains, truth)


def train_on_own_file(folder, root):
    import torch.distributed as dist

    text = GOOD if dist.get_rank() == 0 else GOOD.replace("0F1,,0B0", "0F1,0B0")
    mine = root / str(dist.get_rank())
    mine.mkdir()
    with pytest.raises(MeshError, match="pipeline_order: rank 1 has"):
        train(folder, write(mine, text))


def test_pipeline_order_csvs_are_compared_between_ranks_by_content(tmp_path):
    found = []
    for text in (GOOD, GOOD.replace("0F1,,0B0", "0F1,0B0")):
        options = LoaderOptions(pipeline_order=str(write(tmp_path, text)))
        found.append(facts_of(GPT2Config(), Mesh(pp=2), options)["pipeline_order"])
    assert found[0] != found[1]


def test_ranks_with_different_pipeline_order_csvs_are_refused(tmp_path, ranks):
    ranks.run(train_on_own_file, 2, checkpoint(GPT2, tmp_path), tmp_path)
