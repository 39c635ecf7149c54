"""Files of JSON lines in, documents out: plain, gzip, zstd or lz4.

Reads decoded bytes, gives one page with its text a line. Lines end with a newline and nothing else, because JSON may
hold U+2028 and U+0085. A line that is no document is named by the decoded bytes before it; damage in the compression
costs the line that it cuts.
"""

import json
from collections.abc import Iterator
from typing import Any

from data_pipeline.readers.charset import fits
from data_pipeline.readers.field import document, field, find_text_fields
from data_pipeline.readers.member import Break, Members, Piece
from data_pipeline.readers.page import Page, Skip
from data_pipeline.readers.source import Source
from llmsys.config.read import ReadConfig

_ESCAPED = 6  # a character of one byte takes six as \u0041
_ROOM = 1 << 16  # for the other fields
_STEP = 1 << 18
_MARK = b"\xef\xbb\xbf"


def read_lines(source: Source, magic: bytes, max_text_bytes: int, config: ReadConfig) -> Iterator[Page | Skip]:
    """Yield the documents of one file, and a Skip for each line or place that holds none."""
    limit = max_text_bytes * _ESCAPED + _ROOM
    lines = _Lines(source.path, limit)
    for piece in _pieces(source, magic):
        if isinstance(piece, Break):
            lines.drop()
            yield Skip(source.path, piece.offset, piece.reason)
            continue
        for offset, line in lines.split(piece.data):
            yield from _document(source.path, offset, line, max_text_bytes, config)
    for offset, line in lines.rest():
        yield from _document(source.path, offset, line, max_text_bytes, config)


def _pieces(source: Source, magic: bytes) -> Iterator[Piece | Break]:
    if magic:
        yield from Members(source, magic, bool).read(0)
        return
    for position in range(0, source.size, _STEP):
        yield Piece(0, source.read_at(position, _STEP), position == 0)


class _Lines:
    """Splits pieces into lines; of a line longer than `limit` bytes only the fact is kept."""

    def __init__(self, path: str, limit: int) -> None:
        self.path, self.limit = path, limit
        self.begin = 0  # decoded bytes before the current line
        self.line = bytearray()
        self.size = 0

    def split(self, data: bytes) -> Iterator[tuple[int, bytes | None]]:
        """Yield each line that ends in `data` with its place; None for a line that is too long."""
        *ended, last = data.split(b"\n")
        for line in ended:
            yield self._end(line)
        self._add(last)

    def rest(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield the last line if nothing ended it."""
        if self.size:
            yield self._end(b"")

    def drop(self) -> None:
        """Forget the line that has begun."""
        self.begin += self.size
        self._begin()

    def _begin(self) -> None:
        self.size = 0
        self.line.clear()

    def _add(self, part: bytes) -> None:
        self.size += len(part)
        if self.size <= self.limit:
            self.line += part
        else:
            self.line.clear()

    def _end(self, part: bytes) -> tuple[int, bytes | None]:
        self._add(part)
        place = self.begin
        line = bytes(self.line) if self.size <= self.limit else None
        self.begin += self.size + 1
        self._begin()
        return place, line


def _document(path: str, offset: int, line: bytes | None, limit: int, config: ReadConfig) -> Iterator[Page | Skip]:
    if line is None:
        yield Skip(path, offset, f"longer than {limit} bytes")
        return
    line = line.removeprefix(_MARK) if offset == 0 else line
    if not line.strip():
        return
    row = _parsed(line)
    if isinstance(row, str):
        yield Skip(path, offset, row)
        return
    values = {name: field(row, getattr(config, name)) for name in ("text", "url", "id", "date")}
    names = None if isinstance(values["text"], str) else find_text_fields(row)
    made = document(offset, values, limit, config.text, names)
    yield Skip(path, offset, made) if isinstance(made, str) else made


def _parsed(line: bytes) -> dict[str, Any] | str:
    """The object of a line, or what it is instead."""
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError:
        if not fits(line, "utf-8"):
            return "not UTF-8"
        return _parsed(line.decode("utf-8", "replace").encode())
    except RecursionError:
        return "not JSON: nested too deep"
    except ValueError as error:
        return f"not JSON: {str(error).split(':', 1)[0]}"
    return row if isinstance(row, dict) else "not a JSON object"
