"""Reports that no table used before: their draw into halves, and mistakes in a file of them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from llmsys.errors import ConfigError
from tools.bench.fits.published_row import ROOT
from tools.bench.fits.read_rows import RUNS, UNSEEN
from tools.bench.fits.report_rows import (
    DRAWS,
    FIRST_DRAW,
    Half,
    Report,
    ReportDraw,
    draw_report_split,
    has_experts,
    list_report_rows,
    load_report_split,
    load_reports,
)
from tools.bench.fits.table_rows import load_tables


@pytest.fixture(autouse=True)
def _run_from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(params=DRAWS, ids=["first", "experts"])
def draw(request: pytest.FixtureRequest) -> ReportDraw:
    found: ReportDraw = request.param
    return found


def test_the_halves_are_those_of_the_seed(draw: ReportDraw) -> None:
    split = load_report_split(draw.split)
    drawn = draw_report_split(load_reports(draw.reports), split.seed, split.known, split.shown)
    assert drawn == split


def test_every_report_is_in_one_half_with_all_its_rows(draw: ReportDraw) -> None:
    split = load_report_split(draw.split)
    named = sorted([*split.tuning, *split.held_out, *split.shown])
    assert named == sorted(load_reports(draw.reports))
    assert set(split.known) <= set(split.tuning)
    halves: tuple[Half, ...] = ("tuning", "held_out", "shown")
    rows = {half: list_report_rows(half, [draw]) for half in halves}
    for half, found in rows.items():
        assert {row.source for row in found} == set(getattr(split, half))
    every = [row.name for found in rows.values() for row in found]
    assert len(set(every)) == len(every) >= 60


def test_both_halves_have_reports_with_experts_and_without(draw: ReportDraw) -> None:
    split, reports = load_report_split(draw.split), load_reports(draw.reports)
    for half in (split.tuning, split.held_out):
        kinds = {has_experts(reports[name]) for name in half}
        assert kinds == {True, False}


def test_a_report_priced_before_is_in_neither_half() -> None:
    report = load_reports()["automodel"]
    split = draw_report_split({"seen": report, "new": report}, 1, (), ["seen"])
    assert (split.tuning, split.held_out, split.shown) == (("new",), (), ("seen",))


def test_no_report_is_one_of_an_older_table(draw: ReportDraw) -> None:
    older = " ".join(path.read_text(encoding="utf-8") for path in (RUNS, *UNSEEN))
    earlier = DRAWS[: DRAWS.index(draw)]
    older += " ".join(one.reports.read_text(encoding="utf-8") for one in earlier)
    reports = load_reports(draw.reports)
    known = set(load_tables()).union(*(load_reports(one.reports) for one in earlier))
    assert not set(reports) & known
    assert [one.url for one in reports.values() if one.url in older] == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seconds": None}, "give one of seconds, tokens_per_second, tflops"),
        ({"tflops": 400}, "give one of seconds, tokens_per_second, tflops"),
        ({"seconds": -1}, "greater than 0"),
        ({"cluster": "h200-4"}, "give device or cluster"),
        ({"device": None}, "give device or cluster"),
        ({"recompute": "some"}, "'none', 'selective' or 'full'"),
        ({"gpu": 8}, "Extra inputs are not permitted"),
        ({"gpus": 0}, "greater than or equal to 1"),
    ],
)
def test_a_bad_row_is_refused_by_name(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    values = yaml.safe_load(FIRST_DRAW.reports.read_text(encoding="utf-8"))
    report = values["nemotron4-340b"]
    report["rows"][1] |= change
    path = tmp_path / "reports.yaml"
    path.write_text(yaml.safe_dump({"nemotron4-340b": report}), encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_reports(path)
    assert "reports.yaml: nemotron4-340b: row '340B 3072'" in str(refused.value)
    assert said in str(refused.value)
    assert "Correct that row" in str(refused.value)


def test_a_report_without_an_address_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "reports.yaml"
    rows = [load_reports()["tinyllama"].rows[0].model_dump()]
    path.write_text(yaml.safe_dump({"mine": {"title": "Mine", "url": "here", "rows": rows}}))
    with pytest.raises(ConfigError, match=r"reports\.yaml: mine: url"):
        load_reports(path)


@pytest.mark.parametrize(
    ("measure", "seconds"),
    [
        ({"seconds": 3.5}, 3.5),
        # 1,024 sequences of 2,048 tokens on 16 devices
        ({"tokens_per_second": 1000.0}, 1024 * 2048 / 16_000),
    ],
)
def test_a_measure_becomes_seconds_of_a_step(measure: dict[str, float], seconds: float) -> None:
    row = load_reports()["tinyllama"].rows[0].model_dump(exclude={"tokens_per_second"})
    one = Report.model_validate({"title": "x", "url": "https://x", "rows": [row | measure]})
    assert one.rows[0].build_published_row("x").measured == pytest.approx(seconds)


def test_rates_of_operations_and_of_tokens_agree() -> None:
    row = load_reports()["tinyllama"].rows[0].model_dump(exclude={"tokens_per_second"})
    one = Report.model_validate(
        {"title": "x", "url": "https://x", "rows": [row | {"tflops": 100.0}]}
    )
    seconds = one.rows[0].build_published_row("x").measured
    # 6 · N · D operations are fewer than those with attention, and not by a quarter
    least = 6 * 1_034_512_384 * 1024 * 2048 / (16 * 100e12)
    assert least < seconds < 1.25 * least
