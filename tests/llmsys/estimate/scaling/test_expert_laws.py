"""Laws of mixtures of experts against the tables of their papers."""

import json
import math

import pytest

from llmsys.estimate.scaling.expert_laws import CLARK, KRAJEWSKI, LUDZIEJEWSKI, count_training_flops
from llmsys.estimate.scaling.law import BudgetRequest
from llmsys.launch.main import main

# Krajewski 2024, table 2, all with 64 experts: active parameters, tokens, granularity, FLOPs, loss.
KRAJEWSKI_TABLE = [
    (1e8, 4.37e9, 8, 2.95e18, 3.133),
    (1e9, 28.94e9, 16, 1.93e20, 2.491),
    (3e9, 72.90e9, 16, 1.41e21, 2.245),
    (7e9, 137.60e9, 32, 6.46e21, 2.076),
    (7e10, 941.07e9, 32, 4.16e23, 1.694),
    (3e11, 2.96e12, 64, 5.69e24, 1.503),
    (1e12, 7.94e12, 64, 4.97e25, 1.367),
]
# Ludziejewski 2025, table 1: active parameters and tokens by budget, for 1, 2, 4, 8, 16 and 32
# experts.
LUDZIEJEWSKI_TABLE = {
    1e20: (
        [1.7e9, 1.5e9, 1.2e9, 990e6, 810e6, 669e6],
        [9.7e9, 11.4e9, 13.9e9, 17e9, 20.7e9, 24.9e9],
    ),
    1e21: ([5.7e9, 5e9, 4.4e9, 3.8e9, 3.3e9, 2.85e9], [29.3e9, 33e9, 38e9, 44.3e9, 51.2e9, 58.4e9]),
    1e22: (
        [18.8e9, 17.4e9, 15.8e9, 14.4e9, 13.2e9, 12.2e9],
        [88.6e9, 96e9, 105.4e9, 115.8e9, 126.5e9, 136.9e9],
    ),
}
# Its table 4: m, mu, n and nu.
LUDZIEJEWSKI_REDUCED = {
    1: (30.3640, -0.1817, 53.9838, -0.1965),
    2: (27.7982, -0.1780, 66.8401, -0.2065),
    8: (21.8330, -0.1676, 119.9126, -0.2338),
    32: (16.5424, -0.1557, 234.6726, -0.2652),
}


@pytest.mark.parametrize(("active", "tokens", "granularity", "flops", "loss"), KRAJEWSKI_TABLE)
def test_krajewskis_law_reproduces_its_table_2(active, tokens, granularity, flops, loss) -> None:
    assert count_training_flops(active, 64, granularity) * tokens == pytest.approx(flops, rel=0.005)
    best = KRAJEWSKI.find_optimum(BudgetRequest(flops, experts=64))
    assert best.granularity == granularity, "the best power of two"
    assert (best.parameters, best.tokens) == pytest.approx((active, tokens), rel=0.03)
    # The printed exponents have three digits: alpha = 0.1145 instead of 0.115 moves the loss of a
    # row by as much.
    assert best.loss == pytest.approx(loss, rel=0.01)
    assert best.loss < loss
    assert best.total_parameters == pytest.approx(43 * best.parameters), (
        "their 64 x 3M has 129M parameters"
    )


@pytest.mark.parametrize("flops", LUDZIEJEWSKI_TABLE)
def test_ludziejewskis_law_reproduces_its_table_1(flops) -> None:
    losses: list[float] = []
    for experts, parameters, tokens in zip(
        (1, 2, 4, 8, 16, 32), *LUDZIEJEWSKI_TABLE[flops], strict=True
    ):
        best = LUDZIEJEWSKI.find_optimum(BudgetRequest(flops, experts=experts))
        assert (best.parameters, best.tokens) == pytest.approx((parameters, tokens), rel=0.035)
        losses.append(best.loss or 0.0)
    assert losses == sorted(losses, reverse=True), (
        "more experts are better at equal compute, their finding 2"
    )


@pytest.mark.parametrize("experts", LUDZIEJEWSKI_REDUCED)
def test_ludziejewskis_law_reduces_to_its_table_4(experts) -> None:
    m, mu, n, nu = LUDZIEJEWSKI_REDUCED[experts]
    found = LUDZIEJEWSKI.reduce_to_two_terms(experts)
    assert (found[0], found[2]) == pytest.approx((m, n), rel=4e-3)
    assert (found[1], found[3]) == pytest.approx((mu, nu), abs=1.5e-4)


def test_no_neighbour_on_the_line_of_equal_cost_is_better() -> None:
    served = BudgetRequest(1e22, experts=8, served_tokens=1e11)
    joint, fine = LUDZIEJEWSKI.find_optimum(served), KRAJEWSKI.find_optimum(served)
    assert fine.granularity is not None
    assert joint.parameters * (6 * joint.tokens + 2 * 1e11) == pytest.approx(1e22)
    per_token = count_training_flops(fine.parameters, 8, fine.granularity)
    assert per_token * (fine.tokens + 1e11 / 3) == pytest.approx(1e22)
    for factor in (0.9, 1.1):
        tokens = (1e22 / (joint.parameters * factor) - 2e11) / 6
        assert LUDZIEJEWSKI.predict_loss(joint.parameters * factor, tokens, 8) > joint.loss
        finer = fine.parameters * factor
        tokens = 1e22 / count_training_flops(finer, 8, fine.granularity) - 1e11 / 3
        assert KRAJEWSKI.predict_loss(finer, tokens, fine.granularity, 8) > fine.loss


def test_experts_are_worth_their_dense_loss() -> None:
    for law in CLARK:
        assert law.compute_dense_equivalent(1e9, 1) == pytest.approx(1e9)
        dense = law.compute_dense_equivalent(1e9, 64)
        assert dense > 1e9
        assert law.predict_loss(dense, 1) == pytest.approx(law.predict_loss(1e9, 64))
    # The dense model of the same paper, log10 L = 0.078 (log10 3.568e13 - log10 N), is near one
    # expert.
    assert CLARK[0].predict_loss(1e9, 1) == pytest.approx((3.568e13 / 1e9) ** 0.078, rel=0.02)


CUTOFFS = list(zip(CLARK, (937e9, 85e9, 83e9), strict=True))


@pytest.mark.parametrize(("law", "cutoff"), CUTOFFS, ids=[law.name for law in CLARK])
def test_experts_stop_helping_where_clarks_table_3_puts_it(law, cutoff) -> None:
    # N_cutoff = 10^(-b/c) of equation 2; b and c are printed with three decimals, which allow this
    # span.
    low, high = (-law.b - 0.0005) / (law.c + 0.0005), (-law.b + 0.0005) / (law.c - 0.0005)
    assert low <= math.log10(cutoff) <= high


def test_serving_is_priced_at_its_own_utilisation(capsys) -> None:
    words = ["scale", "budget=1e22", "num_experts=64", "--json"]
    found = {}
    for name, more in {"none": [], "same": ["serve_tokens=1e12"],
                       "slower": ["serve_tokens=1e12", "serve_utilisation=0.1"],
                       "four": ["serve_tokens=4e12"]}.items():  # fmt: skip
        assert main([*words, *more]) == 0
        found[name] = {
            row["law"]: row["parameters"] for row in json.loads(capsys.readouterr().out)["laws"]
        }
    for law in ("krajewski_2024", "ludziejewski_2025", "besiroglu_2024"):
        assert found["none"][law] > found["same"][law] > found["slower"][law]
        assert found["slower"][law] == pytest.approx(found["four"][law]), (
            "0.4 / 0.1 times the tokens"
        )
