"""Windows: training sequences of one length, cut from the shuffled and concatenated documents of an
epoch.

Order 1 of a manifest, for runs over datasets of earlier versions: it holds the lengths and the
order of all documents.

Reads token shards. A window has `length + 1` tokens: inputs and, shifted by one, targets.

Invariants:
- Window w of epoch e is a function of (data fingerprint, seed, e, w) alone.
- The end-of-sequence token that closes a document in the shards opens the next document here, so
  every token of a document is predicted, the first included.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llmsys.data.shuffle import build_permutation, derive_order_key
from llmsys.dataset.token_shards import TokenShards
from llmsys.errors import DataError

# N windows, T positions

# Document number of padding; no token of a document attends to it.
PADDING = -1


@dataclass(frozen=True)
class Window:
    """One training sequence: `length + 1` tokens, and the position of each token's document in
    the epoch's order.
    """

    tokens: NDArray[np.int64]
    documents: NDArray[np.int64]


class WindowBatch(NamedTuple):
    """Several windows: tokens and document numbers, both int64 (N, T + 1).

    Equal document numbers in one window are tokens of one document. Tokens of one document have
    equal numbers in all windows of an epoch; in a mixture, other documents may have them too.
    """

    tokens: NDArray[np.int64]
    documents: NDArray[np.int64]


class WindowDataset(Protocol):
    """All sequences of a run, numbered from zero over all epochs, independent of ranks."""

    length: int
    """Positions to predict; a window has one token more."""

    @property
    def fingerprint(self) -> str:
        """Identifies the data that the windows are cut from."""
        ...

    def get_rows(self, numbers: Sequence[int] | NDArray[np.int64]) -> WindowBatch:
        """Read windows.

        Args:
            numbers: Numbers of the windows, over all epochs.

        Returns:
            The windows in this order, with the document of each token.

        Raises:
            DataError: A file is missing or damaged.
        """
        ...

    def compute_attention_cost(
        self, numbers: Sequence[int] | NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Compute the cost of attention within the documents of windows.

        Args:
            numbers: Numbers of the windows.

        Returns:
            Σ n² over the documents of each window, with n the inputs of a document there, int64
            (N,).
        """
        ...

    def list_documents(self, number: int) -> list[tuple[int, int]]:
        """List the documents with tokens in a window.

        Args:
            number: Number of the window.

        Returns:
            (source, document as numbered in its shards) of each. The source is 0 without a
            mixture.
        """
        ...

    def get_packing_stats(self) -> dict[str, Any]:
        """Return the cost of cutting into windows, in tokens of an epoch, for the log."""
        ...

    def get_progress(self, count: int) -> dict[str, Any]:
        """Describe how far a run has read, for the log.

        Args:
            count: Windows that were read.

        Returns:
            Epochs, in a mixture those of each source.
        """
        ...


class SourceWindows(WindowDataset, Protocol):
    """The sequences of one dataset, over all its epochs."""

    @property
    def windows_per_epoch(self) -> int:
        """Number of windows before the next epoch begins."""
        ...

    def list_windows_with_document(self, document: int, count: int) -> NDArray[np.int64]:
        """List the windows that have tokens of a document.

        Args:
            document: Number of the document in its split.
            count: Only the first `count` windows of a run are searched.

        Returns:
            Numbers of windows, in order.
        """
        ...


def build_size_error(tokens: int, length: int) -> DataError:
    """Build the error for data that do not fill one window.

    Args:
        tokens: Tokens of the data.
        length: `batch.sequence_length`.

    Returns:
        The error, with both numbers and the next step.
    """
    return DataError(
        f"{tokens} training tokens do not fill one sequence of {length}. "
        f"Use a smaller batch.sequence_length or prepare more data."
    )


class DocumentSpans(NamedTuple):
    """Spans of windows within one document each, in order.

    Attributes:
        places: Position of the document in the epoch's order.
        begins: First token of the span in the token stream.
        ends: End of the span in the token stream.
        rows: Row of the window.
    """

    places: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    rows: NDArray[np.int64]


def split_at_documents(
    edges: NDArray[np.int64], starts: NDArray[np.int64], size: int
) -> DocumentSpans:
    """Cut windows of a token stream at document ends.

    Args:
        edges: Document p ends before `edges[p]`, (D,).
        starts: First token of each window, (N,).
        size: Tokens of a window.

    Returns:
        The spans of documents in the windows: document, begin, end and window of each, in order.
    """
    first = np.searchsorted(edges, starts, side="right")
    counts = np.searchsorted(edges, starts + (size - 1), side="right") - first + 1
    rows = np.repeat(np.arange(len(starts)), counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    places = first[rows] + within
    opens = np.where(places > 0, edges[places - 1], 0)
    # The last document has no edge where the stream is longer than its documents, as one shifted by
    # a token is.
    closes = edges[np.minimum(places, len(edges) - 1)]
    ends = np.where(
        places < len(edges), np.minimum(closes, starts[rows] + size), starts[rows] + size
    )
    return DocumentSpans(places, np.maximum(opens, starts[rows]), ends, rows)


@dataclass(frozen=True)
class EpochOrder:
    """One epoch: the shuffled documents, where each ends in the token stream, and the shuffled
    windows.
    """

    documents: NDArray[np.int64]
    ends: NDArray[np.int64]
    windows: NDArray[np.int64]


class CutWindows:
    """Base of windows that are cut from packed documents: what they log."""

    length: int
    windows_per_epoch: int
    tokens_left_over_per_epoch: int

    def get_packing_stats(self) -> dict[str, Any]:
        """Return the cost of cutting into windows: no padding, and the end of an epoch's stream
        fills no window.
        """
        return {
            "tokens_per_epoch": self.windows_per_epoch * self.length,
            "sequences_per_epoch": self.windows_per_epoch,
            "padding_tokens_per_epoch": 0,
            "lost_tokens_per_epoch": self.tokens_left_over_per_epoch,
        }

    def get_progress(self, count: int) -> dict[str, Any]:
        """Implement `WindowDataset.get_progress`."""
        return {"epochs": round(count / self.windows_per_epoch, 4)}


class PackedDocuments(CutWindows):
    """Every epoch of a dataset as windows of a fixed length.

    An epoch has `(tokens - 1) // length` windows. The remainder (fewer than `length` tokens, others
    in each epoch because the order is shuffled again) is `tokens_left_over_per_epoch`.
    """

    def __init__(self, shards: TokenShards, *, length: int, seed: int) -> None:
        self.shards = shards
        self.length = length
        self.seed = seed
        self.tokens = int(shards.lengths.sum())
        # the last window needs one target more
        self.windows_per_epoch = (self.tokens - 1) // length
        if self.windows_per_epoch < 1:
            raise build_size_error(self.tokens, length)
        self.tokens_left_over_per_epoch = self.tokens - 1 - self.windows_per_epoch * length
        # Two epochs: a step at the border reads from both.
        self._epoch = lru_cache(maxsize=2)(self._order_epoch)

    def _order_epoch(self, epoch: int) -> EpochOrder:
        fingerprint = self.shards.fingerprint
        documents = build_permutation(
            len(self.shards.lengths), derive_order_key("documents", fingerprint, self.seed, epoch)
        )
        windows = build_permutation(
            self.windows_per_epoch, derive_order_key("windows", fingerprint, self.seed, epoch)
        )
        return EpochOrder(documents, np.cumsum(self.shards.lengths[documents]), windows)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the dataset."""
        return self.shards.fingerprint

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
        numbers = np.asarray(numbers, np.int64)
        rows = WindowBatch(*(np.empty((len(numbers), self.length + 1), np.int64) for _ in range(2)))
        for order, chosen, starts in self._iter_epochs(numbers):
            epoch_rows = self._read_rows(order, starts)
            if len(chosen) == len(numbers):
                return epoch_rows
            rows.tokens[chosen], rows.documents[chosen] = epoch_rows
        return rows

    def compute_attention_cost(
        self, numbers: Sequence[int] | NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Implement `WindowDataset.compute_attention_cost`."""
        numbers = np.asarray(numbers, np.int64)
        costs = np.zeros(len(numbers), np.int64)
        for order, chosen, starts in self._iter_epochs(numbers):
            spans = split_at_documents(order.ends - 1, starts, self.length)
            lengths = spans.ends - spans.begins
            np.add.at(costs, chosen[spans.rows], lengths * lengths)
        return costs

    def list_documents(self, number: int) -> list[tuple[int, int]]:
        """List (0, document) of every document with tokens in the window: there is one source."""
        [(order, _, starts)] = self._iter_epochs(np.array([number]))
        return [
            (0, int(order.documents[place]))
            for place in split_at_documents(order.ends, starts, self.length + 1).places
        ]

    def list_windows_with_document(self, document: int, count: int) -> NDArray[np.int64]:
        """List the sequences among the first `count` of a run that have tokens of a document, in
        order.
        """
        by_epoch = [np.empty(0, np.int64)]
        for epoch in range(-(-count // self.windows_per_epoch)):
            order = self._epoch(epoch)
            place = int(np.flatnonzero(order.documents == document)[0])
            begin, end = (int(order.ends[place - 1]) if place else 0), int(order.ends[place])
            # Window w has the tokens [w · length, w · length + length].
            first, last = max(0, -(-(begin - self.length) // self.length)), (end - 1) // self.length
            chosen = np.flatnonzero((order.windows >= first) & (order.windows <= last))
            by_epoch.append(chosen + epoch * self.windows_per_epoch)
        numbers = np.concatenate(by_epoch)
        return numbers[numbers < count]

    def _iter_epochs(
        self, numbers: NDArray[np.int64]
    ) -> Iterator[tuple[EpochOrder, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield (order, indices of the numbers in this epoch, start of their windows) for each
        epoch among them.
        """
        epochs, places = np.divmod(numbers, self.windows_per_epoch)
        for epoch in np.unique(epochs).tolist():
            order = self._epoch(epoch)
            chosen = np.flatnonzero(epochs == epoch)
            yield order, chosen, order.windows[places[chosen]] * self.length

    def _read_rows(self, order: EpochOrder, starts: NDArray[np.int64]) -> WindowBatch:
        size = self.length + 1
        spans = split_at_documents(order.ends, starts, size)
        documents = order.documents[spans.places]
        opens = order.ends[spans.places] - self.shards.lengths[documents]
        tokens = np.empty(len(starts) * size, np.int64)
        self.shards.copy_spans(documents, spans.begins - opens, spans.ends - spans.begins, tokens)
        # The closing token of a document belongs, as an input, to the document that it opens: hence
        # -1.
        inputs = split_at_documents(order.ends - 1, starts, size)
        numbers = np.repeat(inputs.places, inputs.ends - inputs.begins)
        return WindowBatch(tokens.reshape(-1, size), numbers.reshape(-1, size))
