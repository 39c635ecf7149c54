"""Documents in any order in, record batches out that hold the documents of one document file each.

Writes one Arrow file; gives, per record batch, the number of the document file it belongs to and its rows, so that a
later task opens only the batches it needs. Memory is bounded by the bytes of text that wait.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa

from data_pipeline.document import concat_batches, assign_shards, count_text_bytes
from data_pipeline.waiting import BlockWriter
from llmsys.shards import ArrowFileWriter


class PartitionWriter(BlockWriter):
    """Splits batches by document file; `batches` holds [document file, rows] of each batch written, in file order."""

    def __init__(self, path: Path, schema: pa.Schema, shards: int, limit_bytes: int) -> None:
        """Write to `path`; about `limit_bytes` of text wait in memory before they are written."""
        super().__init__(ArrowFileWriter(path, schema, "zstd"))
        self._shards, self._limit = shards, limit_bytes
        self._waiting: dict[int, list[pa.RecordBatch]] = {}
        self._bytes = 0
        self.batches: list[list[int]] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Take in a batch with the columns id and text."""
        shards = assign_shards(batch.column("id").to_pylist(), self._shards)
        for shard in np.unique(shards).tolist():
            self._waiting.setdefault(shard, []).append(batch.filter(pa.array(shards == shard)))
        self._bytes += int(count_text_bytes(batch.column("text")).sum())
        if self._bytes >= self._limit:
            self._flush()

    def _flush(self) -> None:
        for shard in sorted(self._waiting):
            batch = concat_batches(self._waiting[shard])
            self._writer.write(batch)
            self.batches.append([shard, batch.num_rows])
        self._waiting.clear()
        self._bytes = 0
