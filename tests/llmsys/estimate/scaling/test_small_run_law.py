"""The law of small runs: a level over the ladder, an interval from texts left out."""

import math

import numpy as np
import pytest

from llmsys.estimate.percentile_interval import Z90
from llmsys.estimate.scaling.small_run_law import (
    LADDER_BYTES,
    UNKNOWN_LENGTH_SPREAD,
    LadderShape,
    SmallRun,
    SmallRuns,
    compute_curve,
    fit_small_runs,
    load_small_run_law,
)

SHAPE = LadderShape(e=1.34, a=5220.0, alpha=0.884, b=20.6, beta=0.142, bytes_per_token=2.945)


def make_run(text: str, length: float, factor: float, tokens: int = 500_000) -> SmallRun:
    curve = compute_curve(SHAPE, 1e6, tokens, 1e9, 3.0, length)
    return SmallRun(
        text=text,
        parameters=1_000_000,
        tokens=tokens,
        unique_tokens=10**9,
        bytes_per_token=3.0,
        token_length=length,
        bits_per_byte=curve * factor,
    )


def build_runs(*runs: SmallRun) -> SmallRuns:
    return SmallRuns(format_version=2, measured="made up", ladder=SHAPE, runs=runs)


def test_the_level_is_the_mean_of_logarithms() -> None:
    points = {"a": (0.8, 0.80), "b": (0.9, 0.95), "c": (1.0, 1.12), "d": (1.3, 1.2)}
    law = fit_small_runs(build_runs(*(make_run(name, *one) for name, one in points.items())))
    rests = np.log([factor for _, factor in points.values()])
    assert law.level == pytest.approx(rests.mean())
    errors = [abs(rests[i] - np.delete(rests, i).mean()) for i in range(4)]
    assert law.spread == pytest.approx(max(errors) / Z90)


def test_the_interval_holds_nine_in_ten_texts_that_the_fit_has_not_seen() -> None:
    """Of few runs with heavy tails, as texts have them, a deviation would hold fewer."""
    generator = np.random.default_rng(5)
    inside = []
    for _ in range(400):
        *known, new = np.exp(0.08 * generator.standard_t(3, 25))
        runs = [make_run(str(number), 1.0, factor) for number, factor in enumerate(known)]
        law = fit_small_runs(build_runs(*runs))
        inside.append(abs(math.log(new) - law.level) <= Z90 * law.spread)
    assert 0.87 < np.mean(inside) < 0.95


def test_a_text_is_left_out_with_all_of_its_runs() -> None:
    points = {"a": (0.8, 0.8), "b": (0.9, 1.0), "c": (1.0, 1.3), "d": (1.3, 1.2)}
    once = fit_small_runs(build_runs(*(make_run(name, *one) for name, one in points.items())))
    twice = fit_small_runs(
        build_runs(*(make_run(name, *one) for name, one in points.items() for _ in range(2)))
    )
    assert twice.spread == pytest.approx(once.spread)


def test_the_curve_is_that_of_the_ladder_in_bits_per_byte() -> None:
    # 1.04M parameters and 524,288 tokens: 4.505 nats were measured
    bits = compute_curve(SHAPE, 1.04e6, 524_288, 1e9, SHAPE.bytes_per_token, 1.0)
    assert bits * math.log(2) * SHAPE.bytes_per_token == pytest.approx(4.505, rel=0.015)


def test_repeated_tokens_count_for_less_and_larger_tokens_for_more() -> None:
    new = compute_curve(SHAPE, 1e6, 4e6, 4e6, 3.0, 1.0)
    assert compute_curve(SHAPE, 1e6, 4e6, 2e6, 3.0, 1.0) > new
    assert compute_curve(SHAPE, 1e6, 4e6, 2e6, 3.0, 1.0) == pytest.approx(new, rel=0.01)
    assert compute_curve(SHAPE, 1e6, 4e6, 1e9, 4.0, 1.0) < new


def test_a_text_of_longer_tokens_has_the_same_nats_per_token() -> None:
    plain = compute_curve(SHAPE, 1e6, 500_000, 1e9, 3.0, 1.0)
    longer = compute_curve(SHAPE, 1e6, 500_000, 1e9, 3.9, 1.3)
    assert longer * 1.3 == pytest.approx(plain)


def test_a_text_of_unknown_tokens_has_a_wider_interval() -> None:
    law = load_small_run_law()
    known, unknown = (
        law.predict_bits_per_byte(
            parameters=law.parameters[0],
            tokens=3e5,
            unique_tokens=1e12,
            bytes_per_token=3.0,
            token_length=length,
        )
        for length in (1.0, None)
    )
    assert unknown.p50 == known.p50
    own, wider = (math.log(one.p90 / one.p50) / Z90 for one in (known, unknown))
    assert wider == pytest.approx(math.hypot(own, UNKNOWN_LENGTH_SPREAD))
    assert wider > own


def test_the_interval_widens_outside_of_the_measured_runs() -> None:
    law = load_small_run_law()

    def predict(parameters: float, tokens: float) -> float:
        found = law.predict_bits_per_byte(
            parameters=parameters,
            tokens=tokens,
            unique_tokens=1e12,
            bytes_per_token=3.0,
            token_length=1.0,
        )
        return found.p90 / found.p50

    inside = predict(
        math.sqrt(math.prod(law.parameters)), math.sqrt(math.prod(law.trained_bytes)) / 3
    )
    assert inside == pytest.approx(math.exp(1.2815515655 * law.spread))
    assert predict(1e8, law.trained_bytes[1] / 3) > inside
    assert predict(law.parameters[1], 1e9) > inside
    assert predict(law.parameters[0] / 10, law.trained_bytes[0] / 3) > inside


def test_runs_of_a_gpu_follow_the_published_law_and_want_larger_models() -> None:
    law = load_small_run_law()

    def predict(parameters: float, tokens: float) -> float:
        return law.predict_bits_per_byte(
            parameters=parameters,
            tokens=tokens,
            unique_tokens=1e13,
            bytes_per_token=4.3,
            token_length=1.0,
        ).p50

    # Chinchilla itself, of about 1.94 nats per token of its law.
    whole = predict(70e9, 1.4e12) * math.log(2) * 4.3
    assert whole == pytest.approx(1.8172 + 482.01 / 70e9**0.3478 + 2085.43 / 1.4e12**0.3658)
    # By the ladder alone ten million parameters are no better than a seventh of a million.
    assert predict(10e6, 3e8) < 0.93 * predict(0.7e6, 3e8)
    assert predict(10e6, 1e7) > 0.98 * predict(0.7e6, 1e7)
    # Where the ladder ends to count alone, nothing jumps; before, more tokens are better.
    end = LADDER_BYTES / 4.3
    assert predict(1e6, 1.001 * end) == pytest.approx(predict(1e6, 0.999 * end), rel=2e-3)
    assert predict(1e6, end) < predict(1e6, end / 3) < predict(1e6, end / 10)
