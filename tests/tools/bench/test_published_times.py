"""Published rows: each is a command line, and P50 beats a constant utilisation on sources that
no fit has seen.
"""

import json
from functools import cache
from math import exp, log, sqrt
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest
import yaml

from llmsys.estimate.percentile_interval import build_log_normal_interval
from llmsys.estimate.program_profile import list_program_names, load_program_profile
from llmsys.estimate.residual_model import load_residuals
from tools.bench.estimates import PAGE, format_summary_line, select_priced_rows
from tools.bench.fits.memory import compute_error, is_calibration
from tools.bench.fits.published_row import (
    ROOT,
    PublishedRow,
    estimate_printed_step,
    read_json,
    run_estimate,
)
from tools.bench.fits.read_rows import RUNS, UNSEEN, SkippedRow, list_rows, read_rows
from tools.bench.fits.report_rows import list_report_rows
from tools.bench.fits.time_fit import (
    HeldOutRow,
    build_program_fits,
    build_residuals,
    clip_outliers,
    fit_class,
    fit_factors,
    list_held_out_rows,
    list_printed_rows,
    select_peers,
)
from tools.bench.fits.time_rows import KINDS, TimeRow, build_time_rows, get_model, get_report

SOURCES = {"moe": 3, "run": 8, "dense": 12}


@cache
def rows() -> list[PublishedRow]:
    priced, skipped = select_priced_rows(RUNS)
    assert skipped == []
    return priced


@cache
def times() -> list[TimeRow]:
    return build_time_rows(rows())


@cache
def tuned() -> list[TimeRow]:
    return build_time_rows(list_report_rows("tuning"))


def fitted(kind: str) -> list[TimeRow]:
    return [row for row in (*times(), *tuned()) if row.kind == kind]


@pytest.fixture(autouse=True)
def _run_from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_every_published_row_is_a_command_of_its_own_name() -> None:
    assert all(
        row.command.startswith("llmsys estimate ") and "--program" in row.words for row in rows()
    )
    assert len({(row.name, row.kind) for row in rows()}) == len(rows()) > 100
    for kind, least in SOURCES.items():
        assert len({row.published.source for row in times() if row.kind == kind}) >= least


def test_what_is_shipped_was_fitted_on_the_named_rows() -> None:
    shipped = load_residuals()
    everything = [*times(), *tuned()]
    assert build_residuals(everything) == {kind: getattr(shipped, kind) for kind in KINDS}
    fits = build_program_fits(everything)
    assert {name: load_program_profile(name).fit for name in fits} == fits
    assert all(not load_program_profile(name).fit for name in set(list_program_names()) - set(fits))


def test_constants_of_one_model_are_unknown_where_it_is_held_out() -> None:
    own = {row.name: row for row in fitted("moe")}
    sinks, plain = (
        own["26.04 H100 gpt-oss-120b BF16 64 of gbs 1280"],
        own["26.04 H100 qwen3-235b-a22b FP8 256 of gbs 8192"],
    )
    assert sinks.blind_log_ratio > sinks.log_ratio + 0.1, (
        "attention with sinks is slower than without"
    )
    assert plain.blind_log_ratio == plain.log_ratio
    spread = fit_class(list(own.values())).spread
    blind = {row.name for row in own.values() if row.blind_log_ratio != row.log_ratio}
    assert len(blind) > 10
    assert spread > fit_class([row for name, row in own.items() if name not in blind]).spread


def test_a_program_that_its_report_gave_is_unknown_where_the_report_is_held_out() -> None:
    own = {row.name: row for row in tuned()}
    # the ring of 1,024 ranks: each of 291 tensors, or each of 32 blocks
    far = own["internevo 7B zero1=-1 1024"]
    assert far.report_blind_log_ratio == far.blind_log_ratio > far.log_ratio + 0.25
    near = own["fms-fsdp 7b"]
    assert near.report_blind_log_ratio == near.log_ratio
    sinks = next(row for row in fitted("moe") if "gpt-oss" in row.name)
    assert sinks.report_blind_log_ratio == sinks.log_ratio, "known from another report's model"


@cache
def list_never_fitted_rows() -> list[TimeRow]:
    return [row for path in UNSEEN for row in build_time_rows(select_priced_rows(path)[0])]


def test_runs_that_nothing_was_fitted_on_are_covered() -> None:
    held = [
        one for one in list_printed_rows(list_never_fitted_rows(), times()) if one.row.kind == "run"
    ]
    assert 0.8 <= mean(one.is_covered for one in held) <= 0.9


def test_peaks_that_nothing_was_fitted_on_are_within_a_tenth_and_never_five_per_cent_under() -> (
    None
):
    errors = [
        compute_error(row)
        for path in UNSEEN
        for row in select_priced_rows(path)[0]
        if row.kind == "memory"
    ]
    assert len(errors) == 10
    assert median(map(abs, errors)) <= 0.05
    assert -0.05 < min(errors) < max(errors) < 0.1


@pytest.mark.parametrize(("kind", "most"), [("dense", 0.10), ("moe", 0.15)])
def test_steps_that_nothing_was_fitted_on_are_covered_and_beat_half_of_a_constant_utilisation(
    kind: str, most: float
) -> None:
    held = [
        one for one in list_printed_rows(list_never_fitted_rows(), times()) if one.row.kind == kind
    ]
    error, base = (
        median(map(abs, errors))
        for errors in zip(*((o.error, o.baseline_error) for o in held), strict=True)
    )
    assert error <= most
    assert error < base / 2
    # Wider than these reports need, since the fit holds what other reports add.
    assert 0.85 <= mean(one.is_covered for one in held) <= 0.98


@pytest.mark.parametrize(
    ("kind", "least", "most", "error"), [("dense", 0.75, 0.95, 0.12), ("moe", 0.75, 1.0, 0.18)]
)
def test_reports_that_nothing_was_fitted_on_are_covered(
    kind: str, least: float, most: float, error: float
) -> None:
    new = [row for row in build_time_rows(list_report_rows("held_out")) if row.kind == kind]
    held = list_printed_rows(new, times())
    assert len(held) >= 10
    assert least <= mean(one.is_covered for one in held) <= most
    assert median(abs(one.error) for one in held) <= error


def test_one_factor_fits_attention_of_one_program_from_short_to_a_million_positions() -> None:
    own = [row for row in list_never_fitted_rows() if row.program == "megatron-2023"]
    ratios = [exp(row.log_ratio) for row in own]
    assert [min(row.length for row in own), max(row.length for row in own)] == [4096, 2**20]
    assert max(ratios) / min(ratios) < 1.05


def test_no_row_of_a_source_is_in_the_fit_that_predicts_it() -> None:
    steps = fitted("moe")
    held = list_held_out_rows(steps, steps)
    report = get_report(steps[0])
    assert report == "megatron_bridge"
    others = [row for row in steps if get_report(row) != report]
    assert held[0].interval == fit_class(others).predict_interval(steps[0])
    assert held[0].interval != fit_class(steps).predict_interval(steps[0])


@pytest.mark.parametrize(
    ("kind", "most", "share"), [("dense", 0.10, 0.5), ("moe", 0.15, 0.5), ("run", 0.17, 0.7)]
)
def test_held_out_sources_are_covered_and_beat_a_constant_utilisation(
    kind: str, most: float, share: float
) -> None:
    own = fitted(kind)
    # Most mixtures are of one report, whose releases repeat their rows: what is held out is a
    # model.
    held = list_held_out_rows(
        own,
        select_peers(own[0].kind, [*times(), *tuned()]),
        get_model if kind == "moe" else None,
    )
    assert 0.8 <= mean(one.is_covered for one in held) <= (0.98 if kind == "moe" else 0.9)
    error, base = (
        median(map(abs, errors))
        for errors in zip(*((o.error, o.baseline_error) for o in held), strict=True)
    )
    assert error <= most
    assert error < share * base


def test_memory_is_within_a_tenth_and_never_five_per_cent_under() -> None:
    errors = {row.name: compute_error(row) for row in rows() if row.kind == "memory"}
    assert median(map(abs, errors.values())) <= 0.05
    assert -0.05 < min(errors.values()) < max(errors.values()) < 0.1
    assert any(not is_calibration(row) for row in rows() if row.kind == "memory")


def test_a_row_prints_what_its_fit_predicts() -> None:
    row = next(row for row in times() if row.name.startswith("megatron_sc21 529.6B"))
    fit = load_program_profile("megatron-2021").fit["dense"]
    assert row.name in fit.rows
    assert row.printed_interval.p50 == pytest.approx(row.modelled_time * fit.factor)
    assert log(row.printed_interval.p90 / row.printed_interval.p50) / 1.2816 == pytest.approx(
        fit.spread, rel=1e-3
    )


def test_the_truth_is_the_papers_own_numbers() -> None:
    by_name = {row.name: row for row in rows() if row.kind != "memory"}
    assert by_name["korthikanti2022 530B selective"].measured == 37.83
    assert run_estimate(by_name["korthikanti2022 530B selective"].words)["time"]["ranks"] == 280
    assert by_name["megatron_sc21 529.6B"].measured == 54.085
    assert by_name["full_runs llama3.1-8b"].measured == 1_460_000  # out of line, and kept


def test_rows_of_unknown_models_and_devices_are_named_and_not_guessed(tmp_path: Path) -> None:
    truth = json.loads(RUNS.read_text())["megatron_bridge"]["rows"][0]
    strange = [
        truth | {"model": "who-knows-9b"},
        truth | {"system": "Z9"},
        truth | {"precision": "NVFP4"},
        truth,
    ]
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"megatron_bridge": {"rows": strange}}))
    model, device, _, known = read_rows(path)
    assert isinstance(model, SkippedRow)
    assert "who-knows-9b" in model.reason
    assert isinstance(device, SkippedRow)
    assert "'z9' has no device profile" in device.reason
    assert not isinstance(known, SkippedRow)
    priced, skipped = select_priced_rows(path)
    assert [row.name for row in priced] == [known.name]
    assert "has no peak for nvfp4 matmuls" in skipped[-1].reason


def test_rows_that_nothing_was_fitted_on_are_no_rows_of_the_fit_and_the_page_has_their_errors() -> (
    None
):
    files = [[json.dumps(row) for row in list_file_rows(path)] for path in (RUNS, *UNSEEN)]
    assert [len(file) for file in files[1:]] == [58, 59, 113, 37]
    everything = [row for file in files for row in file]
    assert len(set(everything)) == len(everything)
    text = PAGE.read_text(encoding="utf-8")
    unseen = [row for path in UNSEEN for row in read_rows(path) if isinstance(row, PublishedRow)]
    assert [row.name for row in unseen if row.name not in text] == []


def list_file_rows(path: Path) -> list[dict[str, Any]]:
    tables = (
        "megatron_bridge",
        "nvidia_recipes",
        "llm_foundry",
        "full_runs",
        "torchtitan",
        "megatron_sc21",
    )
    return [row for name in tables for row in list_rows(read_json(path).get(name, []))]


def test_a_dispatcher_of_experts_is_that_of_the_published_config() -> None:
    programs = {row.name: row.program for row in times() if row.program.startswith("megatron-")}
    assert programs["26.02 GB300 qwen3-235b-a22b MXFP8 256 of gbs 8192"] == "megatron-flex"
    assert programs["26.02 H100 qwen3-235b-a22b FP8 256 of gbs 8192"] == "megatron-overlap"
    assert programs["25.09 H100 qwen3-235b-a22b tokendrop FP8 256 of gbs 2048"] == "megatron-drop"
    assert programs["26.04 B200 gpt-oss-120b BF16 64 of gbs 1280"] == "megatron-flex"
    assert not any("H100 gpt-oss" in name for name in programs)


def test_a_row_out_of_line_counts_for_the_mean_and_not_for_its_program() -> None:
    own = fitted("dense")
    outlier = next(row for row in own if row.name.startswith("full_runs bloomberggpt"))
    assert outlier.program == "pytorch-2022"
    mean_factor, known = fit_factors(own)
    without, same = fit_factors([row for row in own if row is not outlier])
    assert known["pytorch-2022"].weight == same["pytorch-2022"].weight
    assert mean_factor.factor > without.factor


def test_the_interval_of_a_program_is_wider_the_fewer_rows_it_is_known_from() -> None:
    fit = fit_class(fitted("dense"))
    widths = {name: one.widening for name, one in fit.programs.items()}
    assert fit.other.widening == sqrt(1 + 1 / fit.other.prior_rows)
    assert 1 < widths["megatron"] < widths["torchtitan-eager"] < fit.other.widening
    shipped = {name: load_program_profile(name).fit["dense"].spread for name in fit.programs}
    assert shipped == {name: round(fit.spread * width, 3) for name, width in widths.items()}


def test_a_program_that_nobody_named_has_the_variance_between_programs() -> None:
    fit = fit_class(fitted("dense"))
    named, unknown = fit.programs["megatron"], fit.other
    assert named.between < unknown.between == sqrt(1 / unknown.prior_rows)
    assert "unknown" not in fit.programs, "rows of unnamed programs tell no factor of their own"
    assert any(row.program == "unknown" for row in fitted("dense"))
    shipped = load_residuals().dense
    assert shipped.between == round(fit.spread * unknown.between, 3)
    assert shipped.spread == round(sqrt(fit.spread**2 + (fit.spread * unknown.between) ** 2), 3)


def test_the_variance_between_programs_is_found_where_programs_differ() -> None:
    # Two reports of each of three programs: reports differ in the one, programs in the other.
    alike = [
        make_row(name, name + end, t) for name in "abc" for end, t in (("1", 0.8), ("2", 1.25))
    ]
    factors = {"a": 1.0, "b": 2.0, "c": 0.5}
    apart = [make_row(name, name + end, t) for name, t in factors.items() for end in "12"]
    assert fit_class(apart).other.prior_rows < fit_class(alike).other.prior_rows
    assert fit_class(apart).other.between > fit_class(alike).other.between


def make_row(program: str, source: str, measured: float) -> TimeRow:
    """A row whose modelled time is a second."""
    words = ("estimate", "model/x", "batch.sequences=1", "--program", program)
    row = TimeRow(PublishedRow(f"{source} {program}", source, words, measured))
    known: dict[str, Any] = {"kind": "dense", "modelled_time": 1.0, "ideal_time": 0.5}
    blind = {"blind_log_ratio": log(measured), "report_blind_log_ratio": log(measured)}
    vars(row).update(known | blind)
    return row


def test_coverage_and_error_of_a_table_are_those_of_its_rows() -> None:
    inside, outside = make_row("a", "x", 1.1), make_row("a", "y", 2.0)
    held = [HeldOutRow(row, build_log_normal_interval(1.0, 0.2), 3.0) for row in (inside, outside)]
    assert [one.is_covered for one in held] == [True, False]
    line = format_summary_line("two", held)
    # errors of P50 are 1/1.1 - 1 and 1/2 - 1; those of the baseline 3/1.1 - 1 and 3/2 - 1
    assert line == "| two | 2 | 50% | 1.67 | 29.5% | 111.4% | yes |"


def test_a_step_alone_is_what_the_command_prints() -> None:
    row = next(row for row in rows() if row.name.startswith("megatron_sc21 529.6B"))
    alone, whole = estimate_printed_step(row.words), run_estimate(row.words)
    assert alone["time"] == {name: whole["time"][name] for name in alone["time"]}
    assert alone["batch"] == {name: whole["batch"][name] for name in alone["batch"]}
    assert alone["parameters"]["total"] == whole["parameters"]["total"]


def test_outliers_count_as_if_on_the_fence() -> None:
    assert clip_outliers([1.0, 2.0, 3.0, 4.0, 100.0]) == [1.0, 2.0, 3.0, 4.0, 10.0]


def test_every_program_names_its_sources_and_loads() -> None:
    for name in list_program_names():
        profile = load_program_profile(name)
        assert profile.description.endswith(".")
        file = yaml.safe_load(
            (Path(ROOT) / "llmsys" / "estimate" / "programs" / f"{name}.yaml").read_text()
        )
        assert file.keys() <= {*type(profile).model_fields, "base"}
