"""megatron-core on the CPU: its process groups in a run, its layers in a BERT, its logs."""

import warnings

import pytest
import torch

from engine_runs import CASES, assert_same_run, trained
from parity import batch_of, checkpoint
from slapo_zoo import Mesh, create_schedule, get_dialect_cls
from slapo_zoo.errors import MeshError

CASE = CASES["bert"]


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("engines")


def all_families(runs):
    from slapo_zoo.model.integrations.dialects.megatron import import_megatron

    parallel_state, found = import_megatron().parallel_state, []
    for run in runs:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about packages that are not installed
            found.append(trained(*run))
        groups = parallel_state.get_tensor_model_parallel_group()
        assert torch.distributed.get_process_group_ranks(groups) == [0, 1]
    parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize(
    "families", [("gpt2", "t5"), pytest.param(("bert", "classes"), marks=pytest.mark.slow)], ids=str
)
def test_megatron_engine_training_has_the_losses_and_gradients_of_one_process(
    families, root, ranks
):
    folders = {family: checkpoint(CASES[family], root) for family in families}
    options = {"clip": 1.0}
    runs = [(CASES[f], folder, (2, 1, 1), "megatron", options) for f, folder in folders.items()]
    found = ranks.run(all_families, 2, runs, timeout=300)[0]
    for run, (family, folder) in zip(found, folders.items(), strict=True):
        assert_same_run(run, CASES[family], folder)


def on_two_ranks_of_dp(folder, out):
    """A run over dp that stops and goes on under torch at tp2, and under Megatron again."""
    warnings.simplefilter("ignore")
    from slapo_zoo.model.integrations.dialects.megatron import import_megatron

    case, state, options = CASES["gpt2"], import_megatron().parallel_state, {"clip": 1.0}
    before, _ = trained(case, folder, (1, 1, 2), "megatron", options, saved=(2, out))
    state.destroy_model_parallel()
    after, weights = trained(case, folder, (2, 1, 1), "torch", options, resumed=out)
    again, same = trained(case, folder, (1, 1, 2), "megatron", options, resumed=out)
    state.destroy_model_parallel()
    return [(before + after, weights), (before + again, same)]


def test_training_saved_under_torch_or_megatron_and_resumed_under_the_other_equals_one_process(
    root, ranks, tmp_path
):
    folder = checkpoint(CASES["gpt2"], root)
    for run in ranks.run(on_two_ranks_of_dp, 2, folder, tmp_path / "saved", timeout=300)[0]:
        assert_same_run(run, CASES["gpt2"], folder)


def refused(folder):
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig

    from slapo_zoo import AutoScheduledModel, SlapoError, init_target_engine

    model = AutoScheduledModel.from_pretrained(folder, tp=2)
    with pytest.raises(SlapoError) as refusal:
        init_target_engine(model, "megatron", optimizer=OptimizerConfig(optimizer="adam"))
    return refusal.value.what, refusal.value.hint, parallel_state.is_initialized()


def test_megatron_optimizer_is_refused_before_process_groups_are_created(root, ranks):
    what, hint, has_groups = ranks.run(refused, 2, checkpoint(CASE, root))[0]
    assert (what, has_groups) == ("optimizer", False)
    assert "torch.optim.AdamW" in hint


def with_layers(folder):
    """Logits and gradients of a BERT whose feed-forward runs in Megatron's layers."""
    import transformers

    warnings.simplefilter("ignore")  # it recommends settings of CUDA
    from slapo_zoo.model.integrations.dialects.megatron import import_megatron, use_parallel_layers

    model = transformers.BertForMaskedLM.from_pretrained(folder)
    plain = transformers.BertForMaskedLM.from_pretrained(folder)
    sch = create_schedule(model, mesh=Mesh(tp=2, rank=torch.distributed.get_rank()))
    blocks = "bert.encoder.layer.*."
    use_parallel_layers(sch, [blocks + "intermediate.dense"], [blocks + "output.dense"])
    batch = batch_of(CASE)
    mine, theirs = model(**batch), plain(**batch)
    mine.loss.backward()
    theirs.loss.backward()
    torch.testing.assert_close(mine.logits, theirs.logits)
    rank = torch.distributed.get_rank()
    for i, (block, want) in enumerate(
        zip(model.bert.encoder.layer, plain.bert.encoder.layer, strict=True)
    ):
        first = want.intermediate.dense.weight.grad.chunk(2)[rank]
        torch.testing.assert_close(block.intermediate.dense.layer.weight.grad, first, msg=str(i))
        second = want.output.dense.weight.grad.chunk(2, 1)[rank]
        torch.testing.assert_close(block.output.dense.layer.weight.grad, second, msg=str(i))
        query = want.attention.self.query.weight.grad
        torch.testing.assert_close(block.attention.self.query.weight.grad, query, msg=str(i))
    import_megatron().parallel_state.destroy_model_parallel()
    return type(model.bert.encoder.layer[0].output.dense.layer).__name__


def test_replace_installs_megatron_parallel_linears_with_equal_gradients(root, ranks):
    assert ranks.run(with_layers, 2, checkpoint(CASE, root))[0] == "RowParallelLinear"


def wrong_groups():
    from slapo_zoo.model.integrations.dialects.megatron import import_megatron, take_groups

    state = import_megatron().parallel_state
    state.initialize_model_parallel(1, 1)
    try:
        take_groups(Mesh(tp=2, rank=torch.distributed.get_rank()))
    except MeshError as error:
        return str(error)
    finally:
        state.destroy_model_parallel()


def test_megatron_process_groups_of_another_mesh_size_are_refused(ranks):
    assert "found ranks [0] in Megatron's group, expected [0, 1]" in ranks.run(wrong_groups, 2)[0]


LOG = """\
 > number of parameters on (tensor, pipeline) model parallel rank (1, 0): 178100224
 > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 178100224
 iteration       10/     100 | consumed samples:  160 | elapsed time per iteration (ms): 812.5 | \
learning rate: 1.500E-04 | global batch size:    16 | lm loss: 1.0E+01 |
[Rank 0] (after 10 iterations) memory (MB) | allocated: 3000.0 | max allocated: 4096.0 | reserved: 5000.0
 iteration       20/     100 | consumed samples:  320 | elapsed time per iteration (ms): 800.0 | \
learning rate: 1.500E-04 | global batch size:    16 | lm loss: 9.0E+00 |
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [(LOG, (178100224.0, 20.0, 4.0, 0)), ("CUDA out of memory", (0.0, 0.0, 0.0, 1)), ("", (0.0, 0.0, 0.0, 2))],
    ids=["whole", "memory", "empty"],
)  # fmt: skip
def test_megatron_log_parser_reads_throughput_and_memory(text, expected, tmp_path):
    (tmp_path / "log").write_text(text)
    assert get_dialect_cls("log_parser", "megatron")(tmp_path / "log") == expected
