"""`from_pretrained(..., target=)`: the training engine, as `init_target_engine` makes it."""

import warnings

import pytest
import torch
import transformers

from engine_runs import CASES, adamw, assert_same_run, rows_of
from parity import STEPS, checkpoint
from ranks import RankPool
from slapo_zoo import AutoScheduledModel, SlapoError

CASE = CASES["gpt2"]
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
}
TARGETS = {  # layout, target, options, class of the engine's own object
    "torch-ddp": ((1, 1, 2), "torch", {"clip": 1.0, "data_parallel": "ddp"}, "DistributedDataParallel"),
    "megatron": ((2, 1, 1), "megatron", {"clip": 1.0}, "GPT2LMHeadModel"),
    "deepspeed": ((1, 1, 2), "deepspeed", {"config": CONFIG}, "DeepSpeedEngine"),
    "deepspeed-pipeline": ((1, 2, 1), "deepspeed", {"config": {**CONFIG, "zero_optimization": {}}}, "PipelineEngine"),
}  # fmt: skip


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("targets")


@pytest.fixture(scope="module")
def ranks():
    """Return a separate rank pool, since DeepSpeed patches torch."""
    pool = RankPool()
    yield pool
    pool.close()


def each_target(folder, out):
    """Return the run of every target on this rank, and attributes of its engine."""
    warnings.simplefilter("ignore")  # DeepSpeed's and Megatron's own
    found = {}
    for name, ((tp, pp, dp), target, options, _) in TARGETS.items():
        engine = AutoScheduledModel.from_pretrained(
            folder, tp=tp, pp=pp, dp=dp, seed=0, auto_class=CASE.cls, target=target,
            target_options={"optimizer": adamw, **options},
        )  # fmt: skip
        engine.train()
        steps = range(STEPS)
        losses = [float(engine.update(rows_of(CASE, engine.mesh, step))) for step in steps]
        names = {name for name, _ in engine.named_parameters()}
        run = losses, engine.consolidated_state_dict()
        engine.save_pretrained(out / name)
        found[name] = run, type(engine.native).__name__, names, engine.config.model_type
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    return found


def test_every_target_engine_has_the_losses_and_weights_of_one_process(root, ranks, tmp_path):
    """Losses and weights equal one process; the engine has the attributes of the model."""
    folder = checkpoint(CASE, root)
    both = ranks.run(each_target, 2, folder, tmp_path, timeout=300)
    for name, (run, native, _, family) in both[0].items():
        assert_same_run(run, CASE, folder)
        assert native == TARGETS[name][3]
        assert family == "gpt2"
        saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / name)
        assert {n for n, _ in saved.named_parameters()} <= both[0][name][2] | both[1][name][2]
        for key, value in saved.named_parameters():
            torch.testing.assert_close(value, run[1][key], atol=0, rtol=0)


def from_config(folder):
    """A new model in DeepSpeed beside one without an engine."""
    warnings.simplefilter("ignore")
    config = transformers.AutoConfig.from_pretrained(folder)
    plain = AutoScheduledModel.from_config(config, tp=2, seed=3)
    options = {"config": CONFIG, "optimizer": adamw}
    engine = AutoScheduledModel.from_config(
        config, tp=2, seed=3, target="deepspeed", target_options=options
    )
    return plain.consolidated_state_dict(), engine.consolidated_state_dict()


def test_from_config_initializes_the_same_weights_with_and_without_a_target_engine(root, ranks):
    plain, engine = ranks.run(from_config, 2, checkpoint(CASE, root))[0]
    assert plain.keys() == engine.keys()
    assert all(torch.equal(engine[name], value) for name, value in plain.items())


def test_from_pretrained_returns_a_transformers_model_without_target_and_an_engine_with_options(
    root,
):
    folder = checkpoint(CASE, root)
    assert isinstance(
        AutoScheduledModel.from_pretrained(folder, target=None), transformers.GPT2LMHeadModel
    )
    engine = AutoScheduledModel.from_pretrained(folder, target_options={"optimizer": adamw})
    assert isinstance(engine.optimizer, torch.optim.AdamW)


WRONG = {
    "engine": ({"target": "horovod"}, "found no such engine, expected one of .*'deepspeed'"),
    "no-config": ({"target": "deepspeed"}, "expected 'config' too, which deepspeed needs"),
    "option": ({"target": "megatron", "target_options": {"zero": 1}}, "found 'zero', expected"),
    "kind": ({"target": "megatron", "target_options": "ds.json"}, "found str, expected a dict"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_target_engine_arguments_raise_before_any_file_is_read(wrong, tmp_path):
    arguments, message = WRONG[wrong]
    with pytest.raises(SlapoError, match=message) as caught:
        AutoScheduledModel.from_pretrained(tmp_path / "none", **arguments)
    assert caught.value.where == "from_pretrained"
    assert caught.value.hint
    with pytest.raises(SlapoError, match=message):
        AutoScheduledModel.from_config(transformers.GPT2Config(), **arguments)


def test_missing_engine_error_names_the_pip_install_command(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SlapoError, match=r"pip install slapo-zoo\[megatron\]"):
        AutoScheduledModel.from_pretrained(tmp_path / "none", target="megatron")
