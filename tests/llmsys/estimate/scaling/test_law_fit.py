"""A law fitted to runs that follow a known one finds it again, and says how sure it is."""

import json
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from llmsys.errors import DataError
from llmsys.estimate.scaling.law import BudgetRequest
from llmsys.estimate.scaling.law_fit import (
    TrainingRun,
    _predict_log_losses,
    fit_law,
    load_training_runs,
)
from llmsys.estimate.scaling.published_laws import BESIROGLU
from llmsys.launch.main import main
from tests.helpers.example_run import write_events
from tools.docs.json_reference import build_schema

SIZES, RATIOS = (5e7, 1e8, 2e8, 4e8, 8e8), (5, 10, 20, 40, 80)


def ladder(noise: float = 0.0) -> list[TrainingRun]:
    generator = np.random.default_rng(1)
    return [
        TrainingRun(
            f"{n:.0e}",
            n,
            n * ratio,
            BESIROGLU.predict_loss(n, n * ratio) * float(np.exp(generator.normal(0, noise))),
        )
        for n in SIZES
        for ratio in RATIOS
    ]


def test_points_without_noise_give_their_law_to_many_digits() -> None:
    law = fit_law(ladder(), resamples=1).law
    found = (law.irreducible, law.parameter_factor, law.token_factor, law.alpha, law.beta)
    assert found == pytest.approx((1.8172, 482.01, 2085.43, 0.3478, 0.3658), rel=1e-4)


def test_with_noise_the_intervals_hold_the_truth_and_one_bad_run_does_not_bend_the_law() -> None:
    points = ladder(noise=0.002)
    points[7] = TrainingRun(
        "diverged", points[7].parameters, points[7].tokens, points[7].loss * 1.2
    )
    found = fit_law(points, resamples=60)
    truth = dict(
        zip(
            ("E", "A", "B", "alpha", "beta"), (1.8172, 482.01, 2085.43, 0.3478, 0.3658), strict=True
        )
    )
    for name, (low, high) in found.intervals.items():
        assert low < truth[name] < high, name
    best = found.find_optimum(1e21).parameters
    assert best.low < BESIROGLU.find_optimum(BudgetRequest(1e21)).parameters < best.high
    assert max(range(25), key=lambda i: abs(found.residuals[i])) == 7


def test_the_slopes_are_those_of_the_loss() -> None:
    sizes, tokens = np.array([1e8, 1e9]), np.array([1e9, 1e11])
    at = np.array([0.6, 6.0, 7.5, 0.35, 0.37])
    _, slopes = _predict_log_losses(at, sizes, tokens)
    for i in range(5):
        step = np.eye(5)[i] * 1e-6
        difference = (
            _predict_log_losses(at + step, sizes, tokens)[0]
            - _predict_log_losses(at - step, sizes, tokens)[0]
        ) / 2e-6
        assert slopes[:, i] == pytest.approx(difference, rel=1e-5)


def test_too_few_runs_are_refused_with_what_would_do() -> None:
    with pytest.raises(
        DataError,
        match=r"5 runs of different size or length cannot determine the 5 constants .* least 7",
    ):
        fit_law(ladder()[:5])
    with pytest.raises(
        DataError, match=r"2 sizes cannot determine the 5 constants of a law. Use at least 3"
    ):
        fit_law(ladder()[:10])


def test_run_folders_and_tables_give_points(tmp_path: Path) -> None:
    run = tmp_path / "small"
    run.mkdir()
    events = [
        {
            "time": 1,
            "event": "start",
            "parameters": 20,
            "parameters_active": 10,
            "resumed_from": None,
        },
        {"time": 2, "event": "evaluation", "step": 3, "tokens": 300, "loss": 4.5},
    ]
    path = run / "events.jsonl"
    write_events(path, events)
    with pytest.raises(DataError, match="has not finished, so its schedule was cut short"):
        load_training_runs([run])
    path.write_text(path.read_text() + json.dumps({"time": 3, "event": "finish", "step": 3}) + "\n")
    table = tmp_path / "runs.csv"
    table.write_text("name,parameters,tokens,loss\nbig,1e9,2e10,2.5\n")
    assert load_training_runs([run, table]) == [
        TrainingRun("small", 10, 300, 4.5),
        TrainingRun("big", 1e9, 2e10, 2.5),
    ]
    table.write_text("parameters,tokens,loss\n1e9,2e10,lots\n")
    with pytest.raises(
        DataError, match=r'runs.csv:2: .*"lots".* does not give parameters, tokens, loss as numbers'
    ):
        load_training_runs([table])
    table.write_text("parameters,tokens\n1,2\n")
    with pytest.raises(DataError, match="needs the columns parameters, tokens, loss"):
        load_training_runs([table])


def test_the_verb_fits_recommends_and_draws(tmp_path: Path, capsys) -> None:
    table, page = tmp_path / "runs.csv", tmp_path / "law.html"
    rows = [f"{p.parameters},{p.tokens},{p.loss}" for p in ladder(noise=0.002)]
    table.write_text("\n".join(["parameters,tokens,loss", *rows]))
    words = [
        "scale",
        "fit",
        str(table),
        "budget=1e21",
        "--output",
        str(page),
        "--resamples",
        "20",
        "--json",
    ]
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    schema = Draft202012Validator(build_schema("scale-fit"))
    assert [error.message for error in schema.iter_errors(answer)] == []
    assert not schema.is_valid(answer | {"surprise": 1})
    assert answer["optima"][0]["times_beyond"] == pytest.approx(1e21 / 3.072e20)
    html = page.read_text()
    for title in ("Loss against compute", "Loss against parameters", "Loss against tokens"):
        assert title in html
