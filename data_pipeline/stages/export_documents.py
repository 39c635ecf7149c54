"""Export one file of final documents for other tools: parquet, or JSON lines in one zstd frame.

Invariants:
    - The same documents give the same bytes with the same versions of pyarrow and zstandard.
    - A file under its final name is complete.
"""

import base64
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from llmsys.data_pipeline.core.document_schema import read_rows
from llmsys.data_pipeline.core.input_columns import TOKEN_COUNT
from llmsys.data_pipeline.executors.base import Report
from llmsys.dataset.token_shards import read_batches, read_schema
from llmsys.errors import DataError
from llmsys.storage.atomic_write import describe_write_error, sync_folder

_LEVEL = 3  # zstd's default
_DUMP = re.compile(r"CC-MAIN-\d{4}-\d{2}")  # as paths of Common Crawl name it


def export_documents(
    report: Report,
    *,
    source: Path,
    output: Path,
    format: str,
    columns: str = "own",
    tokens: Path | None = None,
) -> dict[str, Any]:
    """Write one file of documents in another format. Progress is in documents.

    Args:
        report: Progress callback.
        source: Arrow file of documents.
        output: File to write.
        format: `parquet` or `jsonl.zst`.
        columns: `own`, or `fineweb` for its names and `token_count`.
        tokens: File of the encoded documents, batch by batch, for `fineweb`; None where there are
            no tokens, whose number is then null.

    Returns:
        Number of documents.
    """
    rows = 0
    is_own = columns == "own"
    schema = read_schema(source) if is_own else _build_fineweb_schema(read_schema(source))
    counts = _iter_token_counts(source if tokens is None else tokens, tokens is not None)
    with open_document_writer(output, format, schema) as write:
        for batch in read_batches(source):
            if is_own:
                write(batch)
            else:
                write(_build_fineweb_batch(batch, next(counts), schema))
            rows += batch.num_rows
            report(batch.num_rows, 0)
    return {"documents_rows": rows}


def _build_fineweb_schema(schema: pa.Schema) -> pa.Schema:
    """Return the columns of documents with FineWeb's names, and those that it has besides. A name
    that a field of the input has is not given again.
    """
    fields = [
        field.with_name("file_path")
        if field.name == "file" and "file_path" not in schema.names
        else field
        for field in schema
    ]
    dump = [] if "dump" in schema.names else [pa.field("dump", pa.string())]
    return pa.schema([*fields, *dump, (TOKEN_COUNT, pa.int64())], schema.metadata)


def _build_fineweb_batch(batch: pa.RecordBatch, counts: pa.Array, schema: pa.Schema) -> Any:
    dump = []
    if "dump" not in batch.schema.names:
        found = map(_DUMP.search, batch.column("file").to_pylist())
        dump = [pa.array((one and one[0] for one in found), pa.string())]
    return pa.record_batch([*batch.columns, *dump, counts], schema=schema)


def _iter_token_counts(path: Path, has_tokens: bool) -> Iterator[pa.Array]:
    """Yield the number of tokens of each document without its end token, batch by batch."""
    import pyarrow.compute as pc  # slow to import

    for batch in read_batches(path):
        if has_tokens:
            lengths = pc.list_value_length(batch.column("tokens"))
            yield pc.subtract(lengths.cast(pa.int64()), 1)
        else:
            yield pa.nulls(batch.num_rows, pa.int64())


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
        for row in read_rows(batch):
            text = json.dumps(row, ensure_ascii=False, separators=(",", ":"), default=_format_cell)
            file.write(text.encode() + b"\n")

    yield write_batch


def _format_cell(value: Any) -> str:
    """Format what JSON does not have: times in ISO 8601, bytes in base64, decimals."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)


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
