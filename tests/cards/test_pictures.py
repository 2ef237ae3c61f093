"""Pictures of a card, which show only measured values."""

from dataclasses import replace

from slapo_zoo.cards.card import UNMEASURED, read_card
from slapo_zoo.cards.make import zoo_card
from slapo_zoo.cards.pictures import draw
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.zoo.argument_values import config_of

BENCH = {
    "device": "2 cores <b>$x$", "step_ms_p50": 10.0, "tokens_per_s": 1000, "peak_memory_gib": UNMEASURED,
    "baselines": {"plain": {"tokens_per_s": 800.0, "peak_memory_gib": 3.0}, "other": UNMEASURED},
}  # fmt: skip


def card():
    config, head = config_of("gpt2")
    return zoo_card(config, head, Mesh(tp=2), "gpt2", any_size=True)


def test_card_picture_omits_unmeasured_values(tmp_path):
    card().write(tmp_path)
    assert not list(tmp_path.glob("*.png"))
    assert "![" not in (tmp_path / "README.md").read_text()


def test_card_picture_shows_measured_values(tmp_path):
    replace(card(), bench={**BENCH, "device": "2 cores"}).write(tmp_path)
    assert [path.name for path in tmp_path.glob("*.png")] == ["throughput.png"]
    assert (tmp_path / "throughput.png").read_bytes().startswith(b"\x89PNG")
    assert "![tokens per second](throughput.png)" in (tmp_path / "README.md").read_text()
    assert read_card(tmp_path).bench["tokens_per_s"] == 1000


def test_card_picture_changes_only_with_the_numbers_of_the_card():
    """Other numbers give another picture, the same numbers the same bytes. Text of a card is escaped in the SVG."""
    first, again = draw(BENCH), draw(dict(BENCH))
    assert first == again
    assert draw({**BENCH, "tokens_per_s": 10}) != first
    assert set(draw({**BENCH, "peak_memory_gib": 2})) == {"throughput.png", "memory.png"}
    assert draw({**BENCH, "tokens_per_s": True, "peak_memory_gib": "9"}) == {}
