"""Base class of all config sections, and introspection of their fields, union members and default kinds.

The loader and the error messages use these functions to walk YAML values and section classes together.

Invariants:
- Sections are frozen, and unknown keys are errors.
- No function modifies its input. `fill_default_kinds` returns new values.
"""

import types
from collections.abc import Iterable
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """One mapping of a YAML file: frozen after validation; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


SectionType = type[BaseModel]


def list_section_types(annotation: object) -> list[SectionType]:
    """Return the section classes of an annotation: one, the members of a union, or none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is Annotated:
        return list_section_types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType, tuple, list, dict):
        return [section for argument in get_args(annotation) for section in list_section_types(argument)]
    return []


def get_kind(section: SectionType) -> str | None:
    """Return the `kind` of a union member; None for a section without a kind."""
    field = section.model_fields.get("kind")
    return None if field is None else str(get_args(field.annotation)[0])


def select_by_kind(members: Iterable[SectionType], kind: object) -> list[SectionType]:
    """Return the members of this kind, or all members if none has it."""
    every = list(members)
    return [member for member in every if get_kind(member) == kind] or every


def get_default_kind(field: FieldInfo) -> str | None:
    """Return the default kind of a union field; None if the kind is required."""
    if field.is_required():
        return None
    if field.default_factory_takes_validated_data:
        return None  # the default depends on other fields, such as the objective on the model
    kind = getattr(field.get_default(call_default_factory=True), "kind", None)
    return kind if isinstance(kind, str) else None


def list_fields(members: Iterable[SectionType], key: str) -> list[FieldInfo]:
    """Return the fields named `key` of these classes."""
    return [member.model_fields[key] for member in members if key in member.model_fields]


def find_default_kind(root: SectionType, keys: tuple[str, ...]) -> str | None:
    """Return the default kind of the union at a key path below `root`; None without a union or a default."""
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
    """Return the values with the default `kind:` added to every union that omits it."""
    if isinstance(values, list):
        return [fill_default_kinds(value, members) for value in values]
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
