"""Arrow files (Feather is one) and streams in, documents out, a few rows at a time.

Reads the columns that the configuration names. What is damaged costs its record batch; so does one that would take more
memory than a process may. A stream cannot be read behind such a batch.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from data_pipeline.readers.arrow_message import Message, file_messages, stream_messages
from data_pipeline.readers.columns import DAMAGE, ROWS, Rows, TooLargeError, columns_of, damage, has_text
from data_pipeline.readers.page import Page, Skip
from data_pipeline.readers.source import Source
from llmsys.config.read import ReadConfig

_MOST_BATCH = 128 << 20  # bytes of a record batch that is unpacked, and of all dictionaries
_SHARED_BYTES = 64 << 20  # that some rows may take when they can share bytes


def read_arrow(source: Source, max_text_bytes: int, config: ReadConfig) -> Iterator[Page | Skip]:
    """Yield the documents of an Arrow file (Feather is one) or stream."""
    reader = Rows(source, max_text_bytes, config)
    is_file = source.read_at(0, 6) == b"ARROW1"
    messages = file_messages(source) if is_file else []
    said = [message for message in messages if message.is_batch]
    rows = sum(message.rows for message in said)
    try:
        file = pa.PythonFile(source, mode="r")
        shared = sum(message.size for message in messages if not message.is_batch)
        if shared > _MOST_BATCH:
            raise TooLargeError(f"dictionaries of {shared} bytes, more than {_MOST_BATCH}")
        arrow: Any = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
        columns = columns_of(arrow.schema, config)
        batches = arrow.num_record_batches if is_file else None
    except TooLargeError as error:
        yield Skip(source.path, 0, str(error), reader.believed(rows))
        return
    except DAMAGE as error:
        yield damage(source, 0, "Arrow file", error)
        return
    if not has_text(columns, config):
        yield reader.without_text(rows, arrow.schema)
    elif batches is None:
        yield from reader.read(_slices(_of_stream(source, arrow), columns), "record batch", 1)
    else:
        for index in range(batches):
            message = said[index] if len(said) == batches else Message(True, 1, 0)
            part = _slices(_of_file(arrow, index, message), columns)
            yield from reader.read(part, "record batch", message.rows)


def _of_file(arrow: Any, index: int, message: Message) -> Iterator[pa.RecordBatch]:
    """One record batch of a file."""
    if message.size > _MOST_BATCH:
        raise TooLargeError(f"a record batch of {message.size} bytes, more than {_MOST_BATCH}: write smaller ones")
    yield arrow.get_batch(index)


def _of_stream(source: Source, arrow: Any) -> Iterator[pa.RecordBatch]:
    """The record batches of a stream, which cannot be read behind one that is too large."""
    shared = 0
    messages = stream_messages(source)
    while True:
        for message in messages:
            shared += 0 if message.is_batch else message.size
            if max(shared, message.size) > _MOST_BATCH:
                size = max(shared, message.size)
                raise TooLargeError(
                    f"{size} bytes at once, more than {_MOST_BATCH}: the rest of the stream is not read"
                )
            if message.is_batch:
                break
        batch = next(arrow, None)
        if batch is None:
            return
        yield batch


def _slices(batches: Iterator[pa.RecordBatch], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of batches, a few at a time: fewer where each may be as long as all that lies behind it."""
    for batch in batches:
        batch = batch.select(columns)
        simple = all(_is_simple(column.type) for column in batch.columns)
        step = ROWS if simple else max(1, min(ROWS, _SHARED_BYTES // max(1, batch.get_total_buffer_size())))
        for start in range(0, batch.num_rows, step):
            yield batch.slice(start, step)


def _is_simple(kind: pa.DataType) -> bool:
    """Whether no two rows of a column can share their bytes."""
    return bool(pa.types.is_primitive(kind)) or any(
        test(kind)
        for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    )
