"""Published times: the interval holds what was not used for its calibration, and beats a constant utilisation."""

import json
from functools import cache
from pathlib import Path
from random import Random
from statistics import mean, median

import pytest

from tools.bench.estimates_time import (
    TimeRow,
    build_time_rows,
    compute_student_quantile,
    compute_utilisation,
    fit_residuals,
    get_shipped_residuals,
    predict_interval,
)
from tools.bench.published import RUNS, SkippedRow, read_setups
from tools.bench.published_setup import Setup


@cache
def everything() -> list[Setup | SkippedRow]:
    return list(read_setups())


@cache
def rows() -> list[TimeRow]:
    return build_time_rows(one for one in everything() if isinstance(one, Setup))


def test_every_published_row_becomes_a_setup() -> None:
    assert [one for one in everything() if isinstance(one, SkippedRow)] == []
    assert len({row.setup.name for row in rows()}) == len(rows()) > 90


def test_what_is_shipped_was_calibrated_on_the_named_rows() -> None:
    assert fit_residuals([row for row in rows() if row.calibrates]) == get_shipped_residuals()
    held = {row.setup.name for row in rows() if not row.calibrates}
    assert not held & {name for one in get_shipped_residuals().values() for name in one.rows}


def test_intervals_hold_four_of_five_rows_that_were_not_used() -> None:
    held = [row for row in rows() if not row.calibrates]
    inside = [predict_interval(row, get_shipped_residuals()).contains(row.setup.measured) for row in held]
    assert mean(inside) >= 0.8


def test_the_middle_beats_a_constant_utilisation() -> None:
    held, calibration = ([row for row in rows() if row.calibrates is used] for used in (False, True))
    constant = {run: compute_utilisation(calibration, run=run) for run in (False, True)}
    ours = [abs(predict_interval(row, get_shipped_residuals()).p50 / row.setup.measured - 1) for row in held]
    theirs = [abs(row.ideal_time / constant[row.kind == "run"] / row.setup.measured - 1) for row in held]
    assert median(ours) < 0.6 * median(theirs)


def test_coverage_does_not_hang_on_which_rows_were_used() -> None:
    draw, covered = Random(0), []
    for _ in range(40):
        mixed = rows().copy()
        draw.shuffle(mixed)
        half = len(mixed) // 2
        fitted = fit_residuals(mixed[:half])
        covered.append(mean(predict_interval(row, fitted).contains(row.setup.measured) for row in mixed[half:]))
    assert mean(covered) >= 0.84


def test_the_truth_is_the_papers_own_numbers() -> None:
    by_name = {row.setup.name: row.setup for row in rows()}
    assert by_name["korthikanti2022 530B selective"].measured == 37.83
    assert by_name["korthikanti2022 530B selective"].num_ranks == 280
    assert by_name["megatron_sc21 529.6B"].measured == 54.085
    assert by_name["full_runs llama3.1-8b"].measured == 1_460_000  # out of line, and kept


def test_rows_of_unknown_models_and_devices_are_named_and_not_guessed(tmp_path: Path) -> None:
    truth = json.loads(RUNS.read_text())["megatron_bridge"]["rows"][0]
    strange = [truth | {"model": "who-knows-9b"}, truth | {"system": "Z9"}, truth]
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"megatron_bridge": {"rows": strange}}))
    model, device, known = read_setups(path)
    assert isinstance(model, SkippedRow)
    assert "who-knows-9b" in model.reason
    assert isinstance(device, SkippedRow)
    assert "'z9' has no device profile" in device.reason
    assert not isinstance(known, SkippedRow)


@pytest.mark.parametrize(("freedom", "quantile"), [(6, 1.440), (30, 1.310), (1000, 1.282)])
def test_students_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert compute_student_quantile(0.9, freedom) == pytest.approx(quantile, abs=2e-3)
