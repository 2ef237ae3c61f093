"""`slapo-zoo list` and `show`: what they say is what happens."""

import json

import pytest
import torch
import torch.distributed as dist

from parity import Case, checkpoint, tiny_config
from slapo_zoo import AutoScheduledModel
from slapo_zoo.cli import main
from slapo_zoo.features import features
from slapo_zoo.mesh import Mesh
from slapo_zoo.outline import Outline
from slapo_zoo.survey import survey
from slapo_zoo.zoo import families

CASES = [
    Case("GPT2LMHeadModel", ("tokens",)),
    Case("AlbertForMaskedLM", ("tokens",)),
    Case("T5ForConditionalGeneration", ("tokens",)),
    Case("MixtralForCausalLM", ("tokens",)),
    Case("MambaForCausalLM", ("tokens",)),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("survey")


def run(*arguments):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return stop.value.code


def test_list_as_data(capsys):
    assert run("list", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == families()
    assert found["mixtral"]["experts"]
    assert not found["gpt2"]["experts"]
    assert all(has["tp"] and has["pp"] for has in features().values())


def test_show_a_family(capsys):
    assert run("show", "gpt2", "--tp", "4", "--pp", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["total_parameters"] == 124_439_808
    assert found["tensors"]["transformer.wte.weight"] == {
        "shape": [50257, 768], "per_rank": [[12565, 768]] * 4, "stages": [0, 1],
    }  # fmt: skip
    assert [(rank["stage"], rank["tp_coord"]) for rank in found["ranks"]] == [
        (stage, r) for stage in range(2) for r in range(4)
    ]
    assert ["lm_head", "shard(param_name='weight', axis=0, pad=True)"] in found["program"]
    sends = [row for row in found["collectives"] if row["kind"] == "send"]
    assert {(row["phase"], row["count"], row["bytes"]) for row in sends} == {
        ("forward", 1, 128 * 768 * 4), ("backward", 1, 128 * 768 * 4),
    }  # fmt: skip


def test_show_a_folder(root, capsys):
    folder = checkpoint(CASES[0], root)
    assert run("show", str(folder), "--tp", "2", "--sequence-parallel") == 0
    printed = capsys.readouterr().out
    assert "transformer.h.*.attn.c_attn.weight" in printed
    assert "reduce_scatter" in printed


def test_show_says_what_it_cannot_find(capsys):
    assert run("show", "no/such/folder") == 2
    assert "slapo-zoo list" in capsys.readouterr().err


def held(folder, case, layout):
    tp, pp, dp = layout
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp, dp=dp, auto_class=case.cls)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.cls)
def test_parameters_per_rank(case, root, ranks):
    """Uneven parts, tied tensors on two stages and divided experts are counted as they are held."""
    folder = checkpoint(case, root)
    outline = Outline(tiny_config(case)[0], case.cls, Mesh(2, 2, 1), torch.float32)
    found = [rank.parameters for rank in survey(outline, 1, 8).ranks]
    assert found == ranks.run(held, 4, folder, case, (2, 2, 1))


def counted(folder, case, sequence_parallel):
    """How often this rank calls each collective in one forward and backward."""
    model = AutoScheduledModel.from_pretrained(
        folder, tp=2, auto_class=case.cls, sequence_parallel=sequence_parallel,
        **({"experts_implementation": "eager"} if "Mixtral" in case.cls else {}),
    )  # fmt: skip
    from slapo_zoo import collectives

    counts = {"all_reduce": 0, "all_gather": 0, "reduce_scatter": 0}

    def counting(owner, attribute, kind):
        call = getattr(owner, attribute)

        def counted(*args, **kwargs):
            counts[kind] += 1
            return call(*args, **kwargs)

        setattr(owner, attribute, counted)
        return owner, attribute, call

    changed = [
        counting(dist, "all_reduce", "all_reduce"),
        counting(collectives, "all_gather_single", "all_gather"),
        counting(collectives, "reduce_scatter_single", "reduce_scatter"),
    ]
    try:
        ids = torch.full((2, 8), 5)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        model.schedule.state.tokens_divided = sequence_parallel
        model._slapo.own_forward(model, **batch).loss.backward()
    finally:
        for owner, attribute, call in changed:
            setattr(owner, attribute, call)
    return counts


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.cls)
def test_collectives_are_counted_right(case, sequence_parallel, root, ranks):
    folder = checkpoint(case, root)
    config, fp32 = tiny_config(case)[0], torch.float32
    outline = Outline(config, case.cls, Mesh(2), fp32, sequence_parallel=sequence_parallel)
    said = {"all_reduce": 0, "all_gather": 0, "reduce_scatter": 0}
    for row in survey(outline, 2, 8).traffic:
        said[row.kind] += row.count
    assert ranks.run(counted, 2, folder, case, sequence_parallel)[0] == said
