"""What every reader gives: record batches of pages, and one line for each thing it had to skip.

Reads nothing; the types here are the border between the formats of files and the rest of the pipeline. A page is HTML
in `payload`, or a text that needs no extraction in `text`.
"""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

PAGE_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string()),  # as the file names it; null when it follows from url, date and content
        pa.field("url", pa.string(), nullable=False),
        pa.field("date", pa.string(), nullable=False),  # as in the crawl: 2024-05-01T12:00:00Z
        pa.field("file", pa.string(), nullable=False),  # path as given to the reader
        # Bytes of the file before the record, or before the compressed member that it begins in; of jsonl, decoded
        # bytes before the line; of parquet and Arrow, rows before the row.
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("content_type", pa.string(), nullable=False),  # of the HTTP header, lower case, "" when absent
        pa.field("charset", pa.string(), nullable=False),  # what decodes the payload
        pa.field("payload", pa.large_binary(), nullable=False),  # HTML bytes after transfer and content decoding
        pa.field("text", pa.large_string()),  # text that needs no extraction; null for HTML
        pa.field("note", pa.string()),  # what is wrong with a page that is kept, parted by "; "; null for nothing
    ]
)
_BATCH_BYTES = 32 << 20  # pages are long at times; memory is bounded by bytes too
_BATCH_SKIPS = 4_096


@dataclass(frozen=True, slots=True)
class SkippedRecord:
    """One record, or the rest of one file, that could not become a page, and why.

    Attributes:
        count: records that this stands for.
        again: whether another attempt may read it, because the storage failed and not the file.
    """

    file: str
    offset: int
    reason: str
    count: int = 1
    is_retryable: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    """One page, as columns take it; see `PAGE_SCHEMA`."""

    offset: int
    url: str
    date: str
    payload: bytes = b""
    charset: str = "utf-8"
    content_type: str = ""
    text: str | None = None
    id: str | None = None
    note: str = ""  # what is wrong with it although it is kept
    more_notes: tuple[str, ...] = ()  # the same, when that is more than one thing

    @property
    def notes(self) -> tuple[str, ...]:
        """All notes, each once."""
        return tuple(dict.fromkeys(note for note in (self.note, *self.more_notes) if note))


@dataclass(slots=True)  # not frozen: there are millions, and freezing makes each four times as dear
class NonPageRecord:
    """A record that is no page and need not be one, such as a request."""

    offset: int


@dataclass(frozen=True, slots=True)
class PageBatch:
    """Some pages of one file in file order, with what was skipped since the last batch.

    Attributes:
        pages: record batch of `PAGE_SCHEMA`; may have no rows.
        skipped: records that did not become pages although they should have.
        noted: what is wrong with pages that were kept.
        records: records of any type seen since the last batch.
        position: compressed bytes of the file read so far, for progress.
    """

    pages: pa.RecordBatch
    skipped: list[SkippedRecord]
    records: int
    position: int
    noted: list[SkippedRecord] = field(default_factory=list)


class PageCollector:
    """Pages of one file being collected into batches."""

    def __init__(self, file: str, batch_pages: int = 128) -> None:
        self.file, self.batch_pages = file, batch_pages
        self._reset_batch()

    def _reset_batch(self) -> None:
        self._pages: list[Page] = []
        self._skipped: list[SkippedRecord] = []
        self._noted: list[SkippedRecord] = []
        self._records = self._bytes = 0

    def add_record(self, found: Page | SkippedRecord | NonPageRecord) -> bool:
        """Take in what a reader found, and say whether the batch is full."""
        if isinstance(found, SkippedRecord):
            self._skipped.append(found)
            return len(self._skipped) >= _BATCH_SKIPS
        self._records += 1
        if isinstance(found, Page):
            self._pages.append(found)
            self._bytes += len(found.payload) + len(found.text or "")
            self._noted += [SkippedRecord(self.file, found.offset, note) for note in found.notes]
        return len(self._pages) >= self.batch_pages or self._bytes >= _BATCH_BYTES

    def take_batch(self, position: int) -> PageBatch:
        """Return what was collected and begin anew; `position` is how much of the file was read."""
        pages = self._pages
        columns = [
            pa.array([page.id for page in pages], pa.string()),
            *(pa.array([getattr(page, name) for page in pages], pa.string()) for name in ("url", "date")),
            pa.array([self.file] * len(pages), pa.string()),
            pa.array([page.offset for page in pages], pa.int64()),
            *(pa.array([getattr(page, name) for page in pages], pa.string()) for name in ("content_type", "charset")),
            _build_binary_array([page.payload for page in pages]),
            pa.array([page.text for page in pages], pa.large_string()),
            pa.array(["; ".join(page.notes) or None for page in pages], pa.string()),
        ]
        batch = pa.record_batch(columns, schema=PAGE_SCHEMA)
        taken = PageBatch(batch, self._skipped, self._records, position, self._noted)
        self._reset_batch()
        return taken


def _build_binary_array(payloads: list[bytes]) -> pa.Array:
    """An array of large_binary, made with one copy."""
    ends = np.cumsum([0, *map(len, payloads)], dtype=np.int64)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(payloads))]
    return pa.Array.from_buffers(pa.large_binary(), len(payloads), buffers)


def remove_invalid_characters(text: str) -> str:
    """The text without what UTF-8 cannot carry and without NULs."""
    if "\0" in text:
        text = text.replace("\0", "")
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate becomes a question mark
        return text.encode("utf-8", "replace").decode("utf-8")
    return text
