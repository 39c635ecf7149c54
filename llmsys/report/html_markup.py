"""Build HTML safely: text is escaped when it becomes a child of `build_tag`.

Also formats numbers for people.

Invariants:
- Only `Html` values reach a page unescaped, and only this package makes them.
"""

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

EXCERPT_CHARACTERS = 2_000


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | Html | None | Iterable["Child"]


def join_html(children: Child) -> Html:
    """Return children one after another: text is escaped, `Html` kept, None left out."""
    if children is None:
        return Html("")
    if isinstance(children, Html):
        return children
    if isinstance(children, str):
        return Html(html.escape(children))
    return Html("".join(join_html(child) for child in children))


def build_tag(element: str, /, *children: Child, **attributes: str | bool) -> Html:
    """Return one element. `class_` becomes class, `data_x` data-x; an attribute that is True has
    no value.
    """
    written = "".join(
        _format_attribute(key.rstrip("_").replace("_", "-"), value)
        for key, value in attributes.items()
    )
    # void elements have no end tag
    if element in {"input", "meta", "link"}:
        return Html(f"<{element}{written}>")
    return Html(f"<{element}{written}>{join_html(children)}</{element}>")


def _format_attribute(key: str, value: str | bool) -> str:
    if isinstance(value, bool):
        return f" {key}" if value else ""
    return f' {key}="{html.escape(value)}"'


def build_section(anchor: str, title: str, *children: Child) -> Html:
    """Build one section of the page, with an anchor for the navigation.

    Args:
        anchor: Identifier of the element.
        title: Heading.
        children: Content; text is escaped.

    Returns:
        The element.
    """
    return build_tag("section", build_tag("h2", title), *children, id=anchor)


def build_table(
    head: Sequence[str], rows: Iterable[Sequence[Child]], numeric: Iterable[int] = ()
) -> Html:
    """Build a table. On narrow screens one of numbers scrolls sideways, and rows with text are
    stacked.

    Args:
        head: Titles of the columns.
        rows: Cells of each row; text is escaped.
        numeric: Columns that are right-aligned.

    Returns:
        The element.
    """
    right = set(numeric)
    is_stacked = not right.issuperset(range(1, len(head)))

    def build_row(kind: str, row: Sequence[Child]) -> Html:
        classes = ["number" if i in right else "" for i in range(len(row))]
        if kind == "th" or not is_stacked:
            return build_tag(
                "tr",
                [build_tag(kind, cell, class_=one) for cell, one in zip(row, classes, strict=True)],
            )
        titled = zip(row, classes, head, strict=True)
        return build_tag(
            "tr",
            [build_tag(kind, cell, class_=one, data_title=title) for cell, one, title in titled],
        )

    body = [build_row("td", row) for row in rows]
    return build_tag(
        "div",
        build_tag("table", build_tag("thead", build_row("th", head)), build_tag("tbody", body)),
        class_="scroll stacked" if is_stacked else "scroll",
        tabindex="0",
    )


def build_definition_list(pairs: Iterable[tuple[str, Child]]) -> Html:
    """Return names with their values, one per line."""
    return build_tag(
        "dl", [(build_tag("dt", name), build_tag("dd", value)) for name, value in pairs]
    )


def build_details(summary: Child, *children: Child, opened: bool = False) -> Html:
    """Return a block that its reader opens.

    Args:
        summary: What is shown of a closed block; text is escaped.
        children: Content; text is escaped.
        opened: Show the content from the start.

    Returns:
        The element.
    """
    return build_tag("details", build_tag("summary", summary), *children, open=opened)


def format_user_text(text: str, characters: int = EXCERPT_CHARACTERS) -> Html:
    """Return text of a page or a model as a block, cut after `characters` with a note."""
    cut = len(text) - characters
    rest = (
        build_tag("span", f" … {format_number(cut)} more characters", class_="muted")
        if cut > 0
        else None
    )
    return build_tag("pre", text[:characters], rest, class_="text", dir="auto")


def escape_plot_text(text: str) -> str:
    """Return user text without the tags, entities and %{…} that plotly interprets in labels and
    hovers.
    """
    return html.escape(text, quote=False).replace("%{", "%\u200b{")


def dump_script_json(value: Any) -> Html:
    """Return a value as JSON that cannot close its <script> element, whatever text it holds."""
    written = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Html(written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def format_number(value: float) -> str:
    """Format a count in full with separators (12,345), or a fraction with four significant digits.

    Args:
        value: The number.

    Returns:
        The text.
    """
    return f"{int(value):,}" if float(value).is_integer() else f"{value:.4g}"


def format_amount(value: float) -> str:
    """Return a count rounded to three digits: 950, 12.3 k, 4.56 M."""
    return _format_scaled(value, ("", "k", "M", "B", "T"))


def format_bytes(value: float) -> str:
    """Return a size in decimal units: 950 B, 12.3 kB, 4.56 MB."""
    return _format_scaled(value, ("B", "kB", "MB", "GB", "TB", "PB"))


def _format_scaled(value: float, prefixes: Sequence[str]) -> str:
    last = len(prefixes) - 1
    step = 0
    while abs(value) >= 999.5 and step < last:
        value, step = value / 1000, step + 1
    digits = f"{value:.0f}" if abs(value) >= 99.95 or float(value).is_integer() else f"{value:.3g}"
    return f"{digits} {prefixes[step]}".strip()


def format_percent(part: float, whole: float) -> str:
    """Return a share: 12.3 %; a dash where `whole` is 0."""
    if whole <= 0:
        return "–"
    share = 100 * part / whole
    if share in (0, 100):
        return f"{share:.0f} %"
    return "< 0.1 %" if share < 0.1 else "> 99.9 %" if 99.9 < share < 100 else f"{share:.1f} %"
