"""LoRA on a sharded model: it trains as plain peft in one process, with the same files."""

import copy
import json

import pytest
import torch
import transformers
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from parity import (
    EPS,
    LEARNING_RATE,
    ROWS,
    STEPS,
    Case,
    Result,
    batch_of,
    cast,
    checkpoint,
    compare,
)
from slapo_zoo import AutoScheduledModel, SlapoError, emulate
from slapo_zoo.model.checkpoints.training_checkpoint import save_checkpoint

# peft asks transformers by a name that the latter has renamed.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT:UserWarning"),
    pytest.mark.filterwarnings("ignore:Already found a .peft_config:UserWarning"),
]

TARGETS = {
    "GPT2LMHeadModel": ["c_attn", "c_proj", "c_fc"],
    "LlamaForCausalLM": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "OPTForCausalLM": ["q_proj", "v_proj", "out_proj", "fc1", "fc2"],
}  # fmt: skip
CASES = {name: Case(name, ("tokens",)) for name in TARGETS}
SIDE_BY_SIDE = [
    ("GPT2LMHeadModel", (2, 1, 1)), ("GPT2LMHeadModel", (2, 2, 1)), ("GPT2LMHeadModel", (1, 1, 2)),
    ("GPT2LMHeadModel", (2, 1, 1, True)), ("LlamaForCausalLM", (2, 1, 1)), ("LlamaForCausalLM", (4, 1, 1)),
    ("LlamaForCausalLM", (2, 2, 1, True)), ("OPTForCausalLM", (2, 1, 1)), ("OPTForCausalLM", (2, 1, 1, True)),
]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


def lora(case, **options):
    # B is drawn too: beside a B of zeros no gradient reaches A, and its mistakes would hide.
    fan_in_fan_out = case.cls.startswith("GPT2")
    plain = {"init_lora_weights": False, "fan_in_fan_out": fan_in_fan_out}
    plain |= {"target_modules": TARGETS[case.cls]}
    return LoraConfig(r=3, lora_alpha=6, **plain | options)


def load(case, folder, layout, **options):
    (tp, pp, dp), sequence_parallel = layout[:3], layout[3:] == (True,)
    return AutoScheduledModel.from_pretrained(
        folder, tp=tp, pp=pp, dp=dp, auto_class=case.cls, seed=5,
        sequence_parallel=sequence_parallel, **options,
    )  # fmt: skip


def train(model, step_of, norm_of, grads_of, dtype, part, case):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.1, eps=EPS)
    losses, norms, grads = [], [], None
    for step in range(STEPS):
        batch = {k: v[part] for k, v in cast(batch_of(case, step), dtype).items()}
        optimizer.zero_grad()
        losses.append(float(step_of(batch)))
        grads = grads_of() if step == 0 else grads
        norms.append(norm_of(trained))
        optimizer.step()
    return losses, norms, grads


def on_a_mesh(case, folder, layout, out):
    model = load(case, folder, layout)
    model.add_adapter(lora(case))
    model.save_adapter(out / "initial")
    mesh = model.mesh
    output = model.eval()(**batch_of(case)).logits.detach()
    model.train()
    rows = ROWS // mesh.dp
    part = slice(mesh.coord("dp") * rows, (mesh.coord("dp") + 1) * rows)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    losses, norms, grads = train(
        model, model.train_step, lambda _: model.clip_grad_norm_(1.0),
        lambda: copy.deepcopy(model.get_adapter_state_dict(grads=True)), torch.float32, part, case,
    )  # fmt: skip
    after = dict(model.named_parameters())
    assert all(torch.equal(after[n], p) and after[n].grad is None for n, p in before.items())
    model.save_pretrained(out / "final")
    weights = model.get_adapter_state_dict()
    return Result(torch.tensor(losses[0]), {"logits": output}, grads, norms[0], losses, weights)


def plain(case, folder, adapter, dtype, attention):
    model = getattr(transformers, case.cls).from_pretrained(
        folder, dtype=dtype, attn_implementation=attention
    )
    model = PeftModel.from_pretrained(
        model, adapter, is_trainable=True, autocast_adapter_dtype=False
    ).to(dtype)
    output = model.eval()(**cast(batch_of(case), dtype)).logits.detach()
    model.train()

    def step(batch):
        loss = model(**batch).loss
        loss.backward()
        return loss.detach()

    def grads():
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
        return {n.replace(".default.", "."): grad for n, grad in found.items()}

    losses, norms, grads = train(
        model,
        step,
        lambda ps: torch.nn.utils.clip_grad_norm_(ps, 1.0),
        grads,
        dtype,
        slice(None),
        case,
    )
    weights = {k: v.detach().clone() for k, v in get_peft_model_state_dict(model).items()}
    return Result(torch.tensor(losses[0]), {"logits": output}, grads, norms[0], losses, weights)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "layout"), SIDE_BY_SIDE, ids=str)
def test_sharded_lora_adapters_train_to_the_weights_of_plain_peft(
    threads, root, tmp_path, name, layout
):
    case = CASES[name]
    folder, size = checkpoint(case, root), layout[0] * layout[1] * layout[2]
    found = threads.run(on_a_mesh, size, case, folder, layout, tmp_path)
    truth = plain(case, folder, tmp_path / "initial", torch.float64, "sdpa")
    others = [
        plain(case, folder, tmp_path / "initial", torch.float32, k) for k in ("sdpa", "eager")
    ]
    compare(found[0], others, truth)
    assert all(r.losses == pytest.approx(found[0].losses, rel=1e-6) for r in found)
    model = getattr(transformers, name).from_pretrained(folder)
    again = get_peft_model_state_dict(PeftModel.from_pretrained(model, tmp_path / "final"))
    assert again.keys() == found[0].weights.keys()
    assert all(torch.equal(again[key], value) for key, value in found[0].weights.items())


def load_saved(case, folder, layout, adapter, dropout):
    model = load(case, folder, layout)
    model.load_adapter(adapter, is_trainable=dropout > 0)
    weights = model.get_adapter_state_dict()
    frozen = not any(p.requires_grad for p in model.parameters())
    output = model(**batch_of(case)).logits.detach()
    model.disable_adapters()
    bare = model(**batch_of(case)).logits.detach()
    model.enable_adapters()
    loss = float(model.train().train_step(batch_of(case))) if dropout else 0.0
    return weights, frozen, output, bare, loss


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_adapter_saved_by_plain_peft_loads_into_a_sharded_model(threads, root, tmp_path, name):
    case, dropout = CASES[name], 0.3
    folder = checkpoint(case, root)
    base = getattr(transformers, name).from_pretrained(folder)
    bare = base(**batch_of(case)).logits.detach()
    peft = get_peft_model(base, lora(case, target_modules=TARGETS[name][:1], lora_dropout=dropout))
    peft.save_pretrained(tmp_path / "a")
    expected = peft.eval()(**batch_of(case)).logits.detach()
    saved, losses = load_file(tmp_path / "a" / "adapter_model.safetensors"), []
    for layout in ((1, 1, 1), (2, 2, 1)):
        args = (case, folder, layout, tmp_path / "a", dropout)
        for rank, (weights, frozen, output, without, loss) in enumerate(
            threads.run(load_saved, layout[0] * layout[1], *args)
        ):
            assert weights.keys() == (saved.keys() if rank == 0 else set())
            assert all(torch.equal(weights[key], saved[key]) for key in weights)
            assert not frozen
            torch.testing.assert_close(output, expected)
            torch.testing.assert_close(without, bare)
            losses.append(loss)
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)  # the same masks everywhere
    weights, frozen, *_ = load_saved(case, folder, (1, 1, 1), tmp_path / "a", 0.0)
    assert frozen


def draw(case, folder, layout, out, init):
    torch.manual_seed(int(out.name))  # earlier draws of a rank change nothing
    model = load(case, folder, layout)
    model.add_adapter(lora(case, init_lora_weights=init))
    model.save_adapter(out)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("init", [True, False, "gaussian"], ids=str)
@pytest.mark.parametrize("other", [(2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_lora_matrices_are_initialized_with_equal_values_on_every_layout(
    ranks, root, tmp_path, other, init
):
    case = CASES["LlamaForCausalLM"]
    folder = checkpoint(case, root)
    for i, layout in enumerate([(1, 1, 1), other]):
        ranks.run(
            draw, layout[0] * layout[1] * layout[2], case, folder, layout, tmp_path / str(i), init
        )
    files = [load_file(tmp_path / str(i) / "adapter_model.safetensors") for i in range(2)]
    assert files[1].keys() == files[0].keys()
    assert all(torch.equal(files[1][key], value) for key, value in files[0].items())
    zeros = {key for key, value in files[0].items() if not value.any()}
    assert zeros == ({key for key in files[0] if "lora_B" in key} if init is not False else set())


REFUSED = {
    "dora": ({"use_dora": True}, "use_dora=True"),
    "velora": ({"velora_config": {"num_groups": 2}}, "velora_config="),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
    "more modules": ({"modules_to_save": ["ln_f"]}, "modules_to_save"),
    "vocabulary": (
        {"target_modules": ["lm_head"], "fan_in_fan_out": False},
        "sharded over a padded vocabulary",
    ),
    "embedding": ({"target_modules": ["wte"]}, "found a Embedding"),
    "no such module": ({"target_modules": ["nothing"]}, "nothing"),
    "uneven dropout": ({"target_modules": ["attn.c_proj"], "lora_dropout": 0.1}, "unequal parts"),
}


def refuse(case, folder, layout, options):
    model = load(case, folder, layout)
    before = {n: (id(p), p.requires_grad) for n, p in model.named_parameters()}
    with pytest.raises((SlapoError, ValueError)) as caught:
        model.add_adapter(lora(case, **options))
    after = {n: (id(p), p.requires_grad) for n, p in model.named_parameters()}
    assert after == before
    model.add_adapter(lora(case))  # and a good one still goes in
    model.train().train_step(batch_of(case))
    return str(caught.value)


@pytest.mark.parametrize("reason", REFUSED)
def test_add_adapter_refuses_variants_of_lora_and_leaves_the_model_unchanged(ranks, root, reason):
    options, problem = REFUSED[reason]
    case = CASES["GPT2LMHeadModel"]
    for text in ranks.run(refuse, 2, case, checkpoint(case, root), (2, 1, 1), options):
        assert problem in text


def other_ways(case, folder, adapter):
    texts = []
    for action in (
        lambda model: get_peft_model(model, lora(case)),
        lambda model: (model.add_adapter(lora(case)), get_peft_model(model, lora(case))),
        lambda model: model.add_adapter(IA3Config(target_modules=["c_attn"])),
        lambda model: model.load_adapter(adapter),
        lambda model: model.load_adapter(folder),
        lambda model: model.load_adapter(adapter, device_map="auto", offload_folder=None),
    ):
        with pytest.raises(SlapoError) as caught:
            action(load(case, folder, (2, 1, 1)))
        texts.append(str(caught.value))
    return texts


def test_errors_of_wrong_adapter_calls_and_files_name_the_cause_or_the_call_to_use(
    ranks, root, tmp_path
):
    case = CASES["GPT2LMHeadModel"]
    folder = checkpoint(case, root)
    model = load(case, folder, (1, 1, 1))
    model.add_adapter(lora(case))
    model.save_adapter(tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    save_file({**load_file(file), "base_model.model.strange": torch.ones(1)}, file)
    for texts in ranks.run(other_ways, 2, case, folder, tmp_path / "a"):
        for text, part in zip(texts, ("model.add_adapter", "model.add_adapter", "expected a LoraConfig", "that the model does not have", "found no", "load_adapter: device_map=: "),
                              strict=True):  # fmt: skip
            assert part in text


def test_save_adapter_refuses_to_overwrite_a_model_folder(root, tmp_path):
    case = CASES["GPT2LMHeadModel"]
    model = load(case, checkpoint(case, root), (1, 1, 1))
    model.save_pretrained(tmp_path / "model")
    model.add_adapter(lora(case))
    with pytest.raises(SlapoError, match="that is no checkpoint"):
        model.save_adapter(tmp_path / "model")
    with pytest.raises(SlapoError, match="training checkpoints do not support"):
        save_checkpoint(model, tmp_path / "whole")
    model.save_adapter(tmp_path / "adapter")
    model.save_adapter(tmp_path / "adapter")  # an older adapter is replaced
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 3
    with pytest.raises(SlapoError, match="no such adapter"):
        model.save_adapter(tmp_path / "b", "other")


BESIDE = {
    "modules_to_save": {"modules_to_save": ["score"]}, "dora": {"use_dora": True}, "lora_bias": {"lora_bias": True},
    "bias": {"bias": "lora_only"}, "pissa": {"init_lora_weights": "pissa"}, "tokens": {"trainable_token_indices": [1, 2]},
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:.*alpha:UserWarning")
@pytest.mark.filterwarnings("ignore:.*invalid shape.*lora_B.bias")  # peft says it of its own biases
@pytest.mark.parametrize("options", BESIDE.values(), ids=BESIDE)
def test_save_adapter_on_one_process_saves_every_parameter_trained_by_peft(root, tmp_path, options):
    """DoRA's magnitudes, biases and modules_to_save are in the file too."""
    case = Case("GPT2ForSequenceClassification", ("two",))
    folder = checkpoint(case, root)
    config = LoraConfig(r=3, fan_in_fan_out=True, target_modules=["c_attn"], **options)
    model = load(case, folder, (1, 1, 1))
    model.add_adapter(config)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for step in range(2):
        model.train().train_step(batch_of(case, step))
        optimizer.step()
    model.save_adapter(tmp_path / "a")
    trained = model.eval()(**batch_of(case)).logits.detach()
    plain = transformers.GPT2ForSequenceClassification.from_pretrained(folder)
    plain = PeftModel.from_pretrained(plain, tmp_path / "a").eval()
    torch.testing.assert_close(plain(**batch_of(case)).logits, trained)
    again = load(case, folder, (1, 1, 1))
    again.load_adapter(tmp_path / "a")
    torch.testing.assert_close(again(**batch_of(case)).logits, trained)
    assert not any(p.requires_grad for p in again.parameters())


def classifier(case, folder, layout, adapter):
    model = load(case, folder, layout)
    model.load_adapter(adapter)
    return model(**batch_of(case)).logits.detach()


def test_peft_adapter_with_a_trained_classifier_loads_on_one_process_and_is_refused_on_several(
    root, tmp_path
):
    case = Case("BertForSequenceClassification", ("two",))
    folder = checkpoint(case, root)
    plain = transformers.BertForSequenceClassification.from_pretrained(folder)
    config = LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
    plain = get_peft_model(plain, config).eval()
    torch.nn.init.normal_(plain.base_model.model.classifier.modules_to_save.default.weight)
    plain.save_pretrained(tmp_path)
    want = plain(**batch_of(case)).logits.detach()
    torch.testing.assert_close(classifier(case, folder, (1, 1, 1), tmp_path), want)
    for mesh in ((2, 1, 1), (1, 2, 1)):
        with pytest.raises(SlapoError, match=r"modules_to_save=\['classifier', 'score'\]\n.*merge"):
            emulate(classifier, case, folder, mesh, tmp_path, mesh=mesh)


def stages(case, folder, layout, targets, options):
    model = load(case, folder, layout)
    model.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=targets, **options))
    loss = float(model.train().train_step(batch_of(case)))
    named = model.peft_config["default"].target_modules
    return loss, float(model.clip_grad_norm_(1.0)), model.get_adapter_state_dict(), named


@pytest.mark.parametrize("targets", [["lm_head", "q_proj"], "all-linear"], ids=str)
def test_pipeline_stages_hold_adapters_of_their_own_layers_and_the_config_names_those_of_all_stages(
    root, targets
):
    case = CASES["LlamaForCausalLM"]
    folder = checkpoint(case, root)
    ((loss, norm, want, _),) = emulate(stages, case, folder, (1, 1, 1), targets, {}, mesh=(1, 1, 1))
    found = emulate(stages, case, folder, (1, 2, 1), targets, {}, mesh=(1, 2, 1))
    assert all(torch.equal(found[0][2][key], value) for key, value in want.items())
    for one in found:
        assert one[:2] == pytest.approx((loss, norm), rel=1e-5)
        assert all(
            any(f".{key}".split(".lora_")[0].endswith(f".{n}") for n in one[3]) for key in want
        )


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set:UserWarning")
@pytest.mark.parametrize(
    ("name", "targets", "options", "problem"),
    [("LlamaForCausalLM", ["embed_tokens"], {}, r"no module with these names on stages \[1\] of pp=2"),
     ("LlamaForCausalLM", ["q_proj"], {"layers_to_transform": [0]}, r"no module with these names on stages \[1\] of pp=2"),
     ("LlamaForCausalLM", ["embed_tokens", "q_proj"], {}, "found a Embedding"),
     ("LlamaForCausalLM", ["nothing"], {}, "not found in the base model"),
     ("GPT2LMHeadModel", ["lm_head"], {}, r"no module with these names on stages \[0\] of pp=2"),
     ("GPT2LMHeadModel", ["lm_head", "c_fc"], {}, "weight that several pipeline stages share")],
)  # fmt: skip
def test_adapter_target_modules_that_a_pipeline_stage_lacks_or_cannot_shard_are_refused(
    root, name, targets, options, problem
):
    case = CASES[name]
    with pytest.raises(SlapoError, match=f"add_adapter: .*{problem}"):
        emulate(stages, case, checkpoint(case, root), (1, 2, 1), targets, options, mesh=(1, 2, 1))
