"""Files of keys: what a document, a span or a string is compared by, in runs that are sorted by key.

Writes and reads Arrow files without compression, so that a task that compares one range of all keys maps its part of
every run and reads nothing else. Promises: memory holds one run while writing; the number of ranges never changes what
is found, only how many tasks find it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline.waiting import BlockWriter
from llmsys.shards import ArrowFileWriter, read_batches

Columns = dict[str, np.ndarray[Any, Any]]

KEYS_PER_RUN = 500_000

# What a group of equals is found by (high, low) and ordered by (rank, tie, then the place in the crawl).
ITEM_SCHEMA = pa.schema(
    [
        ("high", pa.uint64()),
        ("low", pa.uint64()),
        ("rank", pa.uint64()),
        ("tie", pa.uint64()),
        ("row", pa.int64()),
        ("place", pa.int32()),
    ]
)
BUCKET_SCHEMA = pa.schema([("high", pa.uint64()), ("low", pa.uint16()), ("row", pa.int64())])
VALUE_SCHEMA = pa.schema([("high", pa.uint64())])


class KeyWriter(BlockWriter):
    """Writes keys in sorted runs; `count` is how many were written."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        super().__init__(ArrowFileWriter(path, schema))
        self._schema = schema
        self._waiting: list[Mapping[str, Any]] = []
        self._size = 0
        self.count = 0

    def write(self, columns: Mapping[str, Any]) -> None:
        """Take in columns of equal length, one per field of the schema."""
        self._waiting.append(columns)
        self._size += len(columns["high"])
        if self._size >= KEYS_PER_RUN:
            self._flush()

    def _flush(self) -> None:
        if not self._size:
            return
        columns = {name: np.concatenate([part[name] for part in self._waiting]) for name in self._schema.names}
        order = np.argsort(columns["high"], kind="stable")
        arrays = [pa.array(columns[field.name][order], field.type) for field in self._schema]
        self._writer.write(pa.record_batch(arrays, schema=self._schema))
        self.count += self._size
        self._waiting, self._size = [], 0


def compute_key_range(number: int, ranges: int) -> tuple[int, int]:
    """Return the first key of a range, and the last."""
    return (number << 64) // ranges, ((number + 1) << 64) // ranges - 1


def read_range(path: Path, number: int, ranges: int) -> Iterator[Columns]:
    """Yield the keys of one range, run by run; columns are views of the mapped file."""
    first, last = compute_key_range(number, ranges)
    for batch in read_batches(path):
        high = batch.column("high").to_numpy()
        begin = int(np.searchsorted(high, np.uint64(first)))
        end = int(np.searchsorted(high, np.uint64(last), side="right"))
        if end > begin:
            part = batch.slice(begin, end - begin)
            yield {name: part.column(name).to_numpy() for name in part.schema.names}


def concat_columns(parts: list[Columns], schema: pa.Schema) -> Columns:
    """Join columns, each as the type that the schema says; without any part they are empty."""
    types = {field.name: field.type.to_pandas_dtype() for field in schema}
    return {
        name: np.concatenate([np.zeros(0, kind), *(part[name] for part in parts)], dtype=kind, casting="unsafe")
        for name, kind in types.items()
    }


def take_rows(columns: Columns, which: Any) -> Columns:
    """Return some rows of all columns: a mask, indices or a slice."""
    return {name: column[which] for name, column in columns.items()}
