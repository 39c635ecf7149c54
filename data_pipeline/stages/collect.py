"""Judged documents and their duplicates in, one file of kept and one file of dropped documents out.

Reads, of every judged file in the order of their paths, the record batches of one document file; so the rows lie in the
order of crawl file and offset, whatever the workers and the order of the inputs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_pipeline.document import DROPPED_SCHEMA, rebatch, text_bytes
from data_pipeline.executors.event import Report
from data_pipeline.funnel import Tally, dropped_rows
from data_pipeline.stages.duplicates import EXACT, NEAR
from llmsys.shards import ShardWriter, read_batches, read_schema

# Edges of the histogram of characters per document: powers of two, from a line to a book.
LENGTH_EDGES = (0, *(1 << power for power in range(6, 25)), 1 << 40)


@dataclass(frozen=True)
class Source:
    """The judged documents of one crawl file; `..._batches` hold [document file, rows] per record batch."""

    kept: Path
    dropped: Path
    kept_batches: Sequence[Sequence[int]]
    dropped_batches: Sequence[Sequence[int]]


def collect_shard(
    report: Report,
    *,
    shard: int,
    sources: Sequence[Source],
    duplicates: Path | None,
    documents: Path,
    dropped: Path,
    batch_bytes: int,
) -> dict[str, Any]:
    """Write one document file and the dropped documents that belong to it; progress is in documents."""
    collector = _Collector(report)
    schema = read_schema(sources[0].kept)
    with ShardWriter(documents, schema, "zstd") as kept, ShardWriter(dropped, DROPPED_SCHEMA, "zstd") as gone:
        kept_out, gone_out = _Rebatcher(kept, batch_bytes), _Rebatcher(gone, batch_bytes)
        for number, source in enumerate(sources):
            indices = [index for index, (owner, _) in enumerate(source.dropped_batches) if owner == shard]
            for batch in read_batches(source.dropped, indices):
                gone_out.write(batch)
            table = next(read_batches(duplicates, [number])) if duplicates else None
            for batch in collector.kept(source, shard, table):
                kept_out.write(batch)
            gone_out.write(pa.RecordBatch.from_pylist(collector.take_drops(), DROPPED_SCHEMA))
        kept_out.flush()
        gone_out.flush()
    return collector.result() | {"documents_rows": kept_out.rows, "dropped_rows": gone_out.rows}


class _Collector:
    """Takes duplicates out of judged batches, and counts what stays."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.tally = Tally()
        self.lengths = np.zeros(len(LENGTH_EDGES) - 1, np.int64)
        self.text_bytes = 0
        self._drops: list[dict[str, Any]] = []

    def kept(self, source: Source, shard: int, table: pa.RecordBatch | None) -> Iterator[pa.RecordBatch]:
        """Yield the batches of one source that belong to this shard, without duplicates."""
        rows = table.column("row").to_numpy() if table is not None else np.zeros(0, np.int64)
        start = 0
        for index, (owner, count) in enumerate(source.kept_batches):
            if owner == shard:
                batch = next(read_batches(source.kept, [index]))
                first, last = np.searchsorted(rows, [start, start + count]).tolist()
                yield self._without(batch, rows[first:last] - start, table, slice(first, last))
            start += count

    def _without(self, batch: pa.RecordBatch, rows: Any, table: pa.RecordBatch | None, part: slice) -> pa.RecordBatch:
        gone = batch.take(pa.array(rows))
        rules, kept, sizes = (
            [] if table is None else table.column(name).to_pylist()[part] for name in ("rule", "kept", "size")
        )
        is_exact = np.array([rule == EXACT for rule in rules], np.bool_)
        self._count(batch, gone, is_exact)
        for rule, flags in ((EXACT, is_exact), (NEAR, ~is_exact)):
            documents = gone.filter(pa.array(flags)).to_pylist()
            chosen = [(name, size) for name, size, flag in zip(kept, sizes, flags.tolist(), strict=True) if flag]
            drops = dropped_rows(documents, rule, [_verdict(rule, name, size) for name, size in chosen])
            self.tally.drop(drops)
            self._drops += drops
        stays = np.ones(batch.num_rows, np.bool_)
        stays[rows] = False
        batch = batch.filter(pa.array(stays))
        self.text_bytes += int(text_bytes(batch.column("text")).sum())
        self.lengths += np.histogram(pc.utf8_length(batch.column("text")).to_numpy(), LENGTH_EDGES)[0]
        self.report(len(stays), len(rows))
        return batch

    def _count(self, batch: pa.RecordBatch, gone: pa.RecordBatch, is_exact: Any) -> None:
        sizes = text_bytes(gone.column("text"))
        documents, size = batch.num_rows, int(text_bytes(batch.column("text")).sum())
        for rule, flags in ((EXACT, is_exact), (NEAR, ~is_exact)):
            self.tally.count(rule, documents_in=documents, bytes_in=size)
            documents, size = documents - int(flags.sum()), size - int(sizes[flags].sum())
            self.tally.count(rule, documents_out=documents, bytes_out=size)

    def take_drops(self) -> list[dict[str, Any]]:
        """Return the rows dropped since the last call."""
        drops, self._drops = self._drops, []
        return drops

    def result(self) -> dict[str, Any]:
        return {"tally": self.tally.plain(), "lengths": self.lengths.tolist(), "text_bytes": self.text_bytes}


def _verdict(rule: str, kept: str, size: int) -> tuple[str, float | None, float | None, str]:
    test = "same text" if rule == EXACT else "shares a bucket"
    return test, float(size), 1.0, f"{rule}: {test} with {kept}, which stays of {size} documents"


class _Rebatcher:
    """Writes batches that each end with the row that fills them, whatever the sizes they come in."""

    def __init__(self, writer: ShardWriter, limit_bytes: int) -> None:
        self.writer, self.limit = writer, limit_bytes
        self.waiting: list[pa.RecordBatch] = []
        self.bytes = self.rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        self.rows += batch.num_rows
        ends = np.cumsum(text_bytes(batch.column("text")))
        start = used = 0
        while (full := int(np.searchsorted(ends, used + self.limit - self.bytes))) < batch.num_rows:
            self.waiting.append(batch.slice(start, full + 1 - start))
            self.flush()
            start, used = full + 1, int(ends[full])
        if start < batch.num_rows:
            self.waiting.append(batch.slice(start))
            self.bytes += int(ends[-1]) - used

    def flush(self) -> None:
        if self.waiting:
            self.writer.write(rebatch(self.waiting))
        self.waiting, self.bytes = [], 0
