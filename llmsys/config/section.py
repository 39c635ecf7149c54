"""The base of every configuration section: frozen, and strict about unknown keys.

What the sections look like from outside: their fields, the members of their unions, default kinds.

The loader and the error messages walk YAML values and section classes side by side; this file is that walk. No values
are changed here except by `fill_default_kinds`, which writes down the kind that a union has when none is given.
"""

import types
from collections.abc import Iterable
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """One mapping of a YAML file. Values never change after validation; a key nobody knows is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


SectionType = type[BaseModel]


def list_section_types(annotation: object) -> list[SectionType]:
    """The section classes a value with this annotation can be: one, the members of a union, or none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is Annotated:
        return list_section_types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType, tuple, list, dict):
        return [one for argument in get_args(annotation) for one in list_section_types(argument)]
    return []


def get_kind(section: SectionType) -> str | None:
    """The tag of a union's member; None for a section outside unions."""
    field = section.model_fields.get("kind")
    return None if field is None else str(get_args(field.annotation)[0])


def select_by_kind(members: Iterable[SectionType], kind: object) -> list[SectionType]:
    """The members that carry this tag; all of them when none does."""
    every = list(members)
    return [member for member in every if get_kind(member) == kind] or every


def get_default_kind(field: FieldInfo) -> str | None:
    """The kind a union has when the YAML names none; None where it must be named."""
    if field.is_required():
        return None
    if field.default_factory_takes_validated_data:
        return None
    kind = getattr(field.get_default(call_default_factory=True), "kind", None)
    return kind if isinstance(kind, str) else None


def list_fields(members: Iterable[SectionType], key: str) -> list[FieldInfo]:
    """The fields called `key` in any of these classes."""
    return [member.model_fields[key] for member in members if key in member.model_fields]


def get_default_kind_at(root: SectionType, keys: tuple[str, ...]) -> str | None:
    """The default kind of the union at a key path below `root`; None when there is no union or no default."""
    members, kind = [root], None
    for key in keys:
        if key.isdigit():
            kind = None
            continue
        found = list_fields(members, key)
        members = [one for field in found for one in list_section_types(field.annotation)]
        kind = next((get_default_kind(field) for field in found), None)
    return kind


def fill_default_kinds(values: Any, members: list[SectionType], default: str | None = None) -> Any:
    """The values with `kind:` written into every union that leaves it to the default."""
    if isinstance(values, list):
        return [fill_default_kinds(one, members) for one in values]
    if not isinstance(values, dict):
        return values
    if len(members) > 1 and "kind" not in values and default is not None:
        values = {"kind": default, **values}
    if len(members) > 1:
        members = select_by_kind(members, values.get("kind"))
    return {key: _fill_child_kinds(value, list_fields(members, key)) for key, value in values.items()}


def _fill_child_kinds(value: Any, found: list[FieldInfo]) -> Any:
    if not found:
        return value
    return fill_default_kinds(value, list_section_types(found[0].annotation), get_default_kind(found[0]))
