"""Held-back pairs in a fixed order for evaluation: those of similar length side by side, to pad little."""

import numpy as np

from llmsys.data.batch import Batch
from llmsys.data.pairs import MakeBatch, SequencePairs


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
