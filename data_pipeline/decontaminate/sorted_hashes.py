"""A sorted array of distinct hashes with a filter that rejects most others without a search."""

import numpy as np
import numpy.typing as npt

from llmsys.data_pipeline.text.ragged_arrays import Integers
from llmsys.data_pipeline.text.word_hashes import Hashes

_BITS_PER_HASH = 16


class SortedHashes:
    """Distinct hashes, sorted, and the search for them."""

    def __init__(self, hashes: Hashes) -> None:
        """Build the filter.

        Args:
            hashes: Distinct hashes in ascending order, uint64 (H,), H >= 1.
        """
        self._hashes = hashes
        # One bit per slot of the upper hash bits.
        bits = max(16, (len(hashes) * _BITS_PER_HASH).bit_length())
        self._shift = np.uint64(64 - bits)
        slots = hashes >> self._shift
        self._filter = np.zeros(1 << (bits - 3), np.uint8)
        np.bitwise_or.at(
            self._filter, (slots >> np.uint64(3)).astype(np.int64), _compute_bit_masks(slots)
        )

    def __len__(self) -> int:
        return len(self._hashes)

    def find(self, hashes: Hashes) -> tuple[Integers, Integers]:
        """Find hashes.

        Args:
            hashes: Hashes to look for, uint64 (Q,).

        Returns:
            The indices into `hashes` of those that are in the array, ascending, and the place of
            each in the array; (M,) each.
        """
        here = np.flatnonzero(self._query_filter(hashes))
        places = np.minimum(np.searchsorted(self._hashes, hashes[here]), len(self._hashes) - 1)
        hit = self._hashes[places] == hashes[here]
        return here[hit], places[hit]

    def _query_filter(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        slots = hashes >> self._shift
        found: npt.NDArray[np.bool_] = (
            self._filter[(slots >> np.uint64(3)).view(np.int64)] & _compute_bit_masks(slots)
        ) != 0
        return found


def _compute_bit_masks(slots: Hashes) -> npt.NDArray[np.uint8]:
    return np.left_shift(np.uint8(1), (slots & np.uint64(7)).astype(np.uint8))
