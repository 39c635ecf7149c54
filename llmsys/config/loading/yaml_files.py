"""Parse YAML to plain values with line numbers, and write values as YAML.

Differences from the defaults of PyYAML:
- `3e-4`, `1_000_000` and `1e9` are numbers.
- Only true and false are booleans; `no` is text (the language code of Norwegian), as are dates and
  times.
- A duplicate key is an error; every error is a ConfigError with file and line.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer

from llmsys.errors import ConfigError

Keys = tuple[str, ...]


def format_path(path: Path) -> str:
    """Return a path for messages.

    Args:
        path: any path.

    Returns:
        The path relative to the working directory if it is below it, otherwise the path itself.
    """
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


_SCALARS = (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?",
        "-+0123456789.",
    ),
    ("float", r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
)


# Largest nesting depth of a document; real configs have fewer than ten levels.
MAX_DEPTH = 64
# Most values that aliases may repeat; nine nested lines of nine aliases expand to 9^9 values.
MAX_ALIASED_VALUES = 1_000


class _BoundedComposer(Composer):
    """Composer with a depth limit."""

    name_shown = ""
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            line = self.peek_event().start_mark.line + 1  # type: ignore[attr-defined]
            raise ConfigError(
                f"{self.name_shown}:{line}: the limit is {MAX_DEPTH} levels of nesting, more than "
                "any section has. Write keys and lists as `llmsys show --schema` describes them."
            )
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _YamlLoader(_BoundedComposer, yaml.SafeLoader):
    """SafeLoader with the scalars above and a depth limit."""


# A build of PyYAML without libyaml has its parser in Python alone.
_EventLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _LibraryLoader(_BoundedComposer, _EventLoader):  # type: ignore[misc]
    """The same nodes from the events of libyaml: 80 language profiles take 60 ms instead of 250.

    Only its results are used. What it rejects is read again by the parser in Python, whose messages
    have more detail.
    """

    def __init__(self, text: str) -> None:
        _EventLoader.__init__(self, text)
        Composer.__init__(self)


# Characters on which the two parsers disagree; `, "?"` in a list is text for both. Surrogates are
# bytes of a name that are no UTF-8, which libyaml cannot be given.
_READ_DIFFERENTLY = re.compile(
    r'[\t\r\x85\u2028\u2029\ufeff\ud800-\udfff]|(?<!, ")(?<!\[")[?]|[?](?!")'
)


class _YamlDumper(yaml.SafeDumper):
    """SafeDumper that quotes every text that `_YamlLoader` would read as another type."""


# PyYAML's own read `no` as false and dates as dates
_YamlLoader.yaml_implicit_resolvers = {}
_LibraryLoader.yaml_implicit_resolvers = {}
_YamlDumper.yaml_implicit_resolvers = {}


def _parse_number(text: str, kind: type[int] | type[float]) -> int | float:
    return kind(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan").lower())


for _tag, _pattern, _first in _SCALARS:
    _expression = re.compile(rf"^(?:{_pattern})$")
    _initials = ["" if letter == "\0" else letter for letter in _first]
    for _kind in (_YamlLoader, _LibraryLoader, _YamlDumper):
        _kind.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _expression, _initials)
for _loader in (_YamlLoader, _LibraryLoader):
    _loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: _parse_number(node.value, int))
    _loader.add_constructor(
        "tag:yaml.org,2002:float", lambda _, node: _parse_number(node.value.lower(), float)
    )


def parse_yaml(text: str, name: str) -> tuple[Any, dict[Keys, int]]:
    """Parse one YAML document.

    Args:
        text: the document.
        name: name of the text in error messages.

    Returns:
        The value (None for an empty document), and the line of every key path, counted from 1.

    Raises:
        ConfigError: the text is not legal YAML, or exceeds a limit of this module.
    """
    # Its own errors, such as ConfigError for a key that is given twice, are the same ones.
    if not _READ_DIFFERENTLY.search(text):
        with suppress(yaml.YAMLError):
            return _convert_document(_LibraryLoader(text), name)
    try:
        reader = _YamlLoader(text)
    except yaml.reader.ReaderError as error:
        raise ConfigError(
            f"{name}: character {error.position + 1} is {chr(error.character)!a}, which YAML does "
            "not allow. In a file name write ? as a pattern instead, or name the file in a list: "
            "'data.inputs=[\"@files.txt\"]'."
        ) from None
    try:
        return _convert_document(reader, name)
    except yaml.YAMLError as error:
        raise ConfigError(_format_yaml_error(error, text, name)) from None


def _convert_document(
    reader: "_YamlLoader | _LibraryLoader", name: str
) -> tuple[Any, dict[Keys, int]]:
    """Return the value of the one document of a reader, and the line of every key path."""
    reader.name_shown = name
    try:
        node = reader.get_single_node()
        lines: dict[Keys, int] = {}
        value = (
            None
            if node is None
            else _YamlConverter(reader, name, lines).convert_node(node, (), frozenset())
        )
    except ValueError as error:
        # Python refuses to parse integers of more than 4,300 digits
        if "digits" not in str(error):
            raise
        raise ConfigError(
            f"{name}: a number has more digits than the limit ({sys.get_int_max_str_digits():,}). "
            "Write a smaller number, or quote it if it is text."
        ) from None
    finally:
        reader.dispose()
    return value, lines


def dump_yaml(value: object) -> str:
    """Return YAML text that `parse_yaml` parses to the same value.

    Args:
        value: mappings, lists and scalars.

    Returns:
        The text in block style, with keys in their order.
    """
    return str(yaml.dump(value, Dumper=_YamlDumper, sort_keys=False, allow_unicode=True, width=110))


def format_inline(value: object) -> str:
    """Return YAML on one line, for a scalar or a short list."""
    text = yaml.dump(
        value,
        Dumper=_YamlDumper,
        sort_keys=False,
        allow_unicode=True,
        width=2**20,
        default_flow_style=True,
    )
    return str(text).removesuffix("\n").removesuffix("\n...")


class _YamlConverter:
    """Converter of the nodes of one document; plain values have no lines and no duplicate keys."""

    def __init__(
        self, reader: _YamlLoader | _LibraryLoader, name: str, lines: dict[Keys, int]
    ) -> None:
        self.reader, self.name, self.lines = reader, name, lines
        self._seen: set[int] = set()
        self._aliased = 0

    def convert_node(self, node: yaml.Node, keys: Keys, open_nodes: frozenset[int]) -> Any:
        self.lines.setdefault(keys, node.start_mark.line + 1)
        if id(node) in open_nodes:
            raise ConfigError(
                f"{self.name}:{node.start_mark.line + 1}: this alias contains itself. Write it out."
            )
        self._count(node)
        inside = open_nodes | {id(node)}
        if isinstance(node, yaml.MappingNode):
            return {
                key: self.convert_node(child, (*keys, key), inside)
                for key, child in self._iter_pairs(node, keys)
            }
        if isinstance(node, yaml.SequenceNode):
            return [
                self.convert_node(child, (*keys, str(i)), inside)
                for i, child in enumerate(node.value)
            ]
        return self.reader.construct_object(node)

    def _count(self, node: yaml.Node) -> None:
        """Raise ConfigError if aliases repeat more than MAX_ALIASED_VALUES values."""
        if id(node) not in self._seen:
            self._seen.add(id(node))
            return
        self._aliased += 1
        if self._aliased > MAX_ALIASED_VALUES:
            raise ConfigError(
                f"{self.name}:{node.start_mark.line + 1}: aliases repeat more than "
                f"{MAX_ALIASED_VALUES:,} values. Write them out, or inherit a file with `base:`."
            )

    def _iter_pairs(self, node: yaml.MappingNode, keys: Keys) -> Iterator[tuple[str, yaml.Node]]:
        seen: dict[str, int] = {}
        for key_node, child in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if not key or key == "<<":
                raise ConfigError(
                    f"{self.name}:{line}: {key or 'this key'!r} is not a name. Inherit with "
                    "`base:`."
                )
            if key in seen:
                path = ".".join((*keys, key))
                raise ConfigError(
                    f"{self.name}:{line}: {path} is given twice (first on line {seen[key]}). Keep "
                    "one of them."
                )
            seen[key] = line
            self.lines[(*keys, key)] = line
            yield key, child


def _format_yaml_error(error: yaml.YAMLError, text: str, name: str) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"{name}: not YAML: {str(error).splitlines()[0]}"
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return (
            f"{name}:{mark.line + 1}: this line is indented with a tab, but YAML allows only "
            "spaces. Use two spaces per level."
        )
    problem = getattr(error, "problem", None) or str(error)
    is_mark = any(mark in problem for mark in ("'@'", "'`'", "'%'"))
    fix = (
        'Put the value in quotes: ["@files.txt"]'
        if is_mark
        else "Close every bracket and quote; write key: value"
    )
    return (
        f"{name}:{mark.line + 1}: not YAML: {problem}. The line reads {line.strip()[:200]!r}. "
        f"{fix}."
    )
