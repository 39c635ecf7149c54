"""A section of the report with its figures, and the key numbers at the head of the page."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from llmsys.report.plots import Figure, Trace

# Key numbers: what, how much, and a remark.
Numbers = list[tuple[str, str, str]]


@dataclass(frozen=True)
class ReportSection:
    """One section of the page: its figures, then its content.

    Attributes:
        anchor: Identifier of the element.
        title: Name in the navigation.
        content: Blocks after the figures; None is left out.
        figures: Plots, in order.
        heading: Heading, where it is another one than the title.
        num_large: Figures as wide as the page, the others stand side by side; None: all.
    """

    anchor: str
    title: str
    content: Sequence[Markup | None] = ()
    figures: Sequence[Figure] = ()
    heading: str = ""
    num_large: int | None = None

    @property
    def large_figures(self) -> Sequence[Figure]:
        """Figures as wide as the page."""
        return self.figures[: self.num_large]

    @property
    def small_figures(self) -> Sequence[Figure]:
        """Figures that stand side by side."""
        return () if self.num_large is None else self.figures[self.num_large :]


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
