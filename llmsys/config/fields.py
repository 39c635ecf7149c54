"""What the sections look like from outside: their fields, the members of their unions, default kinds.

The loader and the error messages walk YAML values and section classes side by side; this file is that walk. No values
are changed here except by `with_kinds`, which writes down the kind that a union has when none is given.
"""

import types
from collections.abc import Iterable
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

SectionType = type[BaseModel]


def sections(annotation: object) -> list[SectionType]:
    """The section classes a value with this annotation can be: one, the members of a union, or none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is Annotated:
        return sections(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType, tuple, list, dict):
        return [one for argument in get_args(annotation) for one in sections(argument)]
    return []


def kind_of(section: SectionType) -> str | None:
    """The tag of a union's member; None for a section outside unions."""
    field = section.model_fields.get("kind")
    return None if field is None else str(get_args(field.annotation)[0])


def with_kind(members: Iterable[SectionType], kind: object) -> list[SectionType]:
    """The members that carry this tag; all of them when none does."""
    every = list(members)
    return [member for member in every if kind_of(member) == kind] or every


def default_kind(field: FieldInfo) -> str | None:
    """The kind a union has when the YAML names none; None where it must be named."""
    if field.is_required():
        return None
    if field.default_factory_takes_validated_data:
        return None
    kind = getattr(field.get_default(call_default_factory=True), "kind", None)
    return kind if isinstance(kind, str) else None


def children(members: Iterable[SectionType], key: str) -> list[FieldInfo]:
    """The fields called `key` in any of these classes."""
    return [member.model_fields[key] for member in members if key in member.model_fields]


def default_kind_at(root: SectionType, keys: tuple[str, ...]) -> str | None:
    """The default kind of the union at a key path below `root`; None when there is no union or no default."""
    members, kind = [root], None
    for key in keys:
        if key.isdigit():
            kind = None
            continue
        found = children(members, key)
        members = [one for field in found for one in sections(field.annotation)]
        kind = next((default_kind(field) for field in found), None)
    return kind


def with_kinds(values: Any, members: list[SectionType], default: str | None = None) -> Any:
    """The values with `kind:` written into every union that leaves it to the default."""
    if isinstance(values, list):
        return [with_kinds(one, members) for one in values]
    if not isinstance(values, dict):
        return values
    if len(members) > 1 and "kind" not in values and default is not None:
        values = {"kind": default, **values}
    if len(members) > 1:
        members = with_kind(members, values.get("kind"))
    return {key: _child_with_kinds(value, children(members, key)) for key, value in values.items()}


def _child_with_kinds(value: Any, found: list[FieldInfo]) -> Any:
    if not found:
        return value
    return with_kinds(value, sections(found[0].annotation), default_kind(found[0]))
