"""Convert a pydantic ValidationError to a ConfigError with one line per problem.

Each line has the origin, key, value, rule and next step.
"""

import difflib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from llmsys.config.merge import ConfigLayer
from llmsys.config.migration import find_new_key, find_new_value
from llmsys.config.scaling import ScalingLawConfig
from llmsys.config.section import SectionType, format_choices, get_kind, list_fields, list_section_types, select_by_kind
from llmsys.config.yaml_files import Keys
from llmsys.errors import ConfigError

_NOT_A = {
    "int_parsing": "is not a whole number",
    "int_type": "is not a whole number",
    "int_from_float": "is not a whole number",
    "float_parsing": "is not a number",
    "float_type": "is not a number",
    "bool_parsing": "is not true or false",
    "bool_type": "is not true or false",
    "string_type": "is not text. Put it in quotes",
    "tuple_type": "is not a list. Write [a, b]",
    "list_type": "is not a list. Write [a, b]",
    "path_type": "is not a path",
}


class _KeyLocation(NamedTuple):
    """A key path, the section classes that own its last key, and those that its value can be."""

    keys: Keys
    owners: list[SectionType]
    members: list[SectionType]


def build_config_error(error: ValidationError, root: SectionType, layer: ConfigLayer, source: str) -> ConfigError:
    """Return one ConfigError with all problems of a validation.

    Args:
        error: the error that pydantic raised.
        root: the validated section class.
        layer: merged values and the origin (file and line) of each key.
        source: name of the config, used for keys without an origin.

    Returns:
        The error, not raised. Duplicate lines are removed.
    """
    lines = []
    details = error.errors(include_url=False)
    for detail in details:
        if detail["type"] == "default_factory_not_called" and len(details) > 1:
            continue  # the default follows from another field, whose own problem is in the list
        location = _resolve_location(root, layer.values, detail["loc"])
        lines += [
            _format_line(keys, message, layer, source) for keys, message in _iter_messages(detail, location, root)
        ]
    lines = list(dict.fromkeys(lines))
    head = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return ConfigError("\n  ".join([f"{head} in {source}:", *lines]))


def _format_line(keys: Keys, message: str, layer: ConfigLayer, source: str) -> str:
    return f"{layer.find_origin(keys) or source}: {'.'.join(keys)}: {message}"


def _resolve_location(root: SectionType, values: Any, loc: tuple[int | str, ...]) -> _KeyLocation:
    """Return the config key of a pydantic location, without the union tags and validator names it adds."""
    keys: list[str] = []
    members = owners = [root]
    for element in loc:
        if isinstance(element, int):
            keys.append(str(element))
            values = values[element] if isinstance(values, list) and element < len(values) else None
        # pydantic adds the tag of a union to the location, and the file has no such key
        elif len(members) > 1 and any(get_kind(member) == element for member in members):
            members = select_by_kind(members, element)
        elif list_fields(members, element) or (isinstance(values, dict) and element in values):
            keys.append(element)
            owners = members
            values = values.get(element) if isinstance(values, dict) else None
            fields = list_fields(members, element)
            members = [section for field in fields for section in list_section_types(field.annotation)]
    return _KeyLocation(tuple(keys), owners, members)


def _iter_messages(detail: ErrorDetails, location: _KeyLocation, root: SectionType) -> Iterator[tuple[Keys, str]]:
    keys, owners, members = location
    context = detail.get("ctx", {})
    kind, value = detail["type"], detail["input"]
    if kind == "rules":
        for key, message in context["problems"]:
            yield (*keys, *filter(None, key.split("."))), message
    elif kind == "extra_forbidden":
        yield keys, _format_renamed_key(keys, root, value) or _format_unknown_key(keys, owners, root)
    elif kind == "missing":
        if not _has_old_name(keys, value):
            yield keys, f"is missing. {_get_field_description(keys, owners)}".strip()
    elif kind == "union_tag_not_found":
        yield (*keys, "kind"), f"is missing. Use {format_choices([get_kind(member) for member in members])}."
    elif kind == "union_tag_invalid":
        tags = re.findall(r"'([^']*)'", str(context["expected_tags"]))
        yield (*keys, "kind"), _format_illegal_value((*keys, "kind"), context["tag"], tags)
    elif kind == "literal_error":
        # pydantic lists the legal values only as text: 'a', 'b' or 3
        legal = re.findall(r"'([^']*)'|(\d+)", str(context["expected"]))
        words = [word or number for word, number in legal]
        yield keys, _format_illegal_value(keys, value, words)
    elif kind in ("model_type", "model_attributes_type", "dict_type"):
        yield keys, f"{_format_value(value)} is not a section. Write its keys under it, one per line."
    else:
        yield keys, _format_rule(detail, value, _get_field_description(keys, owners))


def _format_rule(detail: ErrorDetails, value: Any, description: str) -> str:
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if detail["type"] in _NOT_A:
        message = f"{_format_value(value)} {_NOT_A[detail['type']]}"
    elif message.startswith("Input "):
        message = f"{_format_value(value)} {message.removeprefix('Input ')}"
    return f"{message.rstrip('.')}. {description}".strip()


def _format_renamed_key(keys: Keys, root: SectionType, value: object) -> str | None:
    section = ("scale",) if root is ScalingLawConfig else ()
    new = find_new_key((*section, *keys))
    if new is None:
        return None
    now = find_new_value(new, value)
    return f"was renamed to {new.removeprefix('scale.')}{f', and {value} to {now}' if now else ''}."


def _has_old_name(keys: Keys, values: object) -> bool:
    """Return whether the mapping has the missing key under an old name, which is reported already."""
    return isinstance(values, dict) and any(find_new_key((*keys[:-1], str(key))) == ".".join(keys) for key in values)


def _format_illegal_value(keys: Keys, value: object, legal: list[str]) -> str:
    now = find_new_value(".".join(keys), value)
    if now is not None:
        return f"{value} was renamed to {now}."
    return f"{value!r} is not {format_choices(legal)}.{_format_suggestion(str(value), legal)}"


def _format_unknown_key(keys: Keys, owners: list[SectionType], root: SectionType) -> str:
    known = list(dict.fromkeys(name for owner in owners for name in owner.model_fields))
    close = difflib.get_close_matches(keys[-1], known, n=1)
    if close:
        return f"unknown key. Did you mean {close[0]}?"
    elsewhere = dict(_iter_key_matches(keys[-1], root))
    if len(keys) == 1 and not elsewhere:  # a section is missing in front, and the rest is misspelt
        close = difflib.get_close_matches(keys[0], _list_nested_names(root), n=1, cutoff=0.8)
        elsewhere = dict(_iter_key_matches(close[0], root)) if close else {}
    if ".".join(keys) in elsewhere:
        return f"unknown key here; it belongs to kind {elsewhere['.'.join(keys)]}. Set {keys[0]}.kind, or remove it."
    if elsewhere:
        return f"unknown key. Did you mean {' or '.join(list(elsewhere)[:2])}?"
    return f"unknown key. Known here: {', '.join(known)}."


def _iter_key_matches(key: str, root: SectionType) -> Iterator[tuple[str, str | None]]:
    for name, field in root.model_fields.items():
        for section in list_section_types(field.annotation):
            if key in section.model_fields and key != "kind":
                yield f"{name}.{key}", get_kind(section)


def _list_nested_names(root: SectionType) -> list[str]:
    below = (section for field in root.model_fields.values() for section in list_section_types(field.annotation))
    return [name for section in below for name in section.model_fields]


def _format_suggestion(value: str, words: list[str]) -> str:
    close = difflib.get_close_matches(value, words, n=1)
    return f" Did you mean {close[0]}?" if close else ""


def _get_field_description(keys: Keys, owners: list[SectionType]) -> str:
    field = next((field for key in keys[-1:] for field in list_fields(owners, key)), None)
    return field.description or "" if field else ""


def _format_value(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
