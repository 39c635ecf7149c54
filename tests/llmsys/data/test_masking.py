"""Laws of masking: 15 % chosen, 80/10/10 of them, anew in each epoch, and the same in every run."""

import numpy as np
import pytest
import torch

from llmsys.config.objective import MaskedLmConfig, NextSentenceConfig, SpanCorruptionConfig
from llmsys.data.batch import IGNORED, Batch
from llmsys.data.masking import PARTNERS, SegmentPairs, SpanCorruptor, TokenMasker
from llmsys.data.packed_windows import WindowBatch

MASK, END, VOCABULARY, LENGTH = 3, 2, 5000, 128


def masking(seed: int = 0) -> TokenMasker:
    return TokenMasker(MaskedLmConfig(), MASK, END, VOCABULARY, ("f00d", seed))


def windows(count: int) -> Batch:
    tokens_BT = torch.randint(
        10, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(0)
    )
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
    assert [SpanCorruptionConfig().count_lengths(length) for length in (2, 3, 20)] == [
        (3, 3),
        (4, 3),
        (19, 5),
    ]


def restore_text(source: list[int], target: list[int]) -> list[int]:
    """Put the spans of a target into its source; both end with the end token."""
    assert (source.pop(), target.pop()) == (END, END)
    spans: dict[int, list[int]] = {}
    for token in target:
        spans.setdefault(token, []) if token in SENTINELS else spans[list(spans)[-1]].append(token)
    assert (
        list(spans)
        == list(SENTINELS[: len(spans)])
        == [token for token in source if token in SENTINELS]
    )
    assert all(spans.values()), "no span is empty"
    return [one for token in source for one in spans.get(token, [token])]


def test_source_and_target_hold_the_text_and_are_shifted_for_the_decoder() -> None:
    batch = windows(50)
    made = corruptor().mask_batch(batch, range(50))
    assert (
        made.source_BS.shape[1],
        made.targets_BT.shape[1],
    ) == SpanCorruptionConfig().count_lengths(LENGTH)
    for row in range(50):
        assert (
            restore_text(made.source_BS[row].tolist(), made.targets_BT[row].tolist())
            == batch.tokens_BT[row].tolist()
        )
        assert made.source_BS[row, 0] == batch.tokens_BT[row, 0], (
            "a text begins with a span that is kept"
        )
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


CLS, SEP = 8, 9


def read_numbered_windows(numbers: list[int]) -> WindowBatch:
    """Window n: the end of a document of n - 1, then tokens 10 + 200 n, 11 + 200 n, … of a
    document of its own.
    """
    tokens, documents = (
        np.zeros((len(numbers), LENGTH + 1), np.int64),
        np.zeros((len(numbers), LENGTH + 1), np.int64),
    )
    for row, number in enumerate(numbers):
        tokens[row] = 10 + 200 * number + np.arange(LENGTH + 1)
        tokens[row, :20] -= 200
        tokens[row, 20], documents[row, :20], documents[row, 20:] = END, number - 1, number
    return WindowBatch(tokens, documents)


def build_pairs(count: int, seed: int = 0, first: int = 1) -> Batch:
    config = NextSentenceConfig(mlm_probability=0.15)
    masker = TokenMasker(config, MASK, END, VOCABULARY, ("f00d", seed))
    numbers = list(range(first, first + count))
    tokens, documents = (torch.from_numpy(array) for array in read_numbered_windows(numbers))
    batch = Batch(tokens[:, :-1], tokens[:, 1:].clone(), documents[:, :-1])
    return SegmentPairs(masker, config, CLS, SEP, read_numbered_windows).mask_batch(batch, numbers)  # type: ignore[arg-type]


def test_half_of_the_second_segments_follow_and_the_others_are_from_other_windows() -> None:
    made = build_pairs(400)
    assert made.next_sentence_B is not None
    assert made.token_types_BT is not None
    assert float(made.next_sentence_B.float().mean()) == pytest.approx(0.5, abs=0.06)
    true = made.targets_BT.where(made.targets_BT != IGNORED, made.tokens_BT)
    cuts = set()
    for row in range(400):
        tokens, types = true[row][made.documents_BT[row] == 0], made.token_types_BT[row]
        border = tokens.tolist().index(SEP)
        assert tokens[[0, -1]].tolist() == [CLS, SEP]
        assert len(tokens) == LENGTH - 21 + 3, "one document, without its opening"
        assert torch.equal(
            types,
            torch.arange(LENGTH).gt(border).logical_and(torch.arange(LENGTH) < len(tokens)).long(),
        )
        first, second = tokens[1:border], tokens[border + 1 : -1]
        assert first.tolist() == list(
            range(31 + 200 * (row + 1), 31 + 200 * (row + 1) + len(first))
        )
        if made.next_sentence_B[row] == 0:
            assert second[0] == first[-1] + 1
        else:
            assert 0 < int(second[0] - 31) // 200 - (row + 1) <= PARTNERS
        assert (second.diff() == 1).all()
        cuts.add(border)
    assert len(cuts) > 60, "the border is drawn anew in every row"
    hidden = made.targets_BT != IGNORED
    assert (hidden.sum(1) == round(0.15 * (LENGTH - 21))).all()
    assert not hidden[(true == CLS) | (true == SEP)].any()


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_segment_that_does_not_follow_is_never_from_the_same_document(is_alone: bool) -> None:
    """A long document fills most windows. Without any other one, segments follow."""

    def read_long_document(numbers: list[int]) -> WindowBatch:
        tokens, documents = (
            np.full((len(numbers), LENGTH + 1), 30),
            np.zeros((len(numbers), LENGTH + 1), np.int64),
        )
        if not is_alone:
            tokens[:, -3:], documents[:, -3:] = 40, 1
        return WindowBatch(tokens, documents)

    numbers, config = list(range(60)), NextSentenceConfig()
    masker = TokenMasker(config, MASK, END, VOCABULARY, ("f00d", 0))
    tokens, documents = (torch.from_numpy(array) for array in read_long_document(numbers))
    batch = Batch(tokens[:, :-1], tokens[:, 1:].clone(), documents[:, :-1])
    made = SegmentPairs(masker, config, CLS, SEP, read_long_document).mask_batch(batch, numbers)  # type: ignore[arg-type]
    assert made.next_sentence_B is not None
    assert made.token_types_BT is not None
    assert bool(made.next_sentence_B.any()) is not is_alone
    true = made.targets_BT.where(made.targets_BT != IGNORED, made.tokens_BT)
    for row in made.next_sentence_B.nonzero()[:, 0].tolist():
        second = true[row][(made.token_types_BT[row] == 1) & (true[row] != SEP)]
        assert set(second.tolist()) == {40}


def test_pairs_are_a_function_of_seed_and_window_alone() -> None:
    whole, alone = build_pairs(8), build_pairs(1, first=5)
    for name in ("tokens_BT", "targets_BT", "documents_BT", "token_types_BT", "next_sentence_B"):
        assert torch.equal(getattr(alone, name)[0], getattr(whole, name)[4]), name
    assert not torch.equal(build_pairs(8, seed=1).targets_BT, whole.targets_BT)


def test_a_window_without_a_document_of_two_tokens_has_no_label() -> None:
    config = NextSentenceConfig()
    masker = TokenMasker(config, MASK, END, VOCABULARY, ("f00d", 0))
    tokens_BT = torch.full((1, 8), END)
    batch = Batch(tokens_BT, tokens_BT.clone(), torch.arange(8)[None])
    made = SegmentPairs(masker, config, CLS, SEP, read_numbered_windows).mask_batch(batch, [0])  # type: ignore[arg-type]
    assert made.next_sentence_B is not None
    assert (made.next_sentence_B.tolist(), made.token_counts.labelled_pairs) == ([IGNORED], 0)
    assert made.tokens_BT[0, :3].tolist() == [CLS, SEP, SEP]
