"""Format a resolved config as YAML, with a mark on each value that is not its default.

Invariants:
- The text loads back to an equal config.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from llmsys.config.loading.yaml_files import Keys, dump_yaml, format_inline

_UNSET: Any = object()


class _DefaultKind(NamedTuple):
    """A default section of which only the kind applies."""

    kind: Any


class ConfigDifference(NamedTuple):
    """One value that is not its default; `default` is None where there is none."""

    key: str
    value: Any
    default: Any
    origin: str


def format_yaml(config: BaseModel) -> str:
    """Return the YAML of a config with all defaults, as stored in a run folder."""
    return dump_yaml(config.model_dump(mode="json"))


def format_annotated_yaml(config: BaseModel, origins: Mapping[Keys, str]) -> str:
    """Return the YAML of a config with a comment on each line that differs from its default.

    Args:
        config: a validated config.
        origins: file and line, or command line, by key path.

    Returns:
        YAML text; a comment names the default and the origin of the value.
    """
    return "\n".join(_iter_lines(config, _UNSET, (), origins)) + "\n"


def find_differences(config: BaseModel, origins: Mapping[Keys, str]) -> list[ConfigDifference]:
    """Return the values that differ from their defaults.

    Args:
        config: a validated config.
        origins: file and line, or command line, by key path.

    Returns:
        Differences in the order of the fields.
    """
    differences = []
    for keys, value, default in _iter_leaves(config, _UNSET, ()):
        if default is _UNSET or value != default:
            plain = None if default is _UNSET else default
            differences.append(
                ConfigDifference(".".join(keys), value, plain, _format_origin(keys, origins))
            )
    return differences


def _iter_leaves(section: BaseModel, default: Any, keys: Keys) -> Iterator[tuple[Keys, Any, Any]]:
    plain = section.model_dump(mode="json")
    for name, value, standard in _iter_fields(section, default):
        if isinstance(value, BaseModel):
            yield from _iter_leaves(value, standard, (*keys, name))
        elif name in plain:  # a field may leave itself out
            yield (*keys, name), plain[name], _to_json_value(standard)


def _iter_lines(
    section: BaseModel, default: Any, keys: Keys, origins: Mapping[Keys, str]
) -> Iterator[str]:
    plain = section.model_dump(mode="json")
    indent = "  " * len(keys)
    for name, value, standard in _iter_fields(section, default):
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _iter_lines(value, standard, (*keys, name), origins)
            continue
        if name not in plain:
            continue
        mark = _format_mark(plain[name], _to_json_value(standard), (*keys, name), origins)
        yield from _iter_value_lines(name, plain[name], indent, mark)


def _iter_fields(section: BaseModel, default: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value, default) of every field."""
    if section == default:
        yield from (
            (name, getattr(section, name), getattr(section, name))
            for name in type(section).model_fields
        )
        return
    fields = type(section).model_fields
    if any(field.is_required() for field in fields.values()):
        # values of one model are no defaults of another
        default = _DefaultKind(getattr(default, "kind", _UNSET))
    for name, field in fields.items():
        yield name, getattr(section, name), _get_default(field, section, name, default)


def _iter_value_lines(name: str, value: Any, indent: str, mark: str) -> Iterator[str]:
    nested = (
        bool(value)
        and isinstance(value, list)
        and any(isinstance(entry, dict | list) for entry in value)
    )
    if not nested:
        yield f"{indent}{name}: {format_inline(value)}{mark}"
        return
    yield f"{indent}{name}:{mark}"
    for line in dump_yaml(value).splitlines():
        yield f"{indent}  {line}"


def _format_mark(value: Any, default: Any, keys: Keys, origins: Mapping[Keys, str]) -> str:
    if default is not _UNSET and value == default:
        return ""
    standard = "" if default is _UNSET else f"default {_format_truncated(default)}; "
    return f"  # {standard}{_format_origin(keys, origins)}"


def _get_default(field: FieldInfo, section: BaseModel, name: str, parent: Any) -> Any:
    """Return the default of a field, or _UNSET when it is required."""
    if name == "kind" or type(parent) is type(section):
        return getattr(parent, name, field.default)
    if field.is_required():
        return _UNSET
    if field.default_factory_takes_validated_data:
        return _UNSET if name in section.model_fields_set else getattr(section, name)
    return field.get_default(call_default_factory=True)


def _to_json_value(default: Any) -> Any:
    if default is _UNSET or default is None or isinstance(default, bool | int | float | str):
        return default
    if isinstance(default, tuple | list):
        return [_to_json_value(entry) for entry in default]
    if isinstance(default, dict):
        return {key: _to_json_value(value) for key, value in default.items()}
    return default.model_dump(mode="json") if isinstance(default, BaseModel) else str(default)


def _format_origin(keys: Keys, origins: Mapping[Keys, str]) -> str:
    for length in range(len(keys), 0, -1):
        if keys[:length] in origins:
            return f"from {origins[keys[:length]]}"
    return "follows from other values"


def _format_truncated(value: Any) -> str:
    text = format_inline(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
