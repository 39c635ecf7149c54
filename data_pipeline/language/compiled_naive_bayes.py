"""Sum the weights of py3langid's model by the compiled core, as `naive_bayes` does in numpy.

Invariants:
- Sums are those of numpy, bit by bit.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llmsys.data_pipeline.core.native import NativeCore
from llmsys.data_pipeline.text.compiled_words import get_address
from llmsys.data_pipeline.text.ragged_arrays import Integers, compute_offsets

# Labels that the core adds at once; a row of halves has a multiple of them.
VECTOR = 8


class _Tables(ctypes.Structure):
    """`LanguageTables` of native/languages.h."""

    _fields_ = (
        ("moves", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("halves", ctypes.c_void_p),
        ("means", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("count_weights", ctypes.c_void_p),
        ("num_moves", ctypes.c_int64),
        ("num_states", ctypes.c_int64),
        ("num_features", ctypes.c_int64),
        ("num_labels", ctypes.c_int64),
        ("row_halves", ctypes.c_int64),
        ("context_bytes", ctypes.c_int64),
        ("num_counts", ctypes.c_int64),
    )


def _check_numbers(name: str, numbers: npt.NDArray[Any], least: int, limit: int) -> None:
    """Refuse numbers that the core would take for places in a table."""
    for number in (numbers.min(), numbers.max()):
        if not least <= number < limit:
            raise ValueError(
                f"{name} of the model of languages holds {number}, which is not between {least} "
                f"and {limit - 1}. A file of the cache is damaged: delete the folders "
                "naive_bayes-* in $LLMSYS_CACHE"
            )


class CompiledSums:
    """The tables of a model, for the core.

    Args:
        core: The compiled core.
        moves: Next state, at a state's row plus byte, uint32.
        row_base: Where the row of each state begins.
        feature: The n-gram that ends in each state, -1 for none.
        halves_FP: Rows of weights as the bits of float16, uint16, in whatever order.
        means_F: What is subtracted from the weights of a feature, float32.
        places_F: Row of each feature in `halves_FP`, int32.
        num_labels: Columns that are labels; the others fill the rows.
        num_context_bytes: Number of preceding bytes that decide the state.

    Raises:
        ValueError: A number of a table is beyond the tables.
    """

    def __init__(
        self,
        core: NativeCore,
        moves: npt.NDArray[np.uint32],
        row_base: Integers,
        feature: npt.NDArray[np.int32],
        halves_FP: npt.NDArray[np.uint16],
        means_F: npt.NDArray[np.float32],
        places_F: npt.NDArray[np.int32],
        num_labels: int,
        num_context_bytes: int,
    ) -> None:
        num_features, row_halves = halves_FP.shape
        _check_numbers("feature", feature, -1, num_features)
        _check_numbers("places_F", places_F, 0, num_features)
        self._core = core
        states = np.empty((len(feature), 2), np.uint32)
        states[:, 0] = row_base
        states[:, 1] = np.where(feature < 0, num_features, feature)
        self._arrays: list[npt.NDArray[Any]] = [moves, states, halves_FP, means_F, places_F]
        self._sizes = (len(moves), len(states), num_features, num_labels, row_halves)
        self._num_context_bytes = num_context_bytes

    def sum_weights(
        self, encoded: Sequence[bytes], count_weights: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.float32], Integers]:
        """Sum the weights of the features of texts.

        Args:
            encoded: D texts.
            count_weights: Weight of each count of a feature, float32; longer than each text.

        Returns:
            Sums by label, float32 (D, L), and the number of distinct features of each text.
        """
        offsets = compute_offsets(list(map(len, encoded)))
        tables = _Tables(
            *map(get_address, [*self._arrays, count_weights]),
            *self._sizes,
            self._num_context_bytes,
            len(count_weights),
        )
        sums_DL = np.empty((len(encoded), tables.num_labels), np.float32)
        found_D = np.empty(len(encoded), np.int64)
        done = self._core.functions.llmsys_score_languages(
            ctypes.byref(tables),
            b"".join(encoded),
            get_address(offsets),
            len(encoded),
            get_address(sums_DL),
            get_address(found_D),
        )
        if done < 0:
            raise MemoryError("language identification needs more memory than there is")
        return sums_DL, found_D
