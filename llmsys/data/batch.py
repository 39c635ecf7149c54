"""Batch: the token ids, targets and document numbers that one process handles in one forward pass."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llmsys.data.packing import Window

IGNORED = -100
"""The target that counts for nothing, as in torch's cross entropy."""


@dataclass(frozen=True)
class Batch:
    """B sequences of T tokens. `targets_BT` is `tokens_BT` one place further; IGNORED where nothing is to be learnt."""

    tokens_BT: Tensor
    targets_BT: Tensor
    documents_BT: Tensor | None

    @property
    def valid_targets(self) -> int:
        """How many targets count."""
        return int((self.targets_BT != IGNORED).sum())

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`."""
        documents = None if self.documents_BT is None else self.documents_BT.to(device, non_blocking=True)
        return Batch(
            self.tokens_BT.to(device, non_blocking=True), self.targets_BT.to(device, non_blocking=True), documents
        )


def make_batch(windows: list[Window], *, separate_documents: bool) -> Batch:
    """Stack windows of T + 1 tokens. With `separate_documents` a token must not see the document before its own."""
    tokens_BT = torch.from_numpy(np.stack([window.tokens for window in windows]))
    documents_BT = None
    if separate_documents:
        documents_BT = torch.from_numpy(np.stack([window.documents[:-1] for window in windows]))
    return Batch(tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous(), documents_BT)


def ignored_like(batch: Batch) -> Batch:
    """A batch of the same shape in which nothing counts, for a rank that has none left but must join its peers."""
    return Batch(batch.tokens_BT, torch.full_like(batch.targets_BT, IGNORED), batch.documents_BT)
