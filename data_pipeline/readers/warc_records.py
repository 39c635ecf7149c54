"""Iterate over the records of a WARC file: with FastWARC, and with `record_parser` wherever
FastWARC fails.

FastWARC reads at the speed of zlib. It stops at the first damaged byte, does not report a cut end,
and does not know record offsets in a file that is compressed as a whole. So `record_parser` reads
the last record of every file and every record that FastWARC rejects, and hands back after the
damage.

Headers are those of WARC (ISO 28500, 4) or of ARC, the format before WARC (Internet Archive, "Arc
File Format", 1996). A WARC header is a version line, named fields and a blank line. An ARC header
is one line of five fields (version 1) or ten (version 2) with the length last; it is returned under
WARC's field names.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from fastwarc.warc import ArchiveIterator, WarcRecord, any_type

from llmsys.data_pipeline.readers.byte_stream import (
    ByteStream,
    CompressedByteStream,
    PlainByteStream,
)
from llmsys.data_pipeline.readers.compressed_members import (
    BZIP2,
    LZ4,
    XZ,
    CompressedMembers,
    detect_compression,
    read_dictionary,
)
from llmsys.data_pipeline.readers.http_response import parse_header_fields
from llmsys.data_pipeline.readers.input_stream import InputStream, ReadError
from llmsys.data_pipeline.readers.page_batch import NonPageRecord, Page, SkippedRecord
from llmsys.data_pipeline.readers.record_parser import (
    UNENDED,
    ParsedRecord,
    RecordDialect,
    RecordHeader,
    parse_records,
)

_START = rb"WARC/(?:1\.[01]|0\.1[78])\r?\n[A-Za-z\-]+:"
_INNER = re.compile(b"\n" + _START)  # no field of a header begins like a record
_NO_HEADER = "damaged record: no WARC header"


class WarcDialect:
    """WARC 0.17 to 1.1; lines may end without a carriage return."""

    start = re.compile(_START)
    separator = b"\r\n\r\n"

    def is_record_start(self, head: bytes) -> bool:
        """Return whether a few bytes can be the beginning of a record."""
        return head.startswith(b"WARC/") or b"WARC/".startswith(head)

    def parse_header(self, head: bytes) -> RecordHeader | str:
        """Return the header at the beginning of `head`, or the reason why there is none."""
        if not head.startswith(b"WARC/"):
            return _NO_HEADER
        end, size = _find_blank_line(head)
        if not size or _INNER.search(head, 0, end):
            return UNENDED
        fields = parse_header_fields(head[:end].decode("utf-8", "replace"))
        try:
            length = int(fields.get("content-length", "none"))
        except ValueError:
            length = -1
        if length < 0:
            problem = (
                "Content-Length is no number" if "content-length" in fields else "no Content-Length"
            )
            return f"damaged record: {problem}"
        return RecordHeader(end + size, fields.get("warc-type", ""), fields, length)


def _find_blank_line(head: bytes) -> tuple[int, int]:
    """Return the end of the line before the first blank one, and the bytes of both line ends;
    (0, 0) without one.
    """
    found = [(index, len(ends)) for ends in (b"\n\r\n", b"\n\n") if (index := head.find(ends)) >= 0]
    return min(found, default=(0, 0))


_LINE_BYTES = 4_096
_FIELDS = (5, 10)
# An address with spaces is followed by an IP address (or a placeholder) and a date.
_SPACED = re.compile(
    r"([^\n]+?) ([\d.]{7,15}|[0-9A-Fa-f.]*:[0-9A-Fa-f:.]+|unknown|-) (\d{8,18}) ([^\n]+)"
)


class ArcDialect:
    """ARC versions 1 and 2."""

    start = re.compile(
        rb"(?m)^[a-z][a-z0-9+.\-]{1,30}:"
        rb"(?:[^\s]{1,2048} [^ \n]{1,64}|[^\n]{1,2048}? [0-9A-Fa-f.:]{7,45})"
        rb" \d{8,18} [^\n]{1,1024}\r?$"
    )
    separator = b"\n"

    def is_record_start(self, head: bytes) -> bool:
        """Return whether a few bytes can be the beginning of a record."""
        return re.match(rb"[a-z][a-z0-9+.\-]{1,30}(?::|$)", head) is not None

    def parse_header(self, head: bytes) -> RecordHeader | str:
        """Return the header at the beginning of `head`, or the reason why there is none."""
        line, end, _ = head[:_LINE_BYTES].partition(b"\n")
        parts = _split_fields(line.decode("utf-8", "replace"))
        if not self.is_record_start(line):
            return "damaged record: no ARC header"
        if not end:
            return UNENDED
        if len(parts) not in _FIELDS or not parts[2].isdigit():
            return f"damaged record: an ARC header of {len(parts)} fields"
        if not (parts[-1].isascii() and parts[-1].isdigit()):
            return "damaged record: its length is no number"
        kind = "warcinfo" if parts[0].startswith("filedesc:") else "response"
        headers = {
            "warc-target-uri": parts[0],
            "warc-date": _format_warc_date(parts[2]),
            "content-type": "application/http",
        }
        return RecordHeader(len(line) + 1, kind, headers, int(parts[-1]))


def _split_fields(line: str) -> list[str]:
    """Split a header line into its fields, which may hold spaces in the address and the media
    type.
    """
    parts = line.split()
    if len(parts) in _FIELDS and parts[2].isdigit():
        return parts
    spaced = _SPACED.match(line.strip())
    if spaced is None:
        return parts
    begin = list(spaced.groups()[:3])
    after = spaced[4].split()
    if len(begin) + len(after) in _FIELDS or len(after) < 2:
        return [*begin, *after]
    return [*begin, " ".join(after[:-1]), after[-1]]  # a media type with parameters


def _format_warc_date(digits: str) -> str:
    """Format 20140216050221 as a WARC date; shorter dates are returned unchanged."""
    if len(digits) < 14:
        return digits
    return (
        f"{digits[:4]}-{digits[4:6]}-{digits[6:8]}T{digits[8:10]}:{digits[10:12]}:{digits[12:14]}Z"
    )


Found = Page | SkippedRecord | NonPageRecord
ConvertRecord = Callable[[ParsedRecord], Found]

KINDS = {"response", "resource", "conversion", "continuation"}  # can be a page or part of one
_NO_PAGES = {"warcinfo", "request", "metadata", "revisit"}
_KINDS_BY_FASTWARC_TYPE = {4: "response", 8: "resource", 128: "conversion", 256: "continuation"}
_OTHER_KINDS = {2, 16, 32, 64}  # warcinfo, request, metadata, revisit
_UNKNOWN = "unknown WARC-Type"
# records to parse after damage; doubled each time
_STAY = 2
_LONGEST_STAY = 1 << 12
# FastWARC skips any declared length without a check: only shorter records are left to it
_TRUSTED = 64 << 20
WARC = WarcDialect()


def iter_records(source: InputStream, convert: ConvertRecord, keep_bytes: int) -> Iterator[Found]:
    """Apply `convert` to each record of a WARC file that can be a page; yield the results and a
    skip per damage.

    Args:
        source: the open file, plain or compressed.
        convert: converts a record into a page.
        keep_bytes: of longer records only the header is read.
    """
    magic = detect_compression(source)
    position: int | None = source.start
    if _has_record_offsets(source, magic):
        stay = _STAY
        while position is not None:
            anchor = yield from _iter_fastwarc_records(source, position, convert, keep_bytes)
            stream = open_byte_stream(source, magic, anchor, WARC)
            position = yield from _iter_parsed_records(
                stream, source.path, WARC, convert, keep_bytes, return_after=stay
            )
            stay = min(stay * 2, _LONGEST_STAY)
    else:
        stream = open_byte_stream(source, magic, source.start, WARC)
        yield from _iter_parsed_records(
            stream, source.path, WARC, convert, keep_bytes, return_after=0
        )


def iter_dialect_records(
    source: InputStream, dialect: RecordDialect, convert: ConvertRecord, keep_bytes: int
) -> Iterator[Found]:
    """Iterate over the records of a file of any dialect without FastWARC."""
    stream = open_byte_stream(source, detect_compression(source), 0, dialect)
    yield from _iter_parsed_records(
        stream, source.path, dialect, convert, keep_bytes, return_after=0
    )


def open_byte_stream(
    source: InputStream, magic: bytes, start: int, dialect: RecordDialect
) -> ByteStream:
    """Open the decoded bytes of a file from byte `start` of it."""
    if not magic:
        return PlainByteStream(source, start)
    return CompressedByteStream(
        CompressedMembers(source, magic, lambda head: bool(dialect.start.match(head))), start
    )


def _iter_parsed_records(
    stream: ByteStream,
    path: str,
    dialect: RecordDialect,
    convert: ConvertRecord,
    keep_bytes: int,
    *,
    return_after: int,
) -> Any:  # a generator of Found that returns where to continue
    records = parse_records(stream, path, dialect, keep_bytes, return_after=return_after)
    while True:
        try:
            record = next(records)
        except StopIteration as end:
            return end.value
        if isinstance(record, SkippedRecord):
            yield record
        else:
            yield _take_parsed_record(record, path, convert)


def _take_parsed_record(record: ParsedRecord, path: str, convert: ConvertRecord) -> Found:
    if record.kind in KINDS:
        return convert(record)
    return (
        NonPageRecord(record.offset)
        if record.kind in _NO_PAGES
        else SkippedRecord(path, record.offset, _UNKNOWN)
    )


# as above
def _iter_fastwarc_records(
    source: InputStream, start: int, convert: ConvertRecord, keep_bytes: int
) -> Any:
    """Yield the records that FastWARC can read, except the last; return the offset of that one."""
    held: Found | None = None
    anchor = start
    trusted = max(keep_bytes, _TRUSTED)
    source.seek(start)
    try:
        for record in ArchiveIterator(source, record_types=any_type, parse_http=False):
            if held is not None:
                yield held
            held = None
            anchor = record.stream_pos
            length = record.content_length
            if length <= trusted and (length or record.headers.get("Content-Length")):
                is_other = int(record.record_type) in _OTHER_KINDS
                held = (
                    NonPageRecord(anchor)
                    if is_other
                    else _take_fastwarc_record(record, source.path, anchor, convert, keep_bytes)
                )
            # The record is cut, very long or has no length: FastWARC does not detect that.
            if held is None:
                break
    except ReadError:
        # The storage failed, not the file: read_pages reports it as retryable.
        raise
    except (OSError, ValueError, EOFError):
        pass  # record_parser reports it
    return anchor


def _take_fastwarc_record(
    record: WarcRecord, path: str, offset: int, convert: ConvertRecord, keep_bytes: int
) -> Found | None:
    kind = _KINDS_BY_FASTWARC_TYPE.get(int(record.record_type))
    if kind is None:
        return SkippedRecord(path, offset, _UNKNOWN)
    length = record.content_length
    block = None
    if length <= keep_bytes:
        block = record.reader.read(length)
        if len(block) < length:
            return None
    return convert(ParsedRecord(offset, kind, record.headers, length, block))  # type: ignore[arg-type]  # its get() is enough


def _has_record_offsets(source: InputStream, magic: bytes) -> bool:
    """Return whether FastWARC's positions are record offsets: each record has its own member, or
    the file is plain.
    """
    if not magic:
        return True
    if magic in (LZ4, BZIP2, XZ) or read_dictionary(source) is not None:
        return False
    source.seek(0)
    try:
        records = iter(ArchiveIterator(source, record_types=any_type, parse_http=False))
        places = [record.stream_pos for record, _ in zip(records, range(2), strict=False)]
    except ReadError:
        # The storage failed, not the file: read_pages reports it as retryable.
        raise
    except (OSError, ValueError, EOFError):
        return False
    return len(places) == 2 and source.read_block(places[1], 3) == magic[:3]
