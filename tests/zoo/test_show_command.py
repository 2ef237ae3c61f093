"""`slapo-zoo list` and `show`: their numbers equal those of real runs."""

import json
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from parity import Case, changes_of, checkpoint, tiny_config
from slapo_zoo import AutoScheduledModel
from slapo_zoo.cli.main import main
from slapo_zoo.errors import ScheduleError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.zoo.features import features
from slapo_zoo.zoo.outline import Outline
from slapo_zoo.zoo.survey import survey
from slapo_zoo.zoo.table import families

CASES = [
    Case("GPT2LMHeadModel", ("tokens",)),
    Case("BertForMaskedLM", ("tokens",)),
    Case("LlamaForCausalLM", ("tokens",)),
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


def test_list_command_as_json_names_every_model_family(capsys):
    assert run("list", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == families()
    assert found["mixtral"]["experts"]
    assert not found["gpt2"]["experts"]
    assert all(has["tp"] and has["pp"] for has in features().values())


def test_show_command_prints_shards_and_collectives_of_a_model_family(capsys):
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
    assert found["tunable"]["attention"] == ["sdpa", "eager", "flash", "xformers"]
    sends = [row for row in found["collectives"] if row["kind"] == "send"]
    assert {(row["phase"], row["count"], row["bytes"]) for row in sends} == {
        ("forward", 1, 128 * 768 * 4), ("backward", 1, 128 * 768 * 4),
    }  # fmt: skip


def test_show_command_on_a_checkpoint_folder_prints_its_shards(root, capsys):
    folder = checkpoint(CASES[0], root)
    assert run("show", str(folder), "--tp", "2", "--sequence-parallel") == 0
    printed = capsys.readouterr().out
    assert "transformer.h.*.attn.c_attn.weight" in printed
    assert "reduce_scatter" in printed


def test_show_command_on_a_missing_folder_exits_with_a_hint(capsys):
    assert run("show", "no/such/folder") == 2
    assert "slapo-zoo list" in capsys.readouterr().err


def held(folder, case, layout):
    tp, pp, dp = layout
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp, dp=dp, auto_class=case.cls)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.one_in(2, 2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.cls)
def test_show_command_prints_the_number_of_parameters_per_rank(case, root, threads):
    """Uneven shards, tensors tied over two stages and sharded experts are counted on each rank that holds them."""
    folder = checkpoint(case, root)
    outline = Outline(tiny_config(case)[0], case.cls, Mesh(2, 2, 1), torch.float32)
    found = [rank.parameters for rank in survey(outline, 1, 8).ranks]
    assert found == threads.run(held, 4, folder, case, (2, 2, 1))


def sent_and_explained(folder, case, options):
    """Return what this rank sends in one training step, and what its schedule predicts."""
    from slapo_zoo.parallel import collectives

    model = AutoScheduledModel.from_pretrained(
        folder, tp=2, auto_class=case.cls, kernels="reference", **options, **changes_of(case)
    ).train()
    ids = torch.full((2, 8), 5)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    explained = model.schedule.explain(batch)
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in model.named_parameters())
    sent = []

    def noting(owner, attribute, kind, whole):
        call = getattr(owner, attribute)

        def noted(*args, **kwargs):
            sent.append((kind, args[whole].nbytes))
            return call(*args, **kwargs)

        setattr(owner, attribute, noted)
        return owner, attribute, call

    changed = [
        noting(dist, "all_reduce", "all_reduce", 0),
        noting(collectives, "all_gather_single", "all_gather", 0),
        noting(collectives, "reduce_scatter_single", "reduce_scatter", 1),
    ]
    try:
        model.train_step(batch)
    finally:
        for owner, attribute, call in changed:
            setattr(owner, attribute, call)
    return Counter(sent), [(*t[:2], t.bytes) for t in explained.transfers], str(explained)


OPTIONS = {
    "tp": {},
    "sp": {"sequence_parallel": True},
    "recomputed": {"checkpoint_ratio": 1.0},
}


@pytest.mark.one_in(3, 3)
@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.cls)
def test_collectives_predicted_by_explain_equal_those_run_in_a_step_in_kind_and_bytes(
    case, how, root, ranks
):
    """Each collective and its bytes are compared: forward, backward, recomputation, loss and gradient all-reduces."""
    folder, options = checkpoint(case, root), OPTIONS[how]
    for sent, explained, _ in ranks.run(sent_and_explained, 2, folder, case, options):
        assert {mesh_dim for _, mesh_dim, _ in explained} == {"tp"}
        assert Counter((kind, nbytes) for kind, _, nbytes in explained) == sent
    if how != "recomputed":  # `slapo-zoo show` says the same, without weights or processes
        outline = Outline(tiny_config(case)[0], case.cls, Mesh(2), torch.float32, **options)
        rows = survey(outline, 2, 8).traffic
        for kind in {kind for kind, _ in sent}:
            assert sum(r.count for r in rows if r.kind == kind) == sum(
                count for (k, _), count in sent.items() if k == kind
            )
            assert sum(r.bytes for r in rows if r.kind == kind) == sum(
                nbytes * count for (k, nbytes), count in sent.items() if k == kind
            )


def explained_alone(folder, case, pp):
    model = AutoScheduledModel.from_pretrained(
        folder, tp=2, pp=pp, auto_class=case.cls, checkpoint_ratio=1.0, **changes_of(case)
    )
    ids = torch.full((2, 8), 5)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    try:
        found = model.schedule.explain(batch)
    except ScheduleError as error:
        return str(error)
    return model.mesh.coord("tp"), [t for t in found.transfers if t.phase != "after backward"]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=() if c.cls.startswith(("GPT2", "Albert")) else pytest.mark.slow)
        for c in CASES
        if "Mixtral" not in c.cls
    ],
    ids=lambda c: c.cls,
)
def test_explain_lists_of_all_pipeline_stages_add_up_to_the_list_of_one_stage(case, root, threads):
    """The lists of all stages together equal that of one stage with the full model."""
    folder = checkpoint(case, root)
    parts = threads.run(explained_alone, 4, folder, case, 2)
    if "Albert" in case.cls:
        assert all("runs on several stages" in part for part in parts)
        return
    whole = threads.run(explained_alone, 2, folder, case, 1)
    for r in range(2):
        mine = Counter(t for coord, found in parts if coord == r for t in found)
        assert mine == Counter(whole[r][1])
        assert all(found for _, found in parts)


EXPLAINED = """\
transformer.h.*.mlp  (each of 3)
    sync(mode='bwd_post', sync_op_or_fn='all_reduce', sequence_axis=1)
        backward: all_reduce over tp, 1,920 bytes
transformer.h.*.mlp.c_fc  (each of 3)
    shard(param_name='weight', axis=1, uneven=True)
    shard(param_name='bias', axis=0, uneven=True)
"""


def test_explain_prints_each_collective_with_module_kind_and_bytes(root, ranks):
    case = CASES[0]
    *_, text = ranks.run(sent_and_explained, 2, checkpoint(case, root), case, {})[0]
    assert EXPLAINED in text
    whole = text.partition("in one training step, on this rank:\n")[2]
    assert (
        "forward: 1 all_gather over tp, 384 bytes" in whole
    )  # the loss over the sharded vocabulary
    assert "backward: 7 all_reduce over tp" in whole
