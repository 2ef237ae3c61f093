"""Options of the loader: typed, documented, refused when unknown; attention back ends; the tuner's space."""

import dataclasses
import inspect
from types import SimpleNamespace

import pytest
import torch
import transformers

from heads import HEADS
from parity import LAYOUTS, Case, checkpoint, compare, references, scheduled
from refusals import BERT, GPT2, refused
from slapo_zoo import AutoScheduledModel, SlapoError
from slapo_zoo.errors import ArchitectureError
from slapo_zoo.hf import models as hf
from slapo_zoo.hf.attention_backends import BACKENDS
from slapo_zoo.zoo.options import INSTEAD, KNOBS, LoaderOptions, tunable
from slapo_zoo.zoo.table import families, table_for

# Swin has no rule that shards tokens, and parts of a batch of CLIP do not add up to its loss
WITHOUT_PARTS = {"swin": "2x1x1", "clip": "2x1x1"}
SEAM = [family for family in HEADS if "eager" in table_for(family).tunable.get("attention", ())]


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("knobs")


@pytest.mark.parametrize("entry", ["from_pretrained", "from_config"])
def test_every_loader_option_is_a_documented_argument_with_the_same_default(entry):
    arguments = inspect.signature(getattr(AutoScheduledModel, entry)).parameters
    for field in dataclasses.fields(LoaderOptions):
        assert arguments[field.name].default == field.default, field.name
    text = inspect.getdoc(AutoScheduledModel.from_pretrained)
    assert all(f"{name}: " in text for name in KNOBS)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("sequence_parallel", 1, "True or False"),
        ("micro_batches", 0, "an integer of at least 1"),
        ("micro_batches", "2", "an integer of at least 1"),
        ("checkpoint_ratio", "half", "a number from 0 to 1"),
        ("stages_per_rank", 1.5, "an integer of at least 1"),
        ("attention", 3, "one of sdpa, eager"),
        ("pipeline_order", None, "a name"),
    ],
)
def test_loader_option_of_wrong_type_is_refused(name, value, expected, root):
    text = refused(SlapoError, checkpoint(GPT2, root), **{name: value})
    assert name in text
    assert expected in text


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("micro_batch", "micro_batches"),
        ("sequence_paralel", "sequence_parallel"),
        ("n_hed", "n_head"),
    ],
)
def test_unknown_loader_option_error_names_the_nearest_option(name, near, root):
    text = refused(SlapoError, checkpoint(GPT2, root), **{name: 2})
    assert f"{name}= | no such argument" in text
    assert near in text


@pytest.mark.parametrize("name", INSTEAD)
def test_transformers_arguments_that_would_have_no_effect_are_refused(name, root):
    text = refused(SlapoError, checkpoint(GPT2, root), **{name: "x"})
    assert f"{name}= | this argument has no effect here | {INSTEAD[name]}" in text


def test_config_field_passed_to_from_pretrained_sets_the_field_in_the_model(root):
    folder = checkpoint(BERT, root)
    model = AutoScheduledModel.from_pretrained(
        folder, auto_class="AutoModelForSequenceClassification", num_labels=5, attention="eager"
    )
    assert model.classifier.out_features == 5


def test_dtype_argument_sets_the_parameter_dtype_of_a_base_model(root):
    folder = checkpoint(HEADS["llama"][1], root)
    model = AutoScheduledModel.from_pretrained(folder, dtype="float64")
    assert {p.dtype for p in model.parameters()} == {torch.float64}


@pytest.mark.parametrize("family", families())
def test_every_schedule_table_declares_valid_values_for_tuning(family):
    space = table_for(family).tunable
    assert {"tp", "pp", "micro_batches", "checkpoint_ratio"} <= space.keys() <= KNOBS.keys()
    assert all(KNOBS[name].fits(value) for name, values in space.items() for value in values)
    assert set(space.get("attention", ())) <= BACKENDS.keys()
    assert bool(space.get("attention")) == (family not in ("mamba", "wideresnet"))


def test_tuning_space_of_a_table_with_unknown_loader_options_is_refused():
    with pytest.raises(SlapoError, match=r"nearest: attention"):
        tunable(atention=("eager",))


QUICK = ("bert", "t5", "llama")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("gpt2", "1x1x1"),
        *(
            pytest.param(family, WITHOUT_PARTS.get(family, "2x1x1-sp" if family in QUICK else "2x2x1-sp"), marks=() if family in QUICK else pytest.mark.slow)
            for family in SEAM
        ),
    ],
)  # fmt: skip
def test_eager_attention_is_as_close_to_fp64_as_plain_transformers(family, layout, root, threads):
    """attention="eager" is as near to fp64 as plain transformers with eager attention."""
    case, sizes = HEADS[family][0], LAYOUTS[layout]
    folder = checkpoint(case, root)
    truth, plains = references(case, folder)
    world = sizes[0] * sizes[1] * sizes[2]
    results = threads.run(eager, world, case, folder, sizes)
    for (result, _), used in results:
        assert used in ({"eager"}, set())  # a stage may hold no attention of a shared block
        assert result.losses == pytest.approx(results[0][0][0].losses, rel=1e-6)
    assert results[0][1] or not hf.calls_interface(getattr(transformers, case.cls))
    compare(results[0][0][0], plains, truth)


def eager(case, folder, sizes):
    """Run with eager attention; return the run, and the functions that its attention called."""
    used, plain = set(), {}
    for name, backend in BACKENDS.items():
        plain[name] = backend.run

        def run(*args, _name=name, _run=backend.run, **kwargs):
            if not isinstance(args[1], torch._subclasses.FakeTensor):
                used.add(_name)
            return _run(*args, **kwargs)

        object.__setattr__(backend, "run", run)
    try:
        return scheduled(case, folder, sizes, attention="eager"), used
    finally:
        for name, backend in BACKENDS.items():
            object.__setattr__(backend, "run", plain[name])


@pytest.mark.parametrize(
    ("case", "name", "found"),
    [
        (GPT2, "flash", "flash-attn and a CUDA device, found cpu"),
        (BERT, "flex", "no backward on cpu"),
        (
            GPT2,
            "flex",
            "GPT2LMHeadModel does not support this backend | choose one of sdpa, eager, flash, xformers",
        ),
        (HEADS["gpt_neo"][0], "sdpa", "does not support this backend | choose one of eager"),
        (HEADS["mamba"][0], "eager", "no attention whose backend can be chosen"),
        (GPT2, "spda", "nearest: ['sdpa'"),
    ],
)
def test_attention_option_with_an_unsupported_backend_is_refused(case, name, found, root):
    assert found in refused(SlapoError, checkpoint(case, root), attention=name)


def test_attention_option_xformers_is_refused_without_xformers_or_on_cpu(root):
    text = refused(ArchitectureError, checkpoint(GPT2, root), attention="xformers")
    assert "not installed" in text or "no kernel for cpu" in text


def test_recomputation_that_saves_matmuls_has_the_gradients_of_plain_transformers(root, ranks):
    """Recomputation that saves matrix products gives the same gradients; an unknown policy raises."""
    folder = checkpoint(GPT2, root)
    truth, plains = references(GPT2, folder)
    options = {"checkpoint_ratio": 1.0, "checkpoint_policy": "save_matmuls"}
    ((result, _),) = ranks.run(with_options, 1, GPT2, folder, (1, 1, 1), options)
    compare(result, plains, truth)
    text = refused(SlapoError, folder, checkpoint_ratio=1.0, checkpoint_policy="all")
    assert "found policy 'all'" in text
    text = refused(SlapoError, folder, checkpoint_policy="save_matmuls")
    assert "no block is recomputed" in text


@pytest.mark.parametrize(
    ("name", "value"),
    [("attention", "eager"), ("checkpoint_ratio", 0.5), ("sequence_parallel", True)],
)
def test_loader_options_that_a_user_schedule_already_decides_are_refused(name, value, root):
    text = refused(SlapoError, checkpoint(GPT2, root), schedule=[], **{name: value})
    assert f"{name}={value!r} | your own schedule decides this" in text


def with_options(case, folder, sizes, options):
    return scheduled(case, folder, sizes, **options)


@pytest.mark.parametrize(
    "config, device",
    [("cpu:gloo,cuda:gloo", "cpu"), ("cuda:nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cuda")],
)
def test_default_device_is_the_gpu_unless_the_process_group_uses_gloo_alone(
    monkeypatch, config, device
):
    """Ranks of gloo alone (`run_local(device="cpu")`, or fewer GPUs than ranks) would all take the first GPU."""
    from slapo_zoo.zoo import argument_values

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(argument_values.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(argument_values.dist, "get_backend_config", lambda: config)
    monkeypatch.setattr(argument_values, "_use_own_gpu", lambda: None)
    monkeypatch.setattr(
        torch, "empty", lambda _, device: SimpleNamespace(device=torch.device(device))
    )
    assert argument_values.pick_device(None).type == device


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sdpa", "eager", "flash", "flex", "xformers"])
def test_attention_backends_on_a_gpu_have_the_gradients_of_eager_attention(name, root):
    """Compare loss and gradients of each available back end with eager attention in float32."""
    folder = checkpoint(Case("LlamaForCausalLM", ("tokens",), (("head_dim", 16),)), root)
    ids = torch.randint(3, 99, (2, 16), device="cuda")
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    batch["attention_mask"][0, -5:] = 0
    want = AutoScheduledModel.from_pretrained(folder, device="cuda", attention="eager")
    want_loss = want.train_step(batch)
    try:
        model = AutoScheduledModel.from_pretrained(
            folder, device="cuda", attention=name, dtype="bfloat16"
        )
    except ArchitectureError as error:
        pytest.skip(str(error))
    assert float(model.train_step(batch)) == pytest.approx(float(want_loss), rel=2e-2)
    mine, theirs = (m.model.layers[0].self_attn.q_proj.weight.grad.float() for m in (model, want))
    torch.testing.assert_close(mine, theirs, rtol=0.1, atol=0.1 * float(theirs.abs().max()))
