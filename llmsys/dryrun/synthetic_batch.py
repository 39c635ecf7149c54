"""Batches of the shape that a config trains on: every position has a target, documents have the
lengths asked for.

Invariants:
- The tensors are real and on the host; their numbers decide shapes where the model selects by them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Self, assert_never

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from llmsys.config.head import ClassificationHeadConfig
from llmsys.config.objective import (
    ClassificationConfig,
    MaskedLmConfig,
    NextSentenceConfig,
    NextTokenConfig,
    PermutationConfig,
    SpanCorruptionConfig,
    TranslationConfig,
)
from llmsys.config.run import RunConfig
from llmsys.data.batch import IGNORED, Batch

# B sequences, T positions, S source positions


class MarkedBatch(Batch):
    """A batch that reports when an engine takes it to the device, which is where a micro-batch
    begins.
    """

    def attach_mark(self, mark: Callable[[], None]) -> Self:
        """Return this batch with a function that `to` calls first."""
        # Batches are frozen.
        object.__setattr__(self, "_mark", mark)
        return self

    def to(self, device: torch.device) -> Self:
        """Implement `Batch.to`."""
        mark: Callable[[], None] | None = getattr(self, "_mark", None)
        if mark is not None:
            mark()
        return super().to(device)


def build_synthetic_batch(
    config: RunConfig,
    sequences: int,
    documents: tuple[int, ...],
    lengths: tuple[int, int] | None = None,
) -> MarkedBatch:
    """Build one micro-batch of a config's objective.

    Args:
        config: config of a run.
        sequences: rows, B.
        documents: lengths of documents in tokens, repeated to fill a row; empty: one document per
            row.
        lengths: positions of source and target; None: those of the config.

    Returns:
        The batch on the CPU: int64, and bytes of patches.
    """
    with _disable_current_modes():
        batch = _build_real_batch(config, sequences, documents, lengths or config.sequence_lengths)
        return batch.count_documents()


def _build_real_batch(
    config: RunConfig, sequences: int, documents: tuple[int, ...], lengths: tuple[int, int]
) -> MarkedBatch:
    source, length = lengths
    tokens_BT = torch.zeros(sequences, length, dtype=torch.int64)
    match config.objective:
        case NextTokenConfig():
            return MarkedBatch(
                tokens_BT,
                tokens_BT.clone(),
                _number_documents(config, sequences, length, documents),
            )
        case MaskedLmConfig(mlm_probability=share):
            targets_BT = torch.full_like(tokens_BT, IGNORED)
            targets_BT[:, : max(1, round(share * length))] = 0
            return MarkedBatch(
                tokens_BT, targets_BT, _number_documents(config, sequences, length, documents)
            )
        case NextSentenceConfig(mlm_probability=share):
            targets_BT = torch.full_like(tokens_BT, IGNORED)
            targets_BT[:, : max(1, round(share * length))] = 0
            zeros_BT = torch.zeros_like(tokens_BT)
            labels_B = torch.zeros(sequences, dtype=torch.int64)
            return MarkedBatch(
                tokens_BT, targets_BT, zeros_BT, token_types_BT=zeros_BT, next_sentence_B=labels_B
            )
        case PermutationConfig():
            tokens_BT = tokens_BT[:, :source].contiguous()
            predicted_BP = torch.arange(length - source).expand(sequences, -1).contiguous()
            numbers_BT = _number_documents(config, sequences, source, documents)
            return MarkedBatch(
                tokens_BT, torch.zeros_like(predicted_BP), numbers_BT, predicted_BP=predicted_BP
            )
        case TranslationConfig():
            source_BS = torch.zeros(sequences, source, dtype=torch.int64)
            return MarkedBatch(
                tokens_BT,
                tokens_BT.clone(),
                documents_BT=torch.zeros_like(tokens_BT),
                source_BS=source_BS,
                source_documents_BS=torch.zeros_like(source_BS),
            )
        case SpanCorruptionConfig():
            source_BS = torch.zeros(sequences, source, dtype=torch.int64)
            return MarkedBatch(tokens_BT, tokens_BT.clone(), source_BS=source_BS)
        case ClassificationConfig():
            assert isinstance(config.model.head, ClassificationHeadConfig)
            if (patches := config.model.patches) is not None:
                shape = sequences, length - patches.num_leading, patches.patch_values
                return MarkedBatch(
                    torch.zeros(shape, dtype=torch.uint8),
                    tokens_BT[:, :1].clone(),
                    real_BT=torch.ones_like(tokens_BT, dtype=torch.bool),
                )
            return MarkedBatch(
                tokens_BT, tokens_BT[:, :1].clone(), documents_BT=torch.zeros_like(tokens_BT)
            )
        case unreachable:
            assert_never(unreachable)


def _number_documents(
    config: RunConfig, sequences: int, length: int, documents: tuple[int, ...]
) -> Tensor | None:
    if config.batch.attention_scope != "document":
        return None
    numbers: list[int] = []
    for number, size in enumerate(cycle(documents or (length,))):
        numbers += [number] * min(size, length - len(numbers))
        if len(numbers) == length:
            break
    return torch.tensor(numbers).repeat(sequences, 1)


@dataclass(frozen=True)
class SyntheticRows:
    """Held-out rows for one forward pass of every rank.

    Attributes:
        config: config of the run.
        num_rows: rows over all ranks.
        documents: lengths of documents in tokens.
    """

    config: RunConfig
    num_rows: int
    documents: tuple[int, ...]

    def get_batch(self, first: int, count: int) -> Batch:
        """Implement `HeldoutRows.get_batch`."""
        return build_synthetic_batch(self.config, count, self.documents)
