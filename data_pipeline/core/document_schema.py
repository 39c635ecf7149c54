"""The columns of a document, kept or dropped, and the numbers that follow from its id.

Reads ids and page fields, gives schemas, ids, and a position in [0, 2^64) per id and purpose. Promises: an id depends
on URL, date and payload alone; shard, split, sample and shuffle follow from ids and seeds, never from file order.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

Positions = np.ndarray[Any, np.dtype[np.uint64]]

EXCERPT_CHARACTERS = 2_000

# What extraction gives: every page of a file, the text null where there is none.
TEXT_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("url", pa.string()),
        ("date", pa.string()),
        ("file", pa.string()),
        ("offset", pa.int64()),
        ("bytes_html", pa.int64()),
        ("text", pa.large_string()),
        ("extract_test", pa.string()),  # the limit that a page without text is beyond
        ("extract_value", pa.float64()),
        ("extract_threshold", pa.float64()),
        ("note", pa.string()),  # what reading found wrong with a page that it kept; null for nothing
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
    ]
)


def build_document_schema(statistics: Iterable[str]) -> pa.Schema:
    """Return the schema of kept documents; `statistics` are names such as gopher_quality.words."""
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
    return pa.schema([*fields, *((name, pa.float32()) for name in statistics)])


def compute_document_id(url: str, date: str, payload: bytes) -> str:
    """Return the 32 hex digits that name one capture of one page."""
    state = hashlib.blake2b(f"{url}\0{date}\0".encode(), digest_size=16)
    state.update(payload)
    return state.hexdigest()


def hash_positions(ids: Sequence[str], purpose: str, seed: int) -> Positions:
    """Return a number in [0, 2^64) per id: the same for the same purpose and seed, independent between purposes."""
    key = f"{purpose}:{seed}".encode()
    digests = b"".join(hashlib.blake2b(name.encode(), key=key, digest_size=8).digest() for name in ids)
    return np.frombuffer(digests, ">u8").astype(np.uint64)


def assign_shards(ids: Sequence[str], shards: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the number of the document file that each id belongs to."""
    return (hash_positions(ids, "shard", 0) % np.uint64(shards)).astype(np.int64)


def is_heldout(ids: Sequence[str], fraction: float, seed: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which ids are held back from training."""
    return hash_positions(ids, "heldout", seed).astype(np.float64) / 2.0**64 < fraction


def count_text_bytes(texts: pa.Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the UTF-8 bytes of each text."""
    offsets = np.frombuffer(texts.buffers()[1], np.int64)[texts.offset : texts.offset + len(texts) + 1]
    lengths: np.ndarray[Any, np.dtype[np.int64]] = np.diff(offsets)
    return lengths


def concat_batches(pieces: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Join record batches into one with buffers of its own: the same bytes for the same rows, however they came."""
    return pa.concat_batches([*pieces, pieces[0].slice(0, 0)])  # a single one would be passed on with its buffers
