"""Export one file of final documents for other tools: parquet, or JSON lines in one zstd frame.

Invariants:
    - The same documents give the same bytes with the same versions of pyarrow and zstandard.
    - A file under its final name is complete.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from llmsys.data_pipeline.executors.base import Report
from llmsys.dataset.token_shards import read_batches, read_schema
from llmsys.errors import DataError
from llmsys.storage.atomic_write import describe_write_error, sync_folder

_LEVEL = 3  # zstd's default


def export_documents(report: Report, *, source: Path, output: Path, format: str) -> dict[str, Any]:
    """Write one file of documents in another format. Progress is in documents.

    Args:
        report: Progress callback.
        source: Arrow file of documents.
        output: File to write.
        format: `parquet` or `jsonl.zst`.

    Returns:
        Number of documents.
    """
    rows = 0
    with open_document_writer(output, format, read_schema(source)) as write:
        for batch in read_batches(source):
            write(batch)
            rows += batch.num_rows
            report(batch.num_rows, 0)
    return {"documents_rows": rows}


Write = Callable[[pa.RecordBatch], None]


@contextmanager
def open_document_writer(path: Path, format: str, schema: pa.Schema) -> Iterator[Write]:
    """Open a file for documents; it has its name once the block ends without an error.

    Args:
        path: File to write.
        format: `parquet`, `jsonl` or `jsonl.zst`.
        schema: Columns of the batches.

    Yields:
        A function that writes a batch.
    """
    with _open_atomic_file(path) as file, _WRITERS[format](file, schema) as write:
        yield write


@contextmanager
def _open_parquet_writer(file: BinaryIO, schema: pa.Schema) -> Iterator[Write]:
    with pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer:
        yield writer.write_batch


@contextmanager
def _open_json_lines_writer(file: BinaryIO, schema: pa.Schema) -> Iterator[Write]:
    # A single frame, because many readers stop after the first.
    packer = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    with (
        packer.stream_writer(file, closefd=False) as writer,
        _open_plain_lines_writer(writer, schema) as write,
    ):
        yield write


@contextmanager
def _open_plain_lines_writer(file: Any, schema: pa.Schema) -> Iterator[Write]:
    def write_batch(batch: pa.RecordBatch) -> None:
        for row in batch.to_pylist():
            file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")

    yield write_batch


_WRITERS: dict[str, Any] = {
    "parquet": _open_parquet_writer,
    "jsonl": _open_plain_lines_writer,
    "jsonl.zst": _open_json_lines_writer,
}


@contextmanager
def _open_atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file. Rename it at the end of the block; remove it if the block raises."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(aside, "wb") as file:
            yield file
            # Before the rename: after a crash the final name must not lead to missing bytes.
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        sync_folder(path.parent)
    except OSError as error:
        raise DataError(describe_write_error(path, error)) from error
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
