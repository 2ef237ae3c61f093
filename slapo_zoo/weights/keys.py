"""Names that a family's files use, where they differ from the model's own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slapo_zoo.placement import TensorSpec


@dataclass(frozen=True)
class KeyMap:
    """Pairs (in files, in the model); each is a substring that is replaced, in order.

    rewrite:  vit.encoder.layer.0.intermediate.dense.bias  <->  vit.layers.0.mlp.fc1.bias
    """

    renames: tuple[tuple[str, str], ...] = ()

    def to_model(self, key: str) -> str:
        """A key of a file --> the model's name; a name of the model stays."""
        for file, model in self.renames:
            key = key.replace(file, model)
        return key

    def to_file(self, name: str) -> str:
        """A name of the model --> the key that `transformers` writes."""
        for file, model in reversed(self.renames):
            name = name.replace(model, file)
        return name

    def file_specs(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        """The specs under the keys of files."""
        return [replace(spec, name=self.to_file(spec.name)) for spec in specs]
