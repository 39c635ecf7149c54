"""The table of what cannot be combined with what, between the sections of a run:
`combinations.yaml`.

Reads: `combinations.yaml`, whose first lines explain its notation.

Invariants:
- A rule over keys that a section lacks applies to nothing, so a part of a run can be asked too.
- Rules that compute what is legal, such as divisors, are functions: see `run_constraints.py`,
  `parallel_layout.py` and `pipeline.py`.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from llmsys.errors import Violation

FILE = Path(__file__).with_name("combinations.yaml")


@dataclass(frozen=True)
class Condition:
    """One choice of the table, such as `engine.kind!=torch`.

    Attributes:
        key: dotted key of a run, or property of a section.
        operator: `=`, `!=`, `>`, or nothing for a value that is set.
        values: what follows the operator, in the spelling of YAML.
    """

    key: str
    operator: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.key}{self.operator}{'|'.join(self.values)}"

    @cached_property
    def _get(self) -> Callable[[object], Any]:
        return attrgetter(self.key)

    def is_met_by(self, run: object) -> bool:
        """Return whether a run makes this choice; False where it has no such key."""
        try:
            found = self._get(run)
        except AttributeError:
            return False
        match self.operator:
            case "":
                return bool(found)
            case ">":
                return bool(found > float(self.values[0]))
            case "=" if isinstance(found, set):
                return not found.isdisjoint(self.values)
            case "=":
                return _format_value(found) in self.values
            case _:
                return _format_value(found) not in self.values


@dataclass(frozen=True)
class RefusedChoice:
    """One row of the table: a choice that a feature refuses.

    Attributes:
        conditions: what makes the choice; all hold.
        key: key of a run at which the message is given.
        shown: key whose value the message shows as the choice.
        message: reason and remedy, with placeholders.
    """

    conditions: tuple[Condition, ...]
    key: str
    shown: str
    message: str


@dataclass(frozen=True)
class Feature:
    """One block of the table: a feature of a run, and what it cannot be combined with.

    Attributes:
        conditions: what makes the feature; all hold.
        refuses: choices that do not go with it.
        otherwise: remedy of every message: to do without the feature.
        only_first: the first choice that a run makes is its only message.
    """

    conditions: tuple[Condition, ...]
    refuses: tuple[RefusedChoice, ...]
    otherwise: str
    only_first: bool

    def find_violations(self, run: object) -> Iterator[Violation]:
        """Yield a violation for each refused choice that a run makes.

        Args:
            run: a run with the feature, or some of its sections.

        Yields:
            Violations with keys of a run.
        """
        for choice in self.refuses:
            if all(one.is_met_by(run) for one in choice.conditions):
                yield Violation(choice.key, self._format_message(choice, run))
                if self.only_first:
                    return

    def _format_message(self, choice: RefusedChoice, run: object) -> str:
        value = attrgetter(choice.key)(run)
        shown = attrgetter(choice.shown)(run)
        return choice.message.format_map(
            _Values(
                run,
                value=_format_value(value),
                name=choice.key.rpartition(".")[2],
                count=len(value) if isinstance(value, tuple) else "",
                feature=self.conditions[0],
                choice=f"{choice.shown}={_format_value(shown)}",
                otherwise=self.otherwise,
            )
        )


class _Values(dict[str, Any]):
    """Values of a message: those that are given, then the sections of the run."""

    def __init__(self, run: object, **values: object) -> None:
        super().__init__(values)
        self._run = run

    def __missing__(self, section: str) -> object:
        return getattr(self._run, section)


def _format_value(value: object) -> str:
    """Return a value as the table and the messages write it."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(value))
    return "null" if value is None else str(value)


@cache
def load_combinations() -> tuple[Feature, ...]:
    """Read the table, in the order of the file.

    Returns:
        One entry per block.
    """
    # libyaml takes 10 ms, the parser in Python 90 ms; every command checks a run
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    blocks = yaml.load(FILE.read_text("utf-8"), loader)  # both are safe loaders
    return tuple(
        Feature(
            _parse_conditions(block["feature"]),
            tuple(_iter_choices(block)),
            otherwise=block.get("otherwise", ""),
            only_first=block.get("only_first", False),
        )
        for block in blocks
    )


def _iter_choices(block: dict[str, Any]) -> Iterator[RefusedChoice]:
    for row in block["refuses"]:
        choices = row["choice"]
        for text in [choices] if isinstance(choices, str) else choices:
            conditions = _parse_conditions(text)
            first = conditions[0].key
            yield RefusedChoice(
                conditions,
                key=row.get("key", block.get("key", first)),
                shown=row.get("shown", first),
                message=row["message"],
            )


def _parse_conditions(text: str) -> tuple[Condition, ...]:
    """Return the conditions of a text such as `engine.kind=torch and layout.tensor>1`."""
    conditions = []
    for part in text.split(" and "):
        found = re.fullmatch(r"([a-z0-9_.]+)(?:(!=|=|>)(.+))?", part)
        if found is None:
            raise ValueError(f"{FILE.name}: {part!r} is no condition. Write key=value or key.")
        key, operator, values = found.groups(default="")
        conditions.append(Condition(key, operator, tuple(values.split("|")) if operator else ()))
    return tuple(conditions)


def find_refused_combinations(run: object, about: str = "") -> Iterator[Violation]:
    """Yield a violation for everything that a run combines and the table refuses.

    Args:
        run: a RunConfig, or an object with some of its sections, such as model and layout alone.
        about: a key of a run, which a row must name. Empty: all rows.

    Yields:
        Violations with keys of a run.
    """
    for feature in load_combinations() if not about else _select_features(about):
        if all(one.is_met_by(run) for one in feature.conditions):
            yield from feature.find_violations(run)


@cache
def _select_features(key: str) -> tuple[Feature, ...]:
    """Return the blocks with the rows that name a key; all rows of a block whose feature does."""

    def has_key(conditions: Iterable[Condition]) -> bool:
        return any(one.key == key for one in conditions)

    features = []
    for feature in load_combinations():
        rows = feature.refuses
        if not has_key(feature.conditions):
            rows = tuple(row for row in rows if has_key(row.conditions))
        features += [replace(feature, refuses=rows)] if rows else []
    return tuple(features)
