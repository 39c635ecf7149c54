"""Count and hash the Arrow files of a dataset for the manifest; write page tables and the index of
a split.

Reads: files in documents/, dropped/ and tokens/. Writes: tokens/*.pages, and tokens/*.index, a row
per token file.

A page table holds a checksum of every page of a token file, so that a reader verifies the pages
that it reads and no others, and the places of the tokens of every record batch, so that it parses
no Arrow. Its head is the struct `PAGE_HEAD`, an int64 (batches, 4) table, and the checksums of the
pages of its body, padded to whole pages. Its body is the uint32 checksums of the pages of the token
file. The manifest has the xxh3_64 of the head.

Invariants:
- Buffers are hashed as raw bytes, before any code decodes them.
"""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from llmsys.dataset.manifest import DocumentFile, TokenFile
from llmsys.dataset.manifest_section import TokenBatch
from llmsys.storage.arrow_file import (
    ArrowFileWriter,
    get_document_lengths,
    get_text_bytes,
    map_file,
    open_arrow,
    read_batch,
)
from llmsys.storage.local_files import write_bytes_atomically
from llmsys.storage.stored_formats import TOKEN_INDEX

SIDE_COLUMNS = ("id", "file", "offset", "url_hash")
INDEX_COUNTS = ("rows", "tokens", "text_bytes", "size")
INDEX_SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        *((name, pa.int64()) for name in INDEX_COUNTS),
        ("digest", pa.binary(16)),
        ("page_root", pa.binary(8)),
    ],
    TOKEN_INDEX.arrow_metadata,
)
PAGE_BYTES = 4096
SUMS_PER_PAGE = PAGE_BYTES // 4
# Magic, bytes of the token file, its pages, its record batches.
PAGE_HEAD = struct.Struct("<8sQQQ")
PAGE_MAGIC = b"LLMPAGE1"


def compute_file_digest(path: Path) -> str:
    """Return the xxh3_128 of a file.

    Args:
        path: Any file.

    Returns:
        32 hex digits over all bytes.
    """
    state = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()


def describe_batch(data: pa.Buffer, batch: pa.RecordBatch) -> TokenBatch:
    """Count and hash one record batch of a token file.

    Args:
        data: The mapped bytes of the file.
        batch: A view of these bytes, from `read_batch`.

    Returns:
        The manifest entry. `begin` and `end` are byte offsets in the file.
    """
    buffers = [
        buffer
        for column in batch.columns
        for buffer in column.buffers()
        if buffer is not None and buffer.size
    ]
    values = batch.column("tokens").values.to_numpy(zero_copy_only=True)
    return TokenBatch(
        rows=batch.num_rows,
        tokens=len(values),
        # buffers are views of the map, so their addresses tell where they lie in the file
        begin=min((buffer.address - data.address for buffer in buffers), default=0),
        end=max((buffer.address - data.address + buffer.size for buffer in buffers), default=0),
        checksum=xxhash.xxh64_hexdigest(values.data),
        lengths_checksum=compute_lengths_checksum(batch),
        lineage_checksum=compute_lineage_checksum(batch),
    )


def compute_lengths_checksum(batch: pa.RecordBatch) -> str:
    """Hash tokens and text bytes per document."""
    state = xxhash.xxh64(get_document_lengths(batch).tobytes())
    state.update(get_text_bytes(batch).tobytes())
    return state.hexdigest()


def compute_lineage_checksum(batch: pa.RecordBatch) -> str:
    """Hash the side columns as they lie in the file, before anything decodes them."""
    lineage = xxhash.xxh64()
    for name in SIDE_COLUMNS:
        for buffer in batch.column(name).buffers():
            # Arrow leaves out the validity bitmap of a column without nulls
            lineage.update(b"" if buffer is None else memoryview(buffer))
    return lineage.hexdigest()


def compute_frame_checksum(data: pa.Buffer, batches: Sequence[TokenBatch]) -> str:
    """Hash the bytes between the data of the batches: schema, batch headers and footer.

    Args:
        data: The mapped bytes of the file.
        batches: The manifest entries of all its batches, in file order.

    Returns:
        The xxh64, 16 hex digits.
    """
    edges = [0, *(edge for batch in batches for edge in (batch.begin, batch.end)), data.size]
    state, view = xxhash.xxh64(), memoryview(data)
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        state.update(view[begin:end])
    return state.hexdigest()


def describe_token_file(path: Path) -> TokenFile:
    """Return the manifest entry of a token file, counted and hashed from disk."""
    data = map_file(path)
    arrow = open_arrow(path, data)
    batches, text_bytes = [], 0
    for index in range(arrow.num_record_batches):
        batch = read_batch(path, arrow, index)
        batches.append(describe_batch(data, batch))
        text_bytes += int(get_text_bytes(batch).sum())
    return TokenFile(
        name=path.name,
        rows=sum(batch.rows for batch in batches),
        tokens=sum(batch.tokens for batch in batches),
        text_bytes=text_bytes,
        size=path.stat().st_size,
        digest=compute_file_digest(path),
        frame_checksum=compute_frame_checksum(data, batches),
        batches=tuple(batches),
    )


def describe_document_file(path: Path) -> DocumentFile:
    """Return the manifest entry of a document file, counted and hashed from disk.

    Args:
        path: A file in documents/ or dropped/.

    Returns:
        Name, rows, bytes and digest.

    Raises:
        DataError: The file is missing or damaged.
    """
    arrow = open_arrow(path, map_file(path))
    rows = sum(read_batch(path, arrow, index).num_rows for index in range(arrow.num_record_batches))
    return DocumentFile(
        name=path.name, rows=rows, size=path.stat().st_size, digest=compute_file_digest(path)
    )


def get_page_table_path(path: Path) -> Path:
    """Return the path of the page table of a token file.

    Args:
        path: The token file.

    Returns:
        The path next to it, with the suffix .pages.
    """
    return path.with_suffix(".pages")


def write_page_table(path: Path) -> TokenFile:
    """Write the page table of a token file.

    Args:
        path: The token file. Its page table is written next to it.

    Returns:
        The entry of the token file in the index, counted and hashed from disk.

    Raises:
        DataError: The token file is damaged, or the table cannot be written.
    """
    data = map_file(path)
    arrow = open_arrow(path, data)
    batches, text_bytes, rows, tokens = [], 0, 0, 0
    for index in range(arrow.num_record_batches):
        batch = read_batch(path, arrow, index)
        # Validity and offsets of the lists, validity and values of their items.
        _, offsets, _, values = batch.column("tokens").buffers()
        places = [
            0 if buffer is None else buffer.address - data.address for buffer in (offsets, values)
        ]
        batches.append([rows, tokens, *places])
        rows, tokens = rows + batch.num_rows, tokens + len(batch.column("tokens").values)
        text_bytes += int(get_text_bytes(batch).sum())
    body = compute_page_sums(memoryview(data))
    head = (
        PAGE_HEAD.pack(PAGE_MAGIC, data.size, len(body), len(batches))
        + np.array(batches, np.int64).tobytes()
    )
    head += compute_page_sums(memoryview(body.tobytes())).tobytes()
    head += bytes(-len(head) % PAGE_BYTES)
    write_bytes_atomically(get_page_table_path(path), head + body.tobytes())
    return TokenFile(
        name=path.name,
        rows=rows,
        tokens=tokens,
        text_bytes=text_bytes,
        size=data.size,
        digest=compute_file_digest(path),
        page_root=xxhash.xxh3_64_hexdigest(head),
    )


def compute_page_sums(data: memoryview) -> NDArray[np.uint32]:
    """Hash every page of some bytes.

    Args:
        data: The bytes; the last page may be short.

    Returns:
        The low 32 bits of the xxh3_64 of each page, (pages,) uint32.
    """
    pages = (data[begin : begin + PAGE_BYTES] for begin in range(0, len(data), PAGE_BYTES))
    return np.fromiter((compute_page_sum(page) for page in pages), np.uint32)


def compute_page_sum(page: Any) -> int:
    """Hash one page.

    Args:
        page: Its bytes, as a buffer.

    Returns:
        The low 32 bits of the xxh3_64.
    """
    return xxhash.xxh3_64_intdigest(page) & 0xFFFFFFFF


def write_token_index(path: Path, entries: Sequence[TokenFile]) -> None:
    """Write the index of a split.

    Args:
        path: The file to write.
        entries: Entries of its token files, each with a page table.

    Raises:
        DataError: The file cannot be written.
    """
    columns: dict[str, Any] = {
        name: [getattr(entry, name) for entry in entries] for name in ("name", *INDEX_COUNTS)
    }
    columns |= {
        name: [bytes.fromhex(getattr(entry, name)) for entry in entries]
        for name in ("digest", "page_root")
    }
    with ArrowFileWriter(path, INDEX_SCHEMA) as writer:
        writer.write(pa.record_batch(columns, schema=INDEX_SCHEMA))
