"""A problem of a dataset folder, and a table of problems."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DatasetFinding:
    """One problem of a dataset folder.

    Attributes:
        file: path relative to the dataset folder.
        where: a part of the file, such as "record batch 3"; "" for all of it.
        problem: description of the problem.
    """

    file: str
    where: str
    problem: str


def format_findings(findings: Sequence[DatasetFinding]) -> str:
    """Format findings as a table with a header."""
    rows = [
        ("file", "where", "what is wrong"),
        *((finding.file, finding.where, finding.problem) for finding in findings),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip() for row in rows)
