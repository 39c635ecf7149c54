"""Windows of one length, cut from the documents in the shuffled order that `llmsys prepare` has
written.

Reads token files with page tables. Memory and time per window do not grow with the corpus.

The tokens of all files are one cyclic stream. An epoch rotates it by its own number of tokens,
cuts it into windows, and permutes them, or gives each row of the batch consecutive ones. A window
has `length + 1` tokens: inputs and, shifted by one, targets.

Invariants:
- Window w of epoch e is a function of (data fingerprint, seed, rows, e, w) alone, and has an
  inverse.
- The end-of-sequence token that closes a document in the files opens the next document here, so
  every token of a document is predicted, the first included.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmsys.data.packed_windows import (
    CutWindows,
    Window,
    WindowBatch,
    build_size_error,
    split_at_documents,
)
from llmsys.data.shuffle import KeyedPermutation, RowOrder, derive_order_key
from llmsys.data.target_documents import RowDocuments
from llmsys.dataset.paged_token_shards import PagedTokenShards

# N windows, T positions


class EpochKeys(NamedTuple):
    """The order of one epoch: the order of its windows, and the first token of window 0 in the
    stream.
    """

    windows: KeyedPermutation | RowOrder
    shift: int


class StreamWindows(CutWindows):
    """Every epoch of a dataset as windows of a fixed length, in order 2 of the manifest.

    An epoch has `tokens // length` windows; one of them begins at the end of the stream and ends
    at its begin. The remainder is `tokens_left_over_per_epoch`: other tokens in each epoch.

    Args:
        shards: The split.
        length: Positions to predict; a window has one token more.
        seed: Seed of the run.
        rows: Windows of a step whose rows read on from step to step. 0 shuffles the windows.
    """

    def __init__(self, shards: PagedTokenShards, *, length: int, seed: int, rows: int = 0) -> None:
        self.stream = shards.stream
        self.length = length
        self.seed = seed
        self.rows = rows
        self.fingerprint = shards.fingerprint
        """Fingerprint of the dataset."""
        self.tokens = self.stream.num_tokens
        if self.tokens <= length:
            raise build_size_error(self.tokens, length)
        self.windows_per_epoch, self.tokens_left_over_per_epoch = divmod(self.tokens, length)
        self._get_epoch = lru_cache(maxsize=16)(self._derive_epoch)

    def _derive_epoch(self, epoch: int) -> EpochKeys:
        identity = self.fingerprint, self.seed, epoch
        windows: KeyedPermutation | RowOrder
        if self.rows:
            windows = RowOrder(self.windows_per_epoch, self.rows)
        else:
            windows = KeyedPermutation(
                self.windows_per_epoch, derive_order_key("stream windows", *identity)
            )
        return EpochKeys(windows, derive_order_key("stream shift", *identity) % self.tokens)

    def get_window(self, index: int) -> Window:
        """Read one window.

        Args:
            index: Its number, counted from zero over all epochs.

        Returns:
            Tokens, and the document of each.
        """
        tokens, documents = self.get_rows([index])
        return Window(tokens[0], documents[0])

    def get_rows(self, numbers: Sequence[int] | NDArray[np.int64]) -> WindowBatch:
        """Implement `WindowDataset.get_rows`."""
        starts = self._get_starts(np.asarray(numbers, np.int64))
        size = self.length + 1
        tokens = np.empty((len(starts), size), np.int64)
        wraps = starts + size > self.tokens
        # Windows across the end of the stream are read below.
        self.stream.copy_ranges(np.where(wraps, 0, starts), size, tokens)
        for row in np.flatnonzero(wraps).tolist():
            tokens[row] = np.concatenate(
                [
                    self.stream.read_range(*part)
                    for part in self._iter_ranges(int(starts[row]), size)
                ]
            )
        return WindowBatch(tokens, self._number_documents(starts, size))

    def _number_documents(self, starts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
        """Return the document of each token of some windows, (N, size)."""
        wraps = starts + size > self.tokens
        if self.stream.is_cached and not wraps.any():
            return self.stream.get_documents(starts, size)
        documents = np.empty((len(starts), size), np.int64)
        is_read = np.zeros(len(starts), np.bool_)
        for group in self.stream.iter_document_groups(starts, size):
            spans = split_at_documents(group.closings, starts[group.rows], size)
            inputs = np.repeat(
                spans.places + group.first_document, spans.ends - spans.begins
            ).reshape(-1, size)
            if len(inputs) == len(starts):  # one group has all windows, in order
                return inputs
            documents[group.rows] = inputs
            is_read[group.rows] = True
        for row in np.flatnonzero(~is_read).tolist():
            counts, first = self._count_document_inputs(int(starts[row]), size)
            documents[row] = np.repeat(np.arange(first, first + len(counts)), counts)
        return documents

    def compute_attention_cost(
        self, numbers: Sequence[int] | NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Implement `WindowDataset.compute_attention_cost`.

        Windows inside one record batch are counted together; the few that cross one are left at
        0 by that and counted one by one.
        """
        starts = self._get_starts(np.asarray(numbers, np.int64))
        costs = np.zeros(len(starts), np.int64)
        for group in self.stream.iter_document_groups(starts, self.length):
            spans = split_at_documents(group.closings, starts[group.rows], self.length)
            lengths = spans.ends - spans.begins
            np.add.at(costs, group.rows[spans.rows], lengths * lengths)
        for row in np.flatnonzero(costs == 0).tolist():
            counts, _ = self._count_document_inputs(int(starts[row]), self.length)
            costs[row] = counts @ counts
        return costs

    def list_documents(self, number: int) -> list[tuple[int, int]]:
        """List the documents with tokens in a window.

        Args:
            number: number of the window in the run, counted from 0.

        Returns:
            (0, document) of each: there is one source.
        """
        found = []
        for begin, end in self._iter_ranges(
            int(self._get_starts(np.array([number]))[0]), self.length + 1
        ):
            first, ends = self.stream.find_document_ends(begin, end)
            found += [(0, first + index) for index in range(len(ends))]
        return list(dict.fromkeys(found))  # one that is cut may be at both ends

    def identify_documents(
        self, numbers: NDArray[np.int64], documents: NDArray[np.int64]
    ) -> RowDocuments:
        """Implement `WindowDataset.identify_documents`."""
        # Across the end of the stream numbers go on: after the last document the first one comes.
        return RowDocuments(
            np.zeros(len(numbers), np.int64),
            numbers // self.windows_per_epoch,
            documents % self.stream.num_documents,
        )

    def list_windows_with_document(self, document: int, count: int) -> NDArray[np.int64]:
        """List the windows that have tokens of a document.

        Args:
            document: number of the document in the dataset.
            count: windows of the run to look at, from the first on.

        Returns:
            Ascending numbers of windows.
        """
        begin, end = self.stream.get_document_span(document)
        by_epoch = [np.empty(0, np.int64)]
        for epoch in range(-(-count // self.windows_per_epoch)):
            order = self._get_epoch(epoch)
            windows = self._list_rotated_windows((begin - order.shift) % self.tokens, end - begin)
            by_epoch.append(
                np.sort(order.windows.find_places(windows)) + epoch * self.windows_per_epoch
            )
        numbers = np.concatenate(by_epoch)
        return numbers[numbers < count]

    def _list_rotated_windows(self, start: int, size: int) -> NDArray[np.int64]:
        """List the windows with some of `size` tokens from `start`; both are in the rotated stream
        of an epoch.

        Window w has the tokens w · length to w · length + length, the last of them modulo the
        tokens.
        """
        found = []
        for begin, end in self._iter_ranges(start, size):
            last = min((end - 1) // self.length, self.windows_per_epoch - 1)
            found.append(np.arange(max(0, (begin - 1) // self.length), last + 1))
            # Without a remainder the last target of the last window is token 0.
            if begin == 0 and not self.tokens_left_over_per_epoch:
                found.append(np.array([self.windows_per_epoch - 1]))
        return np.unique(np.concatenate(found))

    def _get_starts(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first token of each window in the stream, (N,)."""
        epochs, places = np.divmod(numbers, self.windows_per_epoch)
        starts = np.empty_like(numbers)
        if len(numbers) and (epochs == epochs[0]).all():
            return self._get_epoch_starts(int(epochs[0]), places)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            starts[here] = self._get_epoch_starts(epoch, places[here])
        return starts

    def _get_epoch_starts(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        order = self._get_epoch(epoch)
        return (order.windows.get_values(places) * self.length + order.shift) % self.tokens

    def _iter_ranges(self, start: int, size: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the stream with `size` tokens from `start`: two where its end is
        between them.
        """
        yield start, min(start + size, self.tokens)
        if start + size > self.tokens:
            yield 0, start + size - self.tokens

    def _count_document_inputs(self, start: int, size: int) -> tuple[NDArray[np.int64], int]:
        """Return the tokens of each document among `size` from `start`, and the number of the first
        document.

        The closing token of a document belongs to the document that it opens.
        """
        edges: list[NDArray[np.int64]] = []
        first = -1
        at = 0
        for begin, end in self._iter_ranges(start, size):
            number, ends = self.stream.find_document_ends(begin, end)
            first = number if first < 0 else first
            edges.append(ends - 1 - begin + at)
            at += end - begin
        cuts = np.concatenate([[0], *edges, [size]])
        return np.diff(np.minimum(cuts, size)), first
