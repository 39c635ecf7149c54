"""Toy rows of parity runs: windows of text, masked windows, translations, labelled texts and
labelled images.

Invariants:
- A step's content is a function of (parity model, step). Ranks, micro-batches and engine change
  only which rank holds a row.
- Groups of pairs are uneven: rows are padded, and on two or more ranks some rank has no row of a
  group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
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
from llmsys.config.objective import (
    ClassificationConfig,
    MaskedLmConfig,
    NextSentenceConfig,
    NextTokenConfig,
    PermutationConfig,
    SpanCorruptionConfig,
    TranslationConfig,
)
from llmsys.config.patches import BYTE_VALUES
from llmsys.data.batch import Batch
from llmsys.data.images import ImageCollator, ImageLayout
from llmsys.data.masking import SegmentPairs, TokenMasker
from llmsys.data.packed_windows import WindowBatch
from llmsys.data.permutation import PermutationSampler
from llmsys.data.sequence_pairs import ClassificationCollator, MakeBatch, TranslationCollator
from llmsys.data.shuffle import build_permutation, derive_order_key
from llmsys.doctor.parity_models import SEQUENCES, ParityModel, build_parity_batch

# Rows of each group of pairs in a step. With two ranks one has none of the third group, with four
# ranks several.
GROUP_ROWS = (6, 3, 1, 2)

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
        return build_permutation(self.vocab_size, key)[
            np.arange(min(length, self.longest)) % self.vocab_size
        ]


@dataclass(frozen=True)
class ToyImages:
    """Images of `num_values` bytes, as a function of their index."""

    num_values: int

    def get_tokens(self, document: int, /) -> NDArray[np.int64]:
        """Return the bytes of one image."""
        return (
            build_permutation(self.num_values, derive_order_key("doctor", "image", document))
            % BYTE_VALUES
        )


@dataclass(frozen=True)
class ToyLabels:
    """A label for each text."""

    num_labels: int

    def get_tokens(self, document: int, /) -> NDArray[np.int64]:
        """Return the label as a sequence of one id."""
        return np.array([derive_order_key("doctor", "label", document) % self.num_labels])


@dataclass(frozen=True)
class ToyPairs:
    """Sources and targets instead of a prepared dataset."""

    sources: ToyTokens | ToyImages
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
        is_bitwise: assign every ranks-th group of pairs, as bitwise mode does; else divide each
            group among ranks.
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
        case MaskedLmConfig() | NextSentenceConfig() as objective:
            vocab_size, numbers = (
                parity_model.model.vocab_size,
                [step * SEQUENCES + row for row in rows],
            )
            masking = TokenMasker(
                objective, MASK, protected_token=-1, vocab_size=vocab_size, key=("doctor",)
            )
            if isinstance(objective, MaskedLmConfig):
                return masking.mask_batch(batch, numbers)
            pairs = SegmentPairs(
                masking, objective, OPENING, OPENING + 1, partial(_read_windows, parity_model)
            )
            return pairs.mask_batch(batch, numbers)
        case PermutationConfig() as objective:
            numbers = [step * SEQUENCES + row for row in rows]
            return PermutationSampler(objective, protected_token=-1, key=("doctor",)).mask_batch(
                batch, numbers
            )
        case (
            NextTokenConfig()
            | TranslationConfig()
            | SpanCorruptionConfig()
            | ClassificationConfig()
        ):
            return batch
        case unreachable:
            assert_never(unreachable)


def _read_windows(parity_model: ParityModel, numbers: Sequence[int]) -> WindowBatch:
    tokens: list[NDArray[np.int64]] = []
    documents: list[NDArray[np.int64]] = []
    for number in numbers:
        step, row = divmod(number, SEQUENCES)
        batch = build_parity_batch(step, range(row, row + 1), parity_model)
        assert batch.documents_BT is not None
        for found, ids_BT in ((tokens, batch.tokens_BT), (documents, batch.documents_BT)):
            found.append(np.append(ids_BT[0].numpy(), 0))
    return WindowBatch(np.stack(tokens), np.stack(documents))


def _build_pairs(model: ModelConfig) -> tuple[ToyPairs, MakeBatch]:
    longest = ParityModel("", model).length
    source = ToyTokens("source", model.embedding.source_vocab_size or model.vocab_size, longest)
    match model.head:
        case ClassificationHeadConfig(num_labels=labels) if (patches := model.patches) is not None:
            images = ToyImages(patches.num_channels * patches.image_size**2)
            return ToyPairs(images, ToyLabels(labels)), ImageCollator(
                ImageLayout(patches.image_size, patches)
            )
        case ClassificationHeadConfig() as head:
            return ToyPairs(source, ToyLabels(head.num_labels)), ClassificationCollator(OPENING)
        case LmHeadConfig() | MlmHeadConfig() | FeaturesHeadConfig() | PermutationHeadConfig():
            target = ToyTokens("target", model.vocab_size, longest)
            return ToyPairs(source, target), TranslationCollator(OPENING)
        case unreachable:
            assert_never(unreachable)
