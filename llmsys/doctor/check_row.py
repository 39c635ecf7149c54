"""The result of one check of `llmsys doctor device`, and the table of all of them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

State = Literal["ok", "FAIL", "not run"]


@dataclass(frozen=True)
class CheckRow:
    """One check.

    Attributes:
        section: attention, determinism, collectives, memory or speed.
        name: what was checked.
        state: FAIL ends the command with status 1; not run needs a reason in `text`.
        text: the finding, with its limit.
        values: the numbers behind it, for the file.
    """

    section: str
    name: str
    state: State
    text: str
    values: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary, for JSON."""
        return asdict(self)


def build_row(section: str, name: str, is_good: bool, text: str, **values: Any) -> CheckRow:
    """Return the row of a check that ran.

    Args:
        section: section of the table.
        name: what was checked.
        is_good: whether it passed.
        text: the finding.
        values: its numbers.

    Returns:
        The row.
    """
    return CheckRow(section, name, "ok" if is_good else "FAIL", text, values)


def merge_ranks(rows_by_rank: Sequence[Sequence[CheckRow]]) -> list[CheckRow]:
    """Join the rows of checks that every rank made on its own device.

    Args:
        rows_by_rank: rows of each rank, in the same order.

    Returns:
        One row for each check: that of the first rank that failed, with the failing ranks named,
        else rank 0's.
    """
    merged = []
    for rows in zip(*rows_by_rank, strict=True):
        failed = [rank for rank, row in enumerate(rows) if row.state == "FAIL"]
        row = rows[failed[0] if failed else 0]
        where = (
            f" (rank {', '.join(map(str, failed))} of {len(rows)})"
            if failed and len(rows) > 1
            else ""
        )
        merged.append(CheckRow(row.section, row.name, row.state, row.text + where, row.values))
    return merged


def format_rows(rows: Sequence[CheckRow]) -> str:
    """Format rows as a table.

    Args:
        rows: rows of all sections.

    Returns:
        A line for each row: state, section, name, finding.
    """
    width = (
        max((len(row.section) for row in rows), default=0),
        max((len(row.name) for row in rows), default=0),
    )
    return "\n".join(
        f"{row.state:<9}{row.section:<{width[0]}}  {row.name:<{width[1]}}  {row.text}"
        for row in rows
    )
