"""One Arrow file of a dataset: written aside and published by rename, mapped into memory, counted and hashed.

Reads and writes the files in documents/, dropped/ and tokens/; gives `ArrowFileWriter`, `read_batches` and the
functions that describe a file for the manifest. Promises: a file under its final name is whole, the same rows give the
same bytes, and no error leaves out the name of the file.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import xxhash

from llmsys.atomic_write import describe_write_error, sync_folder
from llmsys.errors import DataError
from llmsys.manifest import DocumentFile, TokenBatch, TokenFile

ARROW_ERRORS = (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowSerializationError, OSError)
SIDE_COLUMNS = ("id", "file", "offset", "url_hash")
Integers = np.ndarray[Any, np.dtype[np.int64]]
Tokens = np.ndarray[Any, np.dtype[np.uint16 | np.uint32]]
DAMAGED = "the file was damaged or changed after it was written."
REMAKE = "Run llmsys prepare CONFIG again: only what is missing is made."
NEXT_STEP = f"Delete the file. {REMAKE}"


def choose_token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the narrowest type that holds every id of the vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def build_token_schema(dtype: Literal["uint16", "uint32"]) -> pa.Schema:
    """Return the schema of token files: one row per document, its tokens ending with the end-of-sequence id."""
    return pa.schema(
        [
            ("tokens", pa.list_(pa.field("item", pa.uint16() if dtype == "uint16" else pa.uint32(), nullable=False))),
            ("id", pa.string()),
            ("file", pa.string()),
            ("offset", pa.int64()),
            ("url_hash", pa.uint64()),
            ("text_bytes", pa.int64()),
        ]
    )


class ArrowFileWriter:
    """Writes record batches aside; leaving the `with` block well publishes the file, leaving it by an error does not.

    `compression` is None for files that training maps into memory, "zstd" for documents.
    """

    def __init__(self, path: Path, schema: pa.Schema, compression: Literal["zstd"] | None = None) -> None:
        """Prepare to write `path`; nothing is created before the block is entered."""
        self.path = path
        self.schema = schema
        self.options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
        self.aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def __enter__(self) -> "ArrowFileWriter":
        """Open the file aside and write its schema; DataError when the disk refuses it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.aside, "wb")
        except OSError as error:
            raise DataError(describe_write_error(self.path, error)) from error
        try:
            self.arrow = pa.ipc.new_file(self.file, self.schema, options=self.options)
        except OSError as error:
            self._discard_file()
            raise DataError(describe_write_error(self.path, error)) from error
        return self

    def write(self, batch: pa.RecordBatch) -> None:
        """Append one record batch; DataError when the disk refuses it."""
        try:
            self.arrow.write_batch(batch)
        except OSError as error:
            raise DataError(describe_write_error(self.path, error)) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Publish the file by rename, or remove what was written when the block failed."""
        try:
            if kind is not None:
                return
            self.arrow.close()
            self.file.flush()
            os.fsync(self.file.fileno())
            os.replace(self.aside, self.path)
            sync_folder(self.path.parent)
        except OSError as failure:
            raise DataError(describe_write_error(self.path, failure)) from failure
        finally:
            self._discard_file()

    def _discard_file(self) -> None:
        with suppress(OSError):  # closing flushes, which a full disk refuses again; the cause is already raised
            self.file.close()
        self.aside.unlink(missing_ok=True)


def compute_file_digest(path: Path) -> str:
    """Return the xxh3_128 (hex) of a file's bytes."""
    state = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()


def memory_map_file(path: Path) -> pa.Buffer:
    """Map a whole file into memory; DataError when it is missing."""
    try:
        return pa.memory_map(str(path)).read_buffer()
    except FileNotFoundError:
        raise DataError(f"{path} is missing. {REMAKE}") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} cannot be read ({error}). {NEXT_STEP}") from error


def open_arrow(path: Path, data: pa.Buffer) -> pa.RecordBatchFileReader:
    """Open mapped bytes as an Arrow file; DataError when they are not one."""
    try:
        return pa.ipc.open_file(data)
    except ARROW_ERRORS as error:
        raise DataError(f"{path} is not a whole Arrow file ({error}). {NEXT_STEP}") from error


def read_batch(path: Path, arrow: pa.RecordBatchFileReader, index: int) -> pa.RecordBatch:
    """Return one record batch without copying it; DataError names the file and the batch."""
    try:
        return arrow.get_batch(index)
    except (*ARROW_ERRORS, MemoryError) as error:
        raise DataError(f"{path}, record batch {index}: damaged ({error}). {NEXT_STEP}") from error


def read_batches(path: Path, indices: Iterable[int] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a file one by one, all or those asked for; DataError names the file and the batch."""
    arrow = open_arrow(path, memory_map_file(path))
    for index in range(arrow.num_record_batches) if indices is None else indices:
        yield read_batch(path, arrow, index)


def read_columns(
    path: Path, wanted: Callable[[str], bool], indices: Iterable[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield record batches as `read_batches` does, with some columns; the others are not unpacked."""
    data = memory_map_file(path)
    fields = [number for number, name in enumerate(open_arrow(path, data).schema.names) if wanted(name)]
    arrow = pa.ipc.open_file(data, options=pa.ipc.IpcReadOptions(included_fields=fields))
    for index in range(arrow.num_record_batches) if indices is None else indices:
        yield read_batch(path, arrow, index)


def read_schema(path: Path) -> pa.Schema:
    """Return the columns of a file."""
    return open_arrow(path, memory_map_file(path)).schema


def get_document_lengths(batch: pa.RecordBatch) -> Integers:
    """Return the tokens per document of a batch, (rows,)."""
    lengths: Integers = np.diff(batch.column("tokens").offsets.to_numpy()).astype(np.int64)
    return lengths


def get_text_bytes(batch: pa.RecordBatch) -> Integers:
    """Return the UTF-8 bytes of text per document of a batch, (rows,)."""
    text_bytes: Integers = batch.column("text_bytes").to_numpy()
    return text_bytes


def describe_batch(data: pa.Buffer, batch: pa.RecordBatch) -> TokenBatch:
    """Count and hash one batch as it lies in the file; buffers are hashed raw, before anything trusts them."""
    buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer is not None and buffer.size]
    values = batch.column("tokens").values.to_numpy(zero_copy_only=True)
    return TokenBatch(
        rows=batch.num_rows,
        tokens=len(values),
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
            lineage.update(b"" if buffer is None else memoryview(buffer))
    return lineage.hexdigest()


def compute_frame_checksum(data: pa.Buffer, batches: Sequence[TokenBatch]) -> str:
    """Hash what lies between the data of the batches: schema, batch headers and footer."""
    edges = [0, *(edge for batch in batches for edge in (batch.begin, batch.end)), data.size]
    state, view = xxhash.xxh64(), memoryview(data)
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        state.update(view[begin:end])
    return state.hexdigest()


def describe_token_file(path: Path) -> TokenFile:
    """Count and hash a token file as it lies on disk: what the manifest says about it."""
    data = memory_map_file(path)
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
    """Count and hash a document file as it lies on disk."""
    arrow = open_arrow(path, memory_map_file(path))
    rows = sum(read_batch(path, arrow, index).num_rows for index in range(arrow.num_record_batches))
    return DocumentFile(name=path.name, rows=rows, size=path.stat().st_size, digest=compute_file_digest(path))
