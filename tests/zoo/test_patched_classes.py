"""Classes that users patch: a kernel replaces only the original forward, a patched one runs as in plain transformers."""

import functools

import pytest
import torch
import transformers
from torch import nn
from transformers import activations
from transformers.models.albert import modeling_albert as albert
from transformers.models.bert import modeling_bert as bert
from transformers.models.gpt_neo import modeling_gpt_neo as gpt_neo
from transformers.models.llama import modeling_llama as llama
from transformers.models.roberta import modeling_roberta as roberta
from transformers.models.t5 import modeling_t5 as t5

from heads import HEADS
from parity import Case, batch_of, checkpoint
from slapo_zoo import AutoScheduledModel, emulate
from slapo_zoo.dispatch.kernel_registry import KERNELS, load_kernels

TOKENS = ("tokens",)
CASES = {"bert": Case("BertForMaskedLM", TOKENS), "roberta": Case("RobertaForMaskedLM", TOKENS),
         "albert": Case("AlbertForMaskedLM", TOKENS), "gpt_neo": HEADS["gpt_neo"][0],
         "llama": HEADS["llama"][0], "t5": HEADS["t5"][0]}  # fmt: skip
CLASSES = [
    ("bert", bert.BertSelfOutput), ("bert", bert.BertOutput), ("bert", bert.BertEmbeddings), ("bert", bert.BertEncoder),
    ("bert", bert.BertLMPredictionHead), ("bert", activations.GELUActivation), ("bert", nn.LayerNorm), ("bert", nn.Linear),
    ("roberta", roberta.RobertaOutput), ("roberta", roberta.RobertaLMHead), ("roberta", roberta.RobertaEncoder),
    ("albert", albert.AlbertMLMHead), ("albert", albert.AlbertTransformer), ("albert", activations.NewGELUActivation),
    ("gpt_neo", gpt_neo.GPTNeoSelfAttention), ("llama", llama.LlamaMLP), ("llama", llama.LlamaRMSNorm),
    ("llama", activations.SiLUActivation), ("t5", t5.T5LayerNorm), ("t5", t5.T5Attention), ("t5", t5.T5DenseActDense),
]  # fmt: skip


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("patched")


def doubled(own):
    """Wrap a forward as a recipe may do: its first output is 1.25 times as large."""

    @functools.wraps(own)
    def forward(self, *args, **kwargs):
        out = own(self, *args, **kwargs)
        if isinstance(out, tuple):
            return (1.25 * out[0], *out[1:])
        if not torch.is_tensor(out):
            out.last_hidden_state = 1.25 * out.last_hidden_state
            return out
        return 1.25 * out

    return forward


def of_class(cls, model, patch):
    if not hasattr(cls.forward, "recipe"):  # ranks are threads of one process
        patch.setattr(cls, "forward", doubled(cls.forward))
        cls.forward.recipe = True


def of_instances(cls, model, patch):
    for module in model.modules():
        if isinstance(module, cls):
            module.forward = doubled(cls.forward).__get__(module)


def of_subclass(cls, model, patch):
    changed = {"forward": doubled(cls.forward), "__module__": "recipe"}
    for module in model.modules():
        if isinstance(module, cls):
            module.__class__ = type(cls.__name__, (type(module),), changed)


def applicable(model):
    served = [k.name for k in load_kernels().values() if k.serves and k.name != "linear"]
    names = {cls.__name__ for m in model.modules() for cls in type(m).__mro__}
    return [n for n in served if names & KERNELS[n].serves.keys()]


def step(folder, case, change, patch, kernels, tp, before):
    if before:
        change(None, patch)
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, auto_class=case.cls, kernels=kernels)
    if not before:
        change(model, patch)
    loss = model.train().train_step(batch_of(case))
    return loss, model.consolidated_state_dict(grads=True)


CELLS = [
    pytest.param(family, cls, how, tp, id=f"{family}-{cls.__name__}-{how}-{tp}")
    for family, cls in CLASSES for how in ("before", "after", "instances", "subclass") for tp in (1, 2)
    if tp == 1 or cls is not nn.Linear  # a sharded one is the schedule's
]  # fmt: skip


@pytest.mark.one_in(3, 4)
@pytest.mark.parametrize(("family", "cls", "how", "tp"), CELLS)
def test_forward_patched_by_the_user_runs_in_the_scheduled_model_as_in_plain_transformers(
    family, cls, how, tp, root, monkeypatch
):
    case, kinds = CASES[family], {"instances": of_instances, "subclass": of_subclass}
    folder = checkpoint(case, root)
    plain = getattr(transformers, case.cls).from_pretrained(folder).train()
    change = functools.partial(kinds.get(how, of_class), cls)
    names = applicable(plain)
    with monkeypatch.context() as patch:
        change(plain, patch)
        output = plain(**batch_of(case))
        output.loss.backward()
    with monkeypatch.context() as patch:
        args = (folder, case, change, patch, names, tp, how == "before")
        loss, grads = emulate(step, *args, mesh=(tp, 1, 1))[0]
    torch.testing.assert_close(loss, output.loss.detach(), rtol=1e-4, atol=1e-5)
    largest = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    for name, p in plain.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(grads[name], p.grad, rtol=1e-3, atol=1e-5 * largest, msg=name)  # fmt: skip


def floats_and_functions(model):
    """Yield (path, name) of the numbers and functions that the first module of each served class reads."""
    served = {name for kernel in applicable(model) for name in KERNELS[kernel].serves}
    seen = set()
    for path, module in model.named_modules():
        if type(module).__name__ in served - seen:
            seen.add(type(module).__name__)
            found = {n: x for n, x in vars(module).items() if "dropout" not in n and n[0] != "_"}
            yield from ((path, n) for n, x in found.items() if isinstance(x, float) or callable(x))


@pytest.mark.parametrize("family", CASES)
def test_attribute_changed_after_the_load_is_read_by_the_kernels_too(family, root):
    case = CASES[family]
    folder = checkpoint(case, root)
    plain = getattr(transformers, case.cls).from_pretrained(folder).train()
    names = applicable(plain)
    model = AutoScheduledModel.from_pretrained(folder, auto_class=case.cls, kernels=names).train()
    for path, name in floats_and_functions(plain):
        before = getattr(plain.get_submodule(path), name)
        after = before * 1.5 + 0.1 if isinstance(before, float) else torch.tanh
        losses = []
        for one in (plain, model):
            setattr(one.get_submodule(path), name, after)
            losses.append(one(**batch_of(case)).loss.detach())
            setattr(one.get_submodule(path), name, before)
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5, msg=f"{path}.{name}")
