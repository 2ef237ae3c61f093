"""Published schedule as data: the content of a card's schedule.json, which is checked before it is used."""

import difflib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slapo_zoo.errors import CardError, ScheduleError
from slapo_zoo.language.schedule import FORMAT, Step, from_json
from slapo_zoo.zoo import expressions as arithmetic
from slapo_zoo.zoo.cards import strict_json
from slapo_zoo.zoo.cards.schema import PUBLISHABLE, schema, validator

MESH_NUMBERS = ("tp", "pp", "dp", "cp", "stages")
MODULE = "module"  # the model type of a program for a module outside of `transformers`


@dataclass(frozen=True)
class Program:
    """Published schedule as data. Applying it runs no code of its author, for every name is looked up in a fixed set.

    Args:
        model_type: model family, as in the config of `transformers`; "module" for an nn.Module of a user's own.
        model_class: name of the model class, with its head.
        structure: hash of the required module tree and shapes; None requires only the constraints.
        numbers: name --> integer formula over mesh sizes, earlier names and fields of the config.
        constraints: comparisons that must hold, e.g. "tp <= num_heads", over the same names.
        steps: (module path pattern, primitive such as "shard", arguments) of each directive, a change of modules; an
            argument may be a formula: {"=": "head_dim"}.
    """

    model_type: str
    model_class: str
    structure: str | None
    numbers: Mapping[str, str]
    constraints: tuple[str, ...]
    steps: tuple[tuple[str, str, Mapping[str, Any]], ...]

    @staticmethod
    def parse(data: bytes, where: str = "schedule.json") -> "Program":
        """Return the published schedule in the bytes of a schedule.json; CardError says what is wrong in file `where`."""
        document = strict_json.parse(data, where)
        _check(document, where)
        program = Program(
            document["model"]["model_type"], document["model"]["class"], document["structure"],
            document["numbers"], tuple(document["constraints"]),
            tuple((p, name, arguments) for p, name, arguments in document["steps"]),
        )  # fmt: skip
        program._check_arithmetic(where)
        program._directives(lambda text: 1, where)  # checks the form of directives without a model
        return program

    def document(self) -> dict[str, Any]:
        """Return this published schedule as the JSON object that schedule.json holds."""
        return {
            "format": FORMAT,
            "model": {"model_type": self.model_type, "class": self.model_class},
            "structure": self.structure,
            "numbers": dict(self.numbers),
            "constraints": list(self.constraints),
            "steps": [list(step) for step in self.steps],
        }

    def to_bytes(self) -> bytes:
        """Return the bytes of schedule.json, with one line per directive (change of modules)."""
        head = {key: value for key, value in self.document().items() if key != "steps"}
        lines = ",\n".join("  " + json.dumps(step) for step in self.document()["steps"])
        return (json.dumps(head, indent=1)[:-2] + f',\n "steps": [\n{lines}\n ]\n}}\n').encode()

    @property
    def hash(self) -> str:
        """Return the sha256 of this published schedule's canonical JSON, which has sorted keys and no spaces."""
        return "sha256:" + hashlib.sha256(strict_json.canonical(self.document())).hexdigest()

    def resolve(self, config: Any, mesh: Mapping[str, int]) -> list[Step]:
        """Return (pattern of module paths, directive) for each change of modules, all formulas evaluated for one model.

        Args:
            config: `transformers` config of the model; only its integer fields are read.
            mesh: sizes of tp, pp, dp and stages, by name; and of cp, if it is not 1.

        Raises:
            CardError: the model is of another family, or a constraint does not hold.
        """
        if config.model_type != self.model_type:
            found = config.model_type
            problem = f"the card was made for {self.model_type!r}, the model is {found!r}"
            hint = "choose a card of the model's family"
            if self.model_type == MODULE:
                hint = "apply the card to a module of your own: slapo_zoo.apply_card(module, card)"
            raise CardError("card", "model_type", problem, hint)
        numbers = self._numbers(config, mesh)
        for text in self.constraints:
            if not _ask(arithmetic.holds, text, numbers):
                names = sorted(arithmetic.names_in(arithmetic.parse_comparison(text)))
                found = ", ".join(f"{name} = {numbers[name]}" for name in names)
                hint = "choose a mesh and a model for which it holds, or another card"
                problem = f"the constraint does not hold: found {found}"
                raise CardError("card", f"constraint {text!r}", problem, hint)
        return self._directives(lambda text: _ask(arithmetic.evaluate, text, numbers), "steps")

    def _directives(self, value_of: Callable[[str], int], where: str) -> list[Step]:
        """Return (pattern of module paths, directive) for each change of modules, each formula replaced by
        `value_of(formula)`. CardError for an invalid directive begins with `where`.
        """
        steps = [[p, n, _mapped(arguments, value_of)] for p, n, arguments in self.steps]
        try:
            return from_json(json.dumps({"format": FORMAT, "steps": steps}))
        except (ScheduleError, TypeError) as error:
            raise _card_error(error, where) from None

    def lines(self) -> list[str]:
        """Return this published schedule as lines of text for people; formulas are shown, not evaluated."""
        lines = [f"constraint {text}" for text in self.constraints]
        lines += [f"{name} = {text}" for name, text in sorted(self.numbers.items())]
        for pattern, name, arguments in self.steps:
            written = ", ".join(f"{key}={_shown(value)}" for key, value in arguments.items())
            lines.append(f"sch[{pattern!r}].{name}({written})")
        return lines

    def diff(self, other: "Program", name: str = "this", other_name: str = "other") -> str:
        """Return a unified diff of this published schedule and `other`, labelled with the two names; "" if they are equal."""
        sides = self.lines(), other.lines()
        return "\n".join(difflib.unified_diff(*sides, name, other_name, lineterm="", n=1))

    def _numbers(self, config: Any, mesh: Mapping[str, int]) -> dict[str, int]:
        names = {n for text in self._formulas() for n in arithmetic.names_in(arithmetic.parse(text))}  # fmt: skip
        for text in self.constraints:
            names |= arithmetic.names_in(arithmetic.parse_comparison(text))
        known = {n: getattr(config, n, None) for n in names - {*MESH_NUMBERS}}
        numbers = {n: v for n, v in known.items() if type(v) is int} | {"cp": 1, **mesh}
        for name, text in self.numbers.items():
            numbers[name] = _ask(arithmetic.evaluate, text, numbers)
        return numbers

    def _formulas(self) -> list[str]:
        """Return the text of every formula in this published schedule: in `numbers` and in the arguments of `steps`."""
        inside: list[str] = []
        for _, _, arguments in self.steps:
            _mapped(arguments, inside.append)
        return [*self.numbers.values(), *inside]

    def _check_arithmetic(self, where: str) -> None:
        try:
            for text in set(self._formulas()):
                arithmetic.parse(text)
            for text in self.constraints:
                arithmetic.parse_comparison(text)
        except ScheduleError as error:
            raise _card_error(error, where) from None


def _mapped(arguments: Mapping[str, Any], value_of: Callable[[str], Any]) -> dict[str, Any]:
    """Return the arguments of a directive (change of modules), each formula {"=": text} replaced by `value_of(text)`."""

    def mapped(value: Any) -> Any:
        if isinstance(value, Mapping):
            return value_of(value["="])
        return [mapped(v) for v in value] if isinstance(value, list | tuple) else value

    return {name: mapped(value) for name, value in arguments.items()}


def _check(document: Any, where: str) -> None:
    """Raise CardError, which names the file `where` and a key, if a document violates the schema of schedule.json."""
    error = next(validator().iter_errors(document), None)
    while error is not None and error.context:
        error = error.context[0]
    if error is not None:
        place = ".".join(str(part) for part in error.absolute_path) or "document"
        hint = f"see the schema of {schema()['title']} (docs/cards.md); primitives: {', '.join(PUBLISHABLE)}"
        raise CardError(where, f"{place:.200}", f"{error.message:.300}", hint)


def _ask(question: Any, text: str, numbers: Mapping[str, int]) -> Any:
    try:
        return question(text, numbers)
    except ScheduleError as error:
        raise _card_error(error, "card") from None


def _card_error(error: Exception, where: str) -> CardError:
    if isinstance(error, ScheduleError):
        return CardError(where, error.what, error.problem, error.hint)
    hint = "give the arguments that the primitive takes (docs/reference)"
    return CardError(where, "", str(error), hint)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return value["="]
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_shown, value))})"
    return repr(value)
