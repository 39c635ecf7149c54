"""Differences between variants, against Student's table and scipy's test of pairs."""

import random

import pytest
from scipy import stats

from llmsys.ablation.differences import compute_difference
from llmsys.ablation.table import format_difference

# Student's quantiles of 0.975 as printed in tables, by degrees of freedom.
QUANTILES = {1: 12.706, 2: 4.303, 4: 2.776}


@pytest.mark.parametrize("freedom", QUANTILES)
def test_half_the_width_is_the_quantile_of_the_table_times_the_standard_error(freedom: int) -> None:
    count = freedom + 1
    values = [0.1 * number for number in range(count)]
    found = compute_difference(dict.fromkeys(range(count), 2.0), dict(enumerate(values, 0)))
    mean = sum(values) / count - 2
    variance = sum((value - 2 - mean) ** 2 for value in values) / freedom
    assert found is not None
    assert found.mean == pytest.approx(mean)
    assert found.half_width == pytest.approx(
        QUANTILES[freedom] * (variance / count) ** 0.5, rel=2e-4
    )


def test_pairs_are_of_one_seed_and_the_interval_is_that_of_the_paired_test() -> None:
    choose = random.Random(3)
    base = {seed: 2 + choose.gauss(0, 0.3) for seed in range(6)}
    variant = {seed: base[seed] + 0.05 + choose.gauss(0, 0.01) for seed in reversed(range(6))}
    found = compute_difference(base, variant)
    low, high = stats.ttest_rel(
        [variant[seed] for seed in range(6)], [base[seed] for seed in range(6)]
    ).confidence_interval(0.95)
    assert found is not None
    assert found.half_width is not None
    assert (found.mean - found.half_width, found.mean + found.half_width) == pytest.approx(
        (low, high)
    )
    assert found.is_clear
    assert format_difference(found).endswith(" worse")


def test_one_seed_has_a_difference_and_no_interval_and_no_pair_has_none() -> None:
    found = compute_difference({0: 2.0, 1: 3.0}, {1: 2.5})
    assert found is not None
    assert (found.mean, found.half_width, found.is_clear) == (-0.5, None, False)
    assert format_difference(found) == "-0.5000, one seed"
    assert compute_difference({0: 2.0}, {1: 2.0}) is None


def test_an_interval_that_holds_0_is_called_neither_better_nor_worse() -> None:
    found = compute_difference({0: 2.0, 1: 2.0, 2: 2.0}, {0: 2.1, 1: 1.9, 2: 2.02})
    assert found is not None
    assert not found.is_clear
    assert format_difference(found) == f"+0.0067 ± {found.half_width:.4f}"
