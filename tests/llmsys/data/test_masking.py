"""Laws of masking: 15 % chosen, 80/10/10 of them, anew in each epoch, and the same in every run."""

import numpy as np
import pytest
import torch

from llmsys.config.objective import MaskedLmConfig, SpanCorruptionConfig
from llmsys.data.batch import Batch
from llmsys.data.masking import SpanCorruptor, TokenMasker

MASK, END, VOCABULARY, LENGTH = 3, 2, 5000, 128


def masking(seed: int = 0) -> TokenMasker:
    return TokenMasker(MaskedLmConfig(), MASK, END, VOCABULARY, ("f00d", seed))


def windows(count: int) -> Batch:
    tokens_BT = torch.randint(10, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    tokens_BT[:, ::16] = END
    return Batch(tokens_BT, tokens_BT.roll(-1, 1))


def test_shares_are_those_of_bert() -> None:
    batch = windows(400)
    masked = masking().mask_batch(batch, range(400))
    chosen = masked.targets_BT != -100
    assert (chosen.sum(1) == round(0.15 * (LENGTH - 8))).all()
    assert not chosen[batch.tokens_BT == END].any()
    assert torch.equal(masked.targets_BT[chosen], batch.tokens_BT[chosen])
    assert torch.equal(masked.tokens_BT[~chosen], batch.tokens_BT[~chosen])
    seen, true = masked.tokens_BT[chosen], batch.tokens_BT[chosen]
    assert float((seen == MASK).float().mean()) == pytest.approx(0.8, abs=0.02)
    assert float((seen == true).float().mean()) == pytest.approx(0.1, abs=0.02)
    other = seen[(seen != MASK) & (seen != true)]
    assert len(other) / len(seen) == pytest.approx(0.1, abs=0.02)
    assert len(other.unique()) > 0.8 * len(other)  # any token of the vocabulary
    places = np.flatnonzero(chosen.sum(0).numpy())
    assert len(places) == LENGTH - 8  # no place is spared


def test_a_mask_is_a_function_of_seed_and_window_alone() -> None:
    batch = windows(8)
    whole = masking().mask_batch(batch, range(8))
    alone = masking().mask_batch(Batch(batch.tokens_BT[5:6], batch.targets_BT[5:6]), [5])
    assert torch.equal(alone.tokens_BT[0], whole.tokens_BT[5])
    assert not torch.equal(masking().mask_batch(batch, range(8, 16)).targets_BT, whole.targets_BT)
    assert not torch.equal(masking(seed=1).mask_batch(batch, range(8)).targets_BT, whole.targets_BT)


def test_padding_is_never_chosen() -> None:
    batch = windows(4)
    batch.targets_BT[:, 40:] = -100
    masked = masking().mask_batch(batch, range(4))
    assert not (masked.targets_BT[:, 40:] != -100).any()
    assert (masked.targets_BT != -100).any()


SENTINELS, START = tuple(range(6000, 6100)), 7


def corruptor(seed: int = 0) -> SpanCorruptor:
    return SpanCorruptor(SpanCorruptionConfig(), SENTINELS, END, START, ("f00d", seed))


def test_lengths_are_those_of_t5() -> None:
    """568 tokens make 512 and 114 (Raffel 2019's code, compute_input_and_target_lengths)."""
    assert SpanCorruptionConfig().count_lengths(568) == (512, 114)
    assert [SpanCorruptionConfig().count_lengths(length) for length in (2, 3, 20)] == [(3, 3), (4, 3), (19, 5)]


def restore_text(source: list[int], target: list[int]) -> list[int]:
    """Put the spans of a target into its source; both end with the end token."""
    assert (source.pop(), target.pop()) == (END, END)
    spans: dict[int, list[int]] = {}
    for token in target:
        spans.setdefault(token, []) if token in SENTINELS else spans[list(spans)[-1]].append(token)
    assert list(spans) == list(SENTINELS[: len(spans)]) == [token for token in source if token in SENTINELS]
    assert all(spans.values()), "no span is empty"
    return [one for token in source for one in spans.get(token, [token])]


def test_source_and_target_hold_the_text_and_are_shifted_for_the_decoder() -> None:
    batch = windows(50)
    made = corruptor().mask_batch(batch, range(50))
    assert (made.source_BS.shape[1], made.targets_BT.shape[1]) == SpanCorruptionConfig().count_lengths(LENGTH)
    for row in range(50):
        assert (
            restore_text(made.source_BS[row].tolist(), made.targets_BT[row].tolist()) == batch.tokens_BT[row].tolist()
        )
        assert made.source_BS[row, 0] == batch.tokens_BT[row, 0], "a text begins with a span that is kept"
    assert torch.equal(made.tokens_BT[:, 1:], made.targets_BT[:, :-1])
    assert (made.tokens_BT[:, 0] == START).all()
    starts = [row.index(SENTINELS[0]) for row in made.source_BS.tolist()]
    assert len(set(starts)) > 10, "spans are cut at random"


def test_spans_are_a_function_of_seed_and_window_alone_and_leave_padding_out() -> None:
    batch = windows(8)
    whole = corruptor().mask_batch(batch, range(8))
    alone = corruptor().mask_batch(Batch(batch.tokens_BT[5:6], batch.targets_BT[5:6]), [5])
    assert torch.equal(alone.source_BS[0], whole.source_BS[5])
    other = corruptor(seed=1).mask_batch(batch, range(8))
    assert not torch.equal(other.targets_BT, whole.targets_BT)
    batch.targets_BT[3, 40:] = -100
    batch.targets_BT[4, 1:] = -100
    padded = corruptor().mask_batch(batch, range(8))
    source = padded.source_BS[3][padded.source_documents_BS[3] >= 0]
    target = padded.targets_BT[3][padded.targets_BT[3] != -100]
    assert restore_text(source.tolist(), target.tolist()) == batch.tokens_BT[3, :40].tolist()
    assert (padded.targets_BT[4] == -100).all(), "one token is no text"
    assert padded.real_BT[3].sum() == len(target)
