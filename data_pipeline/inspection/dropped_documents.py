"""List the documents that a dataset dropped: the test, its value and threshold, and the text.

Reads dropped/ and quarantine/ of a dataset folder; rows are sorted by id. A record that could not
be read is a row without address and text. An input in quarantine is a row with its traceback.
"""

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from llmsys.data_pipeline.core.document_schema import read_rows
from llmsys.data_pipeline.graph.quarantine import read_quarantine_rows
from llmsys.dataset.manifest import load_manifest
from llmsys.dataset.manifest_section import format_record_place
from llmsys.dataset.token_shards import read_batches
from llmsys.errors import DataError

FIELDS = ("stage", "rule", "test")
EXCERPT_CHARACTERS = 600


def find_dropped_documents(
    folder: Path, wanted: dict[str, str], limit: int
) -> tuple[int, list[dict[str, Any]]]:
    """Find dropped documents.

    Args:
        folder: the dataset folder.
        wanted: values of stage, rule and test to match.
        limit: maximum number of rows.

    Returns:
        The number of matches, and the rows of those with the smallest ids.

    Raises:
        DataError: if nothing matches; names what was dropped.
    """
    total = 0
    kept: list[dict[str, Any]] = []  # at most `limit` rows: a dataset may drop millions
    for found in iter_matches(folder, wanted):
        total += found.num_rows
        kept = heapq.nsmallest(limit, [*kept, *read_rows(found)], key=lambda row: row["id"])
    given_up = [
        row
        for row in read_quarantine_rows(folder)
        if all(row[name] == value for name, value in wanted.items())
    ]
    total += len(given_up)
    kept = heapq.nsmallest(limit, [*kept, *given_up], key=lambda row: row["id"])
    if not total:
        raise DataError(describe_no_match(folder, wanted))
    return total, kept


def iter_matches(folder: Path, wanted: dict[str, str]) -> Iterator[pa.RecordBatch]:
    """Read the dropped documents that match.

    Args:
        folder: The dataset folder.
        wanted: Values of `stage`, `rule` and `test` to match.

    Yields:
        Batches of matching rows.
    """
    for entry in load_manifest(folder).dropped.files:
        for batch in read_batches(folder / "dropped" / entry.name):
            mask = pa.array([True] * batch.num_rows)
            for name, value in wanted.items():
                mask = pc.and_(mask, pc.equal(batch.column(name), value))
            yield batch.filter(mask)


def parse_wanted(text: str) -> dict[str, str]:
    """Parse rule=gopher_quality or rule=gopher_quality,test=words, or `all`.

    Args:
        text: comma-separated pairs of stage, rule or test and a value, or `all`.

    Returns:
        Values by name; none for `all`.

    Raises:
        DataError: for any other form.
    """
    if text == "all":
        return {}
    parts = [part.partition("=") for part in text.split(",") if part]
    if not parts or any(name not in FIELDS or not value for name, _, value in parts):
        raise DataError(
            f"--dropped {text!r} cannot be parsed. Write all, or stage=, rule= or test= and a "
            "value, such as rule=gopher_quality or rule=gopher_quality,test=words."
        )
    return {name: value for name, _, value in parts}


def format_dropped_documents(total: int, rows: list[dict[str, Any]]) -> str:
    """Format dropped documents for the terminal.

    Args:
        total: number of matches.
        rows: the rows to show.

    Returns:
        Lines of text.
    """
    return "\n\n".join([*map(_format_row, rows), f"{len(rows)} of {total:,} dropped documents"])


def _format_row(row: dict[str, Any]) -> str:
    value = "" if row["value"] is None else f", value {row['value']:.10g}"
    threshold = "" if row["threshold"] is None else f", threshold {row['threshold']:.10g}"
    why = (
        f"\n  {row['reason']}"
        if row["reason"] not in (row["test"], f"{row['rule']}: {row['test']}")
        else ""
    )
    text = row["text"][:EXCERPT_CHARACTERS]
    shown = "\n".join(f"    {line}" for line in text.splitlines())
    more = f"\n    … ({row['bytes']:,} bytes)" if row["bytes"] > len(text.encode()) else ""
    return (
        f"{row['url'] or ('not read' if row['stage'] == 'read' else '(it has no URL)')}\n"
        f"  {format_record_place(row['file'], row['offset'])}\n"
        f"  {row['rule']}: {row['test']}{value}{threshold}{why}\n{shown}{more}"
    ).rstrip("\n")


def describe_no_match(folder: Path, wanted: dict[str, str]) -> str:
    """Describe what a dataset dropped, for values that match nothing.

    Args:
        folder: The dataset folder.
        wanted: The values that match nothing.

    Returns:
        The error message.
    """
    if not wanted:
        return f"{folder} has dropped no document. Read those that were kept in {folder}/documents."
    asked = ", ".join(f"{name}={value}" for name, value in wanted.items())
    funnel = load_manifest(folder).funnel
    found = sorted(
        {f"rule={drop.rule},test={drop.test}" for stage in funnel for drop in stage.dropped}
    )
    there = "; ".join(found[:12]) or "nothing at all"
    return f"{folder} has no dropped document with {asked}. It has: {there}. Use one of these."
