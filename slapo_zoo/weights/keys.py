"""Map tensors of a model to the keys of its checkpoint files: renames, and tensors stored in several pieces."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Generic, TypeVar

from torch import Tensor

from slapo_zoo.errors import WeightsError
from slapo_zoo.parallel.local_tensors import marked_as, rows_of
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.placement import HeldBy, TensorSpec

# Spellings of old files (BERT of 2018), which `transformers` keeps in a save: (in files, in the model)
OLDER = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))
NUMBER = "{}"  # in names of pieces: index on axis 0; in whole keys: any number
ANY = "*"  # in a substring of a file's key: any layer number; saved as `*` (ESM-2)
S = TypeVar("S", bound=TensorSpec)
WHOLE = "^"  # prefix of both sides of a rename of whole keys


@dataclass(frozen=True)
class Pieces:
    """Rule for a tensor [E, n * s, ...] of the model (E experts) that files store as E * n tensors [s, ...], or a
    tensor [n * s, ...] that they store as n.

    rewrite:  experts.gate_up_proj [E, 2 F, D]  <->  experts.{e}.w1.weight [F, D] and
              experts.{e}.w3.weight [F, D], for e in 0..E
              conv1d.weight [3 D, 1, K]  <->  q_conv1d.weight, k_conv1d.weight, v_conv1d.weight

    Args:
        tensor: suffix of the model's tensor name.
        names: suffixes in the files, one for each part of axis 1, with "{}" for the index on axis 0. Suffixes
            without "{}" name the parts of axis 0.
    """

    tensor: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Piece(Generic[S]):
    """One of the file tensors that make up a model tensor, e.g. expert 5's up_proj in experts.gate_up_proj [E, 2 F, D],
    with `number` 5 and `part` 1; or k in qkv [3 D, D], with `number` None and `part` 1.

    Args:
        spec: name, shape and placement of the piece; the name is in the spelling of the model, not of the files.
        number: global index on axis 0 (the expert); None if the model tensor is cut along axis 0.
        part: index among equal slices of axis 1, or of axis 0 if `number` is None.
    """

    spec: S
    number: int | None
    part: int

    def view(self, tensor: Tensor, mesh: Mesh) -> Tensor:
        """Return the view of this piece in `tensor`, this rank's shard of the model tensor; 0 rows if it holds none."""
        held, length, place = self.spec.placement, self.spec.shape[0], self.number
        rows = rows_of(tensor)  # under ZeRO, this dp rank's rows
        own = rows.first if rows else 0
        if place is None:
            begin = self.part * length
            first = min(max(own, begin), begin + length)
            last = max(min(own + len(tensor), begin + length), first)
            at = min(max(first - own, 0), len(tensor))
            return marked_as(tensor.narrow(0, at, last - first), tensor, first - begin)
        if isinstance(held, HeldBy):
            place = held.offset(mesh.size(held.mesh_dim), mesh.coord(held.mesh_dim))
        if place is not None:
            place -= own
            place = place if 0 <= place < len(tensor) else None
        if place is None:
            return marked_as(tensor.new_empty((0, *self.spec.shape[1:])), tensor, 0)
        return marked_as(tensor[place].narrow(0, self.part * length, length), tensor, 0)


@dataclass(frozen=True)
class KeyMap:
    """Renames between the tensors of a model and the keys of its files.

    rewrite: vit.encoder.layer.0.intermediate.dense.bias <-> vit.layers.0.mlp.fc1.bias

    Args:
        renames: pairs (in files, in the model), applied in order; each is a substring to replace or, after "^", a whole
            key such as "^model.llm.layers.{}.wq.weight", with the same number for {} on both sides. A `*` on the file
            side matches any layer number, if all layers' files hold copies of one tensor.
        pieces: rules for model tensors that files store as several tensors, e.g. one per expert.
    """

    renames: tuple[tuple[str, str], ...] = ()
    pieces: tuple[Pieces, ...] = ()

    def as_in(self, keys: Collection[str]) -> "KeyMap":
        """Return a copy of this map that also renames to the old spellings (`LayerNorm.gamma`) found in checkpoint `keys`."""
        older = [
            (file, model) for file, model in OLDER
            if any(file in key for key in keys) and not any(model in key for key in keys)
        ]  # fmt: skip
        return replace(self, renames=(*self.renames, *older))

    def to_model(self, key: str) -> str:
        """Return the model's name of the tensor that files store under `key`; a model's name is returned unchanged."""
        for file, model in self.renames:
            key = _respell(key, file, model)
        return key

    def to_file(self, name: str) -> str:
        """Return the file key under which `transformers` writes the tensor that the model calls `name`."""
        for file, model in reversed(self.renames):
            name = _respell(name, model, file)
        return name

    def renamed(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        """Return `specs` (name, shape, placement) of optimizer tensors, with each name replaced by its key in the files."""
        return [replace(spec, name=self.to_file(spec.name)) for spec in specs]

    def file_specs(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        """Return specs (file key, shape, placement) of the file tensors, one or several for each model tensor of `specs`."""
        return self.renamed(self.read_specs(specs))

    def read_specs(self, specs: Sequence[S], found: Collection[str] = ()) -> list[S]:
        """Return specs of the tensors to read, named as in the model: one per tensor, or one per piece (e.g. expert).

        Args:
            specs: name, shape and placement of each tensor of the model.
            found: keys of a checkpoint, spelled as in the model; a tensor whose own name is among them is stored whole.
        """
        return [part for spec in specs for part in self._parts(spec, found)]

    def _parts(self, spec: S, found: Collection[str]) -> list[S]:
        pieces = [] if _holds(found, spec.name) else list(self.pieces_of(spec))
        return [piece.spec for piece in pieces] or [spec]

    def pieces_of(self, spec: S) -> Iterator[Piece[S]]:
        """Yield the pieces (experts; q, k, v) of the tensor of `spec` in files, with specs; none if stored whole."""
        for rule in self.pieces:
            if not spec.name.endswith(rule.tensor):
                continue
            stem, of = spec.name.removesuffix(rule.tensor), spec.placement
            if NUMBER not in rule.names[0]:
                yield from _parts_of_axis_0(spec, stem, rule)
                continue
            count, rows, *rest = spec.shape
            shape = (rows // len(rule.names), *rest)
            for number in range(count):
                held = HeldBy(0, of.mesh_dim, of=of, count=count, index=number) if of else None
                for part, name in enumerate(rule.names):
                    full = stem + name.replace(NUMBER, str(number))
                    new = replace(spec, name=full, shape=shape, placement=held)
                    yield Piece(new, number, part)

    def split(
        self, local: Mapping[str, Tensor], specs: Sequence[TensorSpec], mesh: Mesh,
        found: Collection[str] = (),
    ) -> dict[str, Tensor]:  # fmt: skip
        """Return {name as in the model: this rank's tensor}; a tensor stored in pieces becomes a view per piece.

        Args:
            local: name --> local tensor of this rank.
            specs: name, shape and placement of each tensor of the model.
            mesh: mesh with the coordinates of this rank.
            found: keys of a checkpoint, spelled as in the model; a tensor whose own name is among them is stored whole.
        """
        whole = {spec.name: spec for spec in specs if not _holds(found, spec.name)}
        views = {}
        for name, tensor in local.items():
            pieces = list(self.pieces_of(whole[name])) if name in whole else []
            views |= {p.spec.name: p.view(tensor, mesh) for p in pieces} or {name: tensor}
        return views

    def to_files(
        self, local: Mapping[str, Tensor], specs: Sequence[TensorSpec], mesh: Mesh
    ) -> dict[str, Tensor]:
        """Return {key in the files: tensor} of this rank's tensors `local`; those stored in pieces as one view per piece."""
        views = self.split(local, specs, mesh)
        return {self.to_file(name): tensor for name, tensor in views.items()}


def _respell(key: str, old: str, new: str) -> str:
    if ANY in old:
        return _any_number(old).sub(lambda _: new, key)
    if not old.startswith(WHOLE):
        return key.replace(old, new)
    match = _numbered(old).fullmatch(key)
    return new[1:].format(*match.groups()) if match else key


@cache
def _any_number(part: str) -> re.Pattern[str]:
    return re.compile(r"(?:\d+|\*)".join(map(re.escape, part.split(ANY))))


@cache
def _numbered(pattern: str) -> re.Pattern[str]:
    return re.compile(r"(\d+)".join(map(re.escape, pattern[1:].split(NUMBER))))


def _parts_of_axis_0(spec: S, stem: str, rule: Pieces) -> Iterator[Piece[S]]:
    if spec.placement is not None:
        problem = f"files hold this parameter in {len(rule.names)} tensors, so it cannot be sharded"
        raise WeightsError("load or save", spec.name, problem, "leave it out of shard(...)")
    rows, *rest = spec.shape
    for part, name in enumerate(rule.names):
        new = replace(spec, name=stem + name, shape=(rows // len(rule.names), *rest))
        yield Piece(new, None, part)


def _holds(found: Collection[str], name: str) -> bool:
    """Return whether files store the model's tensor `name` whole, not in pieces: `found`, the files' keys already
    spelled as in the model, has the name, or the name without its first part ("model." in files of the base model).
    """
    return name in found or name.partition(".")[2] in found
