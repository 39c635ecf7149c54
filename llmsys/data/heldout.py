"""Held-back documents in a fixed order, cut into windows, for evaluation.

Reads the held-back split, gives batches in which every token of every document is a target exactly once, and promises
the same windows whatever the number of ranks. A document is opened by the end-of-sequence token, as in training.
"""

import numpy as np
import torch

from llmsys.data.batch import IGNORED, Batch
from llmsys.shards import TokenShards


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
