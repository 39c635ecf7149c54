"""Collect the documents of one document file from all filtered files, without duplicates.

Reads, from every filtered file in the order of paths, the record batches of one document file. Writes one file of kept
and one of dropped documents.

Invariants:
    - Rows are in the order of crawl file and offset. Dropped rows are ordered by stage first.
    - The bytes do not depend on workers, on the order of inputs, or on how files are split into blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_pipeline.core.document_schema import DROPPED_SCHEMA, concat_batches, count_text_bytes
from data_pipeline.core.funnel import FunnelCounts, sort_in_file_order
from data_pipeline.dedup.duplicate_decisions import DuplicateFilter
from data_pipeline.executors.base import Report
from llmsys.token_shards import ArrowFileWriter, read_batches, read_schema

# Characters per document, in powers of two from a line to a book.
LENGTH_EDGES = (0, *(1 << power for power in range(6, 25)), 1 << 40)


@dataclass(frozen=True)
class ShardSource:
    """The remaining documents of one input block and the rows that each stage dropped.

    Attributes:
        kept: File of documents.
        kept_batches: [document file, rows] per record batch of `kept`.
        dropped: Per stage, the file of dropped documents and its [document file, rows] per record batch.
    """

    kept: Path
    kept_batches: Sequence[Sequence[int]]
    dropped: Sequence[tuple[Path, Sequence[Sequence[int]]]]


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
        batch_bytes: Bytes of text per record batch.

    Returns:
        Funnel counts, histogram of lengths over `LENGTH_EDGES`, bytes of text, and rows of both files.
    """
    collector = _Collector(report)
    schema = read_schema(sources[0].kept)
    with ArrowFileWriter(documents, schema, "zstd") as kept, ArrowFileWriter(dropped, DROPPED_SCHEMA, "zstd") as gone:
        kept_out, gone_out = _Rebatcher(kept, batch_bytes), _Rebatcher(gone, batch_bytes)
        for batch in _iter_dropped_batches(sources, shard):
            gone_out.write(batch)
        # The number is the index by which decisions name the file.
        for number, source in enumerate(sources):
            for batch in collector.iter_kept_batches(
                source, shard, DuplicateFilter(decisions, number, rules, collector.tally)
            ):
                kept_out.write(batch)
            gone_out.write(pa.RecordBatch.from_pylist(collector.pop_drops(), DROPPED_SCHEMA))
        kept_out.flush()
        gone_out.flush()
    return collector.build_result() | {"documents_rows": kept_out.rows, "dropped_rows": gone_out.rows}


def _iter_dropped_batches(sources: Sequence[ShardSource], shard: int) -> Iterator[pa.RecordBatch]:
    """Yield dropped documents stage by stage, so that the output does not depend on how files are split."""
    for stage in zip(*(source.dropped for source in sources), strict=True):
        for path, batches in stage:
            indices = [index for index, (owner, _) in enumerate(batches) if owner == shard]
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
                yield self._remove_duplicates(next(read_batches(source.kept, [index])), start, duplicates)
            start += count

    def _remove_duplicates(self, batch: pa.RecordBatch, start: int, duplicates: DuplicateFilter) -> pa.RecordBatch:
        count = batch.num_rows
        batch, _, drops = duplicates.filter_batch(batch, start)
        self._drops += drops
        self.text_bytes += int(count_text_bytes(batch.column("text")).sum())
        self.lengths += np.histogram(pc.utf8_length(batch.column("text")).to_numpy(), LENGTH_EDGES)[0]
        self.report(count, len(drops))
        return batch

    def pop_drops(self) -> list[dict[str, Any]]:
        """Return the rows dropped since the last call."""
        drops, self._drops = self._drops, []
        return sort_in_file_order(drops)

    def build_result(self) -> dict[str, Any]:
        """Return the counts of the shard."""
        return {"tally": self.tally.to_dict(), "lengths": self.lengths.tolist(), "text_bytes": self.text_bytes}


class _Rebatcher:
    """Writes batches that end at the row that fills them, whatever the sizes of the incoming batches."""

    def __init__(self, writer: ArrowFileWriter, limit_bytes: int) -> None:
        self.writer, self.limit = writer, limit_bytes
        self.waiting: list[pa.RecordBatch] = []
        self.bytes = self.rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        self.rows += batch.num_rows
        ends = np.cumsum(count_text_bytes(batch.column("text")))
        start = used = 0
        # Each batch ends with the row that reaches the limit, so that input batches do not matter.
        while (full := int(np.searchsorted(ends, used + self.limit - self.bytes))) < batch.num_rows:
            self.waiting.append(batch.slice(start, full + 1 - start))
            self.flush()
            start, used = full + 1, int(ends[full])
        if start < batch.num_rows:
            self.waiting.append(batch.slice(start))
            self.bytes += int(ends[-1]) - used

    def flush(self) -> None:
        if self.waiting:
            self.writer.write(concat_batches(self.waiting))
        self.waiting, self.bytes = [], 0
