"""A section of the report with its figures, and the key numbers at the head of the page."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmsys.report.html_markup import Html, build_section
from llmsys.report.plots import Figure, Trace

# Key numbers: what, how much, and a remark.
Numbers = list[tuple[str, str, str]]


@dataclass(frozen=True)
class ReportSection:
    """One section of the page and the figures drawn in it."""

    anchor: str
    title: str
    html: Html
    figures: list[Figure] = field(default_factory=list)


def compute_curves_height(traces: Sequence[Trace]) -> int:
    """Return the height of curves whose legend has a line for each name, as it has on a phone.

    Args:
        traces: Curves with their names.

    Returns:
        Pixels.
    """
    lines = sum(
        str(trace["name"]).count("<br>") + 1 for trace in traces if trace.get("showlegend", True)
    )
    return 300 + 19 * max(4, lines)


def build_report_section(
    anchor: str, title: str, figures: Sequence[Figure], *more: Html | None
) -> ReportSection:
    """Build a section that shows its figures, then the rest.

    Args:
        anchor: Identifier of the section.
        title: Heading.
        figures: Plots, in order.
        more: Content after the plots.

    Returns:
        The section.
    """
    return ReportSection(
        anchor,
        title,
        build_section(anchor, title, [one.to_html() for one in figures], *more),
        list(figures),
    )
