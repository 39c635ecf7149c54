"""Columns of documents, kept or dropped, and the numbers that follow from a document id.

Arrow writers of documents buffer rows in memory until their block ends.

Invariants:
- An id depends on URL, date and payload only.
- Shard, split, sample and shuffle position follow from ids and seeds, never from the order of
  files.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa

from llmsys.data_pipeline.core.input_fields import FIELDS, to_json_value
from llmsys.dataset.token_shards import ArrowFileWriter
from llmsys.storage.stored_formats import DOCUMENTS, DROPPED

if TYPE_CHECKING:
    from llmsys.config.data import HeldoutSplitConfig


class BlockWriter(ABC):
    """A file that is published with its buffered rows when its block ends. A failed block
    publishes nothing.
    """

    def __init__(self, writer: ArrowFileWriter) -> None:
        """Take the file that the rows go to.

        Args:
            writer: A writer that was not entered: it is entered and left with this block.
        """
        self._writer = writer

    @abstractmethod
    def _flush(self) -> None:
        """Write the buffered rows."""

    def __enter__(self) -> Self:
        """Open a temporary file next to the final name."""
        self._writer.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Publish the file. Leave nothing when the block failed."""
        if kind is None:
            try:
                self._flush()
            except BaseException as failure:
                # A failed flush must not publish a truncated file.
                self._writer.__exit__(type(failure), failure, failure.__traceback__)
                raise
        self._writer.__exit__(kind, error, trace)


Positions = np.ndarray[Any, np.dtype[np.uint64]]

EXCERPT_CHARACTERS = 2_000

# Output of extraction: every page of a file. The text is null if there is none.
TEXT_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("url", pa.string()),
        ("date", pa.string()),
        ("file", pa.string()),
        ("offset", pa.int64()),
        ("bytes_html", pa.int64()),
        ("text", pa.large_string()),
        ("extract_test", pa.string()),  # the limit that a page without text exceeds
        ("extract_value", pa.float64()),
        ("extract_threshold", pa.float64()),
        ("note", pa.string()),  # what was damaged in a page that is kept; null if nothing
    ]
)

DROPPED_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("url", pa.string()),
        ("file", pa.string()),
        ("offset", pa.int64()),
        ("stage", pa.string()),
        ("rule", pa.string()),
        ("test", pa.string()),
        ("value", pa.float64()),
        ("threshold", pa.float64()),
        ("reason", pa.string()),
        ("bytes", pa.int64()),
        ("text", pa.large_string()),
    ],
    DROPPED.arrow_metadata,
)


def build_document_schema(columns: Iterable[pa.Field]) -> pa.Schema:
    """Return the schema of kept documents.

    Args:
        columns: Columns that rules add, such as `gopher_quality.words`, float32.

    Returns:
        The fixed columns, then those of rules, in the given order.
    """
    fields = [
        ("id", pa.string()),
        ("url", pa.string()),
        ("date", pa.string()),
        ("file", pa.string()),
        ("offset", pa.int64()),
        ("language", pa.string()),
        ("language_score", pa.float32()),
        ("bytes_html", pa.int64()),
        ("note", pa.string()),  # see TEXT_SCHEMA
        ("text", pa.large_string()),
    ]
    return pa.schema([*fields, *columns], DOCUMENTS.arrow_metadata)


def add_fields_column(schema: pa.Schema) -> pa.Schema:
    """Add the column of the input's further fields.

    Args:
        schema: Schema of documents or dropped documents, with or without the column.

    Returns:
        The schema of a work file, with the column as the last one.
    """
    own = [field for field in schema if field.name != FIELDS]
    return pa.schema([*own, (FIELDS, pa.large_string())], schema.metadata)


def fill_fields_column(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows with the column of the input's further fields as the last one.

    Args:
        batch: Rows of a work file, with or without the column.

    Returns:
        The rows; the column is null where it was absent.
    """
    schema = add_fields_column(batch.schema)
    nulls = pa.nulls(batch.num_rows, pa.large_string())
    columns = [batch.column(n) if n in batch.schema.names else nulls for n in schema.names]
    return pa.record_batch(columns, schema=schema)


def compute_document_id(url: str, date: str, payload: bytes) -> str:
    """Return the id of one capture of one page.

    Args:
        url: Address of the page.
        date: Date of the capture, as the crawl writes it.
        payload: Bytes of the page.

    Returns:
        32 hex digits (blake2b, 128 bits).
    """
    state = hashlib.blake2b(f"{url}\0{date}\0".encode(), digest_size=16)
    # The payload counts: one URL may have two captures with the same date.
    state.update(payload)
    return state.hexdigest()


def hash_positions(ids: Sequence[str], purpose: str, seed: int) -> Positions:
    """Return a reproducible position in [0, 2^64) per document id.

    Args:
        ids: Document ids.
        purpose: Name of the decision, such as `shard`. Positions of different purposes are
            independent.
        seed: Number that gives another set of positions for the same purpose.

    Returns:
        uint64 of shape (len(ids),).
    """
    key = f"{purpose}:{seed}".encode()
    digests = b"".join(
        hashlib.blake2b(name.encode(), key=key, digest_size=8).digest() for name in ids
    )
    return np.frombuffer(digests, ">u8").astype(np.uint64)


def assign_shards(ids: Sequence[str], shards: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the document file of each id.

    Args:
        ids: Document ids.
        shards: Number of document files.

    Returns:
        int64 of shape (len(ids),), values in [0, shards).
    """
    return (hash_positions(ids, "shard", 0) % np.uint64(shards)).astype(np.int64)


def is_heldout(
    ids: Sequence[str], fraction: float, seed: int
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return a mask of the documents that are held out from training.

    Args:
        ids: Document ids.
        fraction: Expected share of held-out documents, in [0, 1].
        seed: Seed of the split.

    Returns:
        bool of shape (len(ids),).
    """
    # A document keeps its split when others are added or removed.
    return hash_positions(ids, "heldout", seed).astype(np.float64) / 2.0**64 < fraction


def select_heldout(
    documents: pa.RecordBatch, split: HeldoutSplitConfig, files: Sequence[str]
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return a mask of the documents that are held out from training.

    Args:
        documents: Batch with the columns `id` and `file`.
        split: Share and seed.
        files: Files whose documents are held out, as the column names them, or archives that these
            files are in; with any, the share is not used.

    Returns:
        bool of shape (rows,).
    """
    if files:
        import pyarrow.compute as pc  # slow to import

        column = documents.column("file")
        chosen = frozenset(files)
        held_files = [file for file in column.unique().to_pylist() if _is_in_files(file, chosen)]
        held = pc.is_in(column, value_set=pa.array(held_files, column.type))
        return np.asarray(held.to_numpy(zero_copy_only=False), np.bool_)
    return is_heldout(documents.column("id").to_pylist(), split.heldout_fraction, split.seed)


def _is_in_files(file: str, files: frozenset[str]) -> bool:
    """Return whether a file is one of some, or a member of an archive that is."""
    parts = file.split("/")
    return any("/".join(parts[:count]) in files for count in range(len(parts), 0, -1))


def count_text_bytes(texts: pa.Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the size of each text.

    Args:
        texts: large_string array. Nulls count as 0.

    Returns:
        UTF-8 bytes, int64 of shape (len(texts),).
    """
    # Offsets of the Arrow buffer: no text is copied or decoded.
    offsets = np.frombuffer(texts.buffers()[1], np.int64)[
        texts.offset : texts.offset + len(texts) + 1
    ]
    lengths: np.ndarray[Any, np.dtype[np.int64]] = np.diff(offsets)
    return lengths


def read_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return rows as mappings, whatever their columns hold.

    Args:
        batch: Rows of documents or dropped documents.

    Returns:
        Values by column; times that Python's `datetime` cannot hold as text.
    """
    columns = [read_cells(column) for column in batch.columns]
    names = batch.schema.names
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def read_cells(column: pa.Array) -> list[Any]:
    """Return the values of a column.

    Args:
        column: Any column of documents.

    Returns:
        Python objects; times that `datetime` cannot hold as text.
    """
    try:
        values: list[Any] = column.to_pylist()
    # nanoseconds, years after 9999, an unknown time zone
    except (ValueError, OverflowError, KeyError):
        width = pa.int32() if column.type.bit_width == 32 else pa.int64()
        payloads = column.cast(width).to_pylist()
        kind = str(column.type)
        values = [None if one is None else to_json_value({kind: one}) for one in payloads]
    return values


def count_row_bytes(batch: pa.RecordBatch) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the size of each row's text and further fields.

    Args:
        batch: Rows of a work file of documents.

    Returns:
        UTF-8 bytes, int64 of shape (rows,).
    """
    sizes = count_text_bytes(batch.column("text"))
    return sizes + count_text_bytes(batch.column(FIELDS)) if FIELDS in batch.schema.names else sizes


def concat_batches(pieces: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Concatenate record batches into one that owns its buffers, so that equal rows are written as
    equal bytes.

    Args:
        pieces: At least one batch; all have the same schema.

    Returns:
        One batch with the rows of all pieces.
    """
    return pa.concat_batches(
        [*pieces, pieces[0].slice(0, 0)]
    )  # pyarrow returns a single batch unchanged, slack bytes included


class PartitionWriter(BlockWriter):
    """Writer that splits batches by document file. `batches` holds [document file, rows] per
    written batch, in file
    order.
    """

    def __init__(self, path: Path, schema: pa.Schema, shards: int, limit_bytes: int) -> None:
        """Prepare to write `path`; nothing is created before the block is entered.

        Args:
            path: The file to write.
            schema: Its columns, with `id` and `text`.
            shards: Number of document files over which `write` divides the rows.
            limit_bytes: UTF-8 bytes of text and fields in memory, about: the batch that reaches it
                is still buffered, and then all of them are written.
        """
        super().__init__(ArrowFileWriter(path, schema, "zstd"))
        self._shards = shards
        self._limit = limit_bytes
        self._waiting: dict[int, list[pa.RecordBatch]] = {}
        self._bytes = 0
        self.batches: list[list[int]] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Buffer the rows of a batch for the document files that their ids choose.

        Args:
            batch: Rows with the schema of the file.
        """
        shards = assign_shards(batch.column("id").to_pylist(), self._shards)
        for shard in np.unique(shards).tolist():
            self._waiting.setdefault(shard, []).append(batch.filter(pa.array(shards == shard)))
        self._add_bytes(batch)

    def write_part(self, batch: pa.RecordBatch, shard: int) -> None:
        """Buffer a batch whose rows all belong to one document file.

        Args:
            batch: Rows with the schema of the file; an empty batch is ignored.
            shard: Number of the document file.
        """
        if batch.num_rows:
            self._waiting.setdefault(shard, []).append(batch)
            self._add_bytes(batch)

    def _add_bytes(self, batch: pa.RecordBatch) -> None:
        self._bytes += int(count_row_bytes(batch).sum())
        if self._bytes >= self._limit:
            self._flush()

    def _flush(self) -> None:
        # Sorted, so that the bytes do not depend on the order of documents in memory.
        for shard in sorted(self._waiting):
            batch = concat_batches(self._waiting[shard])
            self._writer.write(batch)
            self.batches.append([shard, batch.num_rows])
        self._waiting.clear()
        self._bytes = 0
