"""A factor of the covering array: a choice or an event, its values and the settings they make.

Values of tagged unions and of literals come from the config itself: a new kind of optimizer, of
position or of schedule becomes a value without a line here, unless it needs settings.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from llmsys.config.run import RunConfig
from llmsys.config.section import SectionType, get_kind, list_section_types

# Factor → label of its value.
Assignment = Mapping[str, str]
# Dotted key of RunConfig → value.
Settings = dict[str, Any]
# Settings, or a function of the assignment where they depend on other factors.
MakeSettings = Callable[[Assignment], Settings]

NONE = "none"


# (factor, kind) → why no case has it.
LEFT_OUT: dict[tuple[str, str], str] = {
    ("optimizer", "python"): "a class of the user's own has no plain form here",
    ("schedule", "python"): "a class of the user's own has no plain form here",
    ("precision", "auto"): "it is one of the others, by the device",
    ("compile", "auto"): "it is one of the others, by the device",
}


@dataclass(frozen=True)
class Value:
    """One value of a factor.

    Attributes:
        label: its name in cases.
        settings: what it sets, or a function of the assignment.
        needs: values that other factors take with it unless a case says otherwise.
        is_costly: it takes more processes, so it is taken only where it covers more.
        is_slow: it takes many times the time of a usual case, so the sample leaves it out.
    """

    label: str
    settings: Settings | MakeSettings = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)
    is_costly: bool = False
    is_slow: bool = False

    def build_settings(self, assignment: Assignment) -> Settings:
        """Return the settings in a case."""
        return self.settings(assignment) if callable(self.settings) else self.settings


@dataclass(frozen=True)
class Factor:
    """A choice.

    Attributes:
        name: its name in cases.
        values: its values, the default first.
        acts_with: values of other factors without which it does not act.
        path: dotted key of the union or literal that its values come from; empty: none.
        is_event: it is something that happens between steps.
    """

    name: str
    values: tuple[Value, ...]
    acts_with: Mapping[str, frozenset[str]] = field(default_factory=dict)
    path: str = ""
    is_event: bool = False

    @property
    def default(self) -> str:
        """Label of the first value."""
        return self.values[0].label

    def get_value(self, label: str) -> Value:
        """Return the value of a label."""
        return next(value for value in self.values if value.label == label)

    def is_active(self, assignment: Assignment) -> bool:
        """Return whether the factor acts in a case."""
        return all(assignment[name] in labels for name, labels in self.acts_with.items())


def list_choices(path: str) -> tuple[str, ...]:
    """Return the kinds of a union of RunConfig, or the values of a literal, as defined.

    Args:
        path: dotted key, such as `model.moe.balance` or `train.precision`.

    Returns:
        The kinds or values.

    Raises:
        KeyError: RunConfig has no such key.
    """
    return tuple(_list_settings(path))


def _list_settings(path: str) -> dict[str, Settings]:
    """Return the settings of each kind of a union, or of each value of a literal."""
    owners: list[SectionType] = [RunConfig]
    *parents, last = path.split(".")
    for key in parents:
        fields = [owner.model_fields[key] for owner in owners if key in owner.model_fields]
        owners = [section for found in fields for section in list_section_types(found.annotation)]
    fields = [owner.model_fields[last] for owner in owners if last in owner.model_fields]
    if not fields:
        raise KeyError(path)
    kinds: dict[str, Settings] = {
        kind: {path: {"kind": kind}}
        for found in fields
        for section in list_section_types(found.annotation)
        if (kind := get_kind(section))
    }
    literals: dict[str, Settings] = {
        value: {path: value}
        for found in fields
        for value in get_args(found.annotation)
        if isinstance(value, str)
    }
    return kinds or literals


def build_choice_factor(
    name: str, path: str, default: str, *special: Value, **options: Any
) -> Factor:
    """Build a factor with a value for each kind of a union, or for each value of a literal.

    Args:
        name: its name in cases.
        path: dotted key of the union or literal.
        default: label of its first value; `NONE` also for a union that may be left out.
        special: values that need more settings than their own, instead of the plain ones.
        options: further attributes of the factor.

    Returns:
        The factor.
    """
    values = {label: Value(label, settings) for label, settings in _list_settings(path).items()}
    if default == NONE and NONE not in values:
        # An optional union has no kind for its absence.
        values = {NONE: Value(NONE)} | values
    values |= {value.label: value for value in special}
    kept = {label: value for label, value in values.items() if (name, label) not in LEFT_OUT}
    return Factor(name, (kept.pop(default), *kept.values()), path=path, **options)


def build_factor(name: str, *values: Value, **options: Any) -> Factor:
    """Build a factor.

    Args:
        name: its name in cases.
        values: its values, the default first.
        options: further attributes of the factor.

    Returns:
        The factor.
    """
    return Factor(name, values, **options)


def build_event(name: str) -> Factor:
    """Build the factor of something that happens between steps, or not.

    Args:
        name: its name in cases.

    Returns:
        The factor; by default nothing happens.
    """
    return Factor(name, (Value("no"), Value("yes")), is_event=True)


def list_literal_values(path: str) -> tuple[Any, ...]:
    """Return the values of a literal that a member of a union of RunConfig has.

    Args:
        path: dotted key, such as `engine.zero_stage`.

    Returns:
        The values, as defined.
    """
    section, key = path.split(".")
    members = list_section_types(RunConfig.model_fields[section].annotation)
    [found] = [member.model_fields[key] for member in members if key in member.model_fields]
    return get_args(found.annotation)
