"""Reference pages of every config field, from the sections of `RunConfig`.

Invariants:
- Every section class below `RunConfig` is described once, on the page of the first section that
  reaches it.
- A field's text is its `Field(description=…)`; a section's text is its docstring.
"""

import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from llmsys.config.run import RunConfig
from llmsys.config.section import get_default_kind, get_kind, list_section_types
from tools.docs.markdown import (
    format_anchor,
    format_code,
    format_docstring,
    format_table,
    format_text,
)

Section = type[BaseModel]
Key = tuple[str, ...]
FOLDER = "reference/config"
SYMBOLS = {
    annotated_types.Ge: "≥",
    annotated_types.Gt: ">",
    annotated_types.Le: "≤",
    annotated_types.Lt: "<",
}


class SectionReference:
    """Pages of sections: those below the given ones, the page of each, and links between them.

    Args:
        pages: the first sections of each page, with their key paths.
    """

    def __init__(self, pages: Mapping[str, Sequence[tuple[Section, Key]]]) -> None:
        self.pages: dict[str, list[tuple[Section, Key]]] = {name: [] for name in pages}
        self._places: dict[Section, str] = {}
        for name, sections in pages.items():
            for section, key in sections:
                self._collect(section, key, name)

    def _collect(self, section: Section, key: Key, page: str) -> None:
        """Note the section and those below it, depth first, with the first key path that reaches
        each.
        """
        if section in self._places:
            return
        self._places[section] = page
        self.pages[page].append((section, key))
        for name, field in section.model_fields.items():
            for child in list_section_types(field.annotation):
                self._collect(child, (*key, name), page)

    def format_link(self, section: Section, page: str) -> str:
        """Return a link from a page to a section: the kind of a union's member, else the class
        name.
        """
        title = f"`{get_kind(section) or section.__name__}`"
        place = self._places[section]
        return (
            f"[{title}]({'' if place == page else f'{place}.md'}#{format_anchor(section.__name__)})"
        )

    def format_sections(self, page: str) -> str:
        """Return the tables of all sections of a page."""
        return "\n\n".join(
            self._format_section(section, key, page) for section, key in self.pages[page]
        )

    def format_alternatives(self, field: FieldInfo, page: str) -> str:
        """Return links to the kinds of a union and its default; empty for a single section."""
        members = list_section_types(field.annotation)
        if len(members) < 2:
            return ""
        links = ", ".join(self.format_link(member, page) for member in members)
        default = get_default_kind(field)
        return f"`kind:` is one of {links}" + (f"; default `{default}`." if default else ".")

    def _format_section(self, section: Section, key: Key, page: str) -> str:
        path, kind = ".".join(key), get_kind(section)
        title = f"`{path or section.__name__}`" + (f" with `kind: {kind}`" if kind else "")
        rows = [
            self._format_field(name, field, page)
            for name, field in section.model_fields.items()
            if name != "kind"
        ]
        # sections of the manifest say in their docstring what their keys mean
        columns = 4 if any(row[3] for row in rows) else 3
        table = format_table(
            ("key", "type", "default", "meaning")[:columns], [row[:columns] for row in rows]
        )
        table = table if rows else "No further keys."
        heading = f"## {title} {{#{format_anchor(section.__name__)}}}"
        return f"{heading}\n\n{format_docstring(inspect.getdoc(section))}\n\n{table}"

    def _format_field(self, name: str, field: FieldInfo, page: str) -> Sequence[str]:
        limits = [
            f"{symbol} {getattr(entry, attribute)}"
            for entry in field.metadata
            for kind, symbol in SYMBOLS.items()
            for attribute in (kind.__name__.lower(),)
            if isinstance(entry, kind)
        ]
        kind = " ".join([self._format_type(field.annotation, page), *limits])
        return f"`{name}`", kind, format_default(field), format_text(field.description or "")

    def _format_type(self, annotation: Any, page: str) -> str:
        """Return a type as a reader of YAML sees it."""
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin is Annotated:
            return self._format_type(arguments[0], page)
        if origin is Literal:
            return ", ".join(format_code(value) for value in arguments)
        if origin in (Union, types.UnionType):
            return " or ".join(dict.fromkeys(self._format_type(one, page) for one in arguments))
        if origin in (tuple, list, frozenset):
            return f"list of {self._format_type(arguments[0], page)}"
        if origin is dict:
            return (
                f"{self._format_type(arguments[0], page)} → {self._format_type(arguments[1], page)}"
            )
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return (
                self.format_link(annotation, page)
                if annotation in self._places
                else format_code(annotation.__name__)
            )
        names = {
            type(None): "null",
            str: "text",
            int: "int",
            float: "float",
            bool: "bool",
            Any: "any",
        }
        return names.get(annotation) or getattr(annotation, "__name__", str(annotation)).lower()


def format_default(field: FieldInfo) -> str:
    """Return the default of a field as YAML writes it; empty sections and lists by what they
    are.
    """
    if field.is_required():
        return "required"
    if field.default_factory_takes_validated_data:
        return "depends on other keys"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        kind = getattr(value, "kind", None)
        return format_code(f"kind: {kind}") if kind else "its defaults"
    if isinstance(value, tuple | list | dict | frozenset):
        simple = all(isinstance(entry, int | float | str) for entry in value)
        if value and not simple:
            return f"{len(value)} entries"
        return format_code(
            "{}" if isinstance(value, dict) and not value else f"[{', '.join(map(str, value))}]"
        )
    words = {None: "null", True: "true", False: "false", "": '""'}
    return format_code(
        words[value] if value is None or isinstance(value, bool) or value == "" else value
    )


def iter_pages() -> Iterator[tuple[str, str]]:
    """Yield the path below docs/ and the text of each page."""
    fields = RunConfig.model_fields
    reference = SectionReference(
        {
            name: [(one, (name,)) for one in list_section_types(field.annotation)]
            for name, field in fields.items()
        }
    )
    rows = [
        (f"[`{name}`]({name}.md)", format_text(fields[name].description or ""), str(len(sections)))
        for name, sections in reference.pages.items()
    ]
    intro = (
        "# Config fields\n\nThe sections of a run's YAML file. A file needs only what differs "
        "from the defaults; `llmsys show CONFIG` prints all values, and `llmsys show --schema` a "
        "JSON schema for editors. Pages are generated from the code of `llmsys/config`.\n\n"
    )
    yield (
        f"{FOLDER}/index.md",
        intro + format_table(("section", "content", "kinds and subsections"), rows) + "\n",
    )
    for name in reference.pages:
        parts = [f"# {name}", format_text(fields[name].description or "")]
        parts += [
            reference.format_alternatives(fields[name], name),
            reference.format_sections(name),
        ]
        yield f"{FOLDER}/{name}.md", "\n\n".join(filter(None, parts)) + "\n"
