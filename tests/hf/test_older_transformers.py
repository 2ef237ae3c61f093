"""Differences between the releases of transformers that pyproject.toml allows; slapo_zoo.hf fences them."""

from transformers import masking_utils

from slapo_zoo.hf.attention import register_attention

NEWER = "remap_positions_for_packed_sequence"


def test_attention_is_registered_where_masks_read_positions_only_once(monkeypatch):
    """transformers before 5.23 has no second function that reads the positions of packed rows."""
    monkeypatch.delattr(masking_utils, NEWER, raising=False)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    register_attention()
    assert hasattr(masking_utils.find_packed_sequence_indices, "__wrapped__")
    assert not hasattr(masking_utils, NEWER)


def test_this_release_has_the_functions_that_are_wrapped():
    assert callable(masking_utils.find_packed_sequence_indices)
    assert callable(getattr(masking_utils, NEWER))
