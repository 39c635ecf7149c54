"""Collect the documents of one document file from all filtered files, without duplicates.

Reads, from every filtered file in the order of paths, the record batches of one document file.
Writes one file of kept and one of dropped documents.

Invariants:
    - Rows are in the order of crawl file and offset. Dropped rows are ordered by stage first.
    - The bytes do not depend on workers, on the order of inputs, or on how files are split into
      blocks.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa

from llmsys.data_pipeline.core.document_schema import (
    DROPPED_SCHEMA,
    PartitionWriter,
    add_fields_column,
    concat_batches,
    count_row_bytes,
    count_text_bytes,
    fill_fields_column,
)
from llmsys.data_pipeline.core.funnel import FunnelCounts, sort_in_file_order
from llmsys.data_pipeline.core.input_columns import InputColumns
from llmsys.data_pipeline.core.task_record import FileRows
from llmsys.data_pipeline.dedup.duplicate_decisions import DuplicateFilter
from llmsys.data_pipeline.executors.base import Report
from llmsys.dataset.token_shards import ArrowFileWriter, read_batches, read_schema

# Characters per document, in powers of two from a line to a book.
LENGTH_EDGES = (0, *(1 << power for power in range(6, 25)), 1 << 40)


@dataclass(frozen=True)
class ShardSource:
    """The remaining documents of one input block and the rows that each stage dropped.

    Attributes:
        kept: File of documents.
        kept_batches: [document file, rows] per record batch of `kept`.
        dropped: Per stage, the file of dropped documents and its [document file, rows] per record
            batch.
    """

    kept: Path
    kept_batches: Sequence[Sequence[int]]
    dropped: Sequence[tuple[Path, Sequence[Sequence[int]]]]


SOURCE_SCHEMA = pa.schema(
    [
        ("kept", pa.binary()),
        ("kept_batches", pa.list_(pa.list_(pa.int64()))),
        ("dropped", pa.list_(pa.binary())),
        ("dropped_batches", pa.list_(pa.list_(pa.list_(pa.int64())))),
    ]
)


class SourceList(Sequence[ShardSource]):
    """The sources of collecting, in a file; picklable by its name."""

    def __init__(self, folder: Path, rows: FileRows) -> None:
        """List the sources of a file of rows; each source is built when it is asked for.

        Args:
            folder: The dataset folder.
            rows: Rows of `SOURCE_SCHEMA`; their names are relative to `folder`.
        """
        self._folder = folder
        self._rows = rows

    def __len__(self) -> int:
        """Return the number of sources."""
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> ShardSource: ...
    @overload
    def __getitem__(self, index: slice) -> list[ShardSource]: ...
    def __getitem__(self, index: int | slice) -> ShardSource | list[ShardSource]:
        """Return one source, or a list of them."""
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        row = self._rows[index]
        files = [self._folder / os.fsdecode(name) for name in row["dropped"]]
        dropped = list(zip(files, row["dropped_batches"], strict=True))
        return ShardSource(self._folder / os.fsdecode(row["kept"]), row["kept_batches"], dropped)


def build_source_row(
    kept: str,
    kept_batches: Sequence[Sequence[int]],
    dropped: Sequence[tuple[str, Sequence[Sequence[int]]]],
) -> dict[str, Any]:
    """Return a row of `SOURCE_SCHEMA`.

    Args:
        kept: Name of the file of documents.
        kept_batches: [document file, rows] of its batches.
        dropped: Per stage, the name of the file of dropped documents, and [document file, rows] of
            its batches.

    Returns:
        Values by column.
    """
    return {
        "kept": os.fsencode(kept),
        "kept_batches": kept_batches,
        "dropped": [os.fsencode(name) for name, _ in dropped],
        "dropped_batches": [batches for _, batches in dropped],
    }


def gather_sources(
    report: Report,
    *,
    sources: Sequence[ShardSource],
    first: int,
    decisions: Sequence[Path],
    rules: Sequence[str],
    kept: Path,
    dropped: Sequence[Path],
    shards: int,
    batch_bytes: int,
    keeps_fields: bool,
) -> dict[str, Any]:
    """Gather the documents of a group of input blocks by document file. Progress is in documents.

    Collecting then opens one file per group and document file. It reads the rows in the order in
    which it would read them from the blocks.

    Args:
        report: Progress callback.
        sources: The input blocks of the group.
        first: Number of the first of them.
        decisions: Files of duplicate decisions about the group.
        rules: Rules of these decisions, in order.
        kept: File to write the documents to.
        dropped: Files to write the dropped documents to: one per stage, and one for the duplicates.
        shards: Number of document files.
        batch_bytes: Bytes of text and further fields in memory.
        keeps_fields: Whether some block may have further fields.

    Returns:
        Funnel counts, and [document file, rows] of the batches in every file.
    """
    collector = _Collector(report)
    gone_schema = add_fields_column(DROPPED_SCHEMA) if keeps_fields else DROPPED_SCHEMA
    kept_schema = read_schema(sources[0].kept)
    if keeps_fields:
        kept_schema = add_fields_column(kept_schema)
    fill = fill_fields_column if keeps_fields else _keep_batch
    with ExitStack() as stack:
        schemas = [kept_schema, *[gone_schema] * len(dropped)]
        kept_out, *gone_out = [
            stack.enter_context(PartitionWriter(path, schema, shards, batch_bytes))
            for path, schema in zip((kept, *dropped), schemas, strict=True)
        ]
        for number, source in enumerate(sources, first):
            for (path, batches), writer in zip(source.dropped, gone_out[:-1], strict=True):
                for (owner, _), batch in zip(batches, read_batches(path), strict=True):
                    writer.write_part(fill(batch), owner)
            duplicates = DuplicateFilter(decisions, number, rules, collector.tally)
            for owner in sorted({owner for owner, _ in source.kept_batches}):
                for batch in collector.iter_kept_batches(source, owner, duplicates):
                    kept_out.write_part(fill(batch), owner)
                gone_out[-1].write_part(
                    pa.RecordBatch.from_pylist(collector.pop_drops(), gone_schema), owner
                )
    return {
        "tally": collector.tally.to_dict(),
        "kept_batches": kept_out.batches,
        "dropped_batches": [writer.batches for writer in gone_out],
    }


def collect_shard(
    report: Report,
    *,
    shard: int,
    sources: Sequence[ShardSource],
    decisions: Sequence[Path],
    rules: Sequence[str],
    documents: Path,
    dropped: Path,
    batch_bytes: int,
    columns: InputColumns | None = None,
) -> dict[str, Any]:
    """Write one document file and its dropped documents. Progress is in documents.

    Args:
        report: Progress callback.
        shard: Number of the document file.
        sources: All input blocks, in the order of the crawl.
        decisions: Files of duplicate decisions that are not applied yet.
        rules: Rules of these decisions, in order.
        documents: File to write the documents to.
        dropped: File to write the dropped documents to.
        batch_bytes: Bytes of text and further fields per record batch.
        columns: Columns that the further fields become; None if no block has any.

    Returns:
        Funnel counts, histogram of lengths over `LENGTH_EDGES`, bytes of text, and rows of both
        files.
    """
    collector = _Collector(report)
    schemas = [read_schema(sources[0].kept), DROPPED_SCHEMA]
    gone_schema = DROPPED_SCHEMA
    if columns is not None:
        schemas = [columns.extend_schema(schema) for schema in schemas]
        gone_schema = add_fields_column(DROPPED_SCHEMA)
    with (
        ArrowFileWriter(documents, schemas[0], "zstd") as kept,
        ArrowFileWriter(dropped, schemas[1], "zstd") as gone,
    ):
        kept_out = _Rebatcher(kept, batch_bytes, columns)
        gone_out = _Rebatcher(gone, batch_bytes, columns)
        for batch in _iter_dropped_batches(sources, shard):
            gone_out.write(batch)
        # The number is the index by which decisions name the file.
        for number, source in enumerate(sources):
            for batch in collector.iter_kept_batches(
                source, shard, DuplicateFilter(decisions, number, rules, collector.tally)
            ):
                kept_out.write(batch)
            gone_out.write(pa.RecordBatch.from_pylist(collector.pop_drops(), gone_schema))
        kept_out.flush()
        gone_out.flush()
    return collector.build_result() | {
        "documents_rows": kept_out.rows,
        "dropped_rows": gone_out.rows,
    }


def _keep_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def _iter_dropped_batches(sources: Sequence[ShardSource], shard: int) -> Iterator[pa.RecordBatch]:
    """Yield dropped documents stage by stage, so that the output does not depend on how files
    are split.
    """
    for stage in range(len(sources[0].dropped)):
        for source in sources:
            path, batches = source.dropped[stage]
            indices = [index for index, (owner, _) in enumerate(batches) if owner == shard]
            if indices:
                yield from read_batches(path, indices)


class _Collector:
    """Removes duplicates from filtered batches and counts the rest."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.tally = FunnelCounts()
        self.lengths = np.zeros(len(LENGTH_EDGES) - 1, np.int64)
        self.text_bytes = 0
        self._drops: list[dict[str, Any]] = []

    def iter_kept_batches(
        self, source: ShardSource, shard: int, duplicates: DuplicateFilter
    ) -> Iterator[pa.RecordBatch]:
        """Yield the batches of one source that belong to this shard, without duplicates."""
        start = 0
        for index, (owner, count) in enumerate(source.kept_batches):
            if owner == shard:
                yield self._remove_duplicates(
                    next(read_batches(source.kept, [index])), start, duplicates
                )
            start += count

    def _remove_duplicates(
        self, batch: pa.RecordBatch, start: int, duplicates: DuplicateFilter
    ) -> pa.RecordBatch:
        count = batch.num_rows
        batch, _, drops = duplicates.filter_batch(batch, start)
        self._drops += drops
        self.text_bytes += int(count_text_bytes(batch.column("text")).sum())
        import pyarrow.compute as pc  # slow to import

        self.lengths += np.histogram(pc.utf8_length(batch.column("text")).to_numpy(), LENGTH_EDGES)[
            0
        ]
        self.report(count, len(drops))
        return batch

    def pop_drops(self) -> list[dict[str, Any]]:
        """Return the rows dropped since the last call."""
        drops = self._drops
        self._drops = []
        return sort_in_file_order(drops)

    def build_result(self) -> dict[str, Any]:
        """Return the counts of the shard."""
        return {
            "tally": self.tally.to_dict(),
            "lengths": self.lengths.tolist(),
            "text_bytes": self.text_bytes,
        }


class _Rebatcher:
    """Writes batches that end at the row that fills them, whatever the sizes of the incoming
    batches. Further fields become columns.
    """

    def __init__(
        self, writer: ArrowFileWriter, limit_bytes: int, columns: InputColumns | None
    ) -> None:
        self.writer = writer
        self.limit = limit_bytes
        self.columns = columns
        self.waiting: list[pa.RecordBatch] = []
        self.bytes = self.rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        self.rows += batch.num_rows
        if self.columns is not None:
            batch = fill_fields_column(batch)
        ends = np.cumsum(count_row_bytes(batch))
        start = used = 0
        # Each batch ends with the row that reaches the limit, so that input batches do not matter.
        while (full := int(np.searchsorted(ends, used + self.limit - self.bytes))) < batch.num_rows:
            self.waiting.append(batch.slice(start, full + 1 - start))
            self.flush()
            start = full + 1
            used = int(ends[full])
        if start < batch.num_rows:
            self.waiting.append(batch.slice(start))
            self.bytes += int(ends[-1]) - used

    def flush(self) -> None:
        if self.waiting:
            batch = concat_batches(self.waiting)
            self.writer.write(batch if self.columns is None else self.columns.unpack_batch(batch))
        self.waiting = []
        self.bytes = 0
