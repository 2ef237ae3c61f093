"""Scheduled models under DeepSpeed equal one process, for every ZeRO stage and its pipeline."""

from types import SimpleNamespace

import pytest
import torch

from engine_runs import CASES, assert_same_run, make, rows_of, trained
from parity import STEPS, Case, checkpoint
from ranks import RankPool
from slapo_zoo import AutoScheduledModel, SlapoError, get_dialect_cls, init_target_engine

ZERO = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0}


def config(stage, accumulation=1):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {**ZERO, "zero_optimization": zero, "gradient_accumulation_steps": accumulation}


@pytest.fixture(scope="module")
def ranks():
    """Return a separate rank pool: DeepSpeed patches torch, and its import takes seconds."""
    pools = {}  # a pool for each size: ZeRO-3 needs the same number of modules on all ranks

    def run(fn, nprocs, *args):
        if nprocs not in pools:
            pools[nprocs] = RankPool()
        return pools[nprocs].run(fn, nprocs, *args, timeout=300)

    yield SimpleNamespace(run=run)
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("engines")


def all_runs(runs):
    """Many runs in one job: [(losses, weights) of each]."""
    import warnings

    warnings.simplefilter("ignore")  # DeepSpeed's own, of which there are many
    return [trained(*run) for run in runs]


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize("layout", [(1, 1, 2), (2, 1, 2)], ids=["dp2", "tp2-dp2"])
@pytest.mark.parametrize("family", CASES)
def test_deepspeed_zero_training_has_the_losses_and_gradients_of_one_process(
    family, layout, root, ranks
):
    case, folder = CASES[family], checkpoint(CASES[family], root)
    runs = [
        (case, folder, layout, "deepspeed", {"config": config(stage, 2 - stage % 2)})
        for stage in range(4)
    ]
    tp, pp, dp = layout
    found = ranks.run(all_runs, tp * pp * dp, runs)[0]
    for stage in range(4):
        assert_same_run(found[stage], case, folder)


ZERO_STAGES = (0, 1, 3)  # DeepSpeed's stage 2 clips by the code of stage 1


def shared_heads(case, folder):
    """(run, global gradient norm of each step) of torch and of ZERO_STAGES, tp=2."""
    import warnings

    warnings.simplefilter("ignore")
    found = []
    for stage in (None, *ZERO_STAGES):
        target, options = ("torch", {"clip": 1.0}) if stage is None else ("deepspeed", {"config": config(stage)})  # fmt: skip
        engine, losses, norms = make(case, folder, (2, 1, 1), target, options), [], []
        for step in range(STEPS):
            losses.append(float(engine.update(rows_of(case, engine.mesh, step))))
            norms.append(engine.grad_norm)
        found.append(((losses, engine.model.consolidated_state_dict()), norms))
    return found


def test_deepspeed_clipping_counts_shared_kv_heads_once(root, ranks):
    """A KV head replicated on two tp ranks counts once in the gradient norm."""
    case = Case("LlamaForCausalLM", ("tokens",), (("num_key_value_heads", 1),))
    folder = checkpoint(case, root)
    (_, expected), *stages = ranks.run(shared_heads, 2, case, folder)[0]
    assert min(expected) > 1.0, "nothing is clipped"
    for stage, (run, norms) in zip(ZERO_STAGES, stages, strict=True):
        assert_same_run(run, case, folder)
        if stage:  # without ZeRO DeepSpeed does not tell the norm in fp32
            assert norms == pytest.approx(expected, rel=1e-5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("stages", [(0, 1)], ids=["zero0-zero1"])
@pytest.mark.parametrize("family", CASES)
def test_deepspeed_pipeline_training_has_the_losses_and_gradients_of_one_process(
    family, stages, root, ranks
):
    """DeepSpeed's PipelineModule; GPT-2, BERT and T5 tie weights of the first and the last stage."""
    case, folder = CASES[family], checkpoint(CASES[family], root)
    runs = [
        (case, folder, (1, 2, 1), "deepspeed", {"config": config(stage, 2)}) for stage in stages
    ]
    found = ranks.run(all_runs, 2, runs)[0]
    for run in found:
        assert_same_run(run, case, folder)


ENGINES = {
    "torch": ("torch", (2, 1, 1), {"clip": 1.0}),
    "fsdp2": ("torch", (1, 1, 2), {"clip": 1.0, "data_parallel": "fsdp2"}),
    "zero2": ("deepspeed", (1, 1, 2), {"config": config(2)}),
    "zero3": ("deepspeed", (1, 1, 2), {"config": config(3)}),
    "pipeline": ("deepspeed", (1, 2, 1), {"config": config(1, 2)}),
}


def one_after_the_other(case, folder, ends, out):
    """Train under each engine in turn, from the checkpoint of the one before: losses of all steps, last weights."""
    import warnings

    warnings.simplefilter("ignore")
    losses, resumed = [], None
    for name, end in ends.items():
        target, layout, options = ENGINES[name]
        saved = end and (end, out / name)
        found, weights = trained(case, folder, layout, target, options, MICRO[name], saved, resumed)
        losses, resumed = losses + found, out / name
    return losses, weights


MICRO = {"torch": 1, "fsdp2": 1, "zero2": 1, "zero3": 1, "pipeline": 2}
# engine --> step before which it saves and stops; where the engine before has stopped there, it saves what it loaded
CHAIN = {"pipeline": 1, "zero2": 1, "fsdp2": 2, "zero3": 2, "torch": None}
PAIRS = [("torch", "zero2"), ("zero2", "torch"), ("zero3", "fsdp2"), ("fsdp2", "zero3"), ("pipeline", "fsdp2")]  # fmt: skip


@pytest.mark.parametrize(
    "ends", [CHAIN, *(pytest.param({a: 2, b: None}, marks=pytest.mark.slow) for a, b in PAIRS)], ids="-".join
)  # fmt: skip
def test_training_saved_under_deepspeed_and_resumed_under_another_engine_equals_one_process(
    ends, root, ranks, tmp_path
):
    """Weights, optimizer and its step: as if one engine had run all steps."""
    case, folder = CASES["gpt2"], checkpoint(CASES["gpt2"], root)
    assert_same_run(
        ranks.run(one_after_the_other, 2, case, folder, ends, tmp_path)[0], case, folder
    )


OF_ZERO = {  # stage --> where zero_state.py finds what DeepSpeed has no public name for
    1: ("zero.single_partition_of_fp32_groups", "zero._lazy_init_hp_params_optimizer_state",
        "zero._hp_optimizer_states_linked", "zero.optimizer", "p._hp_mapping"),
    3: ("zero.fp32_partitioned_groups_flat", "zero.optimizer", "p.ds_id", "p.ds_tensor",
        "p._z3_optimizer._get_fp32_opt_state_partition",
        "p._z3_optimizer._get_param_partition_rank"),
}  # fmt: skip
PUBLIC = ("safe_get_full_grad", "safe_get_full_fp32_param", "safe_get_full_optimizer_state",
          "safe_set_full_fp32_param", "safe_set_full_optimizer_state")  # fmt: skip


def moved(folder):
    """Return DeepSpeed's private names that are no longer where they were in 0.19."""
    import operator
    import warnings

    warnings.simplefilter("ignore")
    import deepspeed

    found = [f"deepspeed.utils.{n}" for n in PUBLIC if not hasattr(deepspeed.utils, n)]
    for stage, names in OF_ZERO.items():
        engine = make(CASES["gpt2"], folder, (1, 1, 1), "deepspeed", {"config": config(stage)})
        holder = SimpleNamespace(zero=engine.optimizer, p=next(engine.model.parameters()))
        for name in names:
            try:
                operator.attrgetter(name)(holder)
            except AttributeError:
                found.append(f"stage {stage}: {name}")
    return found


def test_private_deepspeed_names_that_the_package_uses_exist(root, ranks):
    """A new DeepSpeed that fails here needs another slapo_zoo/model/integrations/dialects/zero_state.py."""
    assert ranks.run(moved, 1, checkpoint(CASES["gpt2"], root))[0] == []


def logged(folder, file, layout=(1, 1, 1)):
    """A run whose log goes to a file of each rank."""
    import contextlib
    import logging
    import warnings

    warnings.simplefilter("ignore")
    settings = {**config(1), "steps_per_print": 1}
    file = file.with_suffix(f".{torch.distributed.get_rank()}")
    with file.open("w") as out, contextlib.redirect_stdout(out):
        from deepspeed.utils import logger

        logger.setLevel(logging.INFO)  # its throughput is no warning
        logger.addHandler(logging.StreamHandler(out))
        trained(CASES["gpt2"], folder, layout, "deepspeed", {"config": settings})
        logger.handlers.pop()
    return get_dialect_cls("log_parser", "deepspeed")(file)


def test_deepspeed_log_parser_reads_throughput_and_memory(root, ranks, tmp_path):
    folder = checkpoint(CASES["gpt2"], root)
    _, rate, _, code = ranks.run(logged, 1, folder, tmp_path / "log")[0]
    assert code == 0
    assert rate > 0
    parameters, rate, _, code = ranks.run(logged, 2, folder, tmp_path / "stages", (1, 2, 1))[0]
    assert code == 0
    assert rate > 0
    assert parameters > 1000, "what the first stage says it holds"
    (tmp_path / "bad").write_text("torch.OutOfMemoryError: CUDA out of memory")
    assert get_dialect_cls("log_parser", "deepspeed")(tmp_path / "bad")[3] == 1


def test_invalid_deepspeed_configs_are_refused(root, tmp_path):
    model = AutoScheduledModel.from_pretrained(checkpoint(CASES["gpt2"], root))
    (tmp_path / "broken.json").write_text("{")
    for path in (tmp_path / "broken.json", tmp_path / "missing.json"):
        with pytest.raises(SlapoError, match="pass a dict, or the path of a JSON file"):
            init_target_engine(model, "deepspeed", config=path)
    with pytest.raises(SlapoError, match="expected a model of AutoScheduledModel"):
        init_target_engine(model.schedule, "deepspeed", config={})
