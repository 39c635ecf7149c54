"""Lengths of the documents in a batch, as kernels for packed sequences take them.

Invariants:
- Made on the host, before the batch travels: a kernel needs the longest length as a Python integer,
  which on a device would be a wait.
- Counts and lengths are rounded up to powers of two. They are shapes and constants of compiled
  blocks, which would otherwise be compiled again for each batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmsys.errors import DataError

# B rows, T positions, N documents


@dataclass(frozen=True)
class DocumentLengths:
    """The borders of the documents of a batch, with all rows one after another.

    Attributes:
        cu_lengths: Cumulative lengths, int32 (N + 1,): 0, and the end of each document. The last
            entries may repeat: documents without tokens.
        max_length: At least the tokens of the longest document.
    """

    cu_lengths: Tensor
    max_length: int

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "DocumentLengths":
        """Return a copy whose tensor went through a function.

        Args:
            change: Applied to `cu_lengths`, for instance a copy to the device of the model.

        Returns:
            The copy. `max_length` is a Python integer and stays.
        """
        return DocumentLengths(change(self.cu_lengths), self.max_length)


def build_document_lengths(documents_BT: Tensor) -> DocumentLengths:
    """Count the lengths of documents on the host.

    Args:
        documents_BT: Document number of each token, integer (B, T), on the CPU; padding counts as a
            document.

    Returns:
        The lengths, on the CPU.

    Raises:
        DataError: Tokens of one document are apart from each other.
    """
    documents = documents_BT.numpy()
    length = documents.shape[1]
    opens = np.ones(documents.shape, np.bool_)
    opens[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = np.flatnonzero(opens)
    _require_contiguous_documents(starts // length, documents.reshape(-1)[starts])
    ends = np.append(starts[1:], documents.size)
    cu_lengths = np.full(_round_up(len(starts)) + 1, documents.size, np.int32)
    cu_lengths[: len(starts)] = starts
    return DocumentLengths(
        torch.from_numpy(cu_lengths), min(_round_up(int((ends - starts).max())), length)
    )


def build_row_lengths(rows: int, length: int, device: torch.device) -> DocumentLengths:
    """Return the lengths of rows that are one document each.

    Args:
        rows: Number of rows, B.
        length: Positions of a row, T.
        device: Where the tensor is created.

    Returns:
        The lengths.
    """
    ends = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device)
    return DocumentLengths(ends, length)


def _require_contiguous_documents(rows: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
    """Raise DataError for a number with two runs in a row: a table would join them, lengths
    cannot.
    """
    runs = np.stack([rows, numbers])
    unique, counts = np.unique(runs, axis=1, return_counts=True)
    if len(counts) < runs.shape[1]:
        row, number = unique[:, counts > 1][:, 0].tolist()
        raise DataError(
            f"The tokens of document {number} in row {row} of a batch are apart from each other, "
            "and attention on an accelerator takes documents as lengths. Put the tokens of a "
            "document next to each other."
        )


def _round_up(count: int) -> int:
    return 1 << (count - 1).bit_length()
