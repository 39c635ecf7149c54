"""Held-back windows with some tokens hidden, the same ones in every evaluation."""

from llmsys.data.batch import Batch
from llmsys.data.heldout import HeldoutWindows
from llmsys.data.masking import TokenMasker


class MaskedHeldoutWindows:
    """The windows of `HeldoutWindows` as a masked language model is asked about them."""

    def __init__(self, windows: HeldoutWindows, masking: TokenMasker) -> None:
        self.windows, self.masking = windows, masking
        self.num_rows = windows.windows

    def get_batch(self, first: int, count: int) -> Batch:
        """Windows `first` to `first + count - 1`; in those beyond the last nothing counts."""
        return self.masking.mask_batch(self.windows.get_batch(first, count), range(first, first + count))
