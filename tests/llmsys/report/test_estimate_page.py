"""The pages of estimate, plan, scale and doctor as wide as a phone and a desk: plots are drawn,
nothing is cut.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmsys.doctor.coordinate_check import CoordinateRow
from llmsys.estimate.scaling.law import FittedRange
from llmsys.estimate.scaling.law_fit import UNKNOWNS, LawFit, TrainingRun
from llmsys.estimate.scaling.published_laws import BESIROGLU
from llmsys.launch.main import main
from llmsys.report.coordinate_page import write_coordinate_page
from llmsys.report.scaling_page import write_scaling_report
from tests.helpers.browser import needs_chromium, open_in_both_looks

pytestmark = [pytest.mark.browser, needs_chromium]


def open_printed_page(
    words: list[str], folder: Path, capsys
) -> tuple[dict[str, Any], dict[str, int], str]:
    """Run a command with --html and return what it prints, the marks of its plots, and its text."""
    page = folder / "page.html"
    assert main([*words, "--html", str(page), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["page"] == str(page)
    *_, opened = open_in_both_looks(page)
    assert "default-src &#39;none&#39;" in page.read_text(), "nothing is loaded"
    return printed, opened.marks(), opened.dom


def test_an_estimate_shows_memory_roofline_and_timeline(tmp_path, capsys) -> None:
    words = [
        "estimate",
        "train/llama-8b-64xh100",
        "layout.pipeline=4",
        "layout.shard=2",
        "layout.replicate=1",
    ]
    words += [
        "batch.sequences=16",
        "batch.tokens=null",
        "batch.micro_sequences=1",
        "--device",
        "h100-sxm",
    ]
    printed, marks, dom = open_printed_page([*words, "--gpus", "8"], tmp_path, capsys)
    assert set(marks) == {"plot-memory", "plot-roofline", "plot-timeline"}
    assert marks["plot-memory"] >= len(printed["memory"]["instants"]), "a bar for every instant"
    assert marks["plot-roofline"] == 1, "the roof; kernels are dots"
    assert marks["plot-timeline"] > 4 * 2 * 8, "a bar for every pass of 8 micro-batches on 4 ranks"
    assert f"▶ {printed['memory']['peak_instant']}" in dom
    for text in (
        "feed_forward.down_proj",
        "attention (scores and sums)",
        "8 micro-batches on 4 pipeline rank(s)",
    ):
        assert text in dom


def test_a_bare_model_has_a_page_that_says_what_is_missing(tmp_path, capsys) -> None:
    page = tmp_path / "page.html"
    assert main(["estimate", "model/gpt2-small", "--html", str(page)]) == 0
    text = page.read_text()
    assert "A bare model has no run" in text
    assert "Add --device NAME" in text


def test_a_plan_shows_the_front_and_a_step_of_the_best_layout(tmp_path, capsys) -> None:
    printed, marks, dom = open_printed_page(
        ["plan", "train/llama-1b-1xh200", "gpus=2", "device=h100-sxm"], tmp_path, capsys
    )
    assert len(printed["pareto"]) > 1
    assert set(marks) == {"plot-pareto", "plot-memory", "plot-roofline", "plot-timeline"}
    assert marks["plot-pareto"] == marks["plot-roofline"] == 1, (
        "a line; layouts and kernels are dots"
    )
    assert f"▶ {printed['best'][0]['peak_instant']}" in dom
    assert f"The peak, {printed['best'][0]['peak_bytes'] / 2**30:.1f} GiB" in dom
    assert "on 1 pipeline rank(s)" in dom
    assert printed["best"][0]["choice"] in dom
    assert all(one["reason"].split("%")[0] in dom for one in printed["rejected"])


def test_scale_shows_every_law(tmp_path, capsys) -> None:
    words = [
        "scale",
        "budget=1e21",
        "num_experts=64",
        "serve_tokens=1e10",
        "highlight=krajewski_2024",
    ]
    printed, marks, dom = open_printed_page(words, tmp_path, capsys)
    assert marks == {"plot-optima": 1, "plot-ratio": len(printed["laws"])}
    assert all(row["law"] in dom for row in printed["laws"])


def test_a_fitted_law_shows_its_runs_and_one_with_a_long_name(tmp_path) -> None:
    sizes = (5e7, 1e8, 2e8, 4e8, 8e8)
    points = [TrainingRun(f"{n:.0e}", n, n * ratio, BESIROGLU.predict_loss(n, n * ratio))
              for n in sizes for ratio in (5, 20, 80)]  # fmt: skip
    points[0] = TrainingRun(
        "a-long-name-" * 7, points[0].parameters, points[0].tokens, points[0].loss
    )
    spans = (
        *(FittedRange("parameters", 5e7, 8e8), FittedRange("tokens", 2.5e8, 6.4e10)),
        FittedRange("FLOPs", 7.5e16, 3e20),
    )
    law = replace(BESIROGLU, origin=replace(BESIROGLU.origin, spans=spans))
    fit = LawFit(law, dict.fromkeys(UNKNOWNS, (0.1, 1_234.5)), (), (0.001,) * len(points))
    *_, opened = open_in_both_looks(write_scaling_report(points, fit, tmp_path / "law.html"))
    # runs are dots; a line of the law inside and beyond the runs, and one for each of four sizes or
    # lengths
    assert opened.marks() == {"by-compute": 2, "by-parameters": 4, "by-tokens": 4}
    assert "a-long-name-a-long-name" in opened.dom


def test_a_coordinate_check_shows_sizes_and_changes_of_each_parametrization(tmp_path) -> None:
    widths = (64, 128, 256, 512)
    rows = [CoordinateRow(kind, part, dict.fromkeys(widths, 1.0),
        {width: width**slope for width in widths}, slope)
            for kind, slope in (("mup", 0.02), ("standard", 0.9))
            for part in ("embedding", "attention", "feed_forward", "logits")]  # fmt: skip
    *_, opened = open_in_both_looks(write_coordinate_page(rows, 4, tmp_path / "coordinates.html"))
    plots = [f"{kind}-{values}" for kind in ("mup", "standard") for values in ("changes", "sizes")]
    assert opened.marks() == dict.fromkeys(plots, 4)
    assert "+0.90" in opened.dom
