"""Base class of all config sections, their violations, and introspection of fields, union members
and default kinds.

The loader and the error messages use these functions to walk YAML values and section classes
together.

`LocalPath` is the type of values that are local paths; a URL is an error at its key. A `FolderPath`
may be `s3://bucket/folder`: its value is the local path of the folder's copy.

A `Violation` is one of constraints between config values. The after-validator of a section collects
violations and calls `raise_violations`. The loader reports all of them at once, each under its own
key.

Invariants:
- Sections are frozen, and unknown keys are errors.
- No function modifies its input. `fill_default_kinds` returns new values.
"""

import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Union, cast, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from llmsys.errors import ConfigError, Violation
from llmsys.storage.paths import check_local_path, format_folder, parse_folder

LocalPath = Annotated[Path, BeforeValidator(check_local_path)]
FolderPath = Annotated[
    Path,
    BeforeValidator(parse_folder),
    PlainSerializer(format_folder, return_type=str, when_used="json"),
]


def raise_violations(problems: Iterable[Violation]) -> None:
    """Raise one validation error with all violations, if there are any.

    Args:
        problems: violations of a section.

    Raises:
        PydanticCustomError: type `rules`; the context holds (key, message) pairs.
    """
    found = list(problems)
    if found:
        text = "; ".join(f"{key}: {message}" for key, message in found)
        # a ValueError carries text alone; this context carries every key
        raise PydanticCustomError(
            "rules", "{text}", {"text": text, "problems": [tuple(problem) for problem in found]}
        )


def raise_violation(key: str, message: str) -> None:
    """Raise a validation error with one violation.

    Args:
        key: key path below the section; empty for the value itself.
        message: the value, the rule and the next step.

    Raises:
        PydanticCustomError: see `raise_violations`.
    """
    raise_violations([Violation(key, message)])


def round_up_to_power_of_two(number: int, least: int) -> int:
    """Return the smallest power of two that is not below a number.

    Args:
        number: a positive integer.
        least: smallest result, a power of two.

    Returns:
        The power of two.
    """
    return max(least, 1 << (number - 1).bit_length())


# Trial division takes a million steps for it.
MAX_DIVIDED = 10**12


def list_divisors(number: int) -> list[int]:
    """Return all divisors of a number.

    Args:
        number: a positive integer.

    Returns:
        The positive divisors in ascending order.

    Raises:
        ConfigError: the number is beyond what any size in a config can be.
    """
    if number > MAX_DIVIDED:
        raise ConfigError(
            f"{number} is too large for a size that is divided: the maximum is {MAX_DIVIDED}. Use "
            "less."
        )
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def find_nearest(value: int, legal: Sequence[int]) -> int:
    """Return the legal value closest to `value`; the smaller one of a tie."""
    return min(legal, key=lambda candidate: (abs(candidate - value), candidate))


def find_nearest_multiples(value: int, unit: int) -> tuple[int, ...]:
    """Return the positive multiples of `unit` next to `value`: at or below it, and above it."""
    below = value // unit * unit
    return tuple(multiple for multiple in (below, below + unit) if multiple > 0)


_TOO_LARGE = 2**63


class Section(BaseModel):
    """One mapping of a YAML file: frozen after validation; unknown keys are errors."""

    model_config = ConfigDict(
        defer_build=True, frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )
    # Whole numbers that a user gives fit 64 bits.
    has_size_limit: ClassVar[bool] = True

    @model_validator(mode="before")
    @classmethod
    def _check_numbers(cls, values: Any) -> Any:
        """Refuse what pydantic takes for a number: true is no 1, and sizes have 18 digits."""
        if isinstance(values, dict):
            raise_violations(_find_odd_numbers(cls, values))
        return values


class ResultSection(Section):
    """One mapping of a result. Its numbers are computed, such as the FLOPs of a run, and may have
    more than 64 bits.
    """

    has_size_limit: ClassVar[bool] = False


def _find_odd_numbers(section: type[Section], values: dict[str, Any]) -> Iterator[Violation]:
    for name, value in values.items():
        if type(value) is not bool and not (type(value) is int and abs(value) >= _TOO_LARGE):
            continue
        field = section.model_fields.get(name)
        if field is None:
            continue
        types_of_field = _list_plain_types(field.annotation)
        if type(value) is bool and types_of_field & {int, float} and bool not in types_of_field:
            yield Violation(
                name, f"{value} is not a number. Use digits, such as 8 or 0.5. {field.description}"
            )
        elif type(value) is int and int in types_of_field and section.has_size_limit:
            yield Violation(
                name,
                f"{value} is too large for a whole number: the maximum has 18 digits. Use less.",
            )


def _list_plain_types(annotation: object) -> set[object]:
    """Return the types of an annotation: those of a union, and of `Annotated`."""
    if get_origin(annotation) is Annotated:
        return _list_plain_types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return set().union(*(_list_plain_types(one) for one in get_args(annotation)))
    return {annotation}


class NamedRuleConfig(Section):
    """One rule. Subclasses add the `kind` field."""

    name: str = Field(
        "",
        pattern="^([a-z][a-z0-9_]*)?$",
        max_length=60,
        description="Name of the rule in funnel, reasons and columns. Empty: its kind.",
    )

    @property
    def title(self) -> str:
        """The name, or the kind if the name is empty."""
        return self.name or str(getattr(self, "kind", ""))


SectionType = type[BaseModel]


def list_section_types(annotation: object) -> list[SectionType]:
    """Return the section classes of an annotation.

    Args:
        annotation: annotation of a field.

    Returns:
        One class, the members of a union, or none.
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is Annotated:
        return list_section_types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType, tuple, list, dict):
        return [
            section for argument in get_args(annotation) for section in list_section_types(argument)
        ]
    return []


def get_kind(section: SectionType) -> str | None:
    """Return the `kind` of a union member.

    Args:
        section: A class of a section.

    Returns:
        Its kind; None for a section that is no member of a union.
    """
    field = section.model_fields.get("kind")
    return None if field is None else str(get_args(field.annotation)[0])


def select_by_kind(members: Iterable[SectionType], kind: object) -> list[SectionType]:
    """Return the members of a union that have a kind.

    Args:
        members: Classes of sections.
        kind: The value of `kind` in a file, of any type.

    Returns:
        The members of this kind; all of them if none has it, so that an unknown kind is an error of
        the validation.
    """
    every = list(members)
    return [member for member in every if get_kind(member) == kind] or every


def get_default_kind(field: FieldInfo) -> str | None:
    """Return the default kind of a union field; None if the kind is required."""
    if field.is_required():
        return None
    if field.default_factory_takes_validated_data:
        return None  # the default depends on other fields, such as the objective on the model
    # `get_default` would copy a whole section for its kind.
    make = cast("Callable[[], Any] | None", field.default_factory)
    kind = getattr(field.default if make is None else make(), "kind", None)
    return kind if isinstance(kind, str) else None


def list_fields(members: Iterable[SectionType], key: str) -> list[FieldInfo]:
    """Return the fields of a name.

    Args:
        members: Classes of sections.
        key: Name of a field.

    Returns:
        The fields of the classes that have it.
    """
    return [member.model_fields[key] for member in members if key in member.model_fields]


def find_default_kind(root: SectionType, keys: tuple[str, ...]) -> str | None:
    """Return the default kind of the union at a key path.

    Args:
        root: Class of the section in which the path begins.
        keys: The path; digits are places in a list.

    Returns:
        The kind; None where there is no union, or one without a default.
    """
    members, kind = [root], None
    for key in keys:
        if key.isdigit():
            kind = None  # an element of a list has no default
            continue
        found = list_fields(members, key)
        members = [section for field in found for section in list_section_types(field.annotation)]
        kind = next((get_default_kind(field) for field in found), None)
    return kind


def fill_default_kinds(values: Any, members: list[SectionType], default: str | None = None) -> Any:
    """Return the values with the default `kind:` added to every union that omits it.

    pydantic asks every union for its tag, and a file may leave the default out.

    Args:
        values: Plain values of a section, or a list of them.
        members: The classes that the values may have.
        default: The default kind of this union; None where the kind is required.

    Returns:
        New values; the given ones are not changed.
    """
    if isinstance(values, list):
        return [fill_default_kinds(value, members) for value in values]
    if not isinstance(values, dict):
        return values
    if len(members) > 1 and "kind" not in values and default is not None:
        values = {"kind": default, **values}
    if len(members) > 1:
        members = select_by_kind(members, values.get("kind"))
    return {
        key: _fill_child_kinds(value, list_fields(members, key)) for key, value in values.items()
    }


def _fill_child_kinds(value: Any, found: list[FieldInfo]) -> Any:
    # Only sections and lists of them have kinds; most values are numbers.
    if not found or not isinstance(value, dict | list):
        return value
    return fill_default_kinds(
        value, list_section_types(found[0].annotation), get_default_kind(found[0])
    )
