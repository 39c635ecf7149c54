"""Arrow files (Feather is one) and streams in, documents out, a few rows at a time.

Reads the columns that the configuration names. What is damaged costs its record batch; so does one that would take more
memory than a process may. A stream cannot be read behind such a batch.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from data_pipeline.readers.arrow_message import ArrowMessage, read_file_messages, read_stream_messages
from data_pipeline.readers.columns import DAMAGE, ROWS, RowReader, DecodeLimitError, list_columns, build_damage_skip, has_text_column
from data_pipeline.readers.page import Page, SkippedRecord
from data_pipeline.readers.source import InputStream
from llmsys.config.read import ReadConfig

_MOST_BATCH = 128 << 20  # bytes of a record batch that is unpacked, and of all dictionaries
_SHARED_BYTES = 64 << 20  # that some rows may take when they can share bytes


def read_arrow(source: InputStream, max_text_bytes: int, config: ReadConfig) -> Iterator[Page | SkippedRecord]:
    """Yield the documents of an Arrow file (Feather is one) or stream."""
    reader = RowReader(source, max_text_bytes, config)
    is_file = source.read_at(0, 6) == b"ARROW1"
    messages = read_file_messages(source) if is_file else []
    said = [message for message in messages if message.is_batch]
    rows = sum(message.rows for message in said)
    try:
        file = pa.PythonFile(source, mode="r")
        shared = sum(message.size for message in messages if not message.is_batch)
        if shared > _MOST_BATCH:
            raise DecodeLimitError(f"dictionaries of {shared} bytes, more than {_MOST_BATCH}")
        arrow: Any = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
        columns = list_columns(arrow.schema, config)
        batches = arrow.num_record_batches if is_file else None
    except DecodeLimitError as error:
        yield SkippedRecord(source.path, 0, str(error), reader.bound_row_count(rows))
        return
    except DAMAGE as error:
        yield build_damage_skip(source, 0, "Arrow file", error)
        return
    if not has_text_column(columns, config):
        yield reader.build_missing_text_skip(rows, arrow.schema)
    elif batches is None:
        yield from reader.iter_documents(_iter_batch_slices(_iter_stream_batches(source, arrow), columns), "record batch", 1)
    else:
        for index in range(batches):
            message = said[index] if len(said) == batches else ArrowMessage(True, 1, 0)
            part = _iter_batch_slices(_iter_file_batch(arrow, index, message), columns)
            yield from reader.iter_documents(part, "record batch", message.rows)


def _iter_file_batch(arrow: Any, index: int, message: ArrowMessage) -> Iterator[pa.RecordBatch]:
    """One record batch of a file."""
    if message.size > _MOST_BATCH:
        raise DecodeLimitError(f"a record batch of {message.size} bytes, more than {_MOST_BATCH}: write smaller ones")
    yield arrow.get_batch(index)


def _iter_stream_batches(source: InputStream, arrow: Any) -> Iterator[pa.RecordBatch]:
    """The record batches of a stream, which cannot be read behind one that is too large."""
    shared = 0
    messages = read_stream_messages(source)
    while True:
        for message in messages:
            shared += 0 if message.is_batch else message.size
            if max(shared, message.size) > _MOST_BATCH:
                size = max(shared, message.size)
                raise DecodeLimitError(
                    f"{size} bytes at once, more than {_MOST_BATCH}: the rest of the stream is not read"
                )
            if message.is_batch:
                break
        batch = next(arrow, None)
        if batch is None:
            return
        yield batch


def _iter_batch_slices(batches: Iterator[pa.RecordBatch], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of batches, a few at a time: fewer where each may be as long as all that lies behind it."""
    for batch in batches:
        batch = batch.select(columns)
        simple = all(_has_unshared_bytes(column.type) for column in batch.columns)
        step = ROWS if simple else max(1, min(ROWS, _SHARED_BYTES // max(1, batch.get_total_buffer_size())))
        for start in range(0, batch.num_rows, step):
            yield batch.slice(start, step)


def _has_unshared_bytes(kind: pa.DataType) -> bool:
    """Whether no two rows of a column can share their bytes."""
    return bool(pa.types.is_primitive(kind)) or any(
        test(kind)
        for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    )
