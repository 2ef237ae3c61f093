"""ScheduledTrainer on a mesh equals the plain Trainer in one process, with its checkpoints."""

import warnings

import pytest
import torch
import transformers

from engine_runs import CASES
from parity import checkpoint
from trainer_runs import CASE, arguments, assert_same, divided, plain, rows, run


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("layout", "accumulation"),
    [
        pytest.param((2, 1, 1), 2, id="tp2-accumulated"),
        pytest.param((1, 1, 2), 2, id="dp2-accumulated"),
        pytest.param((2, 1, 2), 1, id="tp2-dp2"),
        pytest.param((1, 2, 1), 2, id="pp2-accumulated"),
    ],
)
def test_scheduled_trainer_has_the_losses_and_weights_of_the_plain_trainer(
    layout, accumulation, tmp_path, ranks
):
    folder = checkpoint(CASE, tmp_path)
    dp = layout[2]
    # a mean of means depends on how rows are grouped, so dp ranks evaluate one row at a time
    evaluated = {"per_device_eval_batch_size": 1 if dp > 1 else 3}
    shared = {"gradient_accumulation_steps": accumulation, **evaluated}
    expected = plain(folder, tmp_path, per_device_train_batch_size=4, **shared)
    mine = {"per_device_train_batch_size": 4 // dp, **shared}
    world = layout[0] * layout[1] * dp
    for found in ranks.run(divided, world, folder, tmp_path, layout, mine, timeout=300):
        assert_same((*found[:2], found[2] or expected[2], found[3]), expected)


def squared(outputs, labels, num_items_in_batch=None):
    """Return a sum over the targets of a step: a user's `compute_loss_func`."""
    from torch.nn import functional

    logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:]
    each = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (each + 0.1 * each.square()).sum() / num_items_in_batch


OWN_LOSSES = {"label_smoothing_factor": 0.1}, {"compute_loss_func": squared}, {}


def evaluated(folder, out, layout):
    """Return eval_loss of seven rows by each loss in OWN_LOSSES; of the plain Trainer where layout is None."""
    from accelerate.state import AcceleratorState

    from slapo_zoo import AutoScheduledModel, ScheduledTrainer

    AcceleratorState._reset_state(True)
    sizes = dict(zip(("tp", "dp"), layout or (), strict=False))
    base = AutoScheduledModel if layout else transformers.AutoModelForCausalLM
    cls, found = (ScheduledTrainer if layout else transformers.Trainer), []
    for given in OWN_LOSSES:
        model = base.from_pretrained(folder, **sizes)
        model.loss_type = "ForCausalLM"
        changes = {k: v for k, v in given.items() if k.startswith("label")}
        args = arguments(out, **changes)
        loss = {k: v for k, v in given.items() if k not in changes}
        metrics = cls(model=model, args=args, eval_dataset=rows()[:7], **loss).evaluate()
        found.append(metrics["eval_loss"])
    return found


def test_scheduled_trainer_eval_loss_of_a_user_loss_is_equal_on_every_layout(tmp_path, ranks):
    """Evaluate on tp=2 and on dp=2; on dp=2 one rank repeats a row so that both have equally many."""
    folder = checkpoint(CASE, tmp_path)
    want = evaluated(folder, tmp_path, None)
    assert len({*want}) == len(OWN_LOSSES)
    for layout in ((2, 1), (1, 2)):
        for found in ranks.run(evaluated, 2, folder, tmp_path, layout, timeout=200):
            assert found == pytest.approx(want, rel=1e-6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_scheduled_trainer_of_other_model_families_has_the_losses_of_the_plain_trainer(
    family, tmp_path, ranks
):
    """tp=2 without accumulation: for these families the plain Trainer averages means of micro-batches."""
    folder = checkpoint(CASES[family], tmp_path)
    changes = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 3}
    expected = plain(folder, tmp_path, family, **changes)
    found = ranks.run(divided, 2, folder, tmp_path, (2, 1, 1), changes, None, None, False, family)
    for each in found:
        assert_same((*each[:2], each[2] or expected[2], each[3]), expected)


def test_scheduled_trainer_resumed_on_another_mesh_has_the_losses_of_an_uninterrupted_run(
    tmp_path, ranks
):
    """A run stopped after 2 steps with tp=2 resumes with dp=2 and equals an uninterrupted one."""
    folder, out = checkpoint(CASE, tmp_path), tmp_path / "run"
    expected = plain(folder, tmp_path, per_device_train_batch_size=4)
    first = {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 2}
    found = ranks.run(divided, 2, folder, out, (2, 1, 1), first, timeout=300)[0]
    assert_same(found, expected)
    names = {path.name for path in (out / "checkpoint-2").iterdir()}
    assert {"model.safetensors", "trainer_state.json", "training_state.json"} <= names
    again = transformers.GPT2LMHeadModel.from_pretrained(out / "checkpoint-4")
    for name, p in again.named_parameters():
        torch.testing.assert_close(p, found[2][name], atol=0, rtol=0)
    second = {"per_device_train_batch_size": 2}
    args = (folder, out, (1, 1, 2), second, str(out / "checkpoint-2"), out / "final")
    losses, norms, weights, loss = ranks.run(divided, 2, *args, timeout=300)[0]
    rest = (expected[0][2:], expected[1][2:], *expected[2:])
    assert_same((losses[-2:], norms[-2:], weights, loss), rest)
    assert (out / "final" / "model.safetensors").exists()


def pushed(folder, out, layout, changes, url):
    """Train with push_to_hub against a Hub at `url`; return the unsharded weights."""
    from huggingface_hub import HfApi, constants
    from transformers.utils import hub

    warnings.simplefilter("ignore")  # the client's own, also from its threads
    constants.ENDPOINT, constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = url, False, True
    hub._hf_api = HfApi(endpoint=url, token="hf_test")
    names = {"push_to_hub": True, "hub_model_id": f"me/gpt2-{layout[0]}", "hub_token": "hf_test"}
    names |= {"save_strategy": "steps", "save_steps": 2, "hub_strategy": "every_save"}
    losses, _, weights, _ = divided(folder, out, layout, {**changes, **names}, push=True)
    return losses, weights


def test_scheduled_trainer_pushes_the_unsharded_model_to_the_hub(tmp_path, ranks):
    """Under tp2 and dp2: one repository with the weights of the last step, once, and a card."""
    from hub_server import Hub

    folder = checkpoint(CASE, tmp_path)
    with Hub() as hub:
        for layout in ((2, 1, 1), (1, 1, 2)):
            out = tmp_path / f"run{layout[0]}"
            changes = {"per_device_train_batch_size": 4 // layout[2]}
            arguments = (folder, out, layout, changes, hub.url)
            _, weights = ranks.run(pushed, 2, *arguments, timeout=300)[0]
            repository = hub.repositories[f"me/gpt2-{layout[0]}"]
            files = repository.commits[repository.branches["main"]]
            assert {"README.md", "config.json", "model.safetensors"} <= files.keys()
            assert not any("checkpoint-" in name or "/" in name for name in files)
            local = tmp_path / f"fetched{layout[0]}"
            local.mkdir()
            for name in ("config.json", "model.safetensors"):
                (local / name).write_bytes(files[name])
            plain = transformers.GPT2LMHeadModel.from_pretrained(local)
            for name, p in plain.named_parameters():
                torch.testing.assert_close(p, weights[name], atol=0, rtol=0)
            assert (out / "checkpoint-4" / "training_state.json").exists(), (
                "a push costs checkpoints"
            )


def test_scheduled_trainer_refuses_a_plain_transformers_model(tmp_path):
    from slapo_zoo import SlapoError
    from slapo_zoo.model.integrations.trainer import ScheduledTrainer

    folder = checkpoint(CASE, tmp_path)
    with pytest.raises(SlapoError, match="expected a model of AutoScheduledModel"):
        ScheduledTrainer(model=transformers.GPT2LMHeadModel.from_pretrained(folder))


def accelerated(folder, layout):
    """Run a hand-written loop with Accelerate; return losses of 4 steps, and the rows that this rank read."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from slapo_zoo import AutoScheduledModel
    from slapo_zoo.model.integrations.trainer import prepare

    AcceleratorState._reset_state(True)
    tp, pp, dp = layout
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp, dp=dp, seed=0)
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(rows()[:16], batch_size=4 // dp)
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)
    losses, seen = [], []
    model.train()
    for batch in loader:
        losses.append(float(model.train_step(batch)))
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(batch["input_ids"])
    gathered = accelerator.gather_for_metrics(torch.full((2,), float(model.mesh.coord("dp"))))
    return losses, torch.cat(seen), gathered


def test_accelerate_training_loop_on_a_sharded_model_has_the_losses_of_one_process(tmp_path, ranks):
    folder = checkpoint(CASE, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, whole, _ = ranks.run(accelerated, 1, folder, (1, 1, 1))[0]
        found = ranks.run(accelerated, 4, folder, (2, 1, 2))
    for losses, _, gathered in found:
        torch.testing.assert_close(losses, expected, atol=2e-6, rtol=1e-6)
        assert gathered.tolist() == [0.0, 0.0, 1.0, 1.0]  # the rows of each dp rank once
    assert torch.equal(found[0][1], found[1][1]), "tp peers read different rows"
    both = torch.cat([found[0][1], found[2][1]])
    assert sorted(both.tolist()) == sorted(whole.tolist())


# --- options of the Trainer ----------------------------------------------------------------------


def thrice(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    """Return three times the loss: a user's `compute_loss`."""
    inputs = {**inputs, "labels": inputs["labels"]}
    return 3 * transformers.Trainer.compute_loss(
        trainer, model, inputs, num_items_in_batch=num_items_in_batch
    )


OPTIONS = {
    "compute_loss": {},
    "compute_loss_func": {},
    "label_smoothing": {"label_smoothing_factor": 0.1},
    "neftune": {"neftune_noise_alpha": 5.0},
    "recomputed": {"activation_checkpointing": True},
    "adafactor": {"optim": "adafactor", "learning_rate": 1e-3},
    "bf16": {"bf16": True},
}


def optioned(folder, out, layout, option, rows_each):
    """Run the Trainer of this mesh with an option; the plain one where layout is None."""
    from accelerate.state import AcceleratorState

    from slapo_zoo import AutoScheduledModel
    from slapo_zoo.model.integrations.trainer import ScheduledTrainer

    AcceleratorState._reset_state(True)
    args = arguments(out, per_device_train_batch_size=rows_each, **OPTIONS[option])
    given = {"compute_loss_func": squared} if option == "compute_loss_func" else {}
    base = transformers.Trainer if layout is None else ScheduledTrainer
    cls = type("Mine", (base,), {"compute_loss": thrice} if option == "compute_loss" else {})
    if layout is None:
        model = transformers.GPT2LMHeadModel.from_pretrained(folder)
    else:
        tp, pp, dp = layout
        model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp, dp=dp, seed=0)
    model.loss_type = "ForCausalLM"
    kinds = set()
    model.transformer.h[0].ln_2.register_forward_hook(lambda _m, _a, y: kinds.add(y.dtype))
    model.transformer.h[0].mlp.register_forward_hook(lambda _m, _a, y: kinds.add(y.dtype))
    trainer = cls(model=model, args=args, train_dataset=rows(), **given)
    losses, norms = run(trainer)
    weights = dict(model.named_parameters()) if layout is None else model.consolidated_state_dict()
    return losses, norms, {n: w.detach() for n, w in weights.items()}, kinds


QUICK = {"compute_loss": (1, 1, 2), "compute_loss_func": (2, 1, 1), "bf16": (2, 1, 1)}


@pytest.mark.parametrize(
    ("option", "layout"),
    [
        pytest.param(
            option,
            layout,
            id=f"{option}-{name}",
            marks=() if QUICK.get(option) == layout else pytest.mark.slow,
        )
        for name, layout in {"tp2": (2, 1, 1), "dp2": (1, 1, 2)}.items()
        for option in OPTIONS
        if (option, name) != ("neftune", "dp2")
    ],
)  # dp ranks draw NEFTune's noise for other rows than one process does, as under DDP
def test_scheduled_trainer_with_each_tested_option_has_the_losses_of_the_plain_trainer(
    option, layout, tmp_path, ranks
):
    folder = checkpoint(CASE, tmp_path)
    want = ranks.run(optioned, 1, folder, tmp_path, None, option, 4)[0]
    args = (folder, tmp_path, layout, option, 4 // layout[2])
    found = ranks.run(optioned, 2, *args, timeout=200)
    close = {"atol": 0.03, "rtol": 0.02} if option == "bf16" else {"atol": 1e-5, "rtol": 1e-5}
    for losses, norms, _, kinds in found:
        torch.testing.assert_close(losses, want[0], **close)
        torch.testing.assert_close(norms, want[1], atol=10 * close["atol"], rtol=10 * close["rtol"])
        assert kinds == want[3]
    for name, weight in want[2].items() if option != "bf16" else ():
        mine = found[0][2][name]
        if option == "adafactor" and name.endswith("c_attn.bias"):
            continue  # the gradient of the keys' bias is 0 but for rounding, and its sign is taken
        torch.testing.assert_close(mine, weight, atol=2e-5, rtol=1e-3, msg=name)


def in_fp16(folder, out, layout, rows_each, given, clip):
    """Run a Trainer with a model that computes in fp16, and one with the same model in fp32."""
    from accelerate.state import AcceleratorState

    from slapo_zoo import AutoScheduledModel
    from slapo_zoo.model.integrations.trainer import ScheduledTrainer

    found, (tp, dp) = [], layout
    for precision in ("fp32", "fp16"):
        AcceleratorState._reset_state(True)
        model = AutoScheduledModel.from_pretrained(folder, tp=tp, dp=dp, precision=precision)
        args = arguments(out, per_device_train_batch_size=rows_each, max_grad_norm=clip)
        model.loss_type = "ForCausalLM"
        trainer = ScheduledTrainer(model=model, args=args, train_dataset=rows(), **given)
        history = run(trainer)
        weights = {n: w.detach() for n, w in model.consolidated_state_dict().items()}
        found.append((*history, weights, trainer.accelerator.scaler))
    return [(*rest, scaler and scaler.get_scale()) for *rest, scaler in found]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize(
    "given", [{}, {"compute_loss_func": squared}], ids=["its loss", "own loss"]
)
@pytest.mark.parametrize("layout", [(2, 1), pytest.param((1, 2), marks=pytest.mark.slow)], ids=str)
def test_scheduled_trainer_in_fp16_stays_close_to_the_losses_in_fp32(
    layout, given, clip, tmp_path, ranks
):
    args = (checkpoint(CASE, tmp_path), tmp_path, layout, 4 // layout[1], given, clip)
    for whole, half in ranks.run(in_fp16, 2, *args, timeout=200):
        torch.testing.assert_close(half[0], whole[0], atol=0.01, rtol=0.005)
        torch.testing.assert_close(half[1], whole[1], atol=0.02, rtol=0.01)
        assert half[0] != whole[0]
        assert half[3] == (4096.0 if given else None)
        for name, weight in whole[2].items():  # AdamW's first steps are signs: 4 steps of 1e-3
            assert (half[2][name] - weight).abs().mean() < 5e-4, name


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"fp16": True}, 'precision="fp16"'),
        ({"torch_compile": True}, "block.compile"),
        ({"use_liger_kernel": True}, "kernels="),
        ({"optim": "lomo"}, "during the backward"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_scheduled_trainer_refuses_unsupported_options(option, words, tmp_path):
    from slapo_zoo import AutoScheduledModel, SlapoError
    from slapo_zoo.model.integrations.trainer_options import refuse_options

    model = AutoScheduledModel.from_pretrained(checkpoint(CASE, tmp_path))
    args = arguments(tmp_path)
    for name, value in option.items():  # some would fail in TrainingArguments on this machine
        setattr(args, name, type("Named", (), {"value": value}) if name == "optim" else value)
    with pytest.raises(SlapoError, match=words):
        refuse_options(model, args, "")


def test_scheduled_trainer_refuses_a_gpu_that_the_process_group_of_the_ranks_cannot_serve(
    monkeypatch,
):
    """Two ranks on a machine with one GPU train on the CPU, over gloo."""
    from types import SimpleNamespace

    from slapo_zoo import SlapoError
    from slapo_zoo.model.integrations import trainer_options
    from slapo_zoo.parallel.mesh import Mesh

    monkeypatch.setattr(trainer_options, "group_kinds", lambda: {"cpu"})
    args = SimpleNamespace(device=torch.device("cuda", 0))
    with pytest.raises(SlapoError, match="pass use_cpu=True"):
        trainer_options.refuse_options(SimpleNamespace(mesh=Mesh(tp=2)), args, "")


def test_scheduled_trainer_in_one_process_with_several_gpus_uses_one_of_them(tmp_path):
    from slapo_zoo import AutoScheduledModel, ScheduledTrainer

    args = arguments(tmp_path, per_device_train_batch_size=3)
    args._n_gpu = 2  # as TrainingArguments sets it on such a machine
    model = AutoScheduledModel.from_pretrained(checkpoint(CASE, tmp_path))
    trainer = ScheduledTrainer(model=model, args=args, train_dataset=rows())
    assert trainer._wrap_model(model) is model
    assert next(iter(trainer.get_train_dataloader()))["input_ids"].shape[0] == 3


def wrapped(folder, layout, out):
    """Check the errors of the plain Trainer, and of a user's loss in pipeline stages."""
    from slapo_zoo import AutoScheduledModel, ScheduledTrainer, SlapoError

    model = AutoScheduledModel.from_pretrained(folder, tp=layout[0], pp=layout[1], dp=layout[2])
    with pytest.raises(SlapoError, match=r"use slapo_zoo\.ScheduledTrainer"):
        transformers.Trainer(model=model, args=arguments(out), train_dataset=rows())
    if layout[1] > 1:
        for given in ({"compute_loss_func": squared}, {}):
            args = arguments(out) if given else arguments(out, label_smoothing_factor=0.1)
            with pytest.raises(SlapoError, match="loss_fn"):
                ScheduledTrainer(model=model, args=args, **given)


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=["tp2", "pp2", "dp2"])
def test_transformers_trainer_refuses_a_sharded_model(layout, tmp_path, ranks):
    ranks.run(wrapped, 2, checkpoint(CASE, tmp_path), layout, tmp_path)
