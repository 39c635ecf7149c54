"""The tokens of a split as one stream over its files, which are opened when they are read.

Reads: tokens/ of a dataset folder. No Arrow is parsed: page tables have the places of tokens and of
list offsets.

Invariants:
- Memory does not grow with the documents of a large split, nor with its files beyond 100 bytes
  each.
- Threads may read at the same time.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from functools import cached_property
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from llmsys.dataset.checked_file import CheckedFile
from llmsys.dataset.token_split import TokenFileTable
from llmsys.storage.arrow_file import Integers, Tokens
from llmsys.storage.paths import find_folder_url

# Token files that are open at once, each with two descriptors and up to 130 KiB of checksums.
MAX_OPEN_FILES = 128
# Splits of at most this many files are opened at the start, so that a missing or truncated one is
# found there.
MAX_EAGER_FILES = 32
# Ranges of remote files that are fetched at the same time.
MAX_REQUESTS = 16
# Document ends that stay in memory, 8 bytes each.
MAX_CACHED_ENDS = 1 << 20
# Tokens of a local split that stays in memory, with the document of each: 8 bytes each at most.
MAX_CACHED_TOKENS = 1 << 22


def _copy_rows(values: NDArray[Any], begins: Integers, size: int) -> NDArray[Any]:
    # no sums of indices
    return as_strided(values, (len(values) - size + 1, size), values.strides * 2)[begins]


class DocumentGroup(NamedTuple):
    """Ranges of the stream, and consecutive documents that have all of their tokens.

    Attributes:
        rows: Indices of the ranges, (R,).
        first_document: Number of the first document.
        closings: Last token of each document, which closes it, in the stream.
    """

    rows: Integers
    first_document: int
    closings: Integers


class TokenStream:
    """All tokens of a split, numbered from 0 in the order of its files."""

    def __init__(self, folder: Path, table: TokenFileTable, dtype: str) -> None:
        """Open the split; small ones open their files at once.

        Args:
            folder: The folder of the token files.
            table: The index of the split.
            dtype: Dtype of the stored ids.

        Raises:
            DataError: A file of a small split is missing or damaged.
        """
        self._folder = folder
        self._table = table
        self._dtype = np.dtype(dtype)
        self._first_documents, self._first_tokens = (
            np.concatenate([[0], np.cumsum(table.get_column(name))]) for name in ("rows", "tokens")
        )
        self.num_documents = int(self._first_documents[-1])
        self.num_tokens = int(self._first_tokens[-1])
        self.num_files = len(self._first_tokens) - 1
        self._open: OrderedDict[int, CheckedFile] = OrderedDict()
        self._ends: OrderedDict[tuple[int, int], Integers] = OrderedDict()
        self._num_ends = 0
        self._is_remote = find_folder_url(folder) is not None
        is_small = self.num_tokens <= MAX_CACHED_TOKENS and self.num_files <= MAX_EAGER_FILES
        self.is_cached = is_small and not self._is_remote
        # The loader's thread reads while the main thread logs the documents of a step.
        self._lock = threading.RLock()
        for number in range(self.num_files if self.num_files <= MAX_EAGER_FILES else 0):
            self.get_file(number)

    # --- Files ---

    def get_file(self, number: int) -> CheckedFile:
        """Return an open file, from a cache of the last ones.

        Args:
            number: number of the file in the dataset, counted from 0.

        Raises:
            DataError: it is missing or damaged.
        """
        with self._lock:
            if (file := self._open.get(number)) is not None:
                self._open.move_to_end(number)
                return file
        entry = self._table.get_entry(number)
        # Not under the lock: that of a remote file waits for its storage. Two threads may open it;
        # one is kept.
        file = CheckedFile(self._folder / entry.name, entry)
        with self._lock:
            if len(self._open) >= MAX_OPEN_FILES:
                self._open.popitem(last=False)  # closed when no thread reads it
            return self._open.setdefault(number, file)

    def _locate(self, edges: Integers, number: int) -> int:
        """Return the file that holds a document or a token of the stream."""
        return int(np.searchsorted(edges, number, side="right")) - 1

    # --- The stream ---

    def read_range(self, begin: int, end: int) -> Tokens:
        """Read a range of the stream.

        Args:
            begin: First token.
            end: End of the range.

        Returns:
            (end - begin,) uint16 or uint32.

        Raises:
            DataError: They are damaged, or a file is gone.
        """
        parts = list(self._iter_parts(begin, end))
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, self._dtype), *parts])

    def _iter_parts(self, begin: int, end: int) -> Iterator[Tokens]:
        """Yield the tokens of a range, one part per record batch."""
        while begin < end:
            number = self._locate(self._first_tokens, begin)
            file = self.get_file(number)
            before = int(self._first_tokens[number])
            file.require_complete()
            stop = min(end, int(self._first_tokens[number + 1]))
            batch = self._locate(file.batches.tokens, begin - before)
            while begin < stop:
                opens, closes = self.get_batch_tokens(number, file, batch)
                upto = min(stop, closes)
                place = int(file.batches.values[batch]) + (begin - opens) * self._dtype.itemsize
                yield np.frombuffer(
                    file.read(place, place + (upto - begin) * self._dtype.itemsize), self._dtype
                )
                begin = upto
                batch = batch + 1

    def get_batch_tokens(self, number: int, file: CheckedFile, batch: int) -> tuple[int, int]:
        """Return the tokens of a record batch as a range of the stream.

        Args:
            number: Number of the file in the split, counted from 0.
            file: This file, opened by `get_file`.
            batch: Number of the record batch in the file.

        Returns:
            The first token in the stream, and the end of the batch's tokens.
        """
        before = int(self._first_tokens[number])
        return before + int(file.token_edges[batch]), before + int(file.token_edges[batch + 1])

    @cached_property
    def _all_tokens(self) -> tuple[NDArray[Any], NDArray[Any]]:
        # The token that closes a document opens the next one.
        documents = np.cumsum(
            np.bincount(self._all_closings, minlength=self.num_tokens), dtype=np.int32
        )
        return self.read_range(0, self.num_tokens), documents

    def get_documents(self, begins: Integers, size: int) -> Integers:
        """Return the documents of ranges of a cached split.

        Args:
            begins: First token of each range, (N,).
            size: Tokens of a range.

        Returns:
            The document of each token, int64 (N, size).
        """
        return _copy_rows(self._all_tokens[1], begins, size).astype(np.int64)

    def copy_ranges(self, begins: Integers, size: int, out: Integers) -> None:
        """Fill the rows of `out`, (N, size), with the tokens of ranges of the stream.

        Args:
            begins: First token of each range, (N,).
            size: Tokens of a range.
            out: Any integers.

        Raises:
            DataError: They are damaged, or a file is gone.
        """
        if self._is_remote:
            self._fetch_ranges(begins, size)
        for number, here in self._group_by_file(begins):
            file = self.get_file(number)
            file.require_complete()
            if self.is_cached:
                out[here] = _copy_rows(self._all_tokens[0], begins[here], size)
                continue
            edges = file.token_edges
            local = begins[here] - self._first_tokens[number]
            batches = np.searchsorted(edges, local, side="right") - 1
            places = file.batches.values[batches] + (local - edges[batches]) * self._dtype.itemsize
            # most ranges: one record batch, and one read
            within = local + size <= edges[batches + 1]
            num_bytes = size * self._dtype.itemsize
            joined = b"".join(
                [file.read(place, place + num_bytes) for place in places[within].tolist()]
            )
            out[here[within]] = np.frombuffer(joined, self._dtype).reshape(-1, size)
            for row in here[~within].tolist():
                out[row] = self.read_range(int(begins[row]), int(begins[row]) + size)

    def _fetch_ranges(self, begins: Integers, size: int) -> None:
        """Fetch the blocks of ranges and of their documents at the same time; later reads find
        them on this machine.
        """

        def fetch(begin: int) -> None:
            end = min(begin + size, self.num_tokens)
            self.read_range(begin, end)
            self.find_document_ends(begin, end)

        self._threads.map(fetch, begins.tolist(), chunksize=1)

    @cached_property
    def _threads(self) -> ThreadPool:
        # Daemons: a storage that does not answer must not keep the process from ending.
        return ThreadPool(MAX_REQUESTS)

    def iter_document_groups(self, begins: Integers, size: int) -> Iterator[DocumentGroup]:
        """Group ranges of the stream by the documents in them; a range may be in no group.

        Args:
            begins: First token of each range, (N,).
            size: Tokens of a range.

        Yields:
            All ranges of a small split, whose documents stay in memory; else those of each record
            batch.

        Raises:
            DataError: The lengths of documents are damaged, or a file is gone.
        """
        if self.num_documents <= MAX_CACHED_ENDS and self.num_files <= MAX_EAGER_FILES:
            yield DocumentGroup(
                np.flatnonzero(begins + size <= self.num_tokens), 0, self._all_closings
            )
            return
        for number, here in self._group_by_file(begins):
            file = self.get_file(number)
            edges = file.token_edges
            local = begins[here] - self._first_tokens[number]
            batches = np.searchsorted(edges, local, side="right") - 1
            within = local + size <= edges[batches + 1]
            for batch in np.unique(batches[within]).tolist():
                first = self.get_first_document(number, batch)
                yield DocumentGroup(
                    here[within & (batches == batch)], first, self.get_batch_ends(number, batch) - 1
                )

    @cached_property
    def _all_closings(self) -> Integers:
        files = range(self.num_files)
        batches = (
            (number, batch)
            for number in files
            for batch in range(len(self.get_file(number).batches.rows))
        )
        return np.concatenate([self._read_batch_ends(*batch) for batch in batches]) - 1

    def _group_by_file(self, begins: Integers) -> Iterator[tuple[int, Integers]]:
        """Yield (file, indices of the ranges that begin in it)."""
        numbers = np.searchsorted(self._first_tokens, begins, side="right") - 1
        if len(numbers) and (numbers == numbers[0]).all():
            yield int(numbers[0]), np.arange(len(numbers))
            return
        for number in np.unique(numbers).tolist():
            yield number, np.flatnonzero(numbers == number)

    def find_document_ends(self, begin: int, end: int) -> tuple[int, Integers]:
        """Find the documents with tokens in a range of the stream.

        Args:
            begin: First token.
            end: End of the range, more than `begin`.

        Returns:
            The number of the first document, and the end of each document in the stream,
            (documents,) int64.

        Raises:
            DataError: Their lengths are damaged, or a file is gone.
        """
        number = self._locate(self._first_tokens, begin)
        file = self.get_file(number)
        batch = self._locate(file.batches.tokens, begin - int(self._first_tokens[number]))
        ends = self.get_batch_ends(number, batch)
        skipped = int(np.searchsorted(ends, begin, side="right"))
        first = self.get_first_document(number, batch) + skipped
        if ends[-1] >= end:
            return first, ends[skipped : int(np.searchsorted(ends, end, side="left")) + 1]
        found = [ends[skipped:]]
        reached = int(ends[-1])
        while reached < end:
            _, more = self.find_document_ends(reached, end)
            found.append(more)
            reached = int(more[-1])
        return first, np.concatenate(found)

    def get_batch_ends(self, number: int, batch: int) -> Integers:
        """Return the ends of the documents of a record batch, from a cache of the last ones.

        Args:
            number: Number of the file in the split, counted from 0.
            batch: Number of the record batch in the file.

        Returns:
            The end of each document in the stream, (documents,) int64. Shared with the cache: do
            not change it.

        Raises:
            DataError: The lengths of documents are damaged, or the file is gone.
        """
        key = number, batch
        with self._lock:
            if (cached := self._ends.get(key)) is not None:
                self._ends.move_to_end(key)
                return cached
        ends = self._read_batch_ends(number, batch)
        with self._lock:
            if key not in self._ends:  # another thread may have read it meanwhile
                self._ends[key] = ends
                self._num_ends += len(ends)
            # The one just added stays, however long it is.
            while self._num_ends > MAX_CACHED_ENDS and len(self._ends) > 1:
                self._num_ends -= len(self._ends.popitem(last=False)[1])
        return ends

    def _read_batch_ends(self, number: int, batch: int) -> Integers:
        file = self.get_file(number)
        rows = file.batches.rows
        stop = (
            int(rows[batch + 1])
            if batch + 1 < len(rows)
            else self._table.get_column("rows")[number]
        )
        place = int(file.batches.offsets[batch])
        # one offset more than documents
        data = file.read(place, place + 4 * (int(stop) - int(rows[batch]) + 1))
        ends: Integers = np.frombuffer(data, np.int32)[1:].astype(np.int64)
        ends += self.get_batch_tokens(number, file, batch)[0]
        return ends

    # --- Documents ---

    def get_document_span(self, document: int) -> tuple[int, int]:
        """Find a document in the stream.

        Args:
            document: Its number in the split.

        Returns:
            Its first token in the stream, and the end of its tokens.
        """
        number, batch, row = self.locate_document(document)
        ends = self.get_batch_ends(number, batch)
        opens = self.get_batch_tokens(number, self.get_file(number), batch)[0]
        return int(ends[row - 1]) if row else opens, int(ends[row])

    def get_first_document(self, number: int, batch: int) -> int:
        """Return the number of the first document of a record batch.

        Args:
            number: Number of the file in the split, counted from 0.
            batch: Number of the record batch in the file.

        Returns:
            The number of the document in the split.
        """
        return int(self._first_documents[number]) + int(self.get_file(number).batches.rows[batch])

    def locate_document(self, document: int) -> tuple[int, int, int]:
        """Find a document in the files.

        Args:
            document: Its number in the split, counted from 0.

        Returns:
            The file, the record batch in it and the row in the batch.

        Raises:
            IndexError: The split has no such document.
        """
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} of a split of {self.num_documents}")
        number = self._locate(self._first_documents, document)
        row = document - int(self._first_documents[number])
        rows = self.get_file(number).batches.rows
        batch = self._locate(rows, row)
        return number, batch, row - int(rows[batch])
