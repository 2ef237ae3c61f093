"""Optimizers of torch and transformers over sharded parameters equal one process."""

import warnings
import zlib

import pytest
import torch
from transformers.optimization import Adafactor

from parity import Case, batch_of, checkpoint
from slapo_zoo.model.gradients.optimizers import is_elementwise

CASES = [
    Case("GPT2LMHeadModel", ("tokens",)),
    Case("LlamaForCausalLM", ("tokens",), (("num_key_value_heads", 1),)),
]
STEPS, RATE = 3, 0.02


def muon(model):
    """Make the optimizer as users of Muon do: matrices of the blocks to Muon, the rest to AdamW."""
    named = list(model.named_parameters())
    is_matrix = {n: p.ndim == 2 and "wte" not in n and "embed" not in n and "lm_head" not in n
                 for n, p in named}  # fmt: skip
    matrices, rest = ([p for n, p in named if is_matrix[n] is want] for want in (True, False))
    return [torch.optim.Muon(matrices, lr=RATE), torch.optim.AdamW(rest, lr=1e-3)]


MAKE = {
    "muon": muon,
    "adafactor": lambda m: [torch.optim.Adafactor(m.parameters(), lr=RATE)],
    "hf-adafactor": lambda m: [Adafactor(m.parameters(), lr=RATE, relative_step=False)],
    "hf-adafactor-relative": lambda m: [Adafactor(m.parameters(), warmup_init=True)],
}


def draw(model, step):
    """Return the same gradients on every mesh: a backward's rounding would change signs and bf16 inside an optimizer."""
    from slapo_zoo.parallel.local_tensors import local_part

    for name, p in model.named_parameters():
        placed = model.schedule.state.placed.get(name)
        g = torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)
        full = torch.randn(placed.shape if placed else p.shape, generator=g)
        mesh = model.mesh
        p.grad = local_part(full, placed.placement, mesh.tp, mesh.coord("tp")) if placed else full


def stepped(folder, tp, name):
    from slapo_zoo import AutoScheduledModel

    model = AutoScheduledModel.from_pretrained(folder, tp=tp, seed=0).train()
    optimizers = MAKE[name](model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(STEPS):
            draw(model, i)
            for optimizer in optimizers:
                optimizer.step()
    sizes = [
        (tuple(p.shape), {k: tuple(v.shape) for k, v in kept.items() if torch.is_tensor(v) and v.ndim})
        for p, kept in optimizers[0].state.items()
    ]  # fmt: skip
    return model.consolidated_state_dict(), sizes


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.cls)
@pytest.mark.parametrize("name", MAKE)
def test_optimizers_of_whole_matrices_on_sharded_weights_give_the_weights_of_one_process(
    case, name, tmp_path, threads
):
    folder = checkpoint(case, tmp_path)
    want, _ = threads.run(stepped, 1, folder, 1, name)[0]
    found, sizes = threads.run(stepped, 2, folder, 2, name)[0]
    for key, weight in want.items():
        torch.testing.assert_close(found[key], weight, atol=1e-7, rtol=1e-6, msg=key)
    if name == "muon":  # between steps a rank remembers its part
        assert all(kept["momentum_buffer"] == shape for shape, kept in sizes)


def next_token_loss(output, batch):
    """Return the causal loss in the dtype of the logits; the model's own loss is computed in fp32."""
    logits, labels = output.logits[:, :-1], batch["labels"][:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def trained(folder, layout):
    """Train in fp64, loss included: the rounding of gradients in fp32 would change bf16 values inside Muon."""
    from slapo_zoo import AutoScheduledModel

    tp, pp, dp = layout
    dtype = torch.float64
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp, dp=dp, seed=0, dtype=dtype)
    optimizers = muon(model.train())
    for i in range(STEPS):
        model.train_step(batch_of(CASES[0], i), loss_fn=next_token_loss, micro_batches=1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model.consolidated_state_dict()


@pytest.mark.parametrize(
    "layout", [pytest.param((2, 1, 1), marks=pytest.mark.slow), (2, 2, 1)], ids=["tp2", "tp2-pp2"]
)
def test_muon_on_sharded_weights_trains_to_the_weights_of_one_process(layout, tmp_path, threads):
    folder = checkpoint(CASES[0], tmp_path)
    want = threads.run(trained, 1, folder, (1, 1, 1))[0]
    found = threads.run(trained, layout[0] * layout[1], folder, layout)[0]
    for key, weight in want.items():
        torch.testing.assert_close(found[key], weight, atol=1e-6, rtol=1e-6, msg=key)


class Normed(torch.optim.Optimizer):
    """Optimizer that divides each gradient by the norm of its matrix, as LAMB-like ones do."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm().clamp(min=1e-6) * p.norm() * RATE)


class Clamped(torch.optim.SGD):
    """SGD that clamps the weights after its step."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)


NAMED_ADAMW = type("AdamW", (Normed,), {"step": lambda self: None})  # GaLore's has this name too
OVERRIDES = type("Lamb", (torch.optim.Adam,), {"step": lambda self: None})


@pytest.mark.parametrize(
    ("cls", "known"), [(torch.optim.AdamW, True), (Clamped, True), (OVERRIDES, False), (NAMED_ADAMW, False)]
)  # fmt: skip
def test_optimizer_works_element_by_element_if_its_step_is_or_extends_that_of_a_known_one(
    cls, known
):
    assert is_elementwise(cls([torch.nn.Parameter(torch.ones(2))])) is known


def normed(folder, layout, asked):
    from slapo_zoo import AutoScheduledModel, OptimizerWarning, SlapoError, whole_matrices

    model = AutoScheduledModel.from_pretrained(folder, tp=layout[0], seed=0).train()
    optimizer = Normed(model.parameters())
    optimizer = whole_matrices(optimizer) if asked else optimizer
    for i in range(2):
        model.train_step(batch_of(CASES[0], i))
        if asked or layout[0] == 1 or i == 1:  # it is told once
            optimizer.step()
        else:
            with pytest.warns(OptimizerWarning, match="Normed is not known"):
                optimizer.step()
        optimizer.zero_grad()
    model.train_step(batch_of(CASES[0]))
    if asked and layout[0] > 1:
        with pytest.raises(SlapoError, match="closure"):
            optimizer.step(lambda: None)
    return model.consolidated_state_dict()


def test_unknown_optimizer_on_shards_equals_one_process_only_when_matrices_are_gathered(
    tmp_path, ranks
):
    folder = checkpoint(CASES[0], tmp_path)
    want = ranks.run(normed, 1, folder, (1,), False)[0]
    found = ranks.run(normed, 2, folder, (2,), True)[0]
    for name, weight in want.items():
        torch.testing.assert_close(found[name], weight, atol=2e-5, rtol=1e-4, msg=name)
    apart = ranks.run(normed, 2, folder, (2,), False)[0]
    assert any(float((apart[n] - w).abs().max()) > 1e-3 for n, w in want.items())
