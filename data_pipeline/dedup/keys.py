"""Documents with the same text: a 128-bit hash per document.

Reads texts, gives hashes (two 64-bit halves). Promises: 128 bits make a wrong match less likely than a broken disk
(10^12 documents collide with probability 10^-15).

Files of keys: what a document, a span or a string is compared by, in runs that are sorted by key.

Writes and reads Arrow files without compression, so that a task that compares one range of all keys maps its part of
every run and reads nothing else. Promises: memory holds one run while writing; the number of ranges never changes what
is found, only how many tasks find it.

Items with equal keys: who is the first of each group, and who are the others.

Reads key columns, gives, for every item that is not the first of its group, the item that is, and the size of the
group. Promises: the first is the one with the smallest (age, rank, tie, source, row, place), whatever order the items
come in.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from data_pipeline.core.block_writer import BlockWriter
from llmsys.token_shards import ArrowFileWriter, read_batches

Hashes = np.ndarray[Any, np.dtype[np.uint64]]


def hash_texts(texts: Iterable[str]) -> Hashes:
    """Return the xxh3_128 of each text as two halves, (N, 2) uint64."""
    digests = b"".join(xxhash.xxh3_128_digest(text.encode()) for text in texts)
    return np.frombuffer(digests, ">u8").astype(np.uint64).reshape(-1, 2)


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


# From the most to the least important; `age` 0 is an earlier dataset, 1 is this one.
ORDER = ("age", "rank", "tie", "source", "row", "place")


def mask_repeated_keys(high: np.ndarray[Any, np.dtype[np.uint64]]) -> Any:
    """Return a mask of the keys that occur more than once."""
    order = np.argsort(high, kind="stable")
    equal = high[order][1:] == high[order][:-1]
    mask = np.zeros(len(high), np.bool_)
    mask[order[1:][equal]] = True
    mask[order[:-1][equal]] = True
    return mask


def find_later_items(items: Columns) -> tuple[Columns, Columns, np.ndarray[Any, np.dtype[np.int64]]]:
    """Return the items that come after the first of their group, the first of each of theirs, and the group's size.

    Items of earlier datasets (age 0) are never among the later ones, and count as one of their group.
    """
    items = take_rows(items, mask_repeated_keys(items["high"]))
    items = take_rows(items, np.lexsort([items[name] for name in (*reversed(ORDER), "low", "high")]))
    fresh = np.ones(len(items["high"]), np.bool_)
    fresh[1:] = (items["high"][1:] != items["high"][:-1]) | (items["low"][1:] != items["low"][:-1])
    starts = np.flatnonzero(fresh)
    group = np.cumsum(fresh) - 1
    sizes = np.bincount(group, items["age"] == 1, len(starts)).astype(np.int64)
    sizes += (items["age"][starts] == 0).astype(np.int64)
    later = ~fresh & (items["age"] == 1)
    return take_rows(items, later), take_rows(items, starts[group[later]]), sizes[group[later]]
