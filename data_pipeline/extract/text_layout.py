"""Render runs of text as plain text: paragraphs, lists, tables and code, in page order.

Blocks are separated by one blank line. List items are lines after `- ` or, in ordered lists, their
number, indented by their nesting.
The cells of a table row are one line with ` | ` between them. Code keeps its lines and its
indentation.
"""

from collections import Counter
from typing import NamedTuple

from llmsys.data_pipeline.extract.html_tree import HtmlTree

_LISTS = frozenset(("ul", "ol", "menu", "dir"))
_SHAPING = _LISTS | {"dl", "li", "table", "tr", "pre", "td", "th"}
_DEEPEST = 8  # levels of indentation; deeper items are not indented further
# characters; a table with a longer cell is page layout, and its cells are paragraphs
_LONGEST_CELL = 500


class BlockContext(NamedTuple):
    """The position of an element among lists, tables and code: indices of elements, 0 for none."""

    level: int = 0  # lists around it
    outer_list: int = 0
    item: int = 0
    table: int = 0
    row: int = 0
    cell: int = 0  # column of the cell, from 1
    code: int = 0


def render_text(tree: HtmlTree, kept: list[int]) -> str:
    """Join the kept runs."""
    contexts = compute_contexts(tree, kept)
    layout = find_layout_tables(tree, kept, contexts)
    pieces: list[str] = []
    before = BlockContext()
    numbered: set[int] = set()  # items whose number was written
    for run in kept:
        context = contexts[tree.owner[run]]
        if context.table in layout:
            context = context._replace(table=0, row=0, cell=0)
        text = tree.text[run].removesuffix("¶")  # the mark of a link to a heading
        if pieces:
            pieces.append(_choose_separator(before, context))
        if context.row and context.row != before.row:
            pieces.append("| " * (context.cell - 1))
        elif context.item and not context.code and not context.row:
            mark = _choose_mark(tree, context.item, before.item, numbered)
            text = _format_list_item(text, context.level, mark)
        pieces.append(text)
        before = context
    return unescape_entities("".join(pieces))


def compute_contexts(tree: HtmlTree, kept: list[int]) -> dict[int, BlockContext]:
    """Return the context of each element with kept runs, derived from its parent's."""
    wanted = {0}
    for run in kept:
        element = tree.owner[run]
        while element not in wanted:
            wanted.add(element)
            element = tree.parent[element]
    cells = _number_cells(tree, wanted)
    contexts = {0: BlockContext()}
    for element in sorted(wanted)[1:]:
        around = contexts[tree.parent[element]]
        contexts[element] = (
            _derive_context(tree.tag[element], element, around, cells)
            if tree.tag[element] in _SHAPING
            else around
        )
    return contexts


def _derive_context(
    tag: str, element: int, around: BlockContext, cells: dict[int, int]
) -> BlockContext:
    """Return the context inside an element that shapes text."""
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
    """Return the column of each table cell, from 1; empty cells count."""
    cells: dict[int, int] = {}
    if not any(tree.tag[element] == "tr" for element in wanted):
        return dict.fromkeys(wanted, 1)
    counts: Counter[int] = Counter()
    for element, tag in enumerate(tree.tag):
        if tag in ("td", "th"):
            counts[tree.parent[element]] += 1
            cells[element] = counts[tree.parent[element]]
    return cells


def find_layout_tables(
    tree: HtmlTree, kept: list[int], contexts: dict[int, BlockContext]
) -> set[int]:
    """Return the tables used for layout: with a cell of several blocks or of much text, or with
    code.
    """
    layout: set[int] = set()
    last = (0, 0)
    for run in kept:
        context = contexts[tree.owner[run]]
        cell = (context.row, context.cell)
        if context.table and (
            context.code or (context.cell and cell == last) or len(tree.text[run]) > _LONGEST_CELL
        ):
            layout.add(context.table)
        last = cell
    return layout


def _choose_separator(before: BlockContext, context: BlockContext) -> str:
    """Return the separator between two consecutive runs."""
    if context.row and context.row == before.row:
        return " | " * max(1, context.cell - before.cell)
    near = (
        (context.code and context.code == before.code)
        or (context.table and context.table == before.table)
        or (context.outer_list and context.outer_list == before.outer_list)
    )
    return "\n" if near else "\n\n"


def _choose_mark(tree: HtmlTree, item: int, before: int, numbered: set[int]) -> str:
    """Return what stands before a paragraph of a list item: a mark, a number, or spaces."""
    number = tree.get_item_number(item)
    if number is None:
        return "- " if item != before else "  "
    mark = f"{number}. "
    if item in numbered:
        return " " * len(mark)
    numbered.add(item)
    return mark


def _format_list_item(text: str, level: int, mark: str) -> str:
    """Format a paragraph of a list item; further lines are indented as the first."""
    indent = "  " * (min(level, _DEEPEST) - 1)
    return indent + mark + text.replace("\n", f"\n{indent}{' ' * len(mark)}")


def unescape_entities(text: str) -> str:
    """Return the text without the parser's escapes; it writes only these three."""
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
