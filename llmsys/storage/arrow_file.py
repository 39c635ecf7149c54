"""Write and read one Arrow file of a dataset.

Reads/Writes: files in documents/, dropped/ and tokens/.

Invariants:
- A file under its final name is complete: it is written under a temporary name and renamed.
- The same rows give the same bytes.
- Every error names the file.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

import numpy as np
import pyarrow as pa

from llmsys.errors import DataError
from llmsys.storage.atomic_write import describe_write_error, sync_folder
from llmsys.storage.pack_files import PackWriter, find_packed_file, is_packed_name

ARROW_ERRORS = (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowSerializationError, OSError)
Integers = np.ndarray[Any, np.dtype[np.int64]]
Tokens = np.ndarray[Any, np.dtype[np.uint16 | np.uint32]]
DAMAGED = "the file was damaged or changed after it was written."
REMAKE = "Run llmsys prepare CONFIG again: it makes only missing files."
NEXT_STEP = f"Delete the file. {REMAKE}"


def choose_token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the narrowest type that holds every id of the vocabulary.

    Args:
        vocab_size: Number of ids.

    Returns:
        Name of the numpy and Arrow type; ids of 65,536 pieces still have 2 bytes.
    """
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def build_token_schema(dtype: Literal["uint16", "uint32"]) -> pa.Schema:
    """Return the schema of token files.

    Args:
        dtype: Type of the ids, from `choose_token_dtype`.

    Returns:
        One row per document: its tokens, which end with the end-of-sequence id, its id, its crawl
        file, the byte offset of its record, and the xxh64 of its URL.
    """
    # Without a version: the fingerprint of a dataset is a hash of these bytes, and equal tokens
    # keep theirs.
    return pa.schema(
        [
            (
                "tokens",
                pa.list_(
                    pa.field(
                        "item", pa.uint16() if dtype == "uint16" else pa.uint32(), nullable=False
                    )
                ),
            ),
            ("id", pa.string()),
            ("file", pa.string()),
            ("offset", pa.int64()),
            ("url_hash", pa.uint64()),
            ("text_bytes", pa.int64()),
        ]
    )


class ArrowFileWriter:
    """A context manager that writes record batches to a temporary file and publishes it by rename.

    The file is published when the `with` block succeeds and removed when it raises. `compression`
    is None for files that training maps into memory, "zstd" for documents. In a folder of packs the
    file becomes a part of a pack, see `pack_files.py`.
    """

    def __init__(
        self, path: Path, schema: pa.Schema, compression: Literal["zstd"] | None = None
    ) -> None:
        """Prepare to write `path`; nothing is created before the block is entered.

        Args:
            path: Final name of the file. Its folder is created if it is missing.
            schema: Schema of every batch; its metadata are stored too.
            compression: "zstd" for files that are read once, such as documents. Default: None, so
                that readers can map the file into memory.
        """
        self.path = path
        self.schema = schema
        self.options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
        # in the same folder: a rename is atomic within one file system only
        self.aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def __enter__(self) -> "ArrowFileWriter":
        """Open the file aside and write its schema; DataError when the disk refuses it."""
        try:
            self.file = self._open_file()
        except OSError as error:
            raise DataError(describe_write_error(self.path, error)) from error
        try:
            self.arrow = pa.ipc.new_file(self.file, self.schema, options=self.options)
        except OSError as error:
            self._discard_file()
            raise DataError(describe_write_error(self.path, error)) from error
        return self

    def _open_file(self) -> BinaryIO | PackWriter:
        if is_packed_name(os.fspath(self.path)):
            return PackWriter(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return open(self.aside, "wb")

    def write(self, batch: pa.RecordBatch) -> None:
        """Append one record batch.

        Args:
            batch: rows with the schema of the file.

        Raises:
            DataError: the disk refuses it; the message has the path and the next step.
        """
        try:
            self.arrow.write_batch(batch)
        except OSError as error:
            raise DataError(describe_write_error(self.path, error)) from error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Publish the file by rename, or remove what was written when the block failed."""
        try:
            if kind is not None:
                return
            self.arrow.close()
            if isinstance(self.file, PackWriter):
                # Not synced: the checksums of a pack show what a power failure took.
                self.file.keep()
                return
            self.file.flush()
            # after a power failure the name could otherwise be there without its bytes
            os.fsync(self.file.fileno())
            os.replace(self.aside, self.path)
            sync_folder(self.path.parent)
        except OSError as failure:
            raise DataError(describe_write_error(self.path, failure)) from failure
        finally:
            self._discard_file()

    def _discard_file(self) -> None:
        if isinstance(self.file, PackWriter):
            self.file.discard()
            return
        # closing flushes, which a full disk refuses again; the cause is already raised
        with suppress(OSError):
            self.file.close()
        self.aside.unlink(missing_ok=True)


def map_file(path: Path) -> pa.Buffer:
    """Map a file into memory.

    Args:
        path: The Arrow file.

    Returns:
        The bytes of the file, not copied.

    Raises:
        DataError: The file is missing or cannot be read.
    """
    packed = find_packed_file(path)
    try:
        if packed is not None:
            return packed.map_bytes()
        return pa.memory_map(str(path)).read_buffer()
    except FileNotFoundError:
        raise DataError(f"{path} is missing. {REMAKE}") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} cannot be read ({error}). {NEXT_STEP}") from error


def open_arrow(path: Path, data: pa.Buffer | pa.NativeFile) -> pa.RecordBatchFileReader:
    """Open mapped bytes or an open file as an Arrow file.

    Args:
        path: The Arrow file, for error messages.
        data: The mapped bytes, from `map_file`, or the open file.

    Returns:
        A reader of the record batches.

    Raises:
        DataError: The bytes are not a complete Arrow file.
    """
    try:
        return pa.ipc.open_file(data)
    except ARROW_ERRORS as error:
        raise DataError(f"{path} is not a complete Arrow file ({error}). {NEXT_STEP}") from error


def read_batch(path: Path, arrow: pa.RecordBatchFileReader, index: int) -> pa.RecordBatch:
    """Return one record batch without copying it.

    Args:
        path: The Arrow file, for error messages.
        arrow: The reader, from `open_arrow`.
        index: The number of the batch, from 0.

    Returns:
        The record batch, a view of the mapped bytes.

    Raises:
        DataError: The batch is damaged. The message names the file and the batch.
    """
    try:
        return arrow.get_batch(index)
    except (*ARROW_ERRORS, MemoryError) as error:
        raise DataError(f"{path}, record batch {index}: damaged ({error}). {NEXT_STEP}") from error


def read_batches(path: Path, indices: Iterable[int] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a file one by one.

    Args:
        path: The Arrow file.
        indices: The numbers of the batches to read. None reads all.

    Yields:
        Record batches in the order of `indices`.

    Raises:
        DataError: The file is missing, or a batch is damaged. The message names the file and the
            batch.
    """
    arrow = open_arrow(path, map_file(path))
    for index in range(arrow.num_record_batches) if indices is None else indices:
        yield read_batch(path, arrow, index)


def read_copied_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a file without mapping it: what is read of a mapped file counts
    as memory in use.

    Args:
        path: The Arrow file.

    Yields:
        Record batches in order.

    Raises:
        DataError: The file is missing, or a batch is damaged. The message names the file and the
            batch.
    """
    try:
        file = pa.OSFile(str(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}). {NEXT_STEP}") from error
    with file:
        arrow = open_arrow(path, file)
        for index in range(arrow.num_record_batches):
            yield read_batch(path, arrow, index)


def read_columns(
    path: Path, wanted: Callable[[str], bool], indices: Iterable[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a file with a selection of columns.

    Args:
        path: The Arrow file.
        wanted: Return True for the names of the columns to read. The others are not decompressed.
        indices: The numbers of the batches to read. None reads all.

    Yields:
        Record batches in the order of `indices`.

    Raises:
        DataError: The file is missing, or a batch is damaged. The message names the file and the
            batch.
    """
    data = map_file(path)
    fields = [
        number for number, name in enumerate(open_arrow(path, data).schema.names) if wanted(name)
    ]
    arrow = pa.ipc.open_file(data, options=pa.ipc.IpcReadOptions(included_fields=fields))
    for index in range(arrow.num_record_batches) if indices is None else indices:
        yield read_batch(path, arrow, index)


def read_schema(path: Path) -> pa.Schema:
    """Return the schema of a file.

    Args:
        path: The Arrow file.

    Returns:
        Names and types of the columns.

    Raises:
        DataError: The file is missing or is not an Arrow file.
    """
    return open_arrow(path, map_file(path)).schema


def get_document_lengths(batch: pa.RecordBatch) -> Integers:
    """Return the number of tokens of each document of a batch.

    Args:
        batch: A record batch of a token file.

    Returns:
        Token counts, (rows,) int64.
    """
    # Arrow's list offsets are int32
    lengths: Integers = np.diff(batch.column("tokens").offsets.to_numpy()).astype(np.int64)
    return lengths


def get_text_bytes(batch: pa.RecordBatch) -> Integers:
    """Return the UTF-8 bytes of text of each document of a batch.

    Args:
        batch: A record batch of a token file.

    Returns:
        Byte counts, (rows,) int64.
    """
    text_bytes: Integers = batch.column("text_bytes").to_numpy()
    return text_bytes
