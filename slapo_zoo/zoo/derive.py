"""Which table a config gets: the family's own, or, with schedule="auto", one that was derived and proven."""

import hashlib
import json
from typing import Any

from slapo_zoo.errors import ArchitectureError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.zoo.table import Table, families, table_for

# of transformers' own bookkeeping: they change no module
NOT_STRUCTURE = ("dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures",
                 "id2label", "label2id", "_attn_implementation_internal", "_experts_implementation_internal")  # fmt: skip
Key = tuple[str, int, int]  # structure of a model, tp, pp
DERIVED: dict[Key, Table] = {}  # what the model that is built now gets
TRIALS: set[str] = set()  # structures whose tables are being proven in this process


def find_table(config: Any, cls: Any, kind: str, mesh: Mesh) -> Table:
    """The family's table; with schedule="auto" the derived one where there is none.

    Args:
        config: of `transformers`.
        cls: of the model.
        kind: of the schedule.
        mesh: for which it was proven.

    Raises:
        ArchitectureError: there is none.
    """
    known = kind == "auto" and cls is not None and DERIVED
    found = DERIVED.get((structure(config, cls), mesh.tp, mesh.pp)) if known else None
    if found is None and (config.model_type in families() or kind != "auto"):
        hint = '; or pass schedule="auto", which derives a table and proves it'
        return table_for(config.model_type, hint)
    if found is None:
        raise refusal(config, "it is derived when a model is loaded, and none was", "load it first")
    return found


def structure(config: Any, cls: Any) -> str:
    """A digest of what determines a model's modules and forward: its class and config."""
    known = json.dumps(_plain(config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(f"{cls.__module__}.{cls.__name__}{known}".encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if k not in NOT_STRUCTURE}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def refusal(config: Any, problem: str, hint: str = "write a table (docs/adding_an_architecture.md)") -> ArchitectureError:  # fmt: skip
    """The error of a family that schedule="auto" cannot serve."""
    what = f"schedule='auto' for model_type={config.model_type!r}"
    return ArchitectureError("zoo", what, problem, hint)
