"""Render runs of text as Markdown: headings, lists, fenced code with its language, tables.

Emphasis, links and quotations stay plain text, and nothing is escaped but `|` in tables. Each line
of the text form (`extract.text_layout`) is in a line of the Markdown, in the same order, so that
what rules remove from one can be removed from the other (`text.markdown_lines`).
"""

import re
from collections.abc import Iterator
from typing import Final

from llmsys.data_pipeline.extract.html_tree import HtmlTree
from llmsys.data_pipeline.extract.text_layout import (
    BlockContext,
    compute_contexts,
    find_layout_tables,
    unescape_entities,
)

_WIDEST_INDENT: Final = 32  # columns; deeper items are paragraphs of the last one
_LEVELS: Final = {f"h{level}": "#" * level for level in range(1, 7)}
_BACKTICKS = re.compile("`{3,}")
_LANGUAGE_BEGINNINGS = ("language-", "lang-", "highlight-source-")
_CLASS = re.compile(r' class="([^"]*)"')
_LANGUAGE_ATTRIBUTE = re.compile(r' (?:data-lang|data-language|lang)="([^"]*)"')
_BRUSH = re.compile(r"brush:\s*([\w#+-]+)")
_LANGUAGE = re.compile(r"[a-z][a-z0-9+#.-]{0,19}")
_NO_LANGUAGE = frozenset(["none", "default", "plain", "plaintext", "text", "txt", "nohighlight"])
_MOST_AROUND: Final = 3  # elements around code whose class may name its language


def render_markdown(tree: HtmlTree, kept: list[int]) -> str:
    """Render the kept runs as Markdown."""
    return unescape_entities(_MarkdownWriter(tree, kept).render())


def find_code_language(tree: HtmlTree, code: int) -> str:
    """Return the language that a page names for its code: of `pre`, of `code` in it, or of the
    elements around it; "" for none.
    """
    candidates = [tree.attributes[code], tree.code_attributes.get(code, "")]
    element = code
    for _ in range(_MOST_AROUND):
        element = tree.parent[element]
        candidates.append(tree.attributes[element])
    for number, attributes in enumerate(candidates):
        # `lang` of other elements is that of people
        named = _LANGUAGE_ATTRIBUTE.search(attributes) if number < 2 else None
        for name in [*([named[1]] if named else []), *_iter_class_languages(attributes)]:
            language = name.lower()
            if _LANGUAGE.fullmatch(language):
                return "" if language in _NO_LANGUAGE else language
    return ""


def _iter_class_languages(attributes: str) -> Iterator[str]:
    """Yield the languages that the classes of an element name."""
    found = _CLASS.search(attributes)
    if found is None:
        return
    words = found[1].split()
    for word, following in zip(words, [*words[1:], ""], strict=True):
        for beginning in _LANGUAGE_BEGINNINGS:
            if word.startswith(beginning):
                yield word[len(beginning) :]
        if word.startswith("highlight-") and "notranslate" in words:  # Sphinx
            yield word.removeprefix("highlight-")
        if word == "sourceCode":  # pandoc
            yield following
    if brush := _BRUSH.search(found[1]):  # SyntaxHighlighter
        yield brush[1]


class _MarkdownWriter:
    """Writes the blocks of one page in order."""

    def __init__(self, tree: HtmlTree, kept: list[int]) -> None:
        self._tree = tree
        self._kept = kept
        self._contexts = compute_contexts(tree, kept)
        self._layout = find_layout_tables(tree, kept, self._contexts)
        # columns before the content of each item whose mark was written
        self._content_columns: dict[int, int] = {0: 0}
        self._pieces: list[str] = []
        self._before = BlockContext()

    def render(self) -> str:
        """Return the Markdown, with the parser's escapes."""
        runs = [(run, self._get_context(run)) for run in self._kept]
        start = 0
        while start < len(runs):
            context = runs[start][1]
            end = start + 1
            if context.code or context.row:
                while end < len(runs) and self._is_same_block(context, runs[end][1]):
                    end += 1
            group = runs[start:end]
            if context.code:
                lines = self._write_code(context.code, [self._get_text(run) for run, _ in group])
            elif context.row:
                lines = self._write_table(group)
            else:
                lines = self._write_paragraph(runs[start][0])
            self._add_block(context, lines)
            start = end
        return "".join(self._pieces)

    def _get_context(self, run: int) -> BlockContext:
        context = self._contexts[self._tree.owner[run]]
        is_layout = context.table in self._layout
        return context._replace(table=0, row=0, cell=0) if is_layout else context

    def _get_text(self, run: int) -> str:
        return self._tree.text[run].removesuffix("¶")  # the mark of a link to a heading

    @staticmethod
    def _is_same_block(first: BlockContext, other: BlockContext) -> bool:
        """Return whether a run continues the code or the table of another one."""
        if first.code or other.code:
            return first.code == other.code
        return bool(other.row) and first.table == other.table

    def _write_paragraph(self, run: int) -> list[str]:
        text = self._get_text(run)
        mark = _LEVELS.get(self._tree.tag[self._tree.owner[run]])
        return [f"{mark} {' '.join(text.split())}"] if mark else text.split("\n")

    def _write_code(self, code: int, texts: list[str]) -> list[str]:
        content = "\n".join(texts)
        longest = max(map(len, _BACKTICKS.findall(content)), default=2)
        fence = "`" * (longest + 1)
        return [fence + find_code_language(self._tree, code), *content.split("\n"), fence]

    def _write_table(self, group: list[tuple[int, BlockContext]]) -> list[str]:
        """Return a line per row; the first is the header, which Markdown demands."""
        rows: dict[int, dict[int, str]] = {}
        for run, context in group:
            text = " ".join(self._get_text(run).split()).replace("|", "\\|")
            cells = rows.setdefault(context.row, {})
            column = max(1, context.cell)
            cells[column] = f"{cells[column]} {text}" if column in cells else text
        # A row of a hostile page may have thousands of empty cells before its only text.
        columns = sorted({column for cells in rows.values() for column in cells})
        lines = [
            "| " + " | ".join(cells.get(column, "") for column in columns) + " |"
            for cells in rows.values()
        ]
        lines.insert(1, "| " + " | ".join("---" for _ in columns) + " |")
        return lines

    def _add_block(self, context: BlockContext, lines: list[str]) -> None:
        """Add the lines of a block, indented and marked as its list item demands."""
        first, others = self._build_indents(context.item)
        before = self._before
        is_next_item = (
            first != others
            and bool(context.outer_list)
            and context.outer_list == before.outer_list
            and bool(before.item)
        )
        if self._pieces:
            self._pieces.append("\n" if is_next_item else "\n\n")
        self._pieces.append(first + f"\n{others}".join(lines))
        self._before = context

    def _build_indents(self, item: int) -> tuple[str, str]:
        """Return what stands before the first line of a block, and before the others. Items that
        begin with this block are marked on its first line.
        """
        begun: list[int] = []
        while item not in self._content_columns:
            begun.append(item)
            item = self._contexts[self._tree.parent[item]].item
        columns = self._content_columns[item]
        first = " " * columns
        for inner in reversed(begun):
            # Items below are paragraphs of this one.
            if columns < _WIDEST_INDENT:
                first += self._get_mark(inner)
                columns = len(first)
            self._content_columns[inner] = columns
        return first, " " * columns

    def _get_mark(self, item: int) -> str:
        number = self._tree.get_item_number(item)
        return "- " if number is None else f"{number}. "
