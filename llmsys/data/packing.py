"""Documents of one epoch laid end to end and cut into windows.

Reads token shards, gives windows of `length + 1` tokens (inputs and, one further, targets), and promises that window
w of epoch e is a function of (data fingerprint, seed, e, w) alone. Each document in the shards ends with the
end-of-sequence token; here that token opens the document that follows it, so every token of a document is predicted,
the first included.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from llmsys.data.order import order_key, permutation
from llmsys.errors import DataError
from llmsys.shards import TokenShards


@dataclass(frozen=True)
class Window:
    """One training sequence: `length + 1` tokens, and for each token the place of its document in the epoch's order."""

    tokens: NDArray[np.int64]
    documents: NDArray[np.int64]


@dataclass(frozen=True)
class EpochOrder:
    """One epoch: the shuffled documents, where each ends in the token stream, and the shuffled windows."""

    documents: NDArray[np.int64]
    ends: NDArray[np.int64]
    windows: NDArray[np.int64]


class PackedDocuments:
    """Every epoch of a token set as windows of a fixed length.

    An epoch has `(tokens - 1) // length` windows; what is left over (fewer than `length` tokens, different ones in each
    epoch because the order is shuffled again) is `tokens_left_over_per_epoch`.
    """

    def __init__(self, shards: TokenShards, *, length: int, seed: int) -> None:
        self.shards = shards
        self.length = length
        self.seed = seed
        self.tokens = int(shards.lengths.sum())
        self.windows_per_epoch = (self.tokens - 1) // length
        if self.windows_per_epoch < 1:
            raise DataError(
                f"{self.tokens} training tokens do not fill one sequence of {length}. "
                f"Use a smaller batch.sequence_length or prepare more data."
            )
        self.tokens_left_over_per_epoch = self.tokens - 1 - self.windows_per_epoch * length
        self._epoch = lru_cache(maxsize=2)(self._order_epoch)

    def _order_epoch(self, epoch: int) -> EpochOrder:
        fingerprint = self.shards.fingerprint
        documents = permutation(len(self.shards.lengths), order_key("documents", fingerprint, self.seed, epoch))
        windows = permutation(self.windows_per_epoch, order_key("windows", fingerprint, self.seed, epoch))
        return EpochOrder(documents, np.cumsum(self.shards.lengths[documents]), windows)

    def window(self, index: int) -> Window:
        """Sequence `index` of the run, counted from zero over all epochs."""
        epoch, place = divmod(index, self.windows_per_epoch)
        order = self._epoch(epoch)
        start = int(order.windows[place]) * self.length
        stop = start + self.length + 1
        places = np.arange(start, stop)
        # The closing token of a document belongs, as an input, to the document that it opens: hence +1.
        documents = np.searchsorted(order.ends, places + 1, side="right")
        return Window(self._read(order, start, stop), documents)

    def _read(self, order: EpochOrder, start: int, stop: int) -> NDArray[np.int64]:
        first = int(np.searchsorted(order.ends, start, side="right"))
        last = int(np.searchsorted(order.ends, stop - 1, side="right"))
        parts = [self.shards.tokens(int(order.documents[place])) for place in range(first, last + 1)]
        begin = int(order.ends[first]) - len(parts[0])
        joined = np.concatenate(parts).astype(np.int64)
        return joined[start - begin : stop - begin]

    def sources(self, index: int) -> list[int]:
        """The documents (as numbered in the shards) that sequence `index` has tokens of."""
        epoch, place = divmod(index, self.windows_per_epoch)
        order = self._epoch(epoch)
        start = int(order.windows[place]) * self.length
        first, last = np.searchsorted(order.ends, [start, start + self.length], side="right")
        return [int(document) for document in order.documents[first : last + 1]]
