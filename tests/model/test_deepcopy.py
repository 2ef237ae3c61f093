"""copy.deepcopy of a scheduled model, for weight averages, frozen references and snapshots."""

import copy
import functools
import pickle
import types

import pytest
import torch
import transformers

from heads import HEADS
from parity import Case, batch_of, changes_of, checkpoint
from slapo_zoo import AutoScheduledModel, emulate
from slapo_zoo.hf.own.wideresnet import WideResNetConfig
from sources import ROOT
from tiny_configs import TINY

CASES = [
    Case("GPT2LMHeadModel", ("tokens",), dropout=0.1),
    Case("BertForMaskedLM", ("tokens",), dropout=0.1),
    Case("T5ForConditionalGeneration", ("tokens",)),
    Case("LlamaForCausalLM", ("tokens",), (("num_key_value_heads", 1),)),
    Case("MixtralForCausalLM", ("tokens",)),
    Case("MambaForCausalLM", ("tokens",)),
]
SP, PP = {"tp": 2, "sequence_parallel": True}, {"pp": 2, "checkpoint_ratio": 0.5}
CELLS = [
    *(pytest.param(case, SP, id=f"{case.cls}-tp2-sp") for case in CASES),
    *(pytest.param(CASES[i], PP, id=f"{CASES[i].cls}-pp2") for i in (0, 2)),
]


def step(model, batch):
    model.zero_grad()
    loss = model.train_step(batch)
    return float(loss), {n: p.grad.clone() for n, p in model.named_parameters()}


def copied(folder, case, layout):
    """Return the logits of the original and of its copy, whose parameters are set to zero."""
    from slapo_zoo import AutoScheduledModel

    changes = {"experts_implementation": "eager"} if "Mixtral" in case.cls else {}
    model = AutoScheduledModel.from_pretrained(folder, seed=0, **layout, **changes).train()
    batch = batch_of(case)
    other = copy.deepcopy(model)
    assert other.state_dict().keys() == model.state_dict().keys()
    first, second = step(model, batch), step(other, batch)  # with the same dropout masks
    before = {n: p.grad.clone() for n, p in model.named_parameters()}
    assert first[0] == second[0]
    for name, grad in first[1].items():
        assert torch.equal(grad, second[1][name]), name
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    step(other, batch)
    grads = {n: p.grad for n, p in model.named_parameters()}
    assert all(torch.equal(grads[n], g) for n, g in before.items()), "gradients of the original"
    with torch.no_grad():
        again = model.eval()(**batch).logits
        zeroed = other.eval()(**batch).logits
    own = {id(module) for module in model.modules()}
    assert not own & {id(module) for module in other.modules()}
    return again, zeroed


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("case", "layout"), CELLS)
def test_deepcopied_model_with_zeroed_weights_outputs_zeros_and_the_original_does_not(
    case, layout, tmp_path, threads
):
    folder = checkpoint(case, tmp_path)
    for logits, zeroed in threads.run(copied, 2, folder, case, layout, timeout=200):
        assert logits.abs().max() > 0
        assert zeroed.abs().max() == 0, "the copy computes with weights of the original"


def averaged(folder, layout, options):
    """Train 3 steps with an exponential average of the weights."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    from slapo_zoo import AutoScheduledModel

    tp, pp, dp = layout
    model = AutoScheduledModel.from_pretrained(
        folder, tp=tp, pp=pp, dp=dp, seed=0, **options
    ).train()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = 4 // dp
    part = slice(model.mesh.coord("dp") * rows, (model.mesh.coord("dp") + 1) * rows)
    for i in range(3):
        optimizer.zero_grad()
        model.train_step({k: v[part] for k, v in batch_of(CASES[0], i).items()})
        optimizer.step()
        average.update_parameters(model)
    weights = average.module.consolidated_state_dict()
    with torch.no_grad():
        return weights, average.eval()(**batch_of(CASES[0])).logits


AVERAGES = {
    "tp2": ((2, 1, 1), {}), "pp2": ((1, 2, 1), {}), "dp2": ((1, 1, 2), {}), "zero3": ((1, 1, 2), {"dp_shard": 2}),
    "zero1": ((1, 1, 2), {"dp_shard": 2, "zero_stage": 1}),
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("layout", "options"), AVERAGES.values(), ids=AVERAGES)
def test_torch_averaged_model_of_a_sharded_model_has_the_weights_of_one_process(
    layout, options, tmp_path, threads
):
    case = CASES[0]
    folder = checkpoint(case, tmp_path)
    weights, logits = threads.run(averaged, 1, folder, (1, 1, 1), {})[0]
    found = threads.run(averaged, 2, folder, layout, options)
    for name, want in weights.items():
        torch.testing.assert_close(found[0][0][name], want, atol=2e-6, rtol=1e-5, msg=name)
    for _, each in found:
        torch.testing.assert_close(each, logits, atol=1e-5, rtol=1e-5)


WITHIN = {  # kind of container --> its items by name
    dict: lambda x: {str(k): v for k, v in x.items()} | {f"{k} itself": k for k in x},
    **dict.fromkeys((list, tuple, set, frozenset), lambda x: dict(enumerate(x))),
    types.MethodType: lambda x: {"self": x.__self__, "function": x.__func__},
    functools.partial: lambda x: {"arguments": x.args, "named": x.keywords, "function": x.func},
    types.FunctionType: lambda x: {
        "defaults": x.__defaults__, "named": x.__kwdefaults__,
        **{n: c.cell_contents for n, c in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)},
    },
}  # fmt: skip


def held(root):
    """Map the memory of every tensor that an object holds to a path to it: in closures, hooks and kernels too."""
    found, seen, todo = {}, {}, [("", root)]
    while todo:
        path, x = todo.pop()
        if id(x) in seen or isinstance(x, type | types.ModuleType):
            continue
        seen[id(x)] = x
        if isinstance(x, torch.Tensor):
            has_none = x.is_meta or type(x).__name__ == "FakeTensor"
            found[0 if has_none else x.untyped_storage().data_ptr()] = path
        kinds = [WITHIN[kind](x) for kind in WITHIN if isinstance(x, kind)]
        for within in (getattr(x, "__dict__", {}), *kinds):
            todo += [(f"{path}.{name}", value) for name, value in within.items()]
    found.pop(0, None)  # no memory at all
    return found


def shared(model, other):
    mine, theirs = held(model), held(other)
    return [theirs[at] for at in mine.keys() & theirs.keys()]


def averaged_once(folder, case, tp):
    """Return the memory that a copy shares with a model that trains on; losses and weights of the mean of both."""
    model = AutoScheduledModel.from_pretrained(
        folder, tp=tp, auto_class=case.cls, **changes_of(case)
    )
    model.train().train_step(batch_of(case, 1))
    average = copy.deepcopy(model)
    both = shared(model, average)
    with torch.no_grad():
        for p, q in zip(model.parameters(), average.parameters(), strict=True):
            if p.grad is not None:
                p -= 0.1 * p.grad
            q.lerp_(p, 0.5)
    model.train_step(batch_of(case, 1))  # its state is not shared with the copy
    found = average.eval()(**batch_of(case)).loss.detach()
    return both, found, average.train().train_step(batch_of(case)), average.consolidated_state_dict()  # fmt: skip


FAMILIES = sorted(path.stem for path in (ROOT / "schedules").glob("*.py"))


@pytest.mark.one_in(4, 4)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "wideresnet"])
def test_deepcopied_model_of_every_family_shares_no_tensor_with_the_original(family, tp, tmp_path):
    """Regression: a copy of BERT, RoBERTa or ALBERT read the padding mask of the original."""
    case = HEADS.get(family, HEADS.get(family.replace("_", "-")))[0]
    folder = checkpoint(case, tmp_path)
    cls = getattr(transformers, case.cls)
    for both, evaluated, trained, weights in emulate(averaged_once, folder, case, tp, mesh=(tp, 1, 1)):  # fmt: skip
        assert not both
        if weights:
            plain = cls.from_pretrained(folder, **changes_of(case))
            plain.load_state_dict(weights, strict=False)
            for model, found in ((plain.eval(), evaluated), (plain.train(), trained)):
                torch.testing.assert_close(found, model(**batch_of(case)).loss.detach(), rtol=1e-4, atol=1e-5)  # fmt: skip


def copied_after_a_step(config, layout, options):
    tp, pp, dp = layout
    model = AutoScheduledModel.from_config(config, tp=tp, pp=pp, dp=dp, seed=0, **options).train()
    if config.model_type == "wideresnet":
        return shared(model, copy.deepcopy(model))
    ids = (torch.arange(48).view(4, 12) * 5 % 90).tensor_split(dp)[model.mesh.coord("dp")]
    batch = {"input_ids": ids, "labels": ids}
    model.train_step(batch)
    if pp == 1:
        model(**batch).loss.backward()  # casts and gathered weights stay until the next forward
    return shared(model, copy.deepcopy(model))


COPIED = {**AVERAGES, "bf16": ((1, 1, 1), {"precision": "bf16"}), "sp": ((2, 1, 1), {"sequence_parallel": True})}  # fmt: skip


@pytest.mark.parametrize(("layout", "options"), COPIED.values(), ids=COPIED)
def test_deepcopied_model_on_every_layout_shares_no_tensor_with_the_original(layout, options):
    """Regression: deepcopy raised after a hand-written loop in bf16 or with dp_shard."""
    config = transformers.BertConfig(**TINY["bert"], architectures=["BertForMaskedLM"])
    assert emulate(copied_after_a_step, config, layout, options, mesh=layout) == [[]] * 2 ** (layout != (1, 1, 1))  # fmt: skip


def test_deepcopied_wideresnet_shares_no_tensor_with_the_original():
    config = WideResNetConfig(**TINY["wideresnet"])
    assert emulate(copied_after_a_step, config, (2, 1, 1), {}, mesh=(2, 1, 1)) == [[], []]


def test_pickle_of_a_scheduled_model_is_refused(tmp_path):
    from slapo_zoo import AutoScheduledModel, SlapoError

    model = AutoScheduledModel.from_pretrained(checkpoint(CASES[0], tmp_path))
    with pytest.raises(SlapoError, match="save_pretrained"):
        torch.save(model, tmp_path / "model.pt")
    with pytest.raises(SlapoError, match="save_pretrained"):
        pickle.dumps(model)


def copied_backbone(folder, **layout):
    """Return hidden states of a scaled copy of the backbone, and of the model's own backbone scaled alike."""
    model = AutoScheduledModel.from_pretrained(folder, **layout).train()
    batch = {k: v for k, v in batch_of(CASES[0]).items() if k != "labels"}
    other, found = copy.deepcopy(model.transformer), []
    for backbone in (other, model.transformer):
        with torch.no_grad():
            for p in backbone.parameters():
                p.mul_(1.5)
            found.append(backbone(**batch).last_hidden_state)
    return found


@pytest.mark.parametrize("layout", [{"tp": 2}, {"checkpoint_ratio": 1.0}], ids=str)
def test_deepcopy_of_a_submodule_computes_with_its_own_weights(layout, tmp_path):
    folder = checkpoint(Case("GPT2LMHeadModel", ("tokens",)), tmp_path)
    run, tp = functools.partial(copied_backbone, folder, **layout), layout.get("tp", 1)
    for other, own in emulate(run, mesh=(2, 1, 1)) if tp == 2 else [run()]:
        torch.testing.assert_close(other, own)
