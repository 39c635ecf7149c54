"""Read published times, hours and peaks as command lines of `llmsys estimate`.

Reads tests/data/estimate/published_runs.json (public facts; each table names its source). What a
row does not say is filled in by table, never by row: data/published_tables.yaml for steps,
published_runs.py for whole runs.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llmsys.errors import LlmsysError
from tools.bench.fits.published_row import DATA, PublishedRow
from tools.bench.fits.run_rows import iter_full_run_rows
from tools.bench.fits.table_rows import iter_table_rows, load_tables

RUNS = DATA / "published_runs.json"
# Rows that nothing is fitted on; each table has a note on what was known of its errors when rules
# were written.
UNSEEN = tuple(DATA / f"{name}_runs.json" for name in ("unseen", "later", "recipe", "sibling"))


@dataclass(frozen=True)
class SkippedRow:
    """A row that cannot be priced, with the reason: its model or device has no description."""

    table: str
    row: str
    reason: str


def read_rows(path: Path = RUNS) -> Iterator[PublishedRow | SkippedRow]:
    """Yield every measured number with its command, or the reason why it has none."""
    truth = json.loads(path.read_text(encoding="utf-8"))
    readers = {"full_runs": iter_full_run_rows} | dict.fromkeys(load_tables(), iter_table_rows)
    for table, reader in readers.items():
        for row in list_rows(truth.get(table, [])):
            try:
                yield from list(reader(table, row))
            except (LlmsysError, KeyError, ValidationError) as error:
                name = str(row.get("id") or row.get("model") or row)
                yield SkippedRow(
                    table, name, f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
                )


def list_rows(truth: Any) -> list[dict[str, Any]]:
    """Return the rows of a table."""
    if isinstance(truth, list):
        return truth
    return [*truth.get("rows", []), *truth.get("time", [])]
