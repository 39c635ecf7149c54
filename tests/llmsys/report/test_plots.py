"""Laws of the plots' numbers: thinning keeps peaks, smoothing keeps means, figures are valid
plotly.
"""

import json
import math
import random
import re

import plotly.graph_objects
import pytest

from llmsys.report import plots
from llmsys.report.dataset_sections import build_dataset_sections
from llmsys.report.run_record import read_run
from llmsys.report.run_sections import build_run_sections
from tests.helpers.example_run import HOSTILE, build_example_manifest, run_events, write_run


@pytest.mark.parametrize("count", [0, 1, 2, 1_999, 2_000, 2_001, 50_000])
def test_thinning_keeps_order_and_extremes_within_the_limit(count):
    chance = random.Random(count)
    x, y = list(range(count)), [chance.random() for _ in range(count)]
    if count > 10:
        y[count // 3], y[-2] = 9.0, -9.0
    thin_x, thin_y = plots.downsample_points(x, y)
    assert len(thin_x) == len(thin_y) == min(count, len(thin_x)) <= plots.MAX_POINTS
    assert thin_x == sorted(set(thin_x))
    assert all(b == pytest.approx(y[int(a)], rel=1e-5) for a, b in zip(thin_x, thin_y, strict=True))
    if count > 10:
        assert (max(thin_y), min(thin_y)) == (9.0, -9.0)
    if count <= plots.MAX_POINTS:
        assert thin_x == x


def test_points_that_are_not_finite_are_left_out():
    assert plots.downsample_points([1, 2, 3, math.nan], [math.nan, 5, math.inf, 1]) == ([2], [5])


def test_a_running_mean_leaves_a_straight_line_straight():
    x, y = plots.compute_running_mean(range(10_000), [2.0 * i for i in range(10_000)])
    assert len(x) <= plots.MAX_POINTS // 4
    assert all(b == pytest.approx(2 * a) for a, b in zip(x, y, strict=True))


def test_what_is_beyond_the_largest_is_summed_up():
    assert plots.select_largest([("a", 1), ("b", 5), ("c", 2), ("d", 2)], 2) == [
        ("b", 5),
        ("c", 2),
        ("2 others", 3),
    ]


def test_every_figure_is_valid_plotly_and_holds_no_tags_of_page_text(tmp_path):
    record = read_run(write_run(tmp_path))
    figures = [
        figure
        for part in build_run_sections(record, 0.25)
        + build_dataset_sections(build_example_manifest())
        for figure in part.figures
    ]
    assert len({figure.anchor for figure in figures}) == len(figures) == 16
    for figure in figures:
        written = json.dumps({"data": figure.traces, "layout": figure.layout})
        written = written.replace('"theme:even-scale"', '"Viridis"').replace(
            '"theme:blue-fill"', '"#abc"'
        )
        written = written.replace('"theme:heat-scale"', '"Blues"')
        known_colours = re.sub(r'"theme:(blue|orange|green|purple|faint)"', '"#123456"', written)
        plotly.graph_objects.Figure(json.loads(known_colours))
        assert "<script" not in written
        assert HOSTILE not in json.loads(written)


def test_a_long_run_makes_a_small_page(tmp_path):
    record = read_run(write_run(tmp_path, run_events(steps=8_000, layers=8, experts=16, every=1)))
    assert len(record.curves.step) == 8_000
    figures = [figure for part in build_run_sections(record, 0.25) for figure in part.figures]
    assert all(
        len(trace.get("x", [])) <= plots.MAX_POINTS for figure in figures for trace in figure.traces
    )
    assert len(json.dumps([figure.to_dict() for figure in figures])) < 3_000_000
    heat_map = next(figure for figure in figures if figure.anchor == "plot-experts")
    assert heat_map.slider_steps[-1]["label"] == "step 8,000"
    assert len(heat_map.slider_steps) > 50


def test_ragged_layers_of_experts_are_drawn():
    traces, layout = plots.build_expert_heatmap([[1.0] * 4, [1.0] * 8])
    plotly.graph_objects.Figure([{**traces[0], "colorscale": "Viridis"}], layout)
