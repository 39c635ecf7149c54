"""Parquet files in, documents out, a few rows at a time.

Reads the columns that the configuration names and no others. What is damaged costs its row group; so does a page that
would take more memory than a process may.
"""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.readers.columns import DAMAGE, ROWS, RowReader, DecodeLimitError, list_columns, build_damage_skip, has_text_column
from data_pipeline.readers.page import Page, SkippedRecord
from data_pipeline.readers.page_size import MOST_BYTES, compute_largest_page
from data_pipeline.readers.source import InputStream
from llmsys.config.read import ReadConfig

_BATCH_BYTES = 4 << 20
_MOST_FOOTER = 64 << 20


def read_parquet(source: InputStream, max_text_bytes: int, config: ReadConfig) -> Iterator[Page | SkippedRecord]:
    """Yield the documents of a parquet file."""
    if (footer := int.from_bytes(source.read_at(source.size - 8, 4), "little")) > _MOST_FOOTER:
        yield SkippedRecord(source.path, 0, f"a parquet file with a footer of {footer} bytes, more than {_MOST_FOOTER}")
        return
    try:
        file = pq.ParquetFile(
            pa.PythonFile(source, mode="r"), pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True
        )
        rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        columns = list_columns(file.schema_arrow, config)
    except DAMAGE as error:
        yield build_damage_skip(source, 0, "parquet file", error)
        return
    reader = RowReader(source, max_text_bytes, config)
    if not has_text_column(columns, config):
        yield reader.build_missing_text_skip(sum(rows), file.schema_arrow)
        return
    for group, count in enumerate(rows):
        yield from reader.iter_documents(_iter_row_group_batches(file, source, group, columns), "row group", count)


def _iter_row_group_batches(file: pq.ParquetFile, source: InputStream, group: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """A row group, so many rows at a time as can be decoded."""
    about = file.metadata.row_group(group)
    chunks = [about.column(number) for number in range(about.num_columns)]
    pages = [compute_largest_page(source, chunk, ROWS) for chunk in chunks if _is_column_leaf(chunk.path_in_schema, columns)]
    largest, most = max(page for page, _ in pages), min(rows for _, rows in pages)
    if largest > MOST_BYTES:
        raise DecodeLimitError(f"a page of {largest} bytes, more than {MOST_BYTES}: write smaller ones")
    step = max(1, min(most, _BATCH_BYTES * max(about.num_rows, 1) // max(1, about.total_byte_size)))
    yield from file.iter_batches(step, row_groups=[group], columns=columns, use_threads=False)


def _is_column_leaf(path: str, columns: list[str]) -> bool:
    """Whether a leaf belongs to a column, whose name may have dots."""
    return any(path == name or path.startswith(f"{name}.") for name in columns)
