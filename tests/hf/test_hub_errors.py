"""Requests to a Hub that is out of reach: an error in four parts from whatever sends them, at once."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils import httpx
from transformers import GPT2Config

from slapo_zoo import AutoScheduledModel
from slapo_zoo.data.read import ask_the_hub
from slapo_zoo.errors import SlapoError
from slapo_zoo.hf.hub_errors import hub_errors
from slapo_zoo.weights.push import Push
from slapo_zoo.zoo.argument_values import config_of
from slapo_zoo.zoo.cards import hub
from slapo_zoo.zoo.load_forecast import read_sources

CONFIG = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=20, n_positions=4, bos_token_id=1, eos_token_id=2)  # fmt: skip
CARD = Path(__file__).parents[2] / "hub_cards" / "gpt2"
REQUESTS = {
    "from_pretrained": lambda folder: AutoScheduledModel.from_pretrained("me/x"),
    "card": lambda folder: AutoScheduledModel.from_config(CONFIG, schedule="me/card"),
    "card of a sha": lambda folder: hub.pull(hub.Reference("me/card", "a" * 40)),
    "publish": lambda folder: hub.push(CARD, "me/x"),
    "push_to_hub": lambda folder: Push(folder, {"repo_id": "me/x"}).create(),
    "plan": lambda folder: read_sources("me/x"),
    "config": lambda folder: config_of("me/x"),
    "data": lambda folder: ask_the_hub("me/rows"),
}


@pytest.fixture
def out_of_reach(monkeypatch):
    """Let the client of the Hub raise what its HTTP library raises for a refused connection."""

    def refuse(request):
        raise httpx.ConnectError("Connection refused")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    transport = httpx.MockTransport(refuse)
    huggingface_hub.set_client_factory(lambda: httpx.Client(transport=transport))
    yield
    huggingface_hub.set_client_factory(huggingface_hub.utils._http.default_client_factory)


@pytest.mark.parametrize("name", REQUESTS)
def test_hub_out_of_reach_is_an_error_in_four_parts(name, out_of_reach, tmp_path):
    with pytest.raises(SlapoError, match=r"no answer of the Hub: .*Connection refused") as caught:
        REQUESTS[name](tmp_path)
    assert caught.value.hint
    assert not any(tmp_path.iterdir())


def test_errors_of_the_disk_are_no_answers_of_the_hub(tmp_path):
    with pytest.raises(FileNotFoundError), hub_errors(lambda said, _: SlapoError("", "", said)):
        (tmp_path / "nothing").read_text()
