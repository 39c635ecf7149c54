"""Walks the records of a WARC file: with FastWARC as long as all is well, and carefully wherever it is not.

FastWARC reads at the speed of zlib but stops at the first damaged byte, says nothing of a cut end, and does not know
where a record lies in a file that is compressed as a whole. So the last record of every file, and what FastWARC objects
to, is read again by the careful reader, which hands back once the damage is behind it.
"""

from collections.abc import Callable, Iterator
from typing import Any

from fastwarc.warc import ArchiveIterator, WarcRecord, any_type

from data_pipeline.readers.careful import Dialect, Record, read_carefully
from data_pipeline.readers.flow import Flow, PackedFlow, PlainFlow
from data_pipeline.readers.frame import LZ4, read_dictionary
from data_pipeline.readers.member import Members, compression
from data_pipeline.readers.page import Other, Page, Skip
from data_pipeline.readers.source import Source, UnreadableError
from data_pipeline.readers.warc_record import WarcDialect

Found = Page | Skip | Other
Take = Callable[[Record], Found]

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


def walk(source: Source, take: Take, keep_bytes: int) -> Iterator[Found]:
    """Apply `take` to each record of a WARC file that can be a page, and yield what it gives; `Skip` for damage.

    Args:
        source: the open file, plain or compressed in any way.
        take: makes a page of a record.
        keep_bytes: of longer records only the header is read.
    """
    magic = compression(source)
    position: int | None = source.start
    if _by_record(source, magic):
        stay = _STAY
        while position is not None:
            anchor = yield from _fast(source, position, take, keep_bytes)
            flow = open_flow(source, magic, anchor, WARC)
            position = yield from _carefully(flow, source.path, WARC, take, keep_bytes, leave=stay)
            stay = min(stay * 2, _LONGEST_STAY)
    else:
        flow = open_flow(source, magic, source.start, WARC)
        yield from _carefully(flow, source.path, WARC, take, keep_bytes, leave=0)


def walk_carefully(source: Source, dialect: Dialect, take: Take, keep_bytes: int) -> Iterator[Found]:
    """The same without FastWARC, for any dialect."""
    flow = open_flow(source, compression(source), 0, dialect)
    yield from _carefully(flow, source.path, dialect, take, keep_bytes, leave=0)


def open_flow(source: Source, magic: bytes, start: int, dialect: Dialect) -> Flow:
    """Open the decoded bytes of a file from a byte of it."""
    if not magic:
        return PlainFlow(source, start)
    return PackedFlow(Members(source, magic, lambda head: bool(dialect.start.match(head))), start)


def _carefully(
    flow: Flow, path: str, dialect: Dialect, take: Take, keep_bytes: int, *, leave: int
) -> Any:  # a generator of Found that returns where to go on
    records = read_carefully(flow, path, dialect, keep_bytes, leave=leave)
    while True:
        try:
            record = next(records)
        except StopIteration as end:
            return end.value
        if isinstance(record, Skip):
            yield record
        else:
            yield _one(record, path, take)


def _one(record: Record, path: str, take: Take) -> Found:
    if record.kind in KINDS:
        return take(record)
    return Other(record.offset) if record.kind in _NO_PAGES else Skip(path, record.offset, _UNKNOWN)


def _fast(source: Source, start: int, take: Take, keep_bytes: int) -> Any:  # as above
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
                held = Other(anchor) if is_other else _taken(record, source.path, anchor, take, keep_bytes)
            # Fewer bytes than its header says, or very many, or it does not say how many: FastWARC takes that for none.
            if held is None:
                break
    except UnreadableError:
        raise
    except (OSError, ValueError, EOFError):
        pass  # the careful reader says what it is
    return anchor


def _taken(record: WarcRecord, path: str, offset: int, take: Take, keep_bytes: int) -> Found | None:
    kind = _KIND_OF.get(int(record.record_type))
    if kind is None:
        return Skip(path, offset, _UNKNOWN)
    length = record.content_length
    block = None
    if length <= keep_bytes:
        block = record.reader.read(length)
        if len(block) < length:
            return None
    return take(Record(offset, kind, record.headers, length, block))  # type: ignore[arg-type]  # its get() is enough


def _by_record(source: Source, magic: bytes) -> bool:
    """Whether FastWARC's positions are the beginnings of records: each has its own member, or nothing is packed."""
    if not magic:
        return True
    if magic == LZ4 or read_dictionary(source) is not None:
        return False
    source.seek(0)
    try:
        records = iter(ArchiveIterator(source, record_types=any_type, parse_http=False))
        places = [record.stream_pos for record, _ in zip(records, range(2), strict=False)]
    except UnreadableError:
        raise
    except (OSError, ValueError, EOFError):
        return False
    return len(places) == 2 and source.read_at(places[1], 3) == magic[:3]
