"""Training run on any engine, and its comparison with plain transformers in one process."""

import torch

from parity import (
    EPS,
    LEARNING_RATE,
    STEPS,
    Case,
    assert_close,
    batch_of,
    compare_weights,
    references,
)

CASES = {
    "gpt2": Case("GPT2LMHeadModel", ("tokens",)),
    "bert": Case("BertForMaskedLM", ("tokens",)),
    "t5": Case("T5ForConditionalGeneration", ("tokens",)),
    "classes": Case("BertForSequenceClassification", ("class",), (("num_labels", 3),)),
}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.1, eps=EPS)


def rows_of(case, mesh, step):
    """Return this dp rank's rows of a step's batch."""
    rows = case.rows // mesh.dp
    part = slice(mesh.coord("dp") * rows, (mesh.coord("dp") + 1) * rows)
    return {name: t[part] for name, t in batch_of(case, step).items()}


def make(case, folder, layout, target, options):
    from slapo_zoo import AutoScheduledModel, init_target_engine

    tp, pp, dp = layout
    model = AutoScheduledModel.from_pretrained(
        folder, tp=tp, pp=pp, dp=dp, seed=0, auto_class=case.cls
    )
    model.train()
    return init_target_engine(model, target, **{"optimizer": adamw, **options})[0]


def trained(case, folder, layout, target, options, micro_batches=None, saved=None, resumed=None):
    """Train STEPS steps on this rank of a mesh; return losses and final weights.

    Args:
        saved: (step, folder): save a checkpoint before that step and stop there.
        resumed: folder of a checkpoint to go on from.
    """
    engine = make(case, folder, layout, target, options)
    first = engine.load_checkpoint(resumed).step if resumed else 0
    losses = []
    for step in range(first, STEPS):
        if saved is not None and saved[0] == step:
            engine.save_checkpoint(saved[1], step=step)
            break
        batch = rows_of(case, engine.model.mesh, step)
        losses.append(float(engine.update(batch, micro_batches)))
    return losses, engine.model.consolidated_state_dict()


class Run:
    """Result of a run that a comparison reads."""

    def __init__(self, losses, weights):
        self.losses, self.weights = losses, weights


def assert_same_run(found, case, folder, first=0):
    """Compare losses from step `first` on and final weights with fp64; the tolerance is plain fp32's own error."""
    truth, plains = references(case, folder)
    losses, weights = found
    assert len(losses) == STEPS - first
    run = Run([float("nan")] * first + losses, weights)
    for step in range(first, STEPS):
        assert_close(f"loss {step}", lambda r: torch.tensor(r.losses[step]), run, plains, truth)  # noqa: B023
    assert set(truth.weights) <= set(weights)
    compare_weights(run, plains, truth)
