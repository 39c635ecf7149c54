"""Types of training sequences: windows of one length, cut from the packed documents of an epoch.

A window has `length + 1` tokens: inputs and, shifted by one, targets. `stream_windows.py` cuts the
stream of all documents, `fitted_windows.py` keeps documents whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llmsys.data.target_documents import RowDocuments
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

    def identify_documents(
        self, numbers: NDArray[np.int64], documents: NDArray[np.int64]
    ) -> RowDocuments:
        """Return the document of each target of windows, as its dataset numbers it.

        Args:
            numbers: Numbers of the windows, (N,).
            documents: Their document numbers without those of the last tokens, (N, T): the target
                at a position is of the document of the token there.

        Returns:
            Source, epoch and documents.
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
