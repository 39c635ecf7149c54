"""What every reader gives: record batches of pages, and one line for each thing it had to skip.

Reads nothing; the types here are the border between a crawl format and the rest of the pipeline.
"""

from dataclasses import dataclass

import pyarrow as pa

PAGE_SCHEMA = pa.schema(
    [
        pa.field("url", pa.string(), nullable=False),
        pa.field("date", pa.string(), nullable=False),  # as in the crawl: 2024-05-01T12:00:00Z
        pa.field("file", pa.string(), nullable=False),  # path as given to the reader
        pa.field("offset", pa.int64(), nullable=False),  # bytes of the (compressed) file before the record
        pa.field("content_type", pa.string(), nullable=False),  # of the HTTP header, lower case, "" when absent
        pa.field("charset", pa.string(), nullable=False),  # what decodes the payload
        pa.field("payload", pa.large_binary(), nullable=False),  # HTML bytes after transfer and content decoding
    ]
)


@dataclass(frozen=True, slots=True)
class Skip:
    """One record, or the rest of one file, that could not become a page, and why."""

    file: str
    offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class PageBatch:
    """Some pages of one file in file order, with what was skipped since the last batch.

    Attributes:
        pages: record batch of `PAGE_SCHEMA`; may have no rows.
        skipped: records that did not become pages although they should have.
        records: records of any type seen since the last batch.
        position: compressed bytes of the file read so far, for progress.
    """

    pages: pa.RecordBatch
    skipped: list[Skip]
    records: int
    position: int
