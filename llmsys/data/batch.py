"""Batch: what one process handles in one forward pass: token ids, targets, document numbers, and a source if any."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from torch import Tensor

from llmsys.data.packed_windows import WindowBatch

# B sequences, T positions, S source positions

IGNORED = -100
"""The target that counts for nothing, as in torch's cross entropy."""

PADDING = -1
"""The document number of positions that hold nothing; no token of a document sees them."""


@dataclass(frozen=True)
class Batch:
    """B sequences of T tokens and what is to be learnt from them; IGNORED where that is nothing.

    The targets are the tokens one place further; of a masked text the chosen tokens; of a classifier the labels (B, 1).
    In an encoder-decoder, tokens and targets are those of the translation, and the source is what is translated.
    `real_BT` is False at padding, for batches whose padding needs no document number; None: documents_BT tells.
    """

    tokens_BT: Tensor
    targets_BT: Tensor
    documents_BT: Tensor | None = None
    source_BS: Tensor | None = None
    source_documents_BS: Tensor | None = None
    token_types_BT: Tensor | None = None
    real_BT: Tensor | None = None

    @property
    def num_valid_targets(self) -> int:
        """How many targets count."""
        return int((self.targets_BT != IGNORED).sum())

    @property
    def num_tokens(self) -> int:
        """The tokens that are not padding; of an encoder-decoder those of the target."""
        real_BT = self.real_BT
        if real_BT is None and self.documents_BT is not None:
            real_BT = self.documents_BT >= 0
        return self.tokens_BT.numel() if real_BT is None else int(real_BT.sum())

    @property
    def num_source_tokens(self) -> int:
        """The tokens of the source that are not padding; 0 without a source."""
        if self.source_documents_BS is not None:
            return int((self.source_documents_BS >= 0).sum())
        return 0 if self.source_BS is None else self.source_BS.numel()

    def to_model_inputs(self) -> dict[str, Tensor]:
        """What the model's forward takes, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if name != "targets_BT" and value is not None}

    def pin_memory(self) -> Self:
        """The same batch in pinned memory; needs an accelerator."""
        return self._map_tensors(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device) -> Self:
        """The same batch on `device`."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed = {name: change(value) for name, value in self.to_model_inputs().items()}
        return type(self)(targets_BT=change(self.targets_BT), **changed)


def build_batch(rows: WindowBatch, *, separate_documents: bool) -> Batch:
    """Windows of T + 1 tokens as a batch; with `separate_documents` a token must not see a document but its own."""
    # Copied by numpy: torch would start threads, beside those that train.
    parts = [rows.tokens[:, :-1], rows.tokens[:, 1:]] + ([rows.documents[:, :-1]] if separate_documents else [])
    return Batch(*(torch.from_numpy(np.ascontiguousarray(part)) for part in parts))
