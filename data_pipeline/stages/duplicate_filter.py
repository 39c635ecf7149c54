"""Apply duplicate decisions to the batches of one filtered file, and count the drops.

Used by every stage that reads a filtered file after a comparison.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline.core.document_schema import count_text_bytes
from data_pipeline.core.funnel import FunnelCounts, build_dropped_rows
from data_pipeline.dedup.duplicate_decisions import build_duplicate_verdict, read_decisions

_COLUMNS = ("row", "rule", "kept", "earlier", "size")


class DuplicateFilter:
    """Removes the rows that decisions drop from the batches of one filtered file."""

    def __init__(self, decisions: Sequence[Path], source: int, rules: Sequence[str], tally: FunnelCounts) -> None:
        """Read the decisions about file number `source`. `rules` are the rules of the decisions, in order."""
        table = read_decisions(decisions, source)
        self._rows = table.column("row").to_numpy() if table is not None else np.zeros(0, np.int64)
        self._table, self._rules, self._tally = table, rules, tally

    def filter_batch(self, batch: pa.RecordBatch, start: int) -> tuple[pa.RecordBatch, Any, list[dict[str, Any]]]:
        """Return the remaining rows of a batch that begins at row `start`, a mask of them, and the dropped rows."""
        first, last = np.searchsorted(self._rows, [start, start + batch.num_rows]).tolist()
        stays = np.ones(batch.num_rows, np.bool_)
        stays[self._rows[first:last] - start] = False
        found = self._table.slice(first, last - first) if self._table is not None and last > first else None
        rule_per_row = np.array(found.column("rule").to_pylist() if found else [], object)
        gone = batch.take(pa.array(self._rows[first:last] - start))
        drops: list[dict[str, Any]] = []
        documents, size = batch.num_rows, int(count_text_bytes(batch.column("text")).sum())
        sizes = count_text_bytes(gone.column("text"))
        # The funnel counts rules in order: later ones see what earlier ones left.
        for rule in self._rules:
            flags = rule_per_row == rule
            self._tally.add_amounts(rule, documents_in=documents, bytes_in=size)
            documents, size = documents - int(flags.sum()), size - int(sizes[flags].sum())
            self._tally.add_amounts(rule, documents_out=documents, bytes_out=size)
            if flags.any() and found is not None:
                mask = pa.array(flags)
                drops += build_dropped_rows(gone.filter(mask).to_pylist(), rule, _build_verdicts(found.filter(mask)))
        self._tally.add_drops(drops)
        return batch.filter(pa.array(stays)), stays, drops


def _build_verdicts(decisions: pa.RecordBatch) -> list[tuple[str, float | None, float | None, str]]:
    columns = [decisions.column(name).to_pylist() for name in _COLUMNS[1:]]
    return [
        build_duplicate_verdict(rule, kept, earlier, size) for rule, kept, earlier, size in zip(*columns, strict=True)
    ]
