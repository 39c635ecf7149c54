"""Keys by which documents, spans and strings are compared: hashing, sorted key files, and groups of
equal keys.

Reads and writes uncompressed Arrow files of runs sorted by key. A task that compares one key range
maps its slice of every run and reads nothing else.

Invariants:
- 128-bit hashes: 10^12 documents collide with probability 10^-15.
- Writing holds one run in memory.
- The number of key ranges does not change what is found, only how many tasks find it.
- The first item of a group is the one with the smallest (age, rank, tie, source, row, place),
  whatever the input order.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from llmsys.data_pipeline.core.document_schema import BlockWriter
from llmsys.dataset.token_shards import ArrowFileWriter, read_batches

Hashes = np.ndarray[Any, np.dtype[np.uint64]]


def hash_texts(texts: Iterable[str]) -> Hashes:
    """Hash texts with xxh3_128.

    Args:
        texts: N texts.

    Returns:
        (N, 2) uint64: the high and the low half of each hash.
    """
    digests = b"".join(xxhash.xxh3_128_digest(text.encode()) for text in texts)
    return np.frombuffer(digests, ">u8").astype(np.uint64).reshape(-1, 2)


Columns = dict[str, np.ndarray[Any, Any]]

# A run is sorted in memory. Only keys with embeddings reach the bytes first.
KEYS_PER_RUN = 500_000
BYTES_PER_RUN = 64_000_000
# Filtered files whose documents are gathered in one file, if there are more files than that.
FILES_PER_GROUP = 1_000
# Groups of files whose keys are gathered in one file: every range opens each.
MAX_GROUPS = 300


def compute_group_size(num_files: int) -> int:
    """Return the number of filtered files whose keys, ids and decisions are gathered in one file.

    Args:
        num_files: Number of all filtered files, which are grouped if they are more than
            `FILES_PER_GROUP`.

    Returns:
        A multiple of `FILES_PER_GROUP`. Ranges grow with the files, so that groups may not: all
        ranges together open O(files + ranges) files.
    """
    return FILES_PER_GROUP * -(-num_files // (FILES_PER_GROUP * MAX_GROUPS))


# Equal (high, low) form a group, ordered by (rank, tie, then the position in the crawl).
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
    """Writer of keys in sorted runs; `count` is the number written."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        """Prepare to write `path`; nothing is created before the block is entered.

        Args:
            path: The file to write.
            schema: Its columns, with `high`, by which the rows of each run are sorted.
        """
        super().__init__(ArrowFileWriter(path, schema))
        self._schema = schema
        self._waiting: list[Mapping[str, Any]] = []
        self._size = 0
        self._bytes = 0
        self.count = 0

    def write(self, columns: Mapping[str, Any]) -> None:
        """Add rows. Up to `KEYS_PER_RUN` of them, or `BYTES_PER_RUN`, wait in memory until they are
        sorted and written.

        Args:
            columns: numpy arrays of equal length, one per field of the schema. They are not copied:
                do not change them before the block ends.
        """
        self._waiting.append(columns)
        self._size += len(columns["high"])
        self._bytes += sum(columns[name].nbytes for name in self._schema.names)
        if self._size >= KEYS_PER_RUN or self._bytes >= BYTES_PER_RUN:
            self._flush()

    def _flush(self) -> None:
        if not self._size:
            return
        columns = {
            name: np.concatenate([part[name] for part in self._waiting])
            for name in self._schema.names
        }
        # Readers bisect by `high` alone.
        order = np.argsort(columns["high"], kind="stable")
        arrays = [
            build_key_column(columns[field.name][order], field.type) for field in self._schema
        ]
        self._writer.write(pa.record_batch(arrays, schema=self._schema))
        self.count += self._size
        self._waiting = []
        self._size = 0
        self._bytes = 0


def build_key_column(values: np.ndarray[Any, Any], kind: pa.DataType) -> pa.Array:
    """Build a column of a key file.

    Args:
        values: (N,), or (N, numbers) for a column of lists.
        kind: Type of the column.

    Returns:
        An array of N values.
    """
    if values.ndim == 1:
        return pa.array(values, kind)
    offsets = np.arange(len(values) + 1, dtype=np.int32) * np.int32(values.shape[1])
    return pa.ListArray.from_arrays(offsets, pa.array(values.ravel()), kind)


def read_key_column(column: pa.Array) -> np.ndarray[Any, Any]:
    """Return a column of a key file as an array, a view where that is possible.

    Args:
        column: N values; lists are of one length.

    Returns:
        (N,), or (N, numbers) for a column of lists.
    """
    if pa.types.is_list(column.type):
        return np.asarray(column.flatten().to_numpy()).reshape(
            len(column), -1 if len(column) else 0
        )
    return np.asarray(column.to_numpy())


def compute_key_range(number: int, ranges: int) -> tuple[int, int]:
    """Compute the keys of a range.

    Args:
        number: Number of the range.
        ranges: Number of ranges; together they hold all 64-bit keys.

    Returns:
        The first and the last key.
    """
    # In Python's integers, because 2^64 does not fit into 64 bits.
    return (number << 64) // ranges, ((number + 1) << 64) // ranges - 1


def read_range(path: Path, number: int, ranges: int) -> Iterator[Columns]:
    """Read one key range of a key file.

    Args:
        path: the key file.
        number: number of the key range.
        ranges: total number of key ranges, which divide the values of `high` equally.

    Yields:
        Per run, the columns of its keys; they are views of the mapped file.
    """
    first, last = compute_key_range(number, ranges)
    for batch in read_batches(path):
        high = batch.column("high").to_numpy()
        begin = int(np.searchsorted(high, np.uint64(first)))
        end = int(np.searchsorted(high, np.uint64(last), side="right"))
        if end > begin:
            part = batch.slice(begin, end - begin)
            yield {name: read_key_column(part.column(name)) for name in part.schema.names}


def concat_columns(parts: list[Columns], schema: pa.Schema) -> Columns:
    """Concatenate columns and cast them to the types of a schema.

    Args:
        parts: columns with at least the fields of the schema.
        schema: names and types of the result.

    Returns:
        One array per field; empty arrays if there are no parts.
    """
    types = {field.name: field.type.to_pandas_dtype() for field in schema}
    return {
        name: np.concatenate(
            [np.zeros(0, kind), *(part[name] for part in parts)], dtype=kind, casting="unsafe"
        )
        for name, kind in types.items()
    }


def take_rows(columns: Columns, which: Any) -> Columns:
    """Select rows of all columns.

    Args:
        columns: arrays of equal length.
        which: a mask, indices or a slice.

    Returns:
        The selected rows of each column.
    """
    return {name: column[which] for name, column in columns.items()}


# Sort keys, most significant first; `age` 0 is an earlier dataset, 1 is this one.
ORDER = ("age", "rank", "tie", "source", "row", "place")


def mask_repeated_keys(high: np.ndarray[Any, np.dtype[np.uint64]]) -> Any:
    """Mask the keys that occur more than once.

    Args:
        high: (N,) uint64 keys.

    Returns:
        (N,) boolean mask.
    """
    order = np.argsort(high, kind="stable")
    equal = high[order][1:] == high[order][:-1]
    mask = np.zeros(len(high), np.bool_)
    mask[order[1:][equal]] = True
    mask[order[:-1][equal]] = True
    return mask


def find_later_items(
    items: Columns,
) -> tuple[Columns, Columns, np.ndarray[Any, np.dtype[np.int64]]]:
    """Find the items after the first of their group of equal (high, low).

    Args:
        items: columns of `ITEM_SCHEMA` with `source` and `age`. Items of earlier datasets have age
            0.

    Returns:
        The L later items, all of age 1; the first item of the group of each; and the size of each
        group (L,) int64, in which all items of earlier datasets count as one.
    """
    # Cheap and first: only keys that occur more than once need the sort by all columns.
    items = take_rows(items, mask_repeated_keys(items["high"]))
    items = take_rows(
        items, np.lexsort([items[name] for name in (*reversed(ORDER), "low", "high")])
    )
    fresh = np.ones(len(items["high"]), np.bool_)
    fresh[1:] = (items["high"][1:] != items["high"][:-1]) | (items["low"][1:] != items["low"][:-1])
    starts = np.flatnonzero(fresh)
    group = np.cumsum(fresh) - 1
    sizes = np.bincount(group, items["age"] == 1, len(starts)).astype(np.int64)
    # Earlier datasets count as one document, the one that stays.
    sizes += (items["age"][starts] == 0).astype(np.int64)
    later = ~fresh & (items["age"] == 1)
    return take_rows(items, later), take_rows(items, starts[group[later]]), sizes[group[later]]
