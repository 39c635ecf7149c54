"""Batches of the held-out split for evaluation: windows of documents, masked windows, and pairs.

Invariants:
- Every token of every held-out document is a target exactly once; a document begins with the
  end-of-sequence token, as in training.
- The batches do not depend on the number of ranks, and are the same in every evaluation.
"""

from collections.abc import Sequence

import numpy as np
import torch

from llmsys.data.batch import IGNORED, Batch
from llmsys.data.masking import WindowTransform
from llmsys.data.packed_windows import WindowBatch
from llmsys.data.sequence_pairs import MakeBatch, SequencePairs
from llmsys.dataset.token_shards import TokenShards


class HeldoutWindows:
    """Windows over the held-out documents, concatenated in the order of the shards.

    Args:
        shards: The held-out split.
        length: Positions to predict in a window.
        opening_token: Id before the first document.
        separate_documents: Tokens attend only within their document.
        max_tokens: Only the first documents with at most so many tokens; 0: all. The cut is at a
            document boundary, so that tokens and text bytes stay comparable.
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
        lengths, text_bytes = shards.read_leading_sizes(max_tokens)
        ends = np.cumsum(lengths)
        count = len(ends)
        if max_tokens and ends[-1] > max_tokens:
            count = max(1, int(np.searchsorted(ends, max_tokens, side="right")))
        self.documents = range(count)
        self.length = length
        self.separate_documents = separate_documents
        self.ends = ends[:count]
        parts = [np.array([opening_token])] + [
            shards.get_tokens(document) for document in self.documents
        ]
        self.stream = np.concatenate(parts).astype(np.int64)
        self.tokens = len(self.stream) - 1
        self.text_bytes = int(text_bytes[:count].sum())
        self.windows = -(-self.tokens // length)

    @property
    def num_rows(self) -> int:
        """Number of windows."""
        return self.windows

    def get_batch(self, first: int, count: int) -> Batch:
        """Return consecutive windows as a batch.

        Args:
            first: Number of the first window.
            count: Rows of the batch. Rows after the last window have no targets, so that all
                ranks have batches of one shape.

        Returns:
            The batch.
        """
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
        return Batch(
            tokens_BT,
            targets_BT,
            documents_BT if self.separate_documents else None,
            real_BT=real_BT,
        )

    def get_rows(self, numbers: Sequence[int]) -> WindowBatch:
        """Return windows of `length + 1` tokens.

        Args:
            numbers: Numbers of R windows. Those after the last begin again with the first.

        Returns:
            Tokens and document numbers, (R, length + 1). The last window goes on with the beginning
            of the split.
        """
        starts = np.asarray(numbers)[:, None] % self.windows * self.length
        index = (starts + np.arange(self.length + 1)) % len(self.stream)
        return WindowBatch(self.stream[index], np.searchsorted(self.ends, index, side="right"))


class MaskedHeldoutWindows:
    """The windows of `HeldoutWindows`, with hidden tokens or missing spans."""

    def __init__(self, windows: HeldoutWindows, masking: WindowTransform) -> None:
        """Combine windows with what hides their tokens.

        Args:
            windows: The windows.
            masking: Gets the numbers of the windows with each batch, so every evaluation hides the
                same tokens.
        """
        self.windows = windows
        self.masking = masking
        self.num_rows = windows.windows

    def get_batch(self, first: int, count: int) -> Batch:
        """Return consecutive windows; rows after the last window have no targets.

        Args:
            first: number of the first row, counted from 0.
            count: rows of the batch.
        """
        return self.masking.mask_batch(
            self.windows.get_batch(first, count), range(first, first + count)
        )


class HeldoutPairs:
    """Rows of the held-out pairs, sorted by length to reduce padding.

    Args:
        pairs: The held-out split.
        make: Builds a batch from pairs.
        max_tokens: Only the first pairs with at most so many target tokens; 0: all.
    """

    def __init__(self, pairs: SequencePairs, make: MakeBatch, *, max_tokens: int = 0) -> None:
        self.pairs = pairs
        self.make = make
        count = len(pairs)
        if max_tokens:
            count = max(
                1, int(np.searchsorted(np.cumsum(pairs.targets.lengths), max_tokens, side="right"))
            )
        lengths = pairs.targets.lengths[:count], pairs.source_lengths[:count]
        self.order = np.lexsort((lengths[1], lengths[0])).tolist()
        self.num_rows = count

    def get_batch(self, first: int, count: int) -> Batch:
        """Return the rows that exist among some; without any, a batch without targets.

        Args:
            first: number of the first row, counted from 0.
            count: rows of the batch.
        """
        return self.make(self.pairs, self.order[first : first + count])
