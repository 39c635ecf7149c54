"""Read documents from JSON lines, plain or compressed with gzip, zstd or lz4.

Reads decoded bytes; yields one page with text per line.

Invariants:
- Only a newline ends a line, because JSON strings may hold U+2028 and U+0085.
- The offset of a document is the number of decoded bytes before its line.
- Damage in the compression loses the line that it cuts, not the following ones.
"""

import json
from collections.abc import Iterator
from typing import Any

from llmsys.config.cleaning import ReadConfig
from llmsys.data_pipeline.readers.charset import can_decode
from llmsys.data_pipeline.readers.compressed_members import (
    CompressedMembers,
    DamagedMember,
    MemberChunk,
)
from llmsys.data_pipeline.readers.input_stream import InputStream
from llmsys.data_pipeline.readers.page_batch import Page, SkippedRecord
from llmsys.data_pipeline.readers.row_reader import build_document_page, find_text_fields, get_field

_ESCAPED = 6  # bytes of an escaped one-byte character, such as \u0041
_OTHER_FIELDS_BYTES = 1 << 16
_STEP = 1 << 18
_MARK = b"\xef\xbb\xbf"


def read_json_lines(
    source: InputStream, magic: bytes, max_text_bytes: int, config: ReadConfig
) -> Iterator[Page | SkippedRecord]:
    """Read a file of JSON lines.

    Args:
        source: The file.
        magic: Its compression.
        max_text_bytes: Longer texts are skipped.
        config: Fields of a document.

    Yields:
        Documents, and a `SkippedRecord` for each line or damage without one.
    """
    limit = max_text_bytes * _ESCAPED + _OTHER_FIELDS_BYTES
    lines = _LineSplitter(source.path, limit)
    for piece in _iter_chunks(source, magic):
        if isinstance(piece, DamagedMember):
            lines.discard_line()
            yield SkippedRecord(source.path, piece.offset, piece.reason)
            continue
        for offset, line in lines.split_lines(piece.data):
            yield from _iter_line_documents(source.path, offset, line, max_text_bytes, config)
    for offset, line in lines.flush_last_line():
        yield from _iter_line_documents(source.path, offset, line, max_text_bytes, config)


def _iter_chunks(source: InputStream, magic: bytes) -> Iterator[MemberChunk | DamagedMember]:
    if magic:
        yield from CompressedMembers(source, magic, bool).iter_chunks(0)
        return
    for position in range(0, source.size, _STEP):
        yield MemberChunk(0, source.read_block(position, _STEP), position == 0)


class _LineSplitter:
    """Splitter of chunks into lines. A line longer than `limit` bytes is counted and not stored."""

    def __init__(self, path: str, limit: int) -> None:
        self.path = path
        self.limit = limit
        self.begin = 0  # decoded bytes before the current line
        self.line = bytearray()
        self.size = 0

    def split_lines(self, data: bytes) -> Iterator[tuple[int, bytes | None]]:
        """Yield the offset of each line that ends in `data`, and the line; None for a line that
        is too long.
        """
        *ended, last = data.split(b"\n")
        for line in ended:
            yield self._end_line(line)
        self._append_part(last)

    def flush_last_line(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield the last line if it has no newline."""
        if self.size:
            yield self._end_line(b"")

    def discard_line(self) -> None:
        """Drop the unfinished line."""
        self.begin += self.size
        self._start_line()

    def _start_line(self) -> None:
        self.size = 0
        self.line.clear()

    def _append_part(self, part: bytes) -> None:
        self.size += len(part)
        if self.size <= self.limit:
            self.line += part
        else:
            self.line.clear()

    def _end_line(self, part: bytes) -> tuple[int, bytes | None]:
        self._append_part(part)
        offset = self.begin
        line = bytes(self.line) if self.size <= self.limit else None
        self.begin += self.size + 1
        self._start_line()
        return offset, line


def _iter_line_documents(
    path: str, offset: int, line: bytes | None, limit: int, config: ReadConfig
) -> Iterator[Page | SkippedRecord]:
    if line is None:
        yield SkippedRecord(path, offset, f"longer than {limit} bytes")
        return
    line = line.removeprefix(_MARK) if offset == 0 else line
    if not line.strip():
        return
    row = _parse_json_object(line)
    if isinstance(row, str):
        yield SkippedRecord(path, offset, row)
        return
    values = {
        name: get_field(row, getattr(config, f"{name}_field"))
        for name in ("text", "url", "id", "date")
    }
    names = None if isinstance(values["text"], str) else find_text_fields(row)
    page = build_document_page(offset, values, limit, config.text_field, names)
    yield SkippedRecord(path, offset, page) if isinstance(page, str) else page


def _parse_json_object(line: bytes) -> dict[str, Any] | str:
    """Parse the object of a line, or return the reason why there is none."""
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError:
        if not can_decode(line, "utf-8"):  # a few damaged bytes are replaced instead
            return "not UTF-8"
        return _parse_json_object(line.decode("utf-8", "replace").encode())
    except RecursionError:
        return "not JSON: nested too deep"
    except ValueError as error:
        return f"not JSON: {str(error).split(':', 1)[0]}"
    return row if isinstance(row, dict) else "not a JSON object"
