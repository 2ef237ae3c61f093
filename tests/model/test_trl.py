"""TRL's trainers combined with ScheduledTrainer: losses and weights equal the plain one in one process."""

import os
import runpy
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file

from cli_runs import tokenizer
from parity import Case, checkpoint
from slapo_zoo import ScheduledTrainer
from slapo_zoo.errors import SlapoError
from slapo_zoo.model.integrations.trainer import _own_loss
from slapo_zoo.model.integrations.trainer_options import refuse_options
from slapo_zoo.parallel.mesh import Mesh

ROOT = Path(__file__).parents[2] / "examples" / "trl"
CASE = Case("LlamaForCausalLM", ("tokens",), (("vocab_size", 300), ("max_position_embeddings", 64)))
KINDS = {"sft": "SFT", "dpo": "DPO", "reward": "Reward", "grpo": "GRPO"}
LAYOUTS = {"tp2": (2, 1), "dp2": (1, 2)}


@pytest.fixture
def start(tmp_path):
    """Return a checkpoint with its tokenizer; a reward model's head is trained."""
    folder = checkpoint(CASE, tmp_path)
    words = tokenizer(eos_token="<|endoftext|>", pad_token="<|pad|>")
    words.save_pretrained(folder)
    transformers.set_seed(0)
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, pad_token_id=words.pad_token_id
    )
    judge.save_pretrained(tmp_path / "judge")
    words.save_pretrained(tmp_path / "judge")
    return {kind: str(tmp_path / "judge") if kind == "reward" else str(folder) for kind in KINDS}


def example(kind):
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    warnings.simplefilter("ignore")
    return runpy.run_path(str(ROOT / f"{kind}.py"), run_name="example")


def plain(kind, folder, out, *more):
    """Return the losses of TRL's own trainer; save its model."""
    import trl

    found = example(kind)
    head = "SequenceClassification" if kind == "reward" else "CausalLM"
    model = getattr(transformers, f"AutoModelFor{head}").from_pretrained(folder)
    losses = found["train"](getattr(trl, f"{KINDS[kind]}Trainer"), model, folder, out, *more)
    model.save_pretrained(out)
    return losses


def scheduled(kind, folder, out, tp, dp, *more):
    return example(kind)["main"](folder, out, tp, dp, *more)


def check_same_model(start, one, two):
    """Fail unless both models changed, and to the same weights."""
    before, plainly, here = (load_file(Path(f, "model.safetensors")) for f in (start, one, two))
    assert plainly.keys() == here.keys()
    assert any(not torch.equal(before[name], here[name]) for name in here)
    for name, tensor in plainly.items():
        torch.testing.assert_close(here[name], tensor, atol=1e-5, rtol=1e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_trl_trainers_on_several_ranks_train_to_the_weights_of_one_process(
    kind, layout, start, tmp_path, ranks
):
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    want = ranks.run(plain, 1, kind, start[kind], one, timeout=200)[0]
    assert len(want) == 3
    for losses in ranks.run(scheduled, 2, kind, start[kind], two, *LAYOUTS[layout], timeout=200):
        torch.testing.assert_close(losses, want, atol=1e-5, rtol=1e-5)
    check_same_model(start[kind], one, two)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "dp", "parts"), [(2, 1, 2), (2, 2, 1)])
def test_grpo_with_tp_and_dp_trains_to_the_weights_of_one_process(
    tp, dp, parts, start, tmp_path, ranks
):
    """TRL counts tp peers as ranks with other rows, and would skip rows with micro-batches."""
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    ranks.run(plain, 1, "grpo", start["grpo"], one, 1, 3, parts, timeout=200)
    ranks.run(scheduled, tp * dp, "grpo", start["grpo"], two, tp, dp, parts, timeout=200)
    check_same_model(start["grpo"], one, two)


def asked(**options):
    """Arguments of a trainer that samples."""
    usual = {"num_generations": 4, "per_device_train_batch_size": 4, "steps_per_generation": 2,
             "generation_batch_size": 64}  # fmt: skip
    return SimpleNamespace(**usual | options)


def model_on(*sizes):
    state = SimpleNamespace(sequence_parallel=False)
    found = SimpleNamespace(mesh=Mesh(*sizes), schedule=SimpleNamespace(state=state))
    found._slapo = SimpleNamespace(peft_config=None)
    return found


def test_grpo_generation_batch_size_counts_dp_ranks_and_not_tp_ranks():
    args = asked()
    refuse_options(model_on(2, 1, 3), args, "")
    assert args.generation_batch_size == 4 * 3 * 2
    alone = asked()
    refuse_options(model_on(1, 1, 3), alone, "")
    assert alone.generation_batch_size == 64, "as TRL has counted"
    with pytest.raises(SlapoError, match=r"4 generations .* 6 rows .*\n.*batch_size=8"):
        refuse_options(model_on(2, 1, 1), asked(per_device_train_batch_size=6), "")


@pytest.mark.parametrize("kind", KINDS)
def test_trl_trainers_refuse_models_with_several_pipeline_stages(kind):
    """TRL's losses need full logits, which only the last stage has."""
    import trl

    owner = f"{KINDS[kind]}Trainer"
    made = type("Mine", (ScheduledTrainer, getattr(trl, owner)), {})
    found = _own_loss(made, None, {})
    assert found.endswith(".compute_loss")
    with pytest.raises(SlapoError, match="use pp=1, or a loop of your own"):
        refuse_options(model_on(1, 2, 1), None, found)
