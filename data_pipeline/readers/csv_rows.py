"""Read documents from CSV and TSV files, plain or compressed, one per row.

The first row is the header. Fields may be in double quotes, and then hold delimiters, newlines and
doubled quotes (RFC 4180). An empty field is absent. A column of `data.read.column_types` has its
type, and a row with another value is lost; that of other columns follows from the texts of the
whole dataset (`core/csv_types.py`).

Invariants:
- The offset of a document is the number of decoded bytes before its row.
- Memory holds one row of bounded size and 1 MiB of others, whatever the quotes of a file are.
- A damaged row loses itself. Of one whose quote never ends the first line is lost, and the lines
  after it are read; from the seventeenth such row of a file on all its lines are lost, so that no
  file costs more than a few times its size.
"""

import csv
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from llmsys.config.cleaning import ColumnType, ReadConfig
from llmsys.data_pipeline.core.csv_types import TEXT, convert_texts
from llmsys.data_pipeline.core.input_fields import parse_type
from llmsys.data_pipeline.readers.charset import can_decode
from llmsys.data_pipeline.readers.compressed_members import DamagedMember
from llmsys.data_pipeline.readers.input_stream import InputStream, remove_compression_suffix
from llmsys.data_pipeline.readers.page_batch import Page, SkippedRecord
from llmsys.data_pipeline.readers.row_fields import add_fields, select_row_fields
from llmsys.data_pipeline.readers.row_reader import build_document_page, describe_missing_text
from llmsys.data_pipeline.readers.text_lines import iter_text_lines

# Tried in this order; the first that gives the header a column of text is taken.
DELIMITERS = (",", ";", "\t", "|")
_TAB_ENDINGS = (".tsv", ".tab")
_MARK = b"\xef\xbb\xbf"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
# Each byte of a text may be a doubled quote.
_QUOTED = 2
_OTHER_FIELDS_BYTES = 1 << 16
_MODULE_LIMIT = 2**31 - 1  # characters of a field; it is one of the process, and ours is lower
_TRIES = 16
# Rows whose columns are converted at once.
_ROWS = 128
_ROWS_BYTES = 1 << 20


def read_csv(
    source: InputStream, magic: bytes, max_text_bytes: int, config: ReadConfig
) -> Iterator[Page | SkippedRecord]:
    """Read a file of CSV or TSV.

    Args:
        source: The file; its name says which of the two it is.
        magic: Its compression.
        max_text_bytes: Longer texts are skipped.
        config: Fields of a document.

    Yields:
        Documents, and a `SkippedRecord` for each row or damage without one.
    """
    waiting: list[_Row | SkippedRecord] = []
    size = 0
    for row in _iter_rows(source, magic, max_text_bytes, config):
        waiting.append(row)
        size += sum(map(len, row.cells.values())) if isinstance(row, _Row) else 0
        if len(waiting) == _ROWS or size >= _ROWS_BYTES:
            yield from _build_documents(source.path, waiting, max_text_bytes, config)
            waiting = []
            size = 0
    yield from _build_documents(source.path, waiting, max_text_bytes, config)


@dataclass(slots=True)
class _Row:
    """A row of a file.

    Attributes:
        offset: Its place.
        cells: Texts by column; empty ones are absent.
        header: All columns.
        typed: Values of the columns with a type, as `encode_fields` takes them.
    """

    offset: int
    cells: dict[str, str]
    header: Sequence[str]
    typed: dict[str, Any] = field(default_factory=dict)


def _iter_rows(
    source: InputStream, magic: bytes, max_text_bytes: int, config: ReadConfig
) -> Iterator[_Row | SkippedRecord]:
    csv.field_size_limit(_MODULE_LIMIT)
    limit = max_text_bytes * _QUOTED + _OTHER_FIELDS_BYTES
    lines = _LineFeed(source, magic, limit)
    header: list[str] | None = None
    delimiter = "\t" if remove_compression_suffix(source.path).endswith(_TAB_ENDINGS) else ","
    while not lines.is_done:
        if header is None:
            found = lines.read_first_line()
            if isinstance(found, str):
                delimiter = _choose_delimiter(found, source.path, config)
        row = lines.read_row(delimiter)
        if isinstance(row, SkippedRecord) and header is None:
            reason = f"{row.reason}; it is the header, without which no row is read"
            yield replace(row, reason=reason)
            return
        if isinstance(row, SkippedRecord):
            yield row
            continue
        offset, texts = row
        if not texts:  # an empty line
            continue
        if header is None:
            header = texts
            if (problem := _find_header_problem(header, config)) is not None:
                yield SkippedRecord(source.path, offset, problem)
                return
        elif len(texts) != len(header):
            reason = f"{len(texts)} fields, and the header has {len(header)}"
            yield SkippedRecord(source.path, offset, reason)
        else:
            cells = {
                name: text for name, text in zip(header, texts, strict=True)
                if text or name == config.text_field
            }  # fmt: skip
            yield _Row(offset, cells, header)


class _LineFeed:
    """Feeds the lines of a file to the csv module, and knows where its row began.

    Attributes:
        is_done: No line is left.
    """

    def __init__(self, source: InputStream, magic: bytes, limit: int) -> None:
        self._path = source.path
        self._limit = limit
        self._lines = iter_text_lines(source, magic, limit)
        # Of the row that is being read, and those that are read again.
        self._taken: list[tuple[int, bytes]] = []
        self._waiting: deque[tuple[int, bytes | None] | DamagedMember] = deque()
        self._size = 0
        self._tries = 0  # lost rows of several lines
        self.is_done = False
        self._look_ahead()

    def read_first_line(self) -> str | None:
        """Return the next line without taking it; None if it is none of text."""
        first = self._waiting[0]
        if isinstance(first, DamagedMember) or first[1] is None:
            return None
        return first[1].removeprefix(_MARK).decode("utf-8", "replace")

    def read_row(self, delimiter: str) -> tuple[int, list[str]] | SkippedRecord:
        """Return the offset and the fields of the next row, or a loss; an empty line has no
        fields.
        """
        self._taken = []
        self._size = 0
        first = self._waiting[0]
        if isinstance(first, DamagedMember):
            self._take_line()
            return SkippedRecord(self._path, first.offset, first.reason)
        offset, line = first
        if line is None:
            self._take_line()
            return SkippedRecord(self._path, offset, f"a line longer than {self._limit} bytes")
        if offset == 0 and line.startswith(_UTF_16):
            self._waiting.clear()
            self._lines = iter(())
            self.is_done = True
            reason = "UTF-16: convert it, such as with iconv -f UTF-16 -t UTF-8"
            return SkippedRecord(self._path, 0, reason)
        try:
            return offset, next(csv.reader(self._iter_texts(), delimiter=delimiter))
        except _LostRowError as lost:
            reason = str(lost)
        except csv.Error:  # of those that the module has, the only one that is left
            reason = "not CSV: a carriage return in a field without quotes"
        self._return_lines()
        return SkippedRecord(self._path, offset, reason)

    def _iter_texts(self) -> Iterator[str]:
        """Yield the lines of one row, as many as the csv module asks for."""
        while not self.is_done:
            first = self._waiting[0]
            if isinstance(first, DamagedMember):
                raise _LostRowError("a quoted field that damage in the compression cuts")
            offset, line = first
            if line is None or self._size + len(line) > self._limit:
                raise _LostRowError(f"a quote without end in {self._limit} bytes")
            self._take_line()
            self._taken.append((offset, line))
            self._size += len(line) + 1
            line = line.removeprefix(_MARK) if offset == 0 else line
            try:
                yield f"{line.decode()}\n"
            except UnicodeDecodeError:
                # A few damaged bytes are replaced, as in JSON lines.
                if not can_decode(line, "utf-8"):
                    raise _LostRowError("not UTF-8") from None
                yield f"{line.decode('utf-8', 'replace')}\n"
        if self._taken:
            # The module would take the end of the file for the end of the quote.
            raise _LostRowError("a quote without end")

    def _take_line(self) -> None:
        self._waiting.popleft()
        self._look_ahead()

    def _look_ahead(self) -> None:
        if not self._waiting:
            found = next(self._lines, None)
            if found is None:
                self.is_done = True
            else:
                self._waiting.append(found)

    def _return_lines(self) -> None:
        """Let the lines after the first one of a lost row be read again."""
        if len(self._taken) > 1:
            self._tries += 1
        if self._tries <= _TRIES:
            self._waiting.extendleft(reversed(self._taken[1:]))
        self.is_done = not self._waiting
        self._taken = []


class _LostRowError(Exception):
    """A row that cannot be read; its text is the reason."""


def _choose_delimiter(header: str, path: str, config: ReadConfig) -> str:
    """Return the delimiter of a file: a tab for TSV, else the first that gives the header the
    column of the text.
    """
    if remove_compression_suffix(path).endswith(_TAB_ENDINGS):
        return "\t"
    for delimiter in DELIMITERS:
        names = next(csv.reader([header], delimiter=delimiter), [])
        if config.text_field in [name.strip() for name in names]:
            return delimiter
    return ","


def _find_header_problem(header: list[str], config: ReadConfig) -> str | None:
    """Clean the names of a header; return why it names no documents, if it does not."""
    for number, name in enumerate(header):
        # Tables of pandas have an index without a name.
        header[number] = name.strip() or f"column_{number + 1}"
    if config.text_field not in header:
        return f"{describe_missing_text(config.text_field, header)}; the first row is the header"
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        return f"the header has two columns {twice!r}: rename one"
    return None


def _build_documents(
    path: str, rows: Sequence[_Row | SkippedRecord], limit: int, config: ReadConfig
) -> Iterator[Page | SkippedRecord]:
    """Yield the documents of rows, in their order."""
    refused = {
        number: name
        for name in reversed(config.column_types)  # of several the first one is named
        for number in _convert_column(rows, name, config.column_types[name])
    }
    for number, row in enumerate(rows):
        if isinstance(row, SkippedRecord):
            yield row
        elif (name := refused.get(number)) is not None:
            kind = config.column_types[name]
            reason = f"column {name!r} is not {kind}, its type in data.read.column_types"
            yield SkippedRecord(path, row.offset, reason)
        else:
            page = _build_row_document(row, limit, config)
            yield SkippedRecord(path, row.offset, page) if isinstance(page, str) else page


def _convert_column(
    rows: Sequence[_Row | SkippedRecord], name: str, kind: ColumnType
) -> Iterator[int]:
    """Convert the texts of a column; yield the numbers of rows whose text its type refuses."""
    places = [
        (number, row) for number, row in enumerate(rows)
        if isinstance(row, _Row) and name in row.cells
    ]  # fmt: skip
    texts = [row.cells[name] for _, row in places]
    values: Sequence[Any] = texts
    if kind != "string":
        try:
            values = convert_texts(texts, parse_type(kind))
        except pa.ArrowInvalid:
            if len(texts) == 1:
                yield places[0][0]
                return
            # Few rows are refused, and they are found by halves.
            middle = places[len(places) // 2][0]
            yield from _convert_column(rows[:middle], name, kind)
            yield from (middle + number for number in _convert_column(rows[middle:], name, kind))
            return
    for (_, row), value in zip(places, values, strict=True):
        row.typed[name] = value


def _build_row_document(row: _Row, limit: int, config: ReadConfig) -> Page | str:
    values = {
        name: row.cells.get(getattr(config, f"{name}_field"))
        for name in ("text", "url", "id", "date")
    }
    page = build_document_page(row.offset, values, limit, config.text_field, row.header)
    if isinstance(page, str) or config.keep_fields == "none":
        return page
    fields = select_row_fields(row.cells, values, config)
    return add_fields(
        page,
        {name: row.typed.get(name, {TEXT: text}) for name, text in fields.items()},
    )
