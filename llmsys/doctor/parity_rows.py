"""Rows of parity checks: windows of text, masked windows, translations and labelled texts.

Invariants:
- A step's content is a function of (parity model, step). Ranks, micro-batches and engine change only which rank holds a
  row.
- Groups of pairs are uneven: rows are padded, and on two or more ranks some rank has no row of a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from llmsys.config.head import (
    ClassificationHeadConfig,
    FeaturesHeadConfig,
    LmHeadConfig,
    MlmHeadConfig,
    PermutationHeadConfig,
)
from llmsys.config.model import ModelConfig
from llmsys.config.objective import ClassificationConfig, MaskedLmConfig, NextTokenConfig, TranslationConfig
from llmsys.data.batch import Batch
from llmsys.data.masking import TokenMasker
from llmsys.data.sequence_pairs import ClassificationCollator, MakeBatch, TranslationCollator
from llmsys.data.shuffle import build_permutation, derive_order_key
from llmsys.doctor.parity_models import SEQUENCES, ParityModel, build_parity_batch

GROUP_ROWS = (6, 3, 1, 2)
"""Rows of each group of pairs in a step. With two ranks one has none of the third group, with four ranks several."""

OPENING, MASK = 1, 3


@dataclass(frozen=True)
class ToyTokens:
    """Sequences of 2 to `longest` ids, as a function of their index."""

    side: str
    vocab_size: int
    longest: int

    def get_tokens(self, document: int, /) -> NDArray[np.int64]:
        """Return the ids of one sequence."""
        key = derive_order_key("doctor", self.side, document)
        length = 2 + key % max(1, self.longest - 1)
        return build_permutation(self.vocab_size, key)[np.arange(min(length, self.longest)) % self.vocab_size]


@dataclass(frozen=True)
class ToyLabels:
    """A label for each text."""

    num_labels: int

    def get_tokens(self, document: int, /) -> NDArray[np.int64]:
        """Return the label as a sequence of one id."""
        return np.array([derive_order_key("doctor", "label", document) % self.num_labels])


@dataclass(frozen=True)
class ToyPairs:
    """Sources and targets in place of a prepared dataset."""

    sources: ToyTokens
    targets: ToyTokens | ToyLabels


def build_micro_batches(
    parity_model: ParityModel, step: int, *, rank: int, ranks: int, micro: int, is_bitwise: bool
) -> list[Batch]:
    """Return the micro-batches of one of `ranks` data ranks.

    Args:
        parity_model: the model that is trained.
        step: counted from 0.
        rank: the data rank.
        ranks: number of data ranks.
        micro: rows of one micro-batch of windows.
        is_bitwise: assign every ranks-th group of pairs, as bitwise mode does; else divide each group among ranks.
    """
    if parity_model.has_windows:
        share = SEQUENCES // ranks
        starts = range(rank * share, (rank + 1) * share, micro)
        return [_build_windows(parity_model, step, range(start, start + micro)) for start in starts]
    pairs, make = _build_pairs(parity_model.model)
    groups = _list_groups(step)
    if is_bitwise:
        return [make(pairs, group) for group in groups[rank::ranks]]
    return [make(pairs, group[rank::ranks]) for group in groups]


def list_rows(parity_model: ParityModel, step: int) -> list[Batch]:
    """Return every row of a step as its own batch; pairs have no padding there."""
    if parity_model.has_windows:
        return [_build_windows(parity_model, step, range(row, row + 1)) for row in range(SEQUENCES)]
    pairs, make = _build_pairs(parity_model.model)
    return [make(pairs, [row]) for group in _list_groups(step) for row in group]


def _list_groups(step: int) -> list[Sequence[int]]:
    ends = np.cumsum(GROUP_ROWS) + step * sum(GROUP_ROWS)
    return [range(end - rows, end) for end, rows in zip(ends.tolist(), GROUP_ROWS, strict=True)]


def _build_windows(parity_model: ParityModel, step: int, rows: range) -> Batch:
    batch = build_parity_batch(step, rows, parity_model)
    match parity_model.objective:
        case MaskedLmConfig():
            vocab_size = parity_model.model.vocab_size
            masking = TokenMasker(MaskedLmConfig(), MASK, protected_token=-1, vocab_size=vocab_size, key=("doctor",))
            return masking.mask_batch(batch, [step * SEQUENCES + row for row in rows])
        case NextTokenConfig() | TranslationConfig() | ClassificationConfig():
            return batch
        case unreachable:
            assert_never(unreachable)


def _build_pairs(model: ModelConfig) -> tuple[ToyPairs, MakeBatch]:
    longest = ParityModel("", model).length
    source = ToyTokens("source", model.embedding.source_vocab_size or model.vocab_size, longest)
    match model.head:
        case ClassificationHeadConfig() as head:
            return ToyPairs(source, ToyLabels(head.num_labels)), ClassificationCollator(OPENING)
        case LmHeadConfig() | MlmHeadConfig() | FeaturesHeadConfig() | PermutationHeadConfig():
            target = ToyTokens("target", model.vocab_size, longest)
            return ToyPairs(source, target), TranslationCollator(OPENING)
        case unreachable:
            assert_never(unreachable)
