"""The document of each target of a micro-batch, and the losses of a step summed by document.

A span is a run of targets of one document in one row. The loss adds up the targets of each span on
the device (llmsys/engine/micro_batch_loss.py), and llmsys/train/loss_recorder.py writes them.

Invariants:
- Spans change no token, no target and no loss.
- Copies of a batch share the sums of its spans, so the batch that was read has them after its step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# B rows, T positions, S spans


class RowDocuments(NamedTuple):
    """The documents of some windows, as their datasets number them.

    Attributes:
        sources_B: Source of each row; 0 without a mixture.
        epochs_B: Epoch of the source that each row belongs to, from 0.
        documents_BT: Number of each target's document in the training split of its source; negative
            at padding.
    """

    sources_B: NDArray[np.int64]
    epochs_B: NDArray[np.int64]
    documents_BT: NDArray[np.int64]


@dataclass
class SpanSums:
    """The spans of one micro-batch, and the sums over their targets.

    Attributes:
        sources_S: Source of each span's document.
        epochs_S: Epoch of that source, from 0.
        documents_S: Number of the document in the training split of its source.
        sums_2S: Loss in nats, then number of targets, of those that this rank has computed, float64
            on its device. None: of none, as on the first stages of a pipeline.
    """

    sources_S: NDArray[np.int64]
    epochs_S: NDArray[np.int64]
    documents_S: NDArray[np.int64]
    sums_2S: Tensor | None = None

    def add_losses(self, losses_N: Tensor, valid_N: Tensor, spans_N: Tensor) -> None:
        """Add the losses of targets to their spans. The host waits for nothing.

        Args:
            losses_N: Loss of each target in nats, without autograd.
            valid_N: Whether it is a target at all.
            spans_N: Its span, int32.
        """
        num_spans = len(self.documents_S)
        if self.sums_2S is None:
            self.sums_2S = torch.zeros(2 * num_spans, dtype=torch.float64, device=losses_N.device)
        # One dimension each: on the CPU a row of two columns takes twenty times as long.
        self.sums_2S[:num_spans].index_add_(0, spans_N, losses_N.double())
        self.sums_2S[num_spans:].index_add_(0, spans_N, valid_N.double())


@dataclass(frozen=True)
class TargetDocuments:
    """The span of each target of a micro-batch.

    Attributes:
        spans_BT: Span of each target, int32.
        sums: The spans and their sums.
    """

    spans_BT: Tensor
    sums: SpanSums

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Change the tensor of spans.

        Args:
            change: Called with it.

        Returns:
            A copy with the result and the same sums.
        """
        return replace(self, spans_BT=change(self.spans_BT))


def build_target_documents(rows: RowDocuments) -> TargetDocuments:
    """Number the spans of a micro-batch.

    Args:
        rows: The documents of its targets.

    Returns:
        Their spans, without losses.
    """
    documents_BT = rows.documents_BT
    begins_BT = np.ones(documents_BT.shape, np.bool_)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    spans = np.cumsum(begins_BT, dtype=np.int32) - np.int32(1)
    rows_S = np.nonzero(begins_BT)[0]
    sums = SpanSums(rows.sources_B[rows_S], rows.epochs_B[rows_S], documents_BT[begins_BT])
    return TargetDocuments(torch.from_numpy(spans.reshape(documents_BT.shape)), sums)
