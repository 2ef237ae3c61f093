"""Families whose modules differ between the releases of transformers that pyproject.toml allows."""

import importlib

# family --> rows of its table for modules that only releases before 5.24 have
OLDER_ROWS = {"gptj": ["h.*.attn.attn_dropout"]}


def is_older(family):
    """Return whether the installed transformers has the modules of OLDER_ROWS: attention without AttentionInterface."""
    modeling = f"transformers.models.{family}.modeling_{family}"
    return family in OLDER_ROWS and not hasattr(
        importlib.import_module(modeling), "ALL_ATTENTION_FUNCTIONS"
    )
