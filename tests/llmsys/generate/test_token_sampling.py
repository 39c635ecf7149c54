"""Choosing the next token: what each filter keeps, and that draws follow the probabilities."""

import pytest
import torch

from llmsys.errors import ConfigError
from llmsys.generate.token_sampling import (
    SamplingParams,
    apply_repetition_penalty,
    filter_min_p,
    filter_top_k,
    filter_top_p,
    sample_tokens,
)

LOGITS = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.15, 0.05]]))


def list_kept(logits: torch.Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]


def build_generators(count: int, seed: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed + row) for row in range(count)]


@pytest.mark.parametrize(
    ("top_k", "expected"),
    [(0, [[0, 1, 2, 3]] * 2), (1, [[1], [0]]), (2, [[1, 3], [0, 2]]), (9, [[0, 1, 2, 3]] * 2)],
)
def test_top_k_keeps_the_k_likeliest(top_k: int, expected: list[list[int]]) -> None:
    assert list_kept(filter_top_k(LOGITS, top_k)) == expected


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (1.0, [[0, 1, 2, 3]] * 2),
        (0.65, [[1, 3], [0]]),
        (0.75, [[1, 2, 3], [0, 2]]),
        (1e-9, [[1], [0]]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(
    top_p: float, expected: list[list[int]]
) -> None:
    assert list_kept(filter_top_p(LOGITS, top_p)) == expected


def test_top_k_keeps_exactly_k_among_equals() -> None:
    assert [len(row) for row in list_kept(filter_top_k(torch.zeros(1, 6), 2))] == [2]


def test_temperature_zero_is_greedy_and_draws_nothing() -> None:
    own = build_generators(2)
    before = [one.get_state() for one in own]
    assert sample_tokens(LOGITS, own, SamplingParams(temperature=0)).tolist() == [1, 0]
    assert all(torch.equal(one.get_state(), state) for one, state in zip(own, before, strict=True))


def test_draws_follow_the_tempered_probabilities() -> None:
    draws = 4000
    rows = LOGITS[:1].expand(draws, -1)
    tokens = sample_tokens(rows, build_generators(draws), SamplingParams(temperature=0.5, top_k=3))
    share = torch.bincount(tokens, minlength=4) / draws
    expected = torch.tensor([0.0, 0.16, 0.04, 0.09]) / 0.29
    torch.testing.assert_close(share, expected, rtol=0, atol=0.03)


def test_a_row_depends_on_its_own_generator_only() -> None:
    together = sample_tokens(LOGITS, build_generators(2), SamplingParams())
    alone = sample_tokens(LOGITS[1:], build_generators(2)[1:], SamplingParams())
    assert together[1] == alone[0]


@pytest.mark.parametrize(
    ("min_p", "expected"),
    [(0.0, [[0, 1, 2, 3]] * 2), (0.6, [[1, 3], [0]]), (0.2, [[0, 1, 2, 3], [0, 2]])],
)
def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest(
    min_p: float, expected: list[list[int]]
) -> None:
    assert list_kept(filter_min_p(LOGITS, min_p)) == expected


def test_the_penalty_makes_seen_tokens_less_likely_whatever_their_sign() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]])
    assert apply_repetition_penalty(logits, [[0, 1, 1]], 2.0).tolist() == [[1.0, -4.0, 1.0, 0.5]]
    assert logits[0, 0] == 2.0
    assert sample_tokens(
        logits, build_generators(1), SamplingParams(temperature=0, repetition_penalty=4.0), [[0]]
    ).tolist() == [2]


@pytest.mark.parametrize(
    ("setting", "rule"),
    [
        ({"temperature": -1.0}, "temperature=-1.0 is out of range: it must be 0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "above 0 and at most 1"),
        ({"min_p": 1.5}, "from 0"),
        ({"repetition_penalty": 0.0}, "1 is no penalty"),
    ],
)
def test_a_setting_out_of_range_says_its_rule(setting: dict[str, float], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        SamplingParams(**setting)  # type: ignore[arg-type]
