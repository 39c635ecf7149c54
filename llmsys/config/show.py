"""A resolved config as text: YAML that loads back to the same config, with what differs from the defaults marked."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from llmsys.config.yaml_text import Keys, dump, inline

_UNSET: Any = object()


class _Kind(NamedTuple):
    """What is left of a default section whose other values do not apply."""

    kind: Any


class Difference(NamedTuple):
    """One value that is not its default; `default` is None where there is none."""

    key: str
    value: Any
    default: Any
    origin: str


def as_yaml(config: BaseModel) -> str:
    """Plain YAML of the whole config, every default written out; what a run folder keeps."""
    return dump(config.model_dump(mode="json"))


def as_marked_yaml(config: BaseModel, origins: Mapping[Keys, str]) -> str:
    """The same with a comment on every line that differs from its default: the default, and where it was changed."""
    return "\n".join(_lines(config, _UNSET, (), origins)) + "\n"


def differences(config: BaseModel, origins: Mapping[Keys, str]) -> list[Difference]:
    """Every value that differs from its default."""
    found = []
    for keys, value, default in _leaves(config, _UNSET, ()):
        if default is _UNSET or value != default:
            plain = None if default is _UNSET else default
            found.append(Difference(".".join(keys), value, plain, _origin(keys, origins)))
    return found


def _leaves(section: BaseModel, default: Any, keys: Keys) -> Iterator[tuple[Keys, Any, Any]]:
    plain = section.model_dump(mode="json")
    for name, value, standard in _fields(section, default):
        if isinstance(value, BaseModel):
            yield from _leaves(value, standard, (*keys, name))
        else:
            yield (*keys, name), plain[name], _plain(standard)


def _lines(section: BaseModel, default: Any, keys: Keys, origins: Mapping[Keys, str]) -> Iterator[str]:
    plain = section.model_dump(mode="json")
    indent = "  " * len(keys)
    for name, value, standard in _fields(section, default):
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _lines(value, standard, (*keys, name), origins)
            continue
        mark = _mark(plain[name], _plain(standard), (*keys, name), origins)
        yield from _value_lines(name, plain[name], indent, mark)


def _fields(section: BaseModel, default: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, value, default) of every field."""
    if section == default:
        yield from ((name, getattr(section, name), getattr(section, name)) for name in type(section).model_fields)
        return
    fields = type(section).model_fields
    if any(field.is_required() for field in fields.values()):
        default = _Kind(getattr(default, "kind", _UNSET))  # values of one model say nothing about another
    for name, field in fields.items():
        yield name, getattr(section, name), _default(field, section, name, default)


def _value_lines(name: str, value: Any, indent: str, mark: str) -> Iterator[str]:
    nested = bool(value) and isinstance(value, list) and any(isinstance(one, dict | list) for one in value)
    if not nested:
        yield f"{indent}{name}: {inline(value)}{mark}"
        return
    yield f"{indent}{name}:{mark}"
    for line in dump(value).splitlines():
        yield f"{indent}  {line}"


def _mark(value: Any, default: Any, keys: Keys, origins: Mapping[Keys, str]) -> str:
    if default is not _UNSET and value == default:
        return ""
    standard = "" if default is _UNSET else f"default {_short(default)}; "
    return f"  # {standard}{_origin(keys, origins)}"


def _default(field: FieldInfo, section: BaseModel, name: str, parent: Any) -> Any:
    """The value this field would have if nobody had set it; _UNSET when it must be set."""
    if name == "kind" or type(parent) is type(section):
        return getattr(parent, name, field.default)
    if field.is_required():
        return _UNSET
    if field.default_factory_takes_validated_data:
        return _UNSET if name in section.model_fields_set else getattr(section, name)
    return field.get_default(call_default_factory=True)


def _plain(default: Any) -> Any:
    if default is _UNSET or default is None or isinstance(default, bool | int | float | str):
        return default
    if isinstance(default, tuple | list):
        return [_plain(one) for one in default]
    if isinstance(default, dict):
        return {key: _plain(value) for key, value in default.items()}
    return default.model_dump(mode="json") if isinstance(default, BaseModel) else str(default)


def _origin(keys: Keys, origins: Mapping[Keys, str]) -> str:
    for length in range(len(keys), 0, -1):
        if keys[:length] in origins:
            return f"from {origins[keys[:length]]}"
    return "follows from other values"


def _short(value: Any) -> str:
    text = inline(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
