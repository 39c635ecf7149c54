"""The batch of one forward pass: token ids, targets, document numbers, and a source in an encoder-decoder."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from llmsys.data.packed_windows import WindowBatch

# B sequences, T positions, S source positions

IGNORED = -100
"""Target without a loss, as in torch's cross entropy."""

PADDING = -1
"""Document number of padding; no token of a document attends to it."""


class TokenCounts(NamedTuple):
    """What a step divides its losses by."""

    valid_targets: int
    tokens: int
    source_tokens: int


@dataclass(frozen=True)
class Batch:
    """B sequences of T tokens and their targets.

    Targets are the next tokens; of a masked text the chosen tokens; of a classifier the labels, (B, 1). In an
    encoder-decoder, tokens and targets are those of the translation.

    Attributes:
        tokens_BT: Token ids.
        targets_BT: Targets; IGNORED where a position has no loss.
        documents_BT: Document number of each token, PADDING where there is none; None: one document per row.
        source_BS: Token ids of the source.
        source_documents_BS: Document numbers of the source.
        token_types_BT: Segment of each token.
        real_BT: False at padding, for batches whose padding has no document number. None: `documents_BT` marks it.
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
        """Number of targets with a loss."""
        return self.token_counts.valid_targets

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are not padding; in an encoder-decoder those of the target."""
        return self.token_counts.tokens

    @property
    def num_source_tokens(self) -> int:
        """Number of source tokens that are not padding; 0 without a source."""
        return self.token_counts.source_tokens

    @cached_property
    def token_counts(self) -> TokenCounts:
        """The three counts. `pin_memory` and `to` carry them along, so that nobody waits for a device to count."""
        real_BT = self.real_BT
        if real_BT is None and self.documents_BT is not None:
            real_BT = self.documents_BT >= 0
        tokens = self.tokens_BT.numel() if real_BT is None else int(real_BT.sum())
        if self.source_documents_BS is not None:
            source_tokens = int((self.source_documents_BS >= 0).sum())
        else:
            source_tokens = 0 if self.source_BS is None else self.source_BS.numel()
        return TokenCounts(int((self.targets_BT != IGNORED).sum()), tokens, source_tokens)

    def to_model_inputs(self) -> dict[str, Tensor]:
        """Return the arguments of the model's forward, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if name != "targets_BT" and value is not None}

    def pin_memory(self) -> Self:
        """Return the batch in pinned memory; requires an accelerator."""
        return self._map_tensors(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device) -> Self:
        """Return the batch on `device`."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed = {name: change(value) for name, value in self.to_model_inputs().items()}
        moved = type(self)(targets_BT=change(self.targets_BT), **changed)
        moved.__dict__["token_counts"] = self.token_counts
        return moved


def build_batch(rows: WindowBatch, *, separate_documents: bool) -> Batch:
    """Build a batch from windows of T + 1 tokens; with `separate_documents` a token sees its own document only."""
    # Copied by numpy: torch would start threads that compete with training.
    arrays = [rows.tokens[:, :-1], rows.tokens[:, 1:]] + ([rows.documents[:, :-1]] if separate_documents else [])
    return Batch(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays))
