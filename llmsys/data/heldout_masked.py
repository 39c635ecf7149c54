"""Held-back windows with some tokens hidden, the same ones in every evaluation."""

from llmsys.data.batch import Batch
from llmsys.data.heldout import HeldoutWindows
from llmsys.data.masking import Masking


class HeldoutMasked:
    """The windows of `HeldoutWindows` as a masked language model is asked about them."""

    def __init__(self, windows: HeldoutWindows, masking: Masking) -> None:
        self.windows, self.masking = windows, masking
        self.rows = windows.windows

    def batch(self, first: int, count: int) -> Batch:
        """Windows `first` to `first + count - 1`; in those beyond the last nothing counts."""
        return self.masking.masked(self.windows.batch(first, count), range(first, first + count))
