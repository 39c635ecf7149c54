"""Read byte ranges of a token file, each page verified against the file's page table.

Reads: tokens/*.arrow and tokens/*.pages.

Invariants:
- No byte is returned of a page that was not verified since the file was opened; pages of a remote
  file are verified whenever they are read. A read touches its own pages and at most one page of the
  page table per 4 MiB of the file.
- Nothing is mapped: a file that vanishes or shrinks gives an error with its name, never a bus
  error.
"""

import io
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from llmsys.dataset.manifest import TokenFile
from llmsys.dataset.token_file import (
    PAGE_BYTES,
    PAGE_HEAD,
    PAGE_MAGIC,
    SUMS_PER_PAGE,
    compute_page_sum,
    get_page_table_path,
)
from llmsys.errors import DataError
from llmsys.storage.arrow_file import ARROW_ERRORS, DAMAGED, NEXT_STEP, Integers
from llmsys.storage.byte_file import open_byte_file

# Pages of a page table that stay in memory: the checksums of 128 MiB.
MAX_CACHED_SUMS = 32


class BatchPlaces(NamedTuple):
    """The record batches of a file, each (batches,) int64.

    Attributes:
        rows: Documents before the batch.
        tokens: Tokens before the batch.
        offsets: First byte of its list offsets, int32.
        values: First byte of its tokens.
    """

    rows: Integers
    tokens: Integers
    offsets: Integers
    values: Integers


class CheckedFile:
    """One open token file and its page table; two descriptors."""

    def __init__(self, path: Path, entry: TokenFile) -> None:
        """Open a file and verify the head of its page table.

        Args:
            path: The token file; its page table lies next to it.
            entry: Size and digests of the file, from the index of the split.

        Raises:
            DataError: A file is missing, of another size, or damaged.
        """
        self.path = path
        self.size = entry.size
        self._table_path = get_page_table_path(path)
        self._cached: OrderedDict[int, NDArray[np.uint32]] = OrderedDict()
        self._file = open_byte_file(path, entry.digest)
        self._table = open_byte_file(self._table_path, f"{entry.page_root}.pages")
        if (size := self._file.size) not in (entry.size, None):
            raise DataError(
                f"{path} has {size:,} bytes, expected from the manifest: {entry.size:,}. "
                f"{NEXT_STEP}"
            )
        self._read_head(entry.page_root)
        self.token_edges: Integers = np.append(self.batches.tokens, entry.tokens)
        """First token of each record batch, and the tokens of the file, (batches + 1,)."""
        self._verified = bytearray(-(-entry.size // PAGE_BYTES))

    def _read_head(self, root: str) -> None:
        """Read the places of record batches and the checksums of checksums.

        Their hash is in the index of the split. A copy of a remote file that differs is fetched
        once more, because only the copy may be damaged.
        """
        head, batches, sums = self._read_head_bytes()
        if xxhash.xxh3_64_hexdigest(head) != root and self._table.discard_range(len(head), 0):
            head, batches, sums = self._read_head_bytes()
        if (found := xxhash.xxh3_64_hexdigest(head)) != root:
            raise DataError(
                f"{self._table_path}, head: its checksum is {found}, expected from the index: "
                f"{root}: {DAMAGED}{self._table.describe()} {NEXT_STEP}"
            )
        places_end = PAGE_HEAD.size + 32 * batches
        places = np.frombuffer(head, np.int64, 4 * batches, PAGE_HEAD.size).reshape(-1, 4).T
        self.batches = BatchPlaces(*places)
        self._sums_of_sums = np.frombuffer(head, np.uint32, sums, places_end).tolist()

    def _read_head_bytes(self) -> tuple[bytes, int, int]:
        """Return the head of the page table, and its numbers of batches and of pages of
        checksums.
        """
        # One page is enough for 100 batches of a file of 400 MB.
        head = self._table.read(PAGE_BYTES, 0)
        magic, size, pages, batches = PAGE_HEAD.unpack(
            head[: PAGE_HEAD.size].ljust(PAGE_HEAD.size, b"\0")
        )
        sums = -(-pages // SUMS_PER_PAGE)
        self._body = -(-(PAGE_HEAD.size + 32 * batches + 4 * sums) // PAGE_BYTES) * PAGE_BYTES
        # The head is not verified yet: a damaged number must not decide how much is read.
        limit = self.size if self._table.size is None else self._table.size
        if magic == PAGE_MAGIC and size == self.size and PAGE_BYTES < self._body <= limit:
            head += self._table.read(self._body - PAGE_BYTES, PAGE_BYTES)
        return head, batches, sums

    def read(self, begin: int, end: int) -> memoryview:
        """Read bytes of the file and verify the pages that hold them.

        Args:
            begin: First byte.
            end: End of the range.

        Returns:
            The bytes.

        Raises:
            DataError: A page of them is damaged, or the file is gone or has another size.
        """
        if not 0 <= begin <= end <= self.size:
            raise DataError(
                f"{self.path}: bytes {begin:,} to {end:,} are outside of its {self.size:,}. "
                f"{NEXT_STEP}"
            )
        first, last = begin // PAGE_BYTES, -(-end // PAGE_BYTES)
        # All of its pages were verified: these bytes alone are read. A shorter read is reported
        # below.
        if self._verified.find(0, first, last) < 0:
            exact = self._file.read(end - begin, begin)
            if len(exact) == end - begin:
                return memoryview(exact)
        place = (last - first) * PAGE_BYTES, first * PAGE_BYTES
        data, damaged = self._read_pages(*place)
        if damaged is not None and self._file.discard_range(*place):
            data, damaged = self._read_pages(*place)
        if damaged is not None:
            raise self._build_damage_error(damaged)
        if self._file.is_open:
            self._verified[first:last] = b"\1" * (last - first)
        return data[begin - place[1] : end - place[1]]

    def _read_pages(self, size: int, offset: int) -> tuple[memoryview, int | None]:
        """Return the bytes of some pages and the number of the first that is damaged."""
        data = memoryview(self._file.read(size, offset))
        first = offset // PAGE_BYTES
        if offset + len(data) < min(offset + size, self.size):
            self.require_complete()
        for page in range(first, first + size // PAGE_BYTES):
            at = page * PAGE_BYTES - offset
            if compute_page_sum(data[at : at + PAGE_BYTES]) != self._get_sum(page):
                return data, page
        return data, None

    def _get_sum(self, page: int) -> int:
        number, place = divmod(page, SUMS_PER_PAGE)
        sums = self._cached.get(number)
        if sums is None:
            sums = self._load_sums(number)
        return int(sums[place])

    def _load_sums(self, number: int) -> NDArray[np.uint32]:
        place = (PAGE_BYTES, self._body + number * PAGE_BYTES)
        expected = self._sums_of_sums[number]
        raw = self._table.read(*place)
        if compute_page_sum(raw) != expected and self._table.discard_range(*place):
            raw = self._table.read(*place)
        if compute_page_sum(raw) != expected:
            reason = f"its checksum differs: {DAMAGED}{self._table.describe()}"
            raise DataError(f"{self._table_path}, page {number}: {reason} {NEXT_STEP}")
        self._cached[number] = sums = np.frombuffer(raw, np.uint32)
        if len(self._cached) > MAX_CACHED_SUMS:
            self._cached.popitem(last=False)
        return sums

    def _build_damage_error(self, page: int) -> DataError:
        begin = page * PAGE_BYTES
        end = min(begin + PAGE_BYTES, self.size)
        return DataError(
            f"{self.path}, page {page} (bytes {begin:,} to {end:,}): its checksum differs from "
            f"that of {self._table_path.name}: {DAMAGED}{self._file.describe()} {NEXT_STEP}"
        )

    def require_complete(self) -> None:
        """Raise DataError when the file is gone, replaced or of another size."""
        self._file.require_complete(self.size)

    def find_damaged_pages(self) -> list[int]:
        """Return the numbers of all pages that differ from their checksums; DataError for a
        damaged page table.
        """
        return [
            page
            for page in range(-(-self.size // PAGE_BYTES))
            if compute_page_sum(self._file.read(PAGE_BYTES, page * PAGE_BYTES))
            != self._get_sum(page)
        ]


class CheckedColumns:
    """Some columns of a token file. Arrow parses verified bytes only."""

    def __init__(self, file: CheckedFile, columns: Sequence[str]) -> None:
        """Read the footer of a file; DataError when it is damaged."""
        self._stream = _CheckedStream(file)
        with self._raise_own_errors():
            source = pa.PythonFile(self._stream, mode="r")
            names = pa.ipc.open_file(source).schema.names
            fields = [names.index(column) for column in columns]
            options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
            self._arrow = pa.ipc.open_file(source, options=options)

    def get_batch(self, index: int) -> pa.RecordBatch:
        """Return the columns of one record batch.

        Args:
            index: number of the batch in the file, counted from 0.

        Raises:
            DataError: bytes of it differ from their checksums.
        """
        with self._raise_own_errors():
            return self._arrow.get_batch(index)

    @contextmanager
    def _raise_own_errors(self) -> Iterator[None]:
        """Raise the DataError of a read instead of Arrow's error about it."""
        try:
            yield
        except ARROW_ERRORS as error:
            raise self._stream.failure or error from None


class _CheckedStream(io.RawIOBase):
    """A CheckedFile as Python's file object, for Arrow."""

    def __init__(self, file: CheckedFile) -> None:
        super().__init__()
        self._checked = file
        self._place = 0
        self.failure: DataError | None = None

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a byte and return its place."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._checked.size}[whence]
        self._place = base + offset
        return self._place

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with verified bytes and return their number."""
        end = min(self._place + len(buffer), self._checked.size)
        try:
            data = self._checked.read(min(self._place, end), end)
        except DataError as error:
            self.failure = error
            raise
        buffer[: len(data)] = data
        self._place = end
        return len(data)
