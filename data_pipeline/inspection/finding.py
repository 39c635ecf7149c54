"""One thing that is wrong with a dataset folder, and several of them as a table."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DatasetFinding:
    """`file` is relative to the dataset folder; `where` is a part of it ("record batch 3"), or empty for all of it."""

    file: str
    where: str
    problem: str


def format_findings(findings: Sequence[DatasetFinding]) -> str:
    """The findings in columns, a line each, under a head."""
    rows = [("file", "where", "what is wrong"), *((one.file, one.where, one.problem) for one in findings)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip() for row in rows)
