"""Types that every reader yields: record batches of pages, and one entry per skipped record.

A page is HTML in `payload`, or a text that needs no extraction in `text`.
"""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

PAGE_SCHEMA = pa.schema(
    [
        # id in the file; null if it is derived from url, date and content
        pa.field("id", pa.string()),
        pa.field("url", pa.string(), nullable=False),
        pa.field("date", pa.string(), nullable=False),  # as in the crawl: 2024-05-01T12:00:00Z
        pa.field("file", pa.string(), nullable=False),  # path as given to the reader, and /member
        # Bytes of the file before the record, or before the compressed member that it begins in; of
        # jsonl, decoded bytes before the line; of parquet and Arrow, rows before the row.
        pa.field("offset", pa.int64(), nullable=False),
        # of the HTTP header, lower case, "" when absent
        pa.field("content_type", pa.string(), nullable=False),
        pa.field("charset", pa.string(), nullable=False),  # Python codec of the payload
        # HTML bytes after transfer and content decoding
        pa.field("payload", pa.large_binary(), nullable=False),
        pa.field("text", pa.large_string()),  # text that needs no extraction; null for HTML
        # defects of a page that is kept, separated by "; "; null for none
        pa.field("note", pa.string()),
        # further fields of a row (core/input_fields.py); null for none
        pa.field("fields", pa.large_string()),
    ]
)
_BATCH_BYTES = 32 << 20  # a few long pages fill a batch, so that memory is bounded
_BATCH_SKIPS = 4_096


@dataclass(frozen=True, slots=True)
class SkippedRecord:
    """A record, or the rest of a file, that could not become a page.

    Attributes:
        file: path of the file as records and messages show it.
        offset: position in the file, as `PAGE_SCHEMA` defines it.
        reason: reason.
        count: number of records that this entry represents.
        is_retryable: whether another attempt may succeed, because the storage failed and not the
            file.
    """

    file: str
    offset: int
    reason: str
    count: int = 1
    is_retryable: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    """One page; the fields are the columns of `PAGE_SCHEMA`."""

    offset: int
    url: str
    date: str
    payload: bytes = b""
    charset: str = "utf-8"
    content_type: str = ""
    text: str | None = None
    id: str | None = None
    note: str = ""  # a defect of a page that is kept
    more_notes: tuple[str, ...] = ()  # further defects
    fields: str | None = None  # further fields of a row
    file: str = ""  # of a member of an archive; "" for the file that is read

    @property
    def notes(self) -> tuple[str, ...]:
        """All notes, each once."""
        return tuple(dict.fromkeys(note for note in (self.note, *self.more_notes) if note))


# not frozen: there are millions, and a frozen one takes four times as long to create
@dataclass(slots=True)
class NonPageRecord:
    """A record that is not a page and need not be one, such as a request."""

    offset: int


@dataclass(frozen=True, slots=True)
class PageBatch:
    """Pages of one file in file order, with the records skipped since the last batch.

    Attributes:
        pages: record batch of `PAGE_SCHEMA`; may have no rows.
        skipped: records that should have become pages and did not.
        records: number of records of any type seen since the last batch.
        position: bytes of the file read so far, for progress.
        noted: one entry per defect of a page that was kept.
    """

    pages: pa.RecordBatch
    skipped: list[SkippedRecord]
    records: int
    position: int
    noted: list[SkippedRecord] = field(default_factory=list)


class PageCollector:
    """Collector of the pages of one file into batches."""

    def __init__(self, file: str, batch_pages: int = 128) -> None:
        self.file = file
        self.batch_pages = batch_pages
        self._reset_batch()

    def _reset_batch(self) -> None:
        self._pages: list[Page] = []
        self._skipped: list[SkippedRecord] = []
        self._noted: list[SkippedRecord] = []
        self._records = self._bytes = 0

    def add_record(self, found: Page | SkippedRecord | NonPageRecord) -> bool:
        """Add a record and return whether the batch is full."""
        if isinstance(found, SkippedRecord):
            self._skipped.append(found)
            return len(self._skipped) >= _BATCH_SKIPS
        self._records += 1
        if isinstance(found, Page):
            self._pages.append(found)
            self._bytes += len(found.payload) + len(found.text or "") + len(found.fields or "")
            file = found.file or self.file
            self._noted += [SkippedRecord(file, found.offset, note) for note in found.notes]
        return len(self._pages) >= self.batch_pages or self._bytes >= _BATCH_BYTES

    def take_batch(self, position: int) -> PageBatch:
        """Return the collected batch and start a new one.

        Args:
            position: bytes of the file read so far.
        """
        pages = self._pages
        columns = [
            pa.array([page.id for page in pages], pa.string()),
            *(
                pa.array([getattr(page, name) for page in pages], pa.string())
                for name in ("url", "date")
            ),
            pa.array([page.file or self.file for page in pages], pa.string()),
            pa.array([page.offset for page in pages], pa.int64()),
            *(
                pa.array([getattr(page, name) for page in pages], pa.string())
                for name in ("content_type", "charset")
            ),
            _build_binary_array([page.payload for page in pages]),
            pa.array([page.text for page in pages], pa.large_string()),
            pa.array(["; ".join(page.notes) or None for page in pages], pa.string()),
            pa.array([page.fields for page in pages], pa.large_string()),
        ]
        batch = pa.record_batch(columns, schema=PAGE_SCHEMA)
        taken = PageBatch(batch, self._skipped, self._records, position, self._noted)
        self._reset_batch()
        return taken


def _build_binary_array(payloads: list[bytes]) -> pa.Array:
    """Build a large_binary array with one copy of the bytes."""
    ends = np.cumsum([0, *map(len, payloads)], dtype=np.int64)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(payloads))]
    return pa.Array.from_buffers(pa.large_binary(), len(payloads), buffers)


def remove_invalid_characters(text: str) -> str:
    """Return the text without NULs and with lone surrogates, which UTF-8 cannot encode, replaced
    by question marks.
    """
    if "\0" in text:
        text = text.replace("\0", "")
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode("utf-8")
    return text
