"""Render HTML safely: templates escape every value that is not `Markup` already.

Also formats numbers for people.

Reads the templates of this folder.

Invariants:
- Only `Markup` reaches a page unescaped, and only templates and this module make it.
"""

import html
import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"


@cache
def _load_environment() -> "Environment":
    # 50 ms, which commands without a page do not pay
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        # A misspelled name is an error, not an empty page.
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "amount": format_amount,
        "bytes": format_bytes,
        "number": format_number,
        "percent_of": format_percent,
    }
    return environment


def render_template(template: str, /, **values: Any) -> Markup:
    """Render a file of templates/.

    Args:
        template: Its name.
        values: What the template reads; text is escaped.

    Returns:
        The markup.
    """
    return Markup(_load_environment().get_template(template).render(values))


def build_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], numeric: Iterable[int] = ()
) -> Markup:
    """Build a table. On narrow screens one of numbers scrolls sideways, and rows with text are
    stacked.

    Args:
        head: Titles of the columns.
        rows: Cells of each row; text is escaped.
        numeric: Columns that are right-aligned.

    Returns:
        The element.
    """
    return render_template("table.html", head=head, rows=rows, numeric=list(numeric))


def build_paragraph(text: str, *, is_muted: bool = False) -> Markup:
    """Return a paragraph, or a remark in small grey letters.

    Args:
        text: Its content, escaped.
        is_muted: Whether it is a remark.

    Returns:
        The element.
    """
    start = Markup('<p class="muted">') if is_muted else Markup("<p>")
    return start + text + Markup("</p>")


def build_details(summary: str, *content: Markup) -> Markup:
    """Return a block that its reader opens.

    Args:
        summary: What is shown of a closed block; text is escaped.
        content: What it holds.

    Returns:
        The element.
    """
    return Markup("<details><summary>{}</summary>{}</details>").format(
        summary, Markup("").join(content)
    )


def escape_plot_text(text: str) -> str:
    """Return user text without the tags, entities and %{…} that plotly interprets in labels and
    hovers.

    Args:
        text: Any text.

    Returns:
        The text for a label.
    """
    return html.escape(text, quote=False).replace("%{", "%\u200b{")


def dump_script_json(value: Any) -> Markup:
    """Return a value as JSON that cannot close its <script> element, whatever text it holds."""
    written = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Markup(written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


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
