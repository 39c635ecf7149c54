"""Windows: training sequences of one length by their number, from one dataset or from a mixture of several."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

# N windows, T positions


@dataclass(frozen=True)
class Window:
    """One training sequence: `length + 1` tokens, and for each token the place of its document in the epoch's order."""

    tokens: NDArray[np.int64]
    documents: NDArray[np.int64]


class WindowBatch(NamedTuple):
    """Several windows: tokens and document numbers, both int64 (N, T + 1).

    Document numbers mean something within one window only: equal ones are tokens of one document.
    """

    tokens: NDArray[np.int64]
    documents: NDArray[np.int64]


class WindowDataset(Protocol):
    """Every sequence of a run, counted from zero over all epochs. What a number gives never depends on who asks."""

    length: int
    """Positions to predict: a window has one token more."""

    @property
    def fingerprint(self) -> str:
        """Names the data that the windows are cut from."""
        ...

    def get_rows(self, numbers: Sequence[int] | NDArray[np.int64]) -> WindowBatch:
        """The windows of these numbers, in this order. DataError when a file is missing or damaged."""
        ...

    def compute_attention_cost(self, numbers: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Σ n² over the documents of each window, n being the inputs that a document has there: work of attention."""
        ...

    def list_documents(self, number: int) -> list[tuple[int, int]]:
        """(source, document as numbered in its shards) of every document that the window has tokens of."""
        ...

    def get_packing_stats(self) -> dict[str, Any]:
        """What cutting into windows costs, in tokens of an epoch, for the log."""
        ...

    def get_progress(self, count: int) -> dict[str, Any]:
        """How far the first `count` windows of a run got, for the log: epochs, by source where there are several."""
        ...


class DocumentSpans(NamedTuple):
    """Pieces of windows that lie in one document each, in order: its place, the piece's ends, the window's row."""

    places: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    rows: NDArray[np.int64]


def split_at_documents(edges: NDArray[np.int64], starts: NDArray[np.int64], size: int) -> DocumentSpans:
    """Cut the windows [start, start + size) of a token stream where documents end: document p ends before edges[p]."""
    first = np.searchsorted(edges, starts, side="right")
    counts = np.searchsorted(edges, starts + (size - 1), side="right") - first + 1
    rows = np.repeat(np.arange(len(starts)), counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    places = first[rows] + within
    opens = np.where(places > 0, edges[places - 1], 0)
    # The last document has no edge where the stream is longer than its documents, as one shifted by a token is.
    closes = edges[np.minimum(places, len(edges) - 1)]
    ends = np.where(places < len(edges), np.minimum(closes, starts[rows] + size), starts[rows] + size)
    return DocumentSpans(places, np.maximum(opens, starts[rows]), ends, rows)
