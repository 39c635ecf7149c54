"""Walks the records of a WARC file: with FastWARC as long as all is well, and carefully wherever it is not.

FastWARC reads at the speed of zlib but stops at the first damaged byte, says nothing of a cut end, and does not know
where a record lies in a file that is compressed as a whole. So the last record of every file, and what FastWARC objects
to, is read again by the careful reader, which hands back once the damage is behind it.
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
Take = Callable[[ParsedRecord], Found]

KINDS = {"response", "resource", "conversion", "continuation"}  # what can be a page, or part of one
_NO_PAGES = {"warcinfo", "request", "metadata", "revisit"}
_KIND_OF = {4: "response", 8: "resource", 128: "conversion", 256: "continuation"}  # FastWARC's numbers
_OTHER_KINDS = {2, 16, 32, 64}  # warcinfo, request, metadata, revisit
_UNKNOWN = "unknown WARC-Type"
_STAY, _LONGEST_STAY = 2, 1 << 12  # records that are read carefully behind damage, more the more of it there is
_TRUSTED = (
    64 << 20
)  # FastWARC passes over what a record says it has, up to the end of the file: not over more than this
WARC = WarcDialect()


def iter_records(source: InputStream, take: Take, keep_bytes: int) -> Iterator[Found]:
    """Apply `take` to each record of a WARC file that can be a page, and yield what it gives; `Skip` for damage.

    Args:
        source: the open file, plain or compressed in any way.
        take: makes a page of a record.
        keep_bytes: of longer records only the header is read.
    """
    magic = detect_compression(source)
    position: int | None = source.start
    if _has_record_offsets(source, magic):
        stay = _STAY
        while position is not None:
            anchor = yield from _iter_fastwarc_records(source, position, take, keep_bytes)
            flow = open_byte_stream(source, magic, anchor, WARC)
            position = yield from _iter_parsed_records(flow, source.path, WARC, take, keep_bytes, leave=stay)
            stay = min(stay * 2, _LONGEST_STAY)
    else:
        flow = open_byte_stream(source, magic, source.start, WARC)
        yield from _iter_parsed_records(flow, source.path, WARC, take, keep_bytes, leave=0)


def iter_dialect_records(source: InputStream, dialect: RecordDialect, take: Take, keep_bytes: int) -> Iterator[Found]:
    """The same without FastWARC, for any dialect."""
    flow = open_byte_stream(source, detect_compression(source), 0, dialect)
    yield from _iter_parsed_records(flow, source.path, dialect, take, keep_bytes, leave=0)


def open_byte_stream(source: InputStream, magic: bytes, start: int, dialect: RecordDialect) -> ByteStream:
    """Open the decoded bytes of a file from a byte of it."""
    if not magic:
        return PlainByteStream(source, start)
    return CompressedByteStream(CompressedMembers(source, magic, lambda head: bool(dialect.start.match(head))), start)


def _iter_parsed_records(
    flow: ByteStream, path: str, dialect: RecordDialect, take: Take, keep_bytes: int, *, leave: int
) -> Any:  # a generator of Found that returns where to go on
    records = parse_records(flow, path, dialect, keep_bytes, leave=leave)
    while True:
        try:
            record = next(records)
        except StopIteration as end:
            return end.value
        if isinstance(record, SkippedRecord):
            yield record
        else:
            yield _take_parsed_record(record, path, take)


def _take_parsed_record(record: ParsedRecord, path: str, take: Take) -> Found:
    if record.kind in KINDS:
        return take(record)
    return NonPageRecord(record.offset) if record.kind in _NO_PAGES else SkippedRecord(path, record.offset, _UNKNOWN)


def _iter_fastwarc_records(source: InputStream, start: int, take: Take, keep_bytes: int) -> Any:  # as above
    """Yield all records but the last one that FastWARC can read, and return where that one begins."""
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
                    else _take_fastwarc_record(record, source.path, anchor, take, keep_bytes)
                )
            # Fewer bytes than its header says, or very many, or it does not say how many: FastWARC takes that for none.
            if held is None:
                break
    except ReadError:
        raise
    except (OSError, ValueError, EOFError):
        pass  # the careful reader says what it is
    return anchor


def _take_fastwarc_record(record: WarcRecord, path: str, offset: int, take: Take, keep_bytes: int) -> Found | None:
    kind = _KIND_OF.get(int(record.record_type))
    if kind is None:
        return SkippedRecord(path, offset, _UNKNOWN)
    length = record.content_length
    block = None
    if length <= keep_bytes:
        block = record.reader.read(length)
        if len(block) < length:
            return None
    return take(ParsedRecord(offset, kind, record.headers, length, block))  # type: ignore[arg-type]  # its get() is enough


def _has_record_offsets(source: InputStream, magic: bytes) -> bool:
    """Whether FastWARC's positions are the beginnings of records: each has its own member, or nothing is packed."""
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
    return len(places) == 2 and source.read_at(places[1], 3) == magic[:3]
