"""Beam search against the enumeration of every text, on a small random language."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from llmsys.generate.beam_search import compute_length_penalty, search_beams

VOCABULARY, END = 4, 0


def compute_logits_after(text: Sequence[int], row: int) -> Tensor:
    """The next token's logits of a language in which everything before it counts."""
    generator = torch.Generator().manual_seed(hash((row, *text)) & 0xFFFFFFFF)
    return 2 * torch.randn(VOCABULARY, generator=generator)


class Rows:
    """Stands in for a model and its cache: remembers what each row has read."""

    def __init__(self, count: int) -> None:
        self.texts: list[tuple[int, list[int]]] = [(row, []) for row in range(count)]

    def logits(self) -> Tensor:
        return torch.stack([compute_logits_after(text, row) for row, text in self.texts])

    def step(self, rows_R: Tensor, tokens_R: Tensor) -> Tensor:
        old = [self.texts[row] for row in rows_R.tolist()]
        self.texts = [
            (row, [*text, token]) for (row, text), token in zip(old, tokens_R.tolist(), strict=True)
        ]
        return self.logits()


def search(count: int, beams: int, length_penalty: float, limit: int) -> list[list[int]]:
    rows = Rows(count)
    limits = [limit] * count
    return search_beams(
        rows.logits(),
        rows.step,
        num_beams=beams,
        length_penalty=length_penalty,
        limits=limits,
        end_token=END,
    )


def score(text: Sequence[int], row: int, length_penalty: float, limit: int) -> float:
    whole = [*text, END] if len(text) < limit else list(text)
    total = sum(
        float(compute_logits_after(whole[:i], row).log_softmax(0)[token])
        for i, token in enumerate(whole)
    )
    return total / compute_length_penalty(len(text) + 1, length_penalty)


def find_likeliest(row: int, length_penalty: float, limit: int) -> list[int]:
    words = range(1, VOCABULARY)
    texts = [
        list(text)
        for length in range(limit + 1)
        for text in itertools.product(words, repeat=length)
    ]
    return max(texts, key=lambda text: score(text, row, length_penalty, limit))


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.5])
def test_with_room_for_every_beginning_the_best_text_is_found(length_penalty: float) -> None:
    found = search(5, beams=300, length_penalty=length_penalty, limit=4)
    assert found == [find_likeliest(row, length_penalty, 4) for row in range(5)]


def test_one_beam_is_greedy() -> None:
    for row, text in enumerate(search(6, beams=1, length_penalty=0.0, limit=8)):
        for place, token in enumerate(text):
            assert token == int(compute_logits_after(text[:place], row).argmax())
        assert len(text) == 8 or int(compute_logits_after(text, row).argmax()) == END


def test_more_beams_never_score_worse_here_and_rows_do_not_meet() -> None:
    narrow, wide = search(8, 2, 0.6, 6), search(8, 64, 0.6, 6)
    assert sum(score(t, r, 0.6, 6) for r, t in enumerate(wide)) >= sum(
        score(t, r, 0.6, 6) for r, t in enumerate(narrow)
    )
    assert search(3, 2, 0.6, 6) == narrow[:3]


def test_no_text_is_longer_than_its_own_limit() -> None:
    rows = Rows(3)
    found = search_beams(
        rows.logits(), rows.step, num_beams=3, length_penalty=9.0, limits=[1, 3, 5], end_token=END
    )
    assert [len(text) <= limit for text, limit in zip(found, [1, 3, 5], strict=True)] == [True] * 3
    assert len(found[2]) == 5


def test_the_divisor_is_wus() -> None:
    assert compute_length_penalty(1, 0.6) == 1.0
    assert compute_length_penalty(13, 0.6) == pytest.approx(3**0.6)
    assert math.isclose(compute_length_penalty(40, 0.0), 1.0)
