"""Split long crawl files into blocks, the unit of work of all stages up to collecting.

Of a gzip file it reads a little at each split point. A block is identified by the tag of a remote
file, or by size, time and inode of a local one. Its bytes are hashed where they are extracted, and
here only when a local file changed: a block with the same bytes as before keeps its identity, so
that a partly changed file is processed again in part.

Invariants:
- The split changes no byte of a dataset.
- A range begins and ends between two complete records: reading the ranges in order yields what
  reading the file does.
- From the first record that is not complete and simple, the rest of a local file is one range. A
  remote file is split between two records that are, and that no other record can contain.
"""

import itertools
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import xxhash

from llmsys.data_pipeline.executors.base import Report
from llmsys.data_pipeline.readers.input_stream import InputStream, open_input_stream

_SHARE = 64  # maximum number of ranges of a file, approximately
_READ = 1 << 15
_HASH_READ = 1 << 20
_LONGEST_HEADER = 1 << 16
_LONGEST_RECORD = 1 << 31
# Bytes of complete records before a split point: more than gzip stores as it is in one piece (RFC
# 1951, 3.2.4) of a page that is a crawl file, and more than zlib decodes of damaged bytes before it
# notices.
_RUN = 1 << 16
_PROBE = 1 << 17  # read ahead at a split point, to find a record and to check those after it
_LONGEST_NUMBER = 20  # digits and spaces of a length
_GZIP = b"\x1f\x8b\x08"
_PLAIN = b"WARC/"


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes `start` to `stop` of a file; `digest` is their xxh3_128 (hex), or the identity of the
    file.
    """

    start: int
    stop: int
    digest: str


def split_file(
    path: str, block_bytes: int, identity: str = "", least_probed: int | None = None
) -> list[ByteRange]:
    """Split a file into ranges of about `block_bytes`.

    Args:
        path: a WARC file or its URL, gzip-compressed per record or plain; other files are one
            range.
        block_bytes: minimum size of a range; at least 1/64 of the file, so that ranges stay few.
        identity: what identifies the contents of the file; "" hashes every range.
        least_probed: bytes of ranges from which on a gzip file is not read to find them; None: 0
            with an identity, else never.

    Returns:
        Ranges in file order that cover the file.

    Raises:
        OSError: if the file cannot be read.
    """
    with open_input_stream(path, read_ahead=_PROBE if identity else _HASH_READ) as source:
        size = max(block_bytes, source.size // _SHARE)
        if least_probed is None:
            least_probed = 0 if identity else source.size
        is_probed = size >= least_probed and source.read_block(0, 3) == _GZIP
        iter_points = _iter_probed_points if is_probed else _iter_split_points
        starts = [0, *iter_points(source, size), source.size]
        return [
            # Of a remote file the end counts too: with another size of blocks a range may end
            # elsewhere.
            ByteRange(
                start,
                stop,
                f"{identity} {stop}" if identity else _compute_range_hash(source, start, stop),
            )
            for start, stop in itertools.pairwise(starts)
        ]


def _iter_split_points(source: InputStream, size: int) -> Iterator[int]:
    """Yield the positions between two complete records that end a range of at least `size`
    bytes.
    """
    if source.size <= size:
        return
    last = waiting = 0  # a split point waits until the record after it is known to be complete
    for end in _iter_record_ends(source):
        if waiting:
            yield waiting
            last = waiting
            waiting = 0
        if end - last >= size and end < source.size:
            waiting = end


def _iter_probed_points(source: InputStream, size: int) -> Iterator[int]:
    """Yield the same for a gzip file, from the bytes after each `size` bytes: a storage serves
    ranges.
    """
    if _find_gzip_record_end(source, 0) is None:  # one member for all records, or for a part of one
        return
    position = size
    while position < source.size:
        point = _find_split_point(source, position, min(position + size, source.size))
        if point is not None:
            yield point
        position = size + (point if point is not None else position)


def _find_split_point(source: InputStream, start: int, stop: int) -> int | None:
    """Return the end of a run of complete records that begins from `start` on; None if none
    begins before `stop`.
    """
    position = start
    while (begin := _find_magic(source, position, stop)) is not None:
        end = begin
        while (after := _find_gzip_record_end(source, end)) is not None:
            if end >= begin + _RUN:
                return end
            end = after
        position = end + 1  # the run of each record in between breaks at `end` too
    return None


def _find_magic(source: InputStream, start: int, stop: int) -> int | None:
    for position in range(start, stop, _READ):
        found = source.read_block(position, min(_READ, stop - position) + len(_GZIP) - 1).find(
            _GZIP
        )
        if found >= 0:
            return position + found
    return None


def _iter_record_ends(source: InputStream) -> Iterator[int]:
    """Yield the end of each complete record, up to the first one that is not."""
    head = source.read_block(0, 5)
    step = (
        _find_gzip_record_end
        if head.startswith(_GZIP)
        else _find_plain_record_end
        if head == _PLAIN
        else None
    )
    position: int | None = 0
    while step and position is not None and position < source.size:
        position = step(source, position)
        if position is not None:
            yield position


def _find_gzip_record_end(source: InputStream, start: int) -> int | None:
    """Return the end of the gzip member at `start` if it holds exactly one complete record."""
    inflate = zlib.decompressobj(31)
    position = start
    head = b""
    decoded = 0
    length = -1
    while not inflate.eof:
        block = inflate.unconsumed_tail
        if not block:
            block = source.read_block(position, _READ)
            position += len(block)
        try:
            data = inflate.decompress(block, 1 << 20)
        except zlib.error:
            return None
        if length < 0:
            head += data
            length = _parse_record_length(head)
        decoded += len(data)
        # A member that continues after its record holds others, and is not read to its end.
        longest = _LONGEST_RECORD if length < 0 else min(length, _LONGEST_RECORD)
        if not block or (length < 0 and len(head) > _LONGEST_HEADER) or decoded > longest:
            return None
    return position - len(inflate.unused_data) if decoded == length else None


def _find_plain_record_end(source: InputStream, start: int) -> int | None:
    """Return the end of the uncompressed record at `start`."""
    length = _parse_record_length(source.read_block(start, _LONGEST_HEADER))
    end = start + length
    whole = length > 0 and end <= source.size and source.read_block(end - 4, 4) == b"\r\n\r\n"
    return end if whole else None


def _parse_record_length(head: bytes) -> int:
    """Return the bytes of the record that begins with `head` according to its header; -1 if that
    is unusable.
    """
    end = head.find(b"\r\n\r\n")
    if end < 0 or not head.startswith(_PLAIN):
        return -1
    lengths = [
        line.split(b":", 1)[1]
        for line in head[:end].split(b"\r\n")
        if line[:15].lower() == b"content-length:"
    ]
    if len(lengths) != 1 or not lengths[0].strip().isdigit() or len(lengths[0]) > _LONGEST_NUMBER:
        return -1
    return end + 4 + int(lengths[0]) + 4


def _compute_range_hash(source: InputStream, start: int, stop: int) -> str:
    state = xxhash.xxh3_128()
    for position in range(start, stop, _HASH_READ):
        state.update(source.read_block(position, min(_HASH_READ, stop - position)))
    return state.hexdigest()


@dataclass(frozen=True, slots=True)
class InputBlock:
    """A byte range of a file, or all of it (`stop` None).

    Attributes:
        source: Path or URL.
        name: Unique name in the dataset.
        start: First byte.
        stop: End of the range; None: the end of the file.
        digest: Identity of the contents, see the head of the module; with the range it decides the
            task key.
        size: Bytes, 0 if unknown.
    """

    source: str
    name: str
    start: int
    stop: int | None
    digest: str
    size: int


# A local file is read to find its blocks if they are shorter: runs of complete records would be
# longer than many of them.
LEAST_PROBED = 1 << 20


def compute_block_digest(source: str, start: int, stop: int | None) -> str:
    """Hash a block of a local file.

    Args:
        source: Path of the file.
        start: First byte.
        stop: End of the block. None: the end of the file.

    Returns:
        xxh3_128 in hex; "" if it cannot be read.
    """
    try:
        with open_input_stream(source, read_ahead=_HASH_READ) as stream:
            return _compute_range_hash(stream, start, stream.size if stop is None else stop)
    except OSError:
        return ""


def split_input_file(
    report: Report,
    *,
    source: str,
    block_bytes: int,
    identity: str = "",
    least_probed: int | None = None,
) -> dict[str, Any]:
    """Find the split points of a file. Progress is in bytes.

    Args:
        report: Progress callback.
        source: Path or URL.
        block_bytes: Wanted size of a block.
        identity: What identifies the contents of a file; "" for a local one that changed.
        least_probed: See `split_file`.

    Returns:
        `blocks`: [start, stop, digest] each, empty if the file is unreadable; `is_hashed`: whether
        the digests are those of the bytes.
    """
    try:
        ranges = split_file(source, block_bytes, identity, least_probed)
    # extraction will name the reason; a later success does not change size or time
    except OSError as error:
        return {"blocks": [], "is_provisional": not isinstance(error, IsADirectoryError)}
    report(ranges[-1].stop, 0)
    return {
        "blocks": [[one.start, one.stop, one.digest] for one in ranges],
        "is_hashed": not identity,
    }


class InputBlockList(Sequence[InputBlock]):
    """The blocks of all input files, built on demand from the results of `split_input_file`."""

    def __init__(
        self, inputs: Sequence[tuple[str, str]], find_result: Callable[[int], dict[str, Any]]
    ) -> None:
        """Count the blocks of all inputs.

        Args:
            inputs: Source (a path or URL) and name of each file.
            find_result: Returns the result of `split_input_file` for an input, by its index. It is
                called once for every input here, and again when blocks of another input than the
                last are asked for: blocks are read fastest in order.
        """
        self._inputs = inputs
        self._find_result = find_result
        self._ends = array("q")
        self._latest: tuple[int, list[InputBlock]] = (-1, [])
        for index in range(len(inputs)):
            self._ends.append((self._ends[-1] if index else 0) + len(self._list_blocks(index)))

    def __len__(self) -> int:
        """Return the number of blocks of all files."""
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> InputBlock: ...
    @overload
    def __getitem__(self, index: slice) -> list[InputBlock]: ...
    def __getitem__(self, index: int | slice) -> InputBlock | list[InputBlock]:
        """Return one block, or a list of them."""
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        file = bisect_right(self._ends, index)
        return self._list_blocks(file)[index - (self._ends[file - 1] if file else 0)]

    def _list_blocks(self, index: int) -> list[InputBlock]:
        if self._latest[0] != index:
            self._latest = index, list_input_blocks(*self._inputs[index], self._find_result(index))
        return self._latest[1]


def list_input_blocks(source: str, name: str, result: dict[str, Any]) -> list[InputBlock]:
    """List the blocks of a file.

    Args:
        source: Path or URL.
        name: Name of the file in the dataset.
        result: Result of `split_input_file`.

    Returns:
        One block for a short or unreadable file, else one per range.
    """
    found = result["blocks"]
    # A single block is read to the end of the file, whatever its size is now.
    if len(found) < 2:
        _, stop, digest = found[0] if found else (0, 0, "")
        return [InputBlock(source, name, 0, None, digest, stop)]
    return [
        InputBlock(source, f"{name}.{number:05d}", start, stop, digest, stop - start)
        for number, (start, stop, digest) in enumerate(found)
    ]
