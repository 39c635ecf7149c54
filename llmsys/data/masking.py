"""Windows with hidden tokens: masked tokens to predict, and missing spans to write.

BERT (Devlin 2018, arXiv:1810.04805, 3.1 and A.1): of the chosen 15 %, 80 % become the mask token,
10 % a random one, and 10 % stay. T5 (Raffel 2019, arXiv:1910.10683, 3.1.4): spans of about three
tokens are missing, 15 % of all.

Invariants:
- Masks are a function of (data, seed, number of the window over all epochs): each epoch masks anew,
  and a resumed run masks as the uninterrupted one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from llmsys.config.objective import MaskedLmConfig, NextSentenceConfig, SpanCorruptionConfig
from llmsys.data.batch import IGNORED, Batch
from llmsys.data.packed_windows import PADDING, WindowBatch
from llmsys.data.sequence_pairs import build_pair_batch
from llmsys.data.shuffle import derive_order_key, hash_splitmix64

# T positions

ReadWindows = Callable[[Sequence[int]], WindowBatch]
"""Windows of these numbers, such as `WindowDataset.get_rows`."""


class WindowTransform(Protocol):
    """A function of windows, or of images, and their numbers over all epochs."""

    def mask_batch(self, batch: Batch, numbers: Sequence[int]) -> Batch:
        """Change a batch of windows for an objective.

        Args:
            batch: Windows of next-token prediction.
            numbers: Numbers of its windows over all epochs, which decide what is drawn.

        Returns:
            The batch of the objective. Positions without a target are padding (IGNORED).
        """
        ...


@dataclass(frozen=True)
class TokenMasker:
    """The masking of windows. `protected_token`, which closes documents, is never chosen."""

    config: MaskedLmConfig | NextSentenceConfig
    mask_token: int
    protected_token: int
    vocab_size: int
    key: tuple[str | int, ...]

    def mask_batch(self, batch: Batch, numbers: Sequence[int]) -> Batch:
        """Return the batch with some tokens hidden and those as targets.

        Args:
            batch: windows. Positions without a target are padding and are not chosen.
            numbers: numbers of the windows in the run, by which the choice is drawn.
        """
        tokens_BT = batch.tokens_BT.numpy()
        valid_BT = (batch.targets_BT != IGNORED).numpy()
        hidden_BT = tokens_BT.copy()
        targets_BT = np.full_like(tokens_BT, IGNORED)
        for row, number in enumerate(numbers):
            chosen, seen = self.choose_masked_positions(tokens_BT[row], number, valid_BT[row])
            targets_BT[row, chosen] = tokens_BT[row, chosen]
            hidden_BT[row, chosen] = seen
        hidden = torch.from_numpy(hidden_BT)
        targets = torch.from_numpy(targets_BT)
        return Batch(hidden, targets, batch.documents_BT, real_BT=batch.real_BT)

    def choose_masked_positions(
        self, tokens_T: NDArray[np.int64], number: int, valid_T: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Choose the hidden positions of a window.

        Args:
            tokens_T: Its tokens.
            number: Its number, which decides what is drawn.
            valid_T: False at positions that may not be chosen, such as padding.

        Returns:
            The chosen positions, and the tokens that the model sees there: masks, random tokens
            or the same.
        """
        random_3T = draw_random_bits(derive_order_key("mask", *self.key, number), 3, len(tokens_T))
        eligible = np.flatnonzero(valid_T & (tokens_T != self.protected_token))
        count = round(len(eligible) * self.config.mlm_probability)
        chosen = np.sort(eligible[np.argsort(random_3T[0, eligible], kind="stable")[:count]])
        share = random_3T[1, chosen] / 2.0**64
        any_token = (random_3T[2, chosen] % np.uint64(self.vocab_size)).astype(np.int64)
        masked = share < self.config.mask_replace_prob
        replaced = ~masked & (
            share < self.config.mask_replace_prob + self.config.random_replace_prob
        )
        seen = np.where(masked, self.mask_token, np.where(replaced, any_token, tokens_T[chosen]))
        return chosen, seen


# Labels of next-sentence prediction, as in BERT's released code.
FOLLOWS = 0
DOES_NOT_FOLLOW = 1
PARTNERS = 1 << 10  # the second segment of a row is from one of so many windows after its own
ATTEMPTS = 10  # windows that are tried for another document, as in BERT's released code


@dataclass(frozen=True)
class SegmentPairs:
    """Rows of two segments, [CLS] A [SEP] B [SEP], with hidden tokens and a label: B follows A, or
    does not.

    Attributes:
        masker: Masks the tokens of both segments.
        cls_token: First token of a row.
        sep_token: Token after each segment.
        read_windows: Reads the window of a second segment.
    """

    masker: TokenMasker
    config: NextSentenceConfig
    cls_token: int
    sep_token: int
    read_windows: ReadWindows

    def mask_batch(self, batch: Batch, numbers: Sequence[int]) -> Batch:
        """Return pairs of sentences with some tokens hidden, in rows of the length of the windows.

        Args:
            batch: windows with their documents. Positions without a target are padding.
            numbers: numbers of the windows in the run, by which pairs and tokens are drawn.
        """
        assert batch.documents_BT is not None
        shape = tuple(batch.tokens_BT.shape)
        tokens_BT = np.zeros(shape, np.int64)
        types_BT = np.zeros(shape, np.int64)
        documents_BT = np.full(shape, PADDING)
        labels_B = np.full(shape[0], IGNORED)
        valid_BT = (batch.targets_BT != IGNORED).numpy()
        targets_BT = np.full(shape, IGNORED)
        for row, number in enumerate(numbers):
            run, document = self._select_longest_run(
                batch.tokens_BT[row].numpy(), batch.documents_BT[row].numpy(), valid_BT[row]
            )
            first, second, labels_B[row] = self.choose_segments(
                run[: shape[1] - 3], document, number
            )
            cls = np.array([self.cls_token])
            sep = np.array([self.sep_token])
            pieces = np.concatenate([cls, first, sep, second, sep])
            end = len(pieces)
            border = len(first) + 2
            is_text_T = np.ones(end, bool)
            is_text_T[[0, border - 1, end - 1]] = False
            chosen, seen = self.masker.choose_masked_positions(pieces, number, is_text_T)
            targets_BT[row, chosen] = pieces[chosen]
            pieces[chosen] = seen
            tokens_BT[row, :end] = pieces
            types_BT[row, border:end] = 1
            documents_BT[row, :end] = 0
        tokens, targets, documents, types, labels = map(
            torch.from_numpy, (tokens_BT, targets_BT, documents_BT, types_BT, labels_B)
        )
        return Batch(tokens, targets, documents, token_types_BT=types, next_sentence_B=labels)

    def choose_segments(
        self, run_T: NDArray[np.int64], document: int, number: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Return both segments of window `number` and their label.

        Args:
            run_T: Tokens of one document; fewer than two make a first segment without a label.
            document: Number of the document, from which no second segment is taken that does not
                follow.
            number: Number of the window.
        """
        if len(run_T) < 2:
            return run_T, run_T[:0], IGNORED
        bits = draw_random_bits(
            derive_order_key("segments", *self.masker.key, number), 1, 2 + ATTEMPTS
        )[0]
        cut = 1 + int(bits[0] % np.uint64(len(run_T) - 1))
        if bits[1] / 2.0**64 < self.config.next_sentence_prob:
            return run_T[:cut], run_T[cut:], FOLLOWS
        for draw in bits[2:]:
            partner = self.read_windows([number + 1 + int(draw % np.uint64(PARTNERS))])
            documents_T = partner.documents[0, :-1]
            other_T, _ = self._select_longest_run(
                partner.tokens[0, :-1], documents_T, documents_T != document
            )
            if len(other_T):
                return run_T[:cut], other_T[: len(run_T) - cut], DOES_NOT_FOLLOW
        return run_T[:cut], run_T[cut:], FOLLOWS

    def _select_longest_run(
        self,
        tokens_T: NDArray[np.int64],
        documents_T: NDArray[np.int64],
        valid_T: NDArray[np.bool_],
    ) -> tuple[NDArray[np.int64], int]:
        """Return the tokens of the document with most tokens in a window, without the one that
        opens it; its number.
        """
        inside_T = valid_T & (tokens_T != self.masker.protected_token)
        if not inside_T.any():
            return tokens_T[:0], PADDING
        numbers, counts = np.unique(documents_T[inside_T], return_counts=True)
        longest = numbers[counts.argmax()]
        return tokens_T[inside_T & (documents_T == longest)], int(longest)


@dataclass(frozen=True)
class SpanCorruptor:
    """The removal of spans from windows; `sentinels` are the ids that mark them, in order."""

    config: SpanCorruptionConfig
    sentinels: tuple[int, ...]
    end_token: int
    start_token: int
    key: tuple[str | int, ...]

    def mask_batch(self, batch: Batch, numbers: Sequence[int]) -> Batch:
        """Return sources with sentinels instead of spans, and the spans as targets.

        Args:
            batch: windows. Positions without a target are padding; a window of fewer than two
                tokens has no
                target.
            numbers: numbers of the windows in the run, by which the spans are drawn.
        """
        sources = []
        targets = []
        for tokens_T, valid_T, number in zip(
            batch.tokens_BT.numpy(), (batch.targets_BT != IGNORED).numpy(), numbers, strict=True
        ):
            source, target = self.remove_spans(tokens_T[valid_T], number)
            sources.append(source)
            targets.append(target)
        return build_pair_batch(sources, targets, self.start_token)

    def remove_spans(
        self, tokens_T: NDArray[np.int64], number: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Remove spans from a window, as T5 does.

        Args:
            tokens_T: Its tokens.
            number: Its number, which decides what is drawn.

        Returns:
            Source and target: kept and missing spans alternate, and a kept one is first.
        """
        length = len(tokens_T)
        if length < 2:
            return np.array([self.end_token]), np.array([IGNORED])
        noise, spans = self.config.count_noise(length)
        random_2T = draw_random_bits(derive_order_key("spans", *self.key, number), 2, length)
        kept, missing = (
            _cut_randomly(total, spans, bits)
            for total, bits in zip((length - noise, noise), random_2T, strict=True)
        )
        ends = np.stack([kept, missing], axis=1).flatten().cumsum()
        pieces = np.split(tokens_T, ends[:-1])
        end = [np.array([self.end_token])]
        marks = [np.array([sentinel]) for sentinel in self.sentinels[:spans]]
        source = [piece for pair in zip(pieces[::2], marks, strict=True) for piece in pair]
        target = [piece for pair in zip(marks, pieces[1::2], strict=True) for piece in pair]
        return np.concatenate(source + end), np.concatenate(target + end)


def _cut_randomly(total: int, parts: int, bits_T: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return `parts` lengths above 0 that sum to `total`, every such list with equal
    probability.
    """
    cuts = np.sort(np.argsort(bits_T[: total - 1], kind="stable")[: parts - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


def draw_random_bits(key: int, rows: int, columns: int) -> NDArray[np.uint64]:
    """Draw pseudo-random numbers by a bijective hash of their index.

    Args:
        key: The seed.
        rows: Rows.
        columns: Numbers of a row.

    Returns:
        uint64 (rows, columns), the same for equal arguments on every machine.
    """
    indices = np.arange(rows * columns, dtype=np.uint64).reshape(rows, columns)
    with np.errstate(over="ignore"):
        return hash_splitmix64(indices * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key))
