"""torch.compile of a scheduled model, and of its blocks: gradients equal the uncompiled model's."""

import warnings

import pytest
import torch

from parity import Case, batch_of, checkpoint

GPT2 = Case("GPT2LMHeadModel", ("tokens",))


def compiled(folder, layout, what):
    """Return gradients of the model, uncompiled and compiled, and the warnings."""
    from slapo_zoo import AutoScheduledModel

    tp, pp, dp = layout
    found = []
    for how in ("", what):
        model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp, dp=dp).train()
        if how == "blocks":
            for block in filter(lambda m: type(m).__name__ == "GPT2Block", model.modules()):
                block.compile(backend="eager")
        run = torch.compile(model, backend="eager") if how == "whole" else model
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                model.zero_grad()
                if pp > 1:
                    model.train_step(batch_of(GPT2))
                else:
                    run(**batch_of(GPT2)).loss.backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters()})
    return *found, [str(w.message) for w in said if "runs uncompiled" in str(w.message)]


@pytest.mark.parametrize(
    ("layout", "what"),
    [((2, 1, 1), "whole"), ((1, 2, 1), "blocks"),  # test_compile.py has blocks on tp=2
     *(pytest.param(*case, marks=pytest.mark.slow) for case in (((2, 1, 1), "blocks"), ((1, 1, 2), "whole")))],
)  # fmt: skip
def test_compiled_model_and_compiled_blocks_give_the_gradients_of_the_uncompiled_model(
    layout, what, tmp_path, ranks
):
    for plain, again, said in ranks.run(compiled, 2, checkpoint(GPT2, tmp_path), layout, what):
        assert bool(said) == (what == "whole" and layout[2] == 1)
        for name, grad in plain.items():
            torch.testing.assert_close(again[name], grad, atol=1e-6, rtol=1e-5, msg=name)
