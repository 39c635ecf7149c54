"""A numpy array that grows at its end, for tables that are filled while text is read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class GrowableArray:
    """A one-dimensional array with amortised appending; rebuilding tables per batch would cost more than using them."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._data: npt.NDArray[Any] = np.zeros(1024, dtype)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def extend(self, values: npt.NDArray[Any] | Sequence[int]) -> None:
        """Append values of the array's type."""
        size = self._size + len(values)
        if size > len(self._data):
            grown = np.zeros(max(size, 2 * len(self._data)), self._data.dtype)
            grown[: self._size] = self._data[: self._size]
            self._data = grown
        self._data[self._size : size] = values
        self._size = size

    @property
    def view(self) -> npt.NDArray[Any]:
        """What has been appended so far, without a copy; later growth does not show in it."""
        return self._data[: self._size]
