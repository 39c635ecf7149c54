"""Held-back documents in a fixed order, cut into windows, for evaluation.

Reads the held-back split, gives batches in which every token of every document is a target exactly once, and promises
the same windows whatever the number of ranks. A document is opened by the end-of-sequence token, as in training.

Held-back windows with some tokens hidden, the same ones in every evaluation.

Held-back pairs in a fixed order for evaluation: those of similar length side by side, to pad little.
"""

import numpy as np
import torch

from llmsys.data.batch import IGNORED, Batch
from llmsys.data.masking import TokenMasker
from llmsys.data.sequence_pairs import MakeBatch, SequencePairs
from llmsys.token_shards import TokenShards


class HeldoutWindows:
    """Windows over the held-back documents laid end to end in the order of the shards.

    `max_tokens` (0 means all) cuts after whole documents, so that tokens and text bytes stay comparable.
    """

    def __init__(
        self,
        shards: TokenShards,
        *,
        length: int,
        opening_token: int,
        separate_documents: bool = False,
        max_tokens: int = 0,
    ) -> None:
        ends = np.cumsum(shards.lengths)
        count = len(ends)
        if max_tokens and ends[-1] > max_tokens:
            count = max(1, int(np.searchsorted(ends, max_tokens, side="right")))
        self.documents = range(count)
        self.length = length
        self.separate_documents = separate_documents
        self.ends = ends[:count]
        parts = [np.array([opening_token])] + [shards.get_tokens(document) for document in self.documents]
        self.stream = np.concatenate(parts).astype(np.int64)
        self.tokens = len(self.stream) - 1
        self.text_bytes = int(shards.text_bytes[:count].sum())
        self.windows = -(-self.tokens // length)

    @property
    def num_rows(self) -> int:
        """Rows that batches can have: the windows."""
        return self.windows

    def get_batch(self, first: int, count: int) -> Batch:
        """Windows `first` to `first + count - 1`; windows beyond the last are there but nothing in them counts."""
        tokens_BT = torch.zeros(count, self.length, dtype=torch.int64)
        targets_BT = torch.full((count, self.length), IGNORED, dtype=torch.int64)
        documents_BT = torch.zeros(count, self.length, dtype=torch.int64)
        for row, window in enumerate(range(first, min(first + count, self.windows))):
            start = window * self.length
            piece = torch.from_numpy(self.stream[start : start + self.length + 1].copy())
            places = np.arange(start, start + self.length)
            documents_BT[row] = torch.from_numpy(np.searchsorted(self.ends, places, side="right"))
            tokens_BT[row, : len(piece) - 1] = piece[:-1]
            targets_BT[row, : len(piece) - 1] = piece[1:]
        real_BT = None if bool((targets_BT != IGNORED).all()) else targets_BT != IGNORED
        return Batch(tokens_BT, targets_BT, documents_BT if self.separate_documents else None, real_BT=real_BT)


class MaskedHeldoutWindows:
    """The windows of `HeldoutWindows` as a masked language model is asked about them."""

    def __init__(self, windows: HeldoutWindows, masking: TokenMasker) -> None:
        self.windows, self.masking = windows, masking
        self.num_rows = windows.windows

    def get_batch(self, first: int, count: int) -> Batch:
        """Windows `first` to `first + count - 1`; in those beyond the last nothing counts."""
        return self.masking.mask_batch(self.windows.get_batch(first, count), range(first, first + count))


class HeldoutPairs:
    """Rows of the held-back pairs. `max_tokens` (0 means all) keeps the first pairs with at most so many targets."""

    def __init__(self, pairs: SequencePairs, make: MakeBatch, *, max_tokens: int = 0) -> None:
        self.pairs, self.make = pairs, make
        count = len(pairs)
        if max_tokens:
            count = max(1, int(np.searchsorted(np.cumsum(pairs.targets.lengths), max_tokens, side="right")))
        lengths = pairs.targets.lengths[:count], pairs.sources.lengths[:count]
        self.order = np.lexsort((lengths[1], lengths[0])).tolist()
        self.num_rows = count

    def get_batch(self, first: int, count: int) -> Batch:
        """Rows `first` to `first + count - 1` as far as they exist; nothing counts in a batch of none."""
        return self.make(self.pairs, self.order[first : first + count])
