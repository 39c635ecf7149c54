"""Decisions of deduplication: which rows of a source file to drop and why, and which spans to
remove from their texts.

Reads and writes Arrow files sorted by the number of the source file, so that a reader of some
source files finds its rows by bisection. Every stage that reads a filtered file after a comparison
applies them with `DuplicateFilter`.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from llmsys.config.deduplication import DeduplicationConfig
from llmsys.data_pipeline.core.document_schema import BlockWriter, concat_batches, count_text_bytes
from llmsys.data_pipeline.core.funnel import FunnelCounts, build_dropped_rows
from llmsys.dataset.token_shards import ArrowFileWriter
from llmsys.storage.arrow_file import map_file, open_arrow, read_batch, read_schema

_COLUMNS = ("row", "rule", "kept", "earlier", "size")
_MEASURED = ("rule", "kept", "value", "threshold")


class DuplicateFilter:
    """Removes the rows that decisions drop from the batches of one filtered file."""

    def __init__(
        self, decisions: Sequence[Path], source: int, rules: Sequence[str], tally: FunnelCounts
    ) -> None:
        """Read the decisions about one filtered file.

        Args:
            decisions: Files of decisions; none: every row stays.
            source: Number of the filtered file.
            rules: The rules of the decisions, in the order in which the funnel counts them: a rule
                sees what the rules before it left.
            tally: Counts to which `filter_batch` adds.
        """
        table = read_decisions(decisions, source)
        self._rows = table.column("row").to_numpy() if table is not None else np.zeros(0, np.int64)
        self._table = table
        self._rules = rules
        self._tally = tally

    def filter_batch(
        self, batch: pa.RecordBatch, start: int
    ) -> tuple[pa.RecordBatch, Any, list[dict[str, Any]]]:
        """Remove the rows that decisions drop, and count them.

        Args:
            batch: Consecutive rows of the filtered file.
            start: Number of the first row in the file.

        Returns:
            The remaining rows, a mask of the given rows that is True where one stays, and the
            dropped rows as rows of `DROPPED_SCHEMA`.
        """
        first, last = np.searchsorted(self._rows, [start, start + batch.num_rows]).tolist()
        stays = np.ones(batch.num_rows, np.bool_)
        stays[self._rows[first:last] - start] = False
        found = (
            self._table.slice(first, last - first)
            if self._table is not None and last > first
            else None
        )
        rule_per_row = np.array(found.column("rule").to_pylist() if found else [], object)
        gone = batch.take(pa.array(self._rows[first:last] - start))
        drops: list[dict[str, Any]] = []
        documents = batch.num_rows
        size = int(count_text_bytes(batch.column("text")).sum())
        sizes = count_text_bytes(gone.column("text"))
        # The funnel counts rules in order: later ones see what earlier ones left.
        for rule in self._rules:
            flags = rule_per_row == rule
            self._tally.add_amounts(rule, documents_in=documents, bytes_in=size)
            documents = documents - int(flags.sum())
            size = size - int(sizes[flags].sum())
            self._tally.add_amounts(rule, documents_out=documents, bytes_out=size)
            if flags.any() and found is not None:
                mask = pa.array(flags)
                drops += build_dropped_rows(
                    gone.filter(mask).to_pylist(), rule, _build_verdicts(rule, found.filter(mask))
                )
        self._tally.add_drops(drops)
        return batch.filter(pa.array(stays)), stays, drops


def _build_verdicts(
    rule: str, decisions: pa.RecordBatch
) -> list[tuple[str, float | None, float | None, str]]:
    if rule == SEMANTIC:
        measured = [decisions.column(name).to_pylist() for name in _MEASURED]
        return [build_cosine_verdict(*row) for row in zip(*measured, strict=True)]
    columns = [decisions.column(name).to_pylist() for name in _COLUMNS[1:]]
    return [
        build_duplicate_verdict(rule, kept, earlier, size)
        for rule, kept, earlier, size in zip(*columns, strict=True)
    ]


URL = "url_duplicates"
EXACT = "exact_duplicates"
SPANS = "repeated_segments"
NEAR = "near_duplicates"
SEMANTIC = "semantic_duplicates"
SUBSTRING = "duplicate_substrings"

_TESTS = {URL: "same url", EXACT: "same text", NEAR: "shares a bucket"}


def list_dedup_rules(config: DeduplicationConfig) -> list[str]:
    """List the enabled deduplication rules.

    Args:
        config: the deduplication.

    Returns:
        Names of rules, in the order in which they apply.
    """
    kinds = {
        URL: config.url.kind,
        EXACT: config.exact.kind,
        SPANS: config.repeated_segments.kind,
        NEAR: config.minhash.kind,
        SEMANTIC: config.semantic.kind,
        SUBSTRING: config.substring.kind,
    }
    return [rule for rule, kind in kinds.items() if kind != "none"]


def build_duplicate_verdict(
    rule: str, kept: str, earlier: str, size: int
) -> tuple[str, float | None, float | None, str]:
    """Build the verdict on a duplicate document.

    Args:
        rule: name of the rule.
        kept: id of the document that is kept instead.
        earlier: name of the earlier dataset that holds it; "" for this one.
        size: number of documents in the group of duplicates.

    Returns:
        Test, value, threshold and reason.
    """
    test = _TESTS[rule]
    if earlier:
        test = (
            f"{test} as an earlier dataset" if rule != NEAR else f"{test} with an earlier dataset"
        )
        return (
            test,
            float(size),
            1.0,
            f"{rule}: {_TESTS[rule]} with {kept} of the earlier dataset {earlier}",
        )
    return test, float(size), 1.0, f"{rule}: {test} with {kept}, which stays of {size} documents"


def build_cosine_verdict(
    rule: str, kept: str, cosine: float, threshold: float
) -> tuple[str, float | None, float | None, str]:
    """Build the verdict on a document whose embedding is near that of another.

    Args:
        rule: name of the rule.
        kept: id of the document that is kept instead.
        cosine: their cosine.
        threshold: the smallest one at which documents are dropped.

    Returns:
        Test, value, threshold and reason.
    """
    reason = f"{rule}: cosine {cosine:.4f} >= {threshold:g} with {kept}, which stays"
    return "cosine", cosine, threshold, reason


def build_too_short_verdict(
    rule: str, text: str, limits: Mapping[str, tuple[int, int]]
) -> tuple[str, float | None, float | None, str] | None:
    """Build the verdict on a text after spans were removed from it.

    Args:
        rule: name of the rule.
        text: the remaining text.
        limits: count and minimum by name of the test, such as words.

    Returns:
        Test, value, threshold and reason; None if enough text remains.
    """
    if not text:
        return "empty", 0.0, None, f"{rule}: nothing is left"
    for test, (count, limit) in limits.items():
        if count < limit:
            return test, float(count), float(limit), f"{rule}: {count} {test} left < {limit}"
    return None


# kept: the id of the kept document; earlier: its dataset, "" for this one; size: number of
# documents in the group.
DROP_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("rule", pa.string()),
        ("kept", pa.string()),
        ("earlier", pa.string()),
        ("size", pa.int64()),
    ]
)
# value: the cosine; threshold: the smallest one that drops. The size is 0: it is not counted.
SEMANTIC_SCHEMA = pa.schema([*DROP_SCHEMA, ("value", pa.float64()), ("threshold", pa.float64())])
PLACE_SCHEMA = pa.schema(
    [("row", pa.int64()), ("place", pa.int32())]
)  # place: number of a segment of the row's text, or offset of a window in it


ROWS_PER_BATCH = 65_536


class DecisionWriter(BlockWriter):
    """A writer of decisions in the order of source and row, whatever the sizes of the batches
    that it is given.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        """Prepare to write `path`; nothing is created before the block is entered.

        Args:
            path: The file to write.
            schema: The columns without `source`, which is put before them.
        """
        self.schema = pa.schema([("source", pa.int64()), *schema])
        super().__init__(ArrowFileWriter(path, self.schema))
        self._waiting: list[pa.RecordBatch] = []
        self._rows = 0

    def write(self, columns: Mapping[str, Any]) -> None:
        """Add rows, which must follow the earlier ones in the order of source and row.

        Args:
            columns: `source` and the columns of the schema: Arrow arrays of the type of their
                field, or arrays that Arrow converts to it, of equal length.
        """
        found = [columns[field.name] for field in self.schema]
        arrays = [
            column if isinstance(column, pa.Array) else pa.array(column, field.type)
            for column, field in zip(found, self.schema, strict=True)
        ]
        self.write_batch(pa.record_batch(arrays, schema=self.schema))

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch, which must follow the earlier ones in the order of source and
        row.

        Args:
            batch: Columns of the file, with `source`. Batches may be of any size: those of the file
                are equal.
        """
        while self._rows + batch.num_rows >= ROWS_PER_BATCH:
            full = ROWS_PER_BATCH - self._rows
            self._waiting.append(batch.slice(0, full))
            self._flush()
            batch = batch.slice(full)
        self._waiting.append(batch)
        self._rows += batch.num_rows

    def _flush(self) -> None:
        if any(batch.num_rows for batch in self._waiting):
            self._writer.write(concat_batches(self._waiting))
        self._waiting = []
        self._rows = 0


def write_decisions(path: Path, schema: pa.Schema, source: Any, columns: Mapping[str, Any]) -> None:
    """Write rows to an Arrow file, sorted by source file and by the columns of the schema.

    Args:
        path: the file to write.
        schema: its columns besides `source`.
        source: (N,) number of the source file of each row.
        columns: numpy or Arrow arrays of N values, by name.
    """
    keys = [
        np.asarray(columns[field.name])
        for field in reversed(schema)
        if not pa.types.is_string(field.type)
    ]
    order = np.lexsort([*keys, source])
    indices = pa.array(order)
    with DecisionWriter(path, schema) as writer:
        writer.write(
            {
                name: column.take(indices)
                if isinstance(column, pa.Array)
                else np.asarray(column)[order]
                for name, column in ({"source": np.asarray(source, np.int64), **columns}).items()
            }
        )


def iter_source_rows(path: Path, first: int, last: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows about some source files. Other batches are not read.

    Args:
        path: a file of decisions.
        first: number of the first source file.
        last: number after that of the last.

    Yields:
        Batches with the column `source`, in order.
    """
    arrow = open_arrow(path, map_file(path))

    def get_last_source(index: int) -> int:
        return int(arrow.get_batch(index).column("source")[-1].as_py())

    count = arrow.num_record_batches
    for index in range(bisect_left(range(count), first, key=get_last_source), count):
        batch = read_batch(path, arrow, index)
        begin, end = np.searchsorted(batch.column("source").to_numpy(), [first, last]).tolist()
        yield batch.slice(begin, end - begin)
        if end < batch.num_rows:
            return


def read_decisions(paths: Sequence[Path], source: int) -> pa.RecordBatch | None:
    """Read the decisions about one source file.

    Args:
        paths: files of decisions. One may have columns that another has not, which are null there.
        source: number of the source file.

    Returns:
        The rows of all files, sorted by their columns; None without files.
    """
    if not paths:
        return None
    tables = [
        pa.Table.from_batches(iter_source_rows(path, source, source + 1), read_schema(path))
        for path in paths
    ]
    table = pa.concat_tables(tables, promote_options="default").drop_columns("source")
    table = table.sort_by([(name, "ascending") for name in table.schema.names]).combine_chunks()
    return pa.record_batch(
        [pa.concat_arrays([pa.array([], each.type), *each.chunks]) for each in table.columns],
        schema=table.schema,
    )


_ROW_BITS = 40  # of a number that holds source file and row


def number_rows(source: Any, row: Any) -> Any:
    """Return numbers that sort by source file and row.

    Args:
        source: (N,) numbers of source files, or one number.
        row: (N,) row numbers.

    Returns:
        (N,) int64.
    """
    return (np.asarray(source, np.int64) << _ROW_BITS) + np.asarray(row, np.int64)


def read_dropped_rows(
    paths: Sequence[Path], first: int, last: int | None = None
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Read the dropped rows of one source file, or of several.

    Args:
        paths: files of `DROP_SCHEMA`.
        first: number of the source file.
        last: number after that of the last source file; None: one source file.

    Returns:
        (N,) row numbers, sorted; with `last`, numbers of `number_rows`.
    """
    batches = [
        batch
        for path in paths
        for batch in iter_source_rows(path, first, first + 1 if last is None else last)
    ]
    rows = [
        batch.column("row").to_numpy()
        if last is None
        else number_rows(batch.column("source"), batch.column("row"))
        for batch in batches
    ]
    return np.sort(np.concatenate([np.zeros(0, np.int64), *rows]))


def mask_remaining_rows(rows: Any, dropped: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
    """Mask the rows that were not dropped.

    Args:
        rows: (N,) row numbers.
        dropped: sorted row numbers of the dropped ones.

    Returns:
        (N,) boolean mask.
    """
    if not len(dropped):
        return np.ones(len(rows), np.bool_)
    indices = np.minimum(np.searchsorted(dropped, rows), len(dropped) - 1)
    return dropped[indices] != rows
