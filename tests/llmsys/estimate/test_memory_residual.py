"""The error of estimated peaks: its rows are those of the pages, its numbers those of the rows."""

import json
import math
import re
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

from llmsys.estimate.memory_residual import (
    MemoryResidual,
    format_fit_probability,
    get_memory_residual,
    load_measured_peaks,
)
from llmsys.estimate.memory_timeline import MemoryItem, MemorySnapshot, MemoryTimeline
from llmsys.estimate.program_profile import list_program_names, load_program_profile
from llmsys.launch.main import main

ROOT = Path(__file__).parents[3]
GIB = 2**30


def build_timeline(peak: float, driver: float = 1.0) -> MemoryTimeline:
    """Return a timeline of one instant, in GiB."""
    item = MemoryItem("weights", int(peak * GIB))
    return MemoryTimeline((MemorySnapshot("in the loss", (item,)),), int(driver * GIB))


def list_page_pairs(page: str, pattern: str) -> set[tuple[float, float]]:
    """Return the measured and estimated GiB of the rows of a page that match."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    found = (re.match(pattern, line) for line in lines)
    return {(float(one[1]), float(one[2])) for one in found if one is not None}


def test_rows_are_those_of_the_pages_they_were_measured_on() -> None:
    peaks = load_measured_peaks()
    estimate = "docs/measurements/estimate.md"
    own = list_page_pairs(estimate, r"\| .+? \| ([\d.]+) \| ([\d.]+) \| [+−][\d.]+ % \|")
    assert set(peaks.own_device.values()) == own
    assert len(peaks.own_device) == 10
    row = r"\| \S+ nodes=.+? \| ([\d.]+) \| ([\d.]+) \| [+-][\d.]+% \| \d+ \|"
    assert set(peaks.own_dry_run.values()) == list_page_pairs("docs/measurements/dryrun.md", row)
    assert len(peaks.own_dry_run) == 22
    # rows without a mark of calibration
    row = r"\| (?:T\d|H200).+? \| ([\d.]+) \| ([\d.]+) \| [+-][\d.]+% \| [a-z -]+ \|  ?\|"
    published = list_page_pairs("llmsys/estimate/published_errors.md", row)
    mine = [pair for rows in peaks.programs.values() for pair in rows.values()]
    assert set(mine) == published
    assert len(mine) == 16
    names = {load_program_profile(name).name for name in list_program_names()}
    assert peaks.programs.keys() <= names


def test_factor_and_spread_are_those_of_a_further_row() -> None:
    """Compared with draws: mean and variance from n rows, then one more row of the same law."""
    rows = np.log([m / e for m, e in load_measured_peaks().own_device.values()])
    found = get_memory_residual(1)
    assert math.log(found.factor) == pytest.approx(rows.mean())
    count, generator = len(rows), np.random.default_rng(0)
    # posterior of the variance is a scaled inverse chi-square (Gelman 2013, 3.2)
    variances = (count - 1) * rows.var(ddof=1) / generator.chisquare(count - 1, 400_000)
    further = generator.normal(rows.mean(), np.sqrt(variances * (1 + 1 / count)))
    assert found.spread == pytest.approx(further.std(), rel=0.02)


def test_what_is_known_less_well_has_a_wider_spread() -> None:
    one, many = get_memory_residual(1), get_memory_residual(64)
    known = get_memory_residual(64, load_program_profile("torchtitan-2024"))
    other = get_memory_residual(64, load_program_profile("megatron"))
    assert one.spread < many.spread
    assert known.spread < other.spread
    assert known.factor == other.factor
    assert many == get_memory_residual(8, load_program_profile("llmsys"))


def test_an_interval_covers_the_rows_that_it_was_computed_from() -> None:
    peaks = load_measured_peaks()
    for rows, residual in (
        (peaks.own_device, get_memory_residual(1)),
        (peaks.own_dry_run, get_memory_residual(8)),
    ):
        inside = [
            residual.compute_interval(build_timeline(estimated, 0)).contains(measured * GIB)
            for measured, estimated in rows.values()
        ]
        assert sum(inside) / len(inside) >= 0.7


def test_the_interval_and_the_probability_are_of_one_distribution() -> None:
    residual, memory = MemoryResidual(0.98, 0.05, 10), build_timeline(60, driver=2)
    interval = residual.compute_interval(memory)
    assert (interval.p50 - 2 * GIB) / GIB == pytest.approx(60 * 0.98)
    for share, capacity in ((0.1, interval.p10), (0.5, interval.p50), (0.9, interval.p90)):
        assert residual.compute_fit_probability(memory, capacity) == pytest.approx(share)
    room = math.log(78 / (60 * 0.98)) / 0.05
    assert residual.compute_fit_probability(memory, 80 * GIB) == pytest.approx(
        NormalDist().cdf(room)
    )
    assert residual.compute_fit_probability(memory, 2 * GIB) == 0


@pytest.mark.parametrize("probability", [0.05, 0.5, 0.9, 0.99])
def test_the_usable_bytes_fit_with_the_probability(probability: float) -> None:
    residual = MemoryResidual(1.02, 0.04, 10)
    usable = residual.compute_usable_bytes(GIB, 80 * GIB, probability)
    memory = build_timeline(usable / GIB)
    assert residual.compute_fit_probability(memory, 80 * GIB) == pytest.approx(probability)


@pytest.mark.parametrize(
    ("probability", "text"),
    [(0.97, "97%"), (0.996, "over 99%"), (1.0, "over 99%"), (0.004, "under 1%"), (0.5, "50%")],
)
def test_no_fit_is_certain(probability: float, text: str) -> None:
    assert format_fit_probability(probability) == f"fits with {text}"


def test_an_estimate_prints_the_interval_and_on_a_device_the_probability(capsys) -> None:
    words = ["estimate", "train/llama-1b-1xh200", "--gpus", "1", "--device"]
    assert main([*words, "h100-sxm", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    needed = memory["needed_bytes"]
    residual = get_memory_residual(1)
    assert needed["p50"] == pytest.approx(
        memory["peak_bytes"] * residual.factor + memory["driver_bytes"]
    )
    assert needed["p10"] < needed["p50"] < needed["p90"]
    assert memory["capacity_bytes"] == pytest.approx(80e9, rel=0.08)
    assert 0.9 < memory["fit_probability"] < 1
    assert main([*words, "a100-40gb"]) == 0
    text = capsys.readouterr().out
    assert "fits with under 1%" in text
    assert main(["estimate", "train/llama-1b-1xh200", "--json"]) == 0
    assert "fit_probability" not in json.loads(capsys.readouterr().out)["memory"]
