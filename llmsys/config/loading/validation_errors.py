"""Convert a pydantic ValidationError to a ConfigError with one line per problem.

Each line has the origin, key, value, rule and next step.
"""

import difflib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from llmsys.config.loading.common_names import (
    COMMON_KEYS,
    COMMON_SWITCHES,
    NEEDLESS_KEYS,
    OTHER_UNITS,
    suggest_amount,
    suggest_value,
)
from llmsys.config.loading.merge import ConfigLayer
from llmsys.config.loading.yaml_files import Keys, format_inline
from llmsys.config.section import (
    SectionType,
    get_kind,
    list_fields,
    list_section_types,
    select_by_kind,
)
from llmsys.errors import ConfigError, Violation, format_choices

_NOT_A = {
    "int_parsing": "is not a whole number",
    "int_type": "is not a whole number",
    "int_from_float": "is not a whole number",
    "float_parsing": "is not a number",
    "float_type": "is not a number",
    "bool_parsing": "is not true or false",
    "bool_type": "is not true or false",
    "string_type": "is not text",
    "tuple_type": "is not a list",
    "list_type": "is not a list",
    "path_type": "is not a path",
}
_LIMITS = {
    "greater_than_equal": ("ge", "is too small: the minimum is {0}. Use {0} or more"),
    "greater_than": ("gt", "is too small: it must be above {0}. Use a number above {0}"),
    "less_than_equal": ("le", "is too large: the maximum is {0}. Use {0} or less"),
    "less_than": ("lt", "is too large: it must be below {0}. Use a number below {0}"),
}


class _KeyLocation(NamedTuple):
    """A key path, the section classes that own its last key, and those that its value can be."""

    keys: Keys
    owners: list[SectionType]
    members: list[SectionType]


def build_config_error(
    error: ValidationError, root: SectionType, layer: ConfigLayer, source: str
) -> ConfigError:
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
        if detail["type"] == "too_short" and any(
            one["loc"][: len(detail["loc"])] == detail["loc"]
            for one in details
            if one is not detail
        ):
            continue  # pydantic counts the entries that are legal
        location = _resolve_location(root, layer.values, detail["loc"])
        lines += [
            _format_line(keys, message, layer, source)
            for keys, message in _iter_messages(detail, location, root)
        ]
    lines = list(dict.fromkeys(lines))
    head = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return ConfigError("\n  ".join([f"{head} in {source}:", *lines]))


def build_violation_error(problem: Violation, layer: ConfigLayer, source: str) -> ConfigError:
    """Return the error of a rule that is checked after validation.

    Args:
        problem: the dotted key, and the message.
        layer: merged values and the origin of each key.
        source: name of the config, used for keys without an origin.

    Returns:
        The error, not raised.
    """
    line = _format_line(tuple(problem.key.split(".")), problem.message, layer, source)
    return ConfigError(f"1 problem in {source}:\n  {line}")


def _format_line(keys: Keys, message: str, layer: ConfigLayer, source: str) -> str:
    return f"{layer.find_origin(keys) or source}: {'.'.join(keys)}: {message}"


def _resolve_location(root: SectionType, values: Any, loc: tuple[int | str, ...]) -> _KeyLocation:
    """Return the config key of a pydantic location, without the union tags and validator names
    it adds.
    """
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
            members = [
                section for field in fields for section in list_section_types(field.annotation)
            ]
    return _KeyLocation(tuple(keys), owners, members)


def _iter_messages(
    detail: ErrorDetails, location: _KeyLocation, root: SectionType
) -> Iterator[tuple[Keys, str]]:
    keys, owners, members = location
    context = detail.get("ctx", {})
    kind, value = detail["type"], detail["input"]
    if kind == "rules":
        for key, message in context["problems"]:
            yield (*keys, *filter(None, key.split("."))), message
    elif kind == "extra_forbidden":
        yield keys, _format_unknown_key(keys, owners, root)
    elif kind == "missing":
        yield keys, _format_missing(keys, _get_field_description(keys, owners))
    elif kind == "union_tag_not_found":
        yield (
            (*keys, "kind"),
            f"is missing. Use {format_choices([get_kind(member) for member in members])}.",
        )
    elif kind == "union_tag_invalid" and isinstance(value, str | int | float):
        yield keys, _format_not_section(keys, value, members)
    elif kind == "union_tag_invalid":
        tags = re.findall(r"'([^']*)'", str(context["expected_tags"]))
        yield (*keys, "kind"), _format_illegal_value((*keys, "kind"), context["tag"], tags)
    elif kind == "literal_error":
        # pydantic lists the legal values only as text: 'a', 'b' or 3
        legal = re.findall(r"'([^']*)'|(\d+)", str(context["expected"]))
        words = [word or number for word, number in legal]
        yield keys, _format_illegal_value(keys, value, words)
    elif kind in ("model_type", "model_attributes_type", "dict_type"):
        yield keys, _format_not_section(keys, value, members)
    else:
        yield keys, _format_rule(detail, keys, _get_field_description(keys, owners))


def _format_missing(keys: Keys, description: str) -> str:
    """Return the message of a key, or of an entry of a list of a fixed length, that is not
    given.
    """
    if keys[-1].isdigit():
        return f"is missing. Give {int(keys[-1]) + 1} or more values, as [a, b]."
    return " ".join(filter(None, ["is missing.", description, f"Give {'.'.join(keys)}=…"]))


def _format_not_section(keys: Keys, value: object, members: list[SectionType]) -> str:
    """Return the message of a value where a section is needed, with the section that it probably
    means.
    """
    here, text = ".".join(keys), str(value)
    head = f"{_format_value(value)} is not a section."
    kinds = [kind for member in members if (kind := get_kind(member))]
    names = list(dict.fromkeys(name for member in members for name in member.model_fields))
    if len(kinds) > 1:
        meant = suggest_value(f"{here}.kind", text, kinds)
        others = "" if meant else f" (or {format_choices(kinds[1:])})"
        return f"{head} Use {here}.kind={meant or kinds[0]}{others}."
    if "hidden_size" in names:
        return (
            f"{head} Use {here}.base={text if '/' in text else f'model/{text}'}, or its keys: "
            f"{', '.join(names[:4])}, …"
        )
    if "entries" in names and isinstance(value, str):
        return f"{head} Use {{entries: [{text}]}}, or {{files: [FILE]}} with one entry per line."
    first = next(name for name in names if name != "kind")
    if value in ("none", "None", "false", "off"):
        return f"{head} Use {here}=null where it can be left out, or its keys: {', '.join(names)}."
    return f"{head} Use its keys, such as {here}.{first}=…; known: {', '.join(names)}."


def _format_rule(detail: ErrorDetails, keys: Keys, description: str) -> str:
    value = detail["input"]
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in _LIMITS:
        name, text = _LIMITS[kind]
        message = f"{_format_value(value)} {text.format(f'{context[name]:g}')}"
    elif kind in _NOT_A:
        message = f"{_format_value(value)} {_NOT_A[kind]}. {_suggest_type(kind, keys, value)}"
    elif kind == "int_parsing_size":
        message = (
            f"{_format_value(value)} is too large for a whole number: the maximum has 18 digits. "
            "Use less"
        )
    elif kind == "finite_number":
        message = f"{_format_value(value)} should be a finite number. Use one, such as 0.1"
    elif kind == "too_short":
        message = (
            f"{_format_value(value)} has too few entries. Give at least {context['min_length']}"
        )
    elif kind == "too_long":
        message = (
            f"{_format_value(value)} has too many entries. Give at most {context['max_length']}"
        )
    elif kind == "string_pattern_mismatch":
        message = (
            f"{_format_value(value)} does not match {context['pattern']}. Use letters of that "
            "pattern"
        )
    elif kind == "string_too_short":
        message = (
            f"{_format_value(value)} is too short. Give at least {context['min_length']} characters"
        )
    elif message.startswith(("Input ", "String ", "Tuple ", "List ")):
        message = f"{_format_value(value)} {message.partition(' ')[2]}"
    return f"{message.rstrip('.')}. {description}".strip()


def _suggest_type(kind: str, keys: Keys, value: object) -> str:
    """Return the value in the type that is needed, where it can be one."""
    if kind in ("tuple_type", "list_type"):
        if isinstance(value, str) and value.startswith("(") and value.endswith(")"):
            return f"Use [{value[1:-1]}]"
        return f"Use [{'' if value in (None, 'none', False) else format_inline(value)}]"
    if kind == "string_type":
        return "Give a text" if value is None else f'Use "{value}"'
    if kind.startswith("bool"):
        return "Use true or false"
    if kind == "int_from_float" and isinstance(value, float) and abs(value) >= 1:
        return f"Use {round(value)}"
    if kind.startswith(("int", "float")):
        amount = suggest_amount(keys[-1], value, kind.startswith("int"))
        return f"Use {amount or 'digits, such as 8 or 1_000'}"
    return "Give a path"


def _format_illegal_value(keys: Keys, value: object, legal: list[str]) -> str:
    meant = suggest_value(".".join(keys), str(value), legal)
    return (
        f"{value!r} is not "
        f"{format_choices(legal)}.{f' Did you mean {meant}?' if meant else ' Use one of these.'}"
    )


def _format_unknown_key(keys: Keys, owners: list[SectionType], root: SectionType) -> str:
    known = list(dict.fromkeys(name for owner in owners for name in owner.model_fields))
    elsewhere = dict(_iter_key_matches(keys[-1], root))
    if kind := elsewhere.get(".".join(keys)):
        return (
            f"unknown key here; it belongs to kind {kind}. Set {keys[0]}.kind={kind}, or remove it."
        )
    # `scale` and profiles of devices have sections of their own
    if "train" in root.model_fields and (meant := _find_common_name(keys)):
        return meant
    close = difflib.get_close_matches(keys[-1], known, n=1)
    if close:
        return f"unknown key. Did you mean {close[0]}?"
    if len(keys) == 1 and not elsewhere:  # a section is missing in front, and the rest is misspelt
        close = difflib.get_close_matches(keys[0], _list_nested_names(root), n=1, cutoff=0.8)
        elsewhere = dict(_iter_key_matches(close[0], root)) if close else {}
    if elsewhere:
        return f"unknown key. Did you mean {' or '.join(list(elsewhere)[:2])}?"
    return f"unknown key. Known here: {', '.join(known)}."


def _find_common_name(keys: Keys) -> str | None:
    """Return the message about a key that another trainer has."""
    dotted, last = ".".join(keys), keys[-1]
    if reason := NEEDLESS_KEYS.get(dotted) or NEEDLESS_KEYS.get(last):
        return f"unknown key; it {reason}."
    if common := COMMON_KEYS.get(".".join(keys[-2:])) or COMMON_KEYS.get(last):
        unit = OTHER_UNITS.get(last)
        return f"unknown key. Did you mean {common}?{f' {unit}' if unit else ''}"
    if switch := COMMON_SWITCHES.get(last):
        return f"unknown key. Did you mean {switch}?"
    return None


def find_config_key(name: str, root: SectionType) -> str | None:
    """Return the dotted key that an option such as --batch.sequences or --temperature probably
    means.

    Args:
        name: option without its dashes.
        root: section class of the whole config.

    Returns:
        The key; None where no key has that name.
    """
    matches = list(dict(_iter_key_matches(name.rpartition(".")[2], root)))
    same = [key for key in matches if key.endswith(name)]
    return COMMON_KEYS.get(name) or next(iter([*same, *matches]), None)


def _iter_key_matches(key: str, root: SectionType) -> Iterator[tuple[str, str | None]]:
    for name, field in root.model_fields.items():
        for section in list_section_types(field.annotation):
            if key in section.model_fields and key != "kind":
                yield f"{name}.{key}", get_kind(section)


def _list_nested_names(root: SectionType) -> list[str]:
    below = (
        section
        for field in root.model_fields.values()
        for section in list_section_types(field.annotation)
    )
    return [name for section in below for name in section.model_fields]


def _get_field_description(keys: Keys, owners: list[SectionType]) -> str:
    field = next((field for key in keys[-1:] for field in list_fields(owners, key)), None)
    return field.description or "" if field else ""


def _format_value(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
