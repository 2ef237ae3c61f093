"""torch's DDP and FSDP2 around scheduled models equal one process, on every layout."""

import pytest

from engine_runs import CASES, assert_same_run, trained
from parity import Case, checkpoint

LAYOUTS = {  # tp, pp, dp, data_parallel
    "tp2": (2, 1, 1, None),
    "dp2-ddp": (1, 1, 2, "ddp"),
    "dp2-fsdp2": (1, 1, 2, "fsdp2"),
    "tp2-dp2-ddp": (2, 1, 2, "ddp"),
    "tp2-dp2-fsdp2": (2, 1, 2, "fsdp2"),
    "tp2-pp2": (2, 2, 1, None),
    "pp2-dp2-ddp": (1, 2, 2, "ddp"),
    "pp2-dp2-fsdp2": (1, 2, 2, "fsdp2"),
}
# each kind of data parallelism, one beside tp and one beside stages; test_engines_target.py has DDP alone
ALWAYS = {("gpt2", "tp2-dp2-fsdp2"), ("t5", "pp2-dp2-ddp")}


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("engines")


@pytest.mark.parametrize("family, layout", [
    pytest.param(family, layout, marks=() if (family, layout) in ALWAYS else pytest.mark.slow)
    for family in CASES for layout in LAYOUTS
])  # fmt: skip
def test_training_under_torch_ddp_or_fsdp2_has_the_losses_of_one_process(
    family, layout, root, ranks
):
    tp, pp, dp, data_parallel = LAYOUTS[layout]
    case, folder = CASES[family], checkpoint(CASES[family], root)
    options = {"data_parallel": data_parallel, "clip": 1.0}
    arguments = (case, folder, (tp, pp, dp), "torch", options, 2)
    results = ranks.run(trained, tp * pp * dp, *arguments)
    assert_same_run(results[0], case, folder)


def bytes_of_whole_parameters(folder):
    """Return the bytes of parameters that are no shards of FSDP2: after the load, and after FSDP2 has sharded the model."""
    import gc

    import torch
    from torch.distributed.tensor import DTensor

    from slapo_zoo import AutoScheduledModel, init_target_engine

    def held():
        gc.collect()
        found = [x for x in gc.get_objects() if isinstance(x, torch.nn.Parameter)]
        return sum(x.untyped_storage().size() for x in found
                   if not isinstance(x, DTensor) and not x.is_meta)  # fmt: skip

    before = held()
    model = AutoScheduledModel.from_pretrained(folder, dp=2)
    loaded = held() - before
    engine = init_target_engine(model, "torch", optimizer="AdamW", data_parallel="fsdp2")
    return loaded, held() - before, engine is not None


def test_fsdp2_frees_the_unsharded_parameters_on_every_rank(root, ranks):
    case = Case("GPT2LMHeadModel", ("tokens",))
    for loaded, sharded, _ in ranks.run(bytes_of_whole_parameters, 2, checkpoint(case, root)):
        assert loaded > 0
        assert sharded <= 0  # below 0 if what an earlier test left was freed


def refused(folder):
    from slapo_zoo import AutoScheduledModel, SlapoError, init_target_engine

    model = AutoScheduledModel.from_pretrained(folder, pp=2, pipeline_order="interleaved_1f1b")
    found = []
    for kind in ("ddp", "fsdp2", "ddp3"):
        try:
            init_target_engine(model, "torch", data_parallel=kind)
        except SlapoError as error:
            found.append(str(error))
    return found


def test_ddp_and_fsdp2_refuse_several_pipeline_stages_per_rank(root, ranks):
    case = Case("GPT2LMHeadModel", ("tokens",), (("n_layer", 4),))
    ddp, fsdp2, unknown = ranks.run(refused, 2, checkpoint(case, root / "four"))[0]
    for text in (ddp, fsdp2):
        assert "found 4 stages on pp=2 ranks, in the order Interleaved1F1B" in text
        assert "(1f1b or gpipe), or leave data_parallel= out" in text
    assert "expected one of (None, 'ddp', 'fsdp2')" in unknown
