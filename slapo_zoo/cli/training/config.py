"""From a YAML file, `--set key=value` and flags to `TrainOptions`, and back to YAML."""

import difflib
import math
import os
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from slapo_zoo.cli.readable_errors import is_first
from slapo_zoo.cli.training.train_options import (
    BELOW,
    ELSEWHERE,
    LEAST,
    ONE_OF,
    PATHS,
    RENAMED,
    TrainOptions,
    described,
)
from slapo_zoo.errors import SlapoError

KINDS = get_type_hints(TrainOptions)


class ConfigError(SlapoError, ValueError):
    """A key or a value of a run's configuration cannot be used."""


class OnceEach(yaml.SafeLoader):
    """YAML in which a key that stands twice is an error: nobody can tell which one was meant."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """The keys and values of one mapping."""
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise yaml.YAMLError(f"{name!r} stands in it {names.count(name)} times")
        return super().construct_mapping(node, deep)


def read_config(path: Path) -> dict[str, Any]:
    """The keys of a YAML file, each of its type."""
    try:
        found = OnceEach(path.read_text(encoding="utf-8")).get_single_data()
    except FileNotFoundError:
        hint = "slapo-zoo init writes one"
        raise ConfigError(str(path), "--config", "found no such file", hint) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = f"found no YAML: {str(error).splitlines()[0]}"
        raise ConfigError(str(path), "--config", problem, "write one `key: value` a line") from None
    if not isinstance(found, dict):
        problem = f"found {type(found).__name__}, expected keys and values"
        raise ConfigError(str(path), "--config", problem, "write one `key: value` a line")
    return checked(found, str(path))


def read_sets(words: Sequence[str]) -> dict[str, Any]:
    """The keys of `--set key=value`; a value is written as in YAML, `columns.text=body` sets one entry."""
    found: dict[str, Any] = {}
    for word in words:
        key, is_set, text = word.partition("=")
        if not is_set:
            raise ConfigError("--set", word, "found no `=`", "write key=value")
        key, _, entry = key.strip().partition(".")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            hint = "write the value as in YAML, in quotes where it has brackets"
            problem = f"found no YAML: {str(error).splitlines()[0]}"
            raise ConfigError("--set", word, problem, hint) from None
        entries = held if isinstance(held := found.get(key), dict) else {}
        found[key] = {**entries, entry: value} if entry else value
    return checked(found, "--set")


def checked(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check names, types and bounds of options; return them under their current names.

    A number may be a string such as 1e-4. `where` is the file or flag, for ConfigError.
    """
    now = {key: RENAMED.get(str(key), str(key)) for key in given}
    if older := [f"{key} is called {new} now" for key, new in now.items() if key != new]:
        sys.stderr.write(f"warning: {where}: {', '.join(older)}\n" if is_first() else "")
    if twice := [new for key, new in now.items() if key != new and new in given]:
        older_name = next(key for key, new in RENAMED.items() if new == twice[0])
        problem = f"found {older_name} too, which is its older name"
        raise ConfigError(where, twice[0], problem, "leave one of them out")
    return {now[key]: _value(now[key], value, where) for key, value in given.items()}


def make_options(*sources: Mapping[str, Any]) -> TrainOptions:
    """The options of several sources; a later one wins, entries of a mapping one by one."""
    given: dict[str, Any] = {}
    for source in sources:
        for key, value in source.items():
            is_part = isinstance(value, Mapping) and key in given
            given[key] = {**given[key], **value} if is_part else value
    if not given.get("model"):
        hint = "name a folder or a Hub id: slapo-zoo train MODEL, or `model:` in the file"
        raise ConfigError("train", "model", "found none", hint)
    return TrainOptions(**given)


def as_yaml(options: TrainOptions) -> str:
    """The whole configuration, as `--config` takes it."""
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(options).items()}
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def changes(options: TrainOptions) -> str:
    """Return the keys that differ from their defaults, as YAML."""
    whole, usual = (yaml.safe_load(as_yaml(each)) for each in (options, TrainOptions("")))
    given = {key: value for key, value in whole.items() if value != usual[key]}
    return yaml.safe_dump(given, sort_keys=False, allow_unicode=True)


def _value(key: str, value: Any, where: str) -> Any:
    if key not in KINDS:
        near = difflib.get_close_matches(key, [*KINDS, *ELSEWHERE], 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(KINDS)}"
        hint = f"here it is {ELSEWHERE[near[0]]}" if near and near[0] in ELSEWHERE else hint
        raise ConfigError(where, key, "found no such key", hint)
    value, wanted = _coerced(value, KINDS[key]), KINDS[key]
    if not _fits(value, wanted):
        problem = f"found {value!r:.60}, expected {_said(wanted)}"
        raise ConfigError(where, key, problem, _default(key))
    if value == "":
        raise ConfigError(where, key, "found an empty text", "give it a value, or leave it out")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(where, key, f"found {value}, expected a finite number", _default(key))
    if value is not None and key in LEAST and value < LEAST[key]:
        problem = f"found {value!r}, expected at least {LEAST[key]}"
        raise ConfigError(where, key, problem, _default(key))
    if value is not None and key in BELOW and value >= BELOW[key]:
        problem = f"found {value!r}, expected less than {BELOW[key]}"
        raise ConfigError(where, key, problem, _default(key))
    if value is not None and key in ONE_OF and value not in ONE_OF[key]:
        problem = f"found {value!r}, expected one of {', '.join(ONE_OF[key])}"
        raise ConfigError(where, key, problem, "choose one of them")
    is_path = key in PATHS and value is not None  # which no shell may have seen
    return os.path.expanduser(str(value)) if is_path else value


def _default(key: str) -> str:
    """Suggest a value: the default of the key."""
    default = getattr(TrainOptions(""), key)
    return f"the default is {default!r}" if default not in (None, "") else described()[key]


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


def _coerced(value: Any, kind: Any) -> Any:
    """YAML reads 1e-4 as a text, and a list where we have a tuple."""
    members = _members(kind)
    if float in members and str not in members and isinstance(value, str | int):
        try:
            return value if isinstance(value, bool) else float(value)
        except ValueError:
            return value
    if int in members and str not in members and isinstance(value, str):
        try:
            return int(float(value)) if float(value).is_integer() else value
        except ValueError:
            return value
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, str) and get_origin(kind) is tuple else value


def _fits(value: Any, kind: Any) -> bool:
    for member in _members(kind):
        plain = get_origin(member) or member
        if isinstance(value, plain) and (plain is bool or not isinstance(value, bool)):
            held: Any = value
            inner = [*held] if plain in (tuple, Mapping) else []
            inner += held.values() if get_args(member) == (str, str) else []
            return all(isinstance(one, str) for one in inner)
    return False


def _said(kind: Any) -> str:
    names = {"NoneType": "nothing", "str": "a text", "int": "an integer", "float": "a number",
             "bool": "true or false", "Mapping": "a mapping of names", "tuple": "a list of texts"}  # fmt: skip
    plain = [(get_origin(member) or member).__name__ for member in _members(kind)]
    return " or ".join(names[name] for name in plain)
