"""The scripts of examples/backbone/: a plain and a scheduled model run the same loop and print the same numbers."""

import runpy
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from parity import Case, checkpoint
from slapo_zoo import AutoScheduledModel, emulate

ROOT = Path(__file__).parents[2] / "examples" / "backbone"
MESHES = [(1, 1, 1), (2, 1, 1)]
SEEDS = range(3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a function: dropout rate --> folder of a tiny BERT."""
    root = tmp_path_factory.mktemp("bert")
    return lambda dropout: checkpoint(Case("BertForMaskedLM", (), dropout=dropout), root)


def main_of(name):
    return runpy.run_path(str(ROOT / f"{name}.py"), run_name="example")["main"]


@cache
def plain(name, folder, seed=0):
    model = transformers.BertForMaskedLM.from_pretrained(folder)
    torch.manual_seed(seed)
    return main_of(name)(model)


def ours(name, folder, mesh):
    """Return the numbers that an example prints, equal on every rank."""
    main = main_of(name)

    def run():
        return main(AutoScheduledModel.from_pretrained(folder, tp=mesh[0], seed=0))

    found = emulate(run, mesh=mesh) if mesh[0] > 1 else [run()]
    for other in found[1:]:
        torch.testing.assert_close(torch.tensor(flat(other)), torch.tensor(flat(found[0])))
    return found[0]


def flat(figures):
    """Return the numbers of nested lists."""
    nested = isinstance(figures, list | tuple)
    return [x for part in figures for x in flat(part)] if nested else [float(figures)]


def among(found, samples, times=2.0):
    """Fail unless a number lies in the range of those of the plain model over several seeds."""
    low, high = min(samples), max(samples)
    room = times * (high - low) + 1e-6
    assert low - room <= found <= high + room, f"{found}, the plain model {samples}"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", ["ema", "embeddings"])
def test_example_script_without_dropout_has_the_metrics_of_plain_transformers(name, mesh, folder):
    found, want = (
        torch.tensor(flat(x)) for x in (ours(name, folder(0.0), mesh), plain(name, folder(0.0)))
    )
    torch.testing.assert_close(found, want, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_grad_cache_example_has_the_gradients_of_the_full_batch(mesh, folder):
    apart, losses = ours("grad_cache", folder(0.1), mesh)
    assert apart < 1e-5
    assert losses[0] == pytest.approx(losses[1])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_simcse_example_has_dropout_views_and_losses_within_the_range_of_plain_models(mesh, folder):
    losses, alike = ours("simcse", folder(0.1), mesh)
    runs = [plain("simcse", folder(0.1), seed) for seed in SEEDS]
    assert alike[0] < 0.9999
    among(alike[0], [run[1][0] for run in runs])
    among(sum(alike) / 30, [sum(run[1]) / 30 for run in runs])
    among(sum(losses[-8:]), [sum(run[0][-8:]) for run in runs])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mesh", MESHES[::-1], ids=str)
def test_monte_carlo_dropout_example_has_mean_and_spread_within_the_range_of_plain_models(
    mesh, folder
):
    mean, spread = ours("mc_dropout", folder(0.1), mesh)
    runs = [plain("mc_dropout", folder(0.1), seed) for seed in SEEDS]
    among(mean, [run[0] for run in runs])
    among(spread, [run[1] for run in runs])
