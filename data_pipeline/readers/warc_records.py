"""Iterate over the records of a WARC file: with FastWARC, and with `record_parser` wherever FastWARC fails.

FastWARC reads at the speed of zlib. It stops at the first damaged byte, does not report a cut end, and does not know
record offsets in a file that is compressed as a whole. So `record_parser` reads the last record of every file and
every record that FastWARC rejects, and hands back after the damage.
"""

from collections.abc import Callable, Iterator
from typing import Any

from fastwarc.warc import ArchiveIterator, WarcRecord, any_type

from data_pipeline.readers.byte_stream import ByteStream, CompressedByteStream, PlainByteStream
from data_pipeline.readers.compressed_members import CompressedMembers, detect_compression
from data_pipeline.readers.frame_scanner import LZ4, read_dictionary
from data_pipeline.readers.input_stream import InputStream, ReadError
from data_pipeline.readers.page_batch import NonPageRecord, Page, SkippedRecord
from data_pipeline.readers.record_dialects import WarcDialect
from data_pipeline.readers.record_parser import ParsedRecord, RecordDialect, parse_records

Found = Page | SkippedRecord | NonPageRecord
ConvertRecord = Callable[[ParsedRecord], Found]

KINDS = {"response", "resource", "conversion", "continuation"}  # can be a page or part of one
_NO_PAGES = {"warcinfo", "request", "metadata", "revisit"}
_KINDS_BY_FASTWARC_TYPE = {4: "response", 8: "resource", 128: "conversion", 256: "continuation"}
_OTHER_KINDS = {2, 16, 32, 64}  # warcinfo, request, metadata, revisit
_UNKNOWN = "unknown WARC-Type"
_STAY, _LONGEST_STAY = 2, 1 << 12  # records to parse after damage; doubled each time
_TRUSTED = 64 << 20  # FastWARC skips any declared length without a check: only shorter records are left to it
WARC = WarcDialect()


def iter_records(source: InputStream, convert: ConvertRecord, keep_bytes: int) -> Iterator[Found]:
    """Apply `convert` to each record of a WARC file that can be a page; yield the results and a skip per damage.

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
        yield from _iter_parsed_records(stream, source.path, WARC, convert, keep_bytes, return_after=0)


def iter_dialect_records(
    source: InputStream, dialect: RecordDialect, convert: ConvertRecord, keep_bytes: int
) -> Iterator[Found]:
    """Iterate over the records of a file of any dialect without FastWARC."""
    stream = open_byte_stream(source, detect_compression(source), 0, dialect)
    yield from _iter_parsed_records(stream, source.path, dialect, convert, keep_bytes, return_after=0)


def open_byte_stream(source: InputStream, magic: bytes, start: int, dialect: RecordDialect) -> ByteStream:
    """Open the decoded bytes of a file from byte `start` of it."""
    if not magic:
        return PlainByteStream(source, start)
    return CompressedByteStream(CompressedMembers(source, magic, lambda head: bool(dialect.start.match(head))), start)


def _iter_parsed_records(
    stream: ByteStream, path: str, dialect: RecordDialect, convert: ConvertRecord, keep_bytes: int, *, return_after: int
) -> Any:  # a generator of Found that returns where to go on
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
    return NonPageRecord(record.offset) if record.kind in _NO_PAGES else SkippedRecord(path, record.offset, _UNKNOWN)


def _iter_fastwarc_records(source: InputStream, start: int, convert: ConvertRecord, keep_bytes: int) -> Any:  # as above
    """Yield the records that FastWARC can read, except the last; return the offset of that one."""
    held: Found | None = None
    anchor, trusted = start, max(keep_bytes, _TRUSTED)
    source.seek(start)
    try:
        for record in ArchiveIterator(source, record_types=any_type, parse_http=False):
            if held is not None:
                yield held
            held, anchor = None, record.stream_pos
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
    """Return whether FastWARC's positions are record offsets: each record has its own member, or the file is plain."""
    if not magic:
        return True
    if magic == LZ4 or read_dictionary(source) is not None:
        return False
    source.seek(0)
    try:
        records = iter(ArchiveIterator(source, record_types=any_type, parse_http=False))
        places = [record.stream_pos for record, _ in zip(records, range(2), strict=False)]
    except ReadError:
        raise
    except (OSError, ValueError, EOFError):
        return False
    return len(places) == 2 and source.read_block(places[1], 3) == magic[:3]
