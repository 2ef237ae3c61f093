"""Families whose modules differ between the releases of transformers that pyproject.toml allows."""

import importlib
import sys

# family --> rows of its table for modules that only releases before 5.24 have
OLDER_ROWS = {"gptj": ["h.*.attn.attn_dropout"]}


def is_older(family):
    """Return whether the installed transformers has the modules of OLDER_ROWS: attention without AttentionInterface."""
    modeling = f"transformers.models.{family}.modeling_{family}"
    return family in OLDER_ROWS and not hasattr(
        importlib.import_module(modeling), "ALL_ATTENTION_FUNCTIONS"
    )


def take_any_peft():
    """Let transformers take the installed peft, if it is loaded: 5.24 wants 0.22, which is not published yet."""
    if integration := sys.modules.get("transformers.integrations.peft"):
        integration.MIN_PEFT_VERSION = "0"
