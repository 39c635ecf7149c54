"""Runs of text as one plain text: paragraphs, lists, tables and code, each in the shape that readers know.

Reads a `HtmlTree` and the runs to keep, gives text. Blocks stand apart by one blank line; items of a list follow each
other line by line behind `- `, indented by how deep they are nested; the cells of a table's row stand on one line
between ` | `; code keeps its lines and its indentation. The order is that of the page.
"""

from collections import Counter
from typing import NamedTuple

from data_pipeline.extract.html_tree import HtmlTree

_LISTS = frozenset(("ul", "ol", "menu", "dir"))
_PLACES = _LISTS | {"dl", "li", "table", "tr", "pre", "td", "th"}
_DEEPEST = 8  # levels of indentation; what is nested deeper is indented no further
_LONGEST_CELL = 500  # characters; a table with a longer cell lays out a page, and its cells are paragraphs


class _BlockContext(NamedTuple):
    """What an element stands in: elements by their numbers, 0 is none."""

    level: int = 0  # lists around it
    outer_list: int = 0
    item: int = 0
    table: int = 0
    row: int = 0
    cell: int = 0  # which cell of the row, from 1
    code: int = 0


def render_text(tree: HtmlTree, kept: list[int]) -> str:
    """Join the runs that stay."""
    places = _compute_contexts(tree, kept)
    layout = _find_layout_tables(tree, kept, places)
    pieces: list[str] = []
    before = _BlockContext()
    for run in kept:
        place = places[tree.owner[run]]
        if place.table in layout:
            place = place._replace(table=0, row=0, cell=0)
        text = tree.text[run].removesuffix("¶")  # the mark of a link to a heading
        if pieces:
            pieces.append(_choose_separator(before, place))
        if place.row and place.row != before.row:
            pieces.append("| " * (place.cell - 1))
        elif place.item and not place.code and not place.row:
            text = _format_list_item(text, place.level, place.item != before.item)
        pieces.append(text)
        before = place
    return _unescape_entities("".join(pieces))


def _compute_contexts(tree: HtmlTree, kept: list[int]) -> dict[int, _BlockContext]:
    """The place of each element that holds runs that stay, from that of its parent."""
    wanted = {0}
    for run in kept:
        element = tree.owner[run]
        while element not in wanted:
            wanted.add(element)
            element = tree.parent[element]
    cells = _number_cells(tree, wanted)
    places = {0: _BlockContext()}
    for element in sorted(wanted)[1:]:
        around = places[tree.parent[element]]
        places[element] = (
            _derive_context(tree.tag[element], element, around, cells) if tree.tag[element] in _PLACES else around
        )
    return places


def _derive_context(tag: str, element: int, around: _BlockContext, cells: dict[int, int]) -> _BlockContext:
    """The place inside an element that shapes text."""
    if tag in _LISTS:
        return around._replace(level=around.level + 1, outer_list=around.outer_list or element)
    if tag == "dl":
        return around._replace(outer_list=around.outer_list or element)
    if tag == "li":
        return around._replace(level=max(1, around.level), item=element)
    if tag == "table":
        return around._replace(table=element, row=0, cell=0)
    if tag == "tr":
        return around._replace(row=element, cell=0)
    if tag == "pre":
        return around._replace(code=around.code or element)
    return around._replace(cell=cells[element])


def _number_cells(tree: HtmlTree, wanted: set[int]) -> dict[int, int]:
    """For each cell of a table, which one of its row it is, from 1; empty ones count."""
    cells: dict[int, int] = {}
    if not any(tree.tag[element] == "tr" for element in wanted):
        return dict.fromkeys(wanted, 1)
    counts: Counter[int] = Counter()
    for element, tag in enumerate(tree.tag):
        if tag in ("td", "th"):
            counts[tree.parent[element]] += 1
            cells[element] = counts[tree.parent[element]]
    return cells


def _find_layout_tables(tree: HtmlTree, kept: list[int], places: dict[int, _BlockContext]) -> set[int]:
    """Tables with a cell of several blocks or of much text, and those that hold code: their cells are no table."""
    layout: set[int] = set()
    last = (0, 0)
    for run in kept:
        place = places[tree.owner[run]]
        cell = (place.row, place.cell)
        if place.table and (place.code or (place.cell and cell == last) or len(tree.text[run]) > _LONGEST_CELL):
            layout.add(place.table)
        last = cell
    return layout


def _choose_separator(before: _BlockContext, place: _BlockContext) -> str:
    """What stands between two runs that follow each other."""
    if place.row and place.row == before.row:
        return " | " * max(1, place.cell - before.cell)
    near = (
        (place.code and place.code == before.code)
        or (place.table and place.table == before.table)
        or (place.outer_list and place.outer_list == before.outer_list)
    )
    return "\n" if near else "\n\n"


def _format_list_item(text: str, level: int, first: bool) -> str:
    """A paragraph of a list's item, behind a mark if it is the first."""
    indent = "  " * (min(level, _DEEPEST) - 1)
    return indent + ("- " if first else "  ") + text.replace("\n", f"\n{indent}  ")


def _unescape_entities(text: str) -> str:
    """The text that the parser wrote with entities: there are only these three."""
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
