"""Laws of the examples on the page: text stays text, every test is shown once, and a page has a
size of its own.
"""

import re

from llmsys.dataset.manifest_section import NearThresholdDocument, ThresholdReport, ThresholdSide
from llmsys.report import plots
from llmsys.report.html_page import render_report
from tests.helpers.example_run import HOSTILE, build_example_manifest

NEAR = NearThresholdDocument("00", f"https://evil.example/{'x' * 9_000}?{HOSTILE}", 49, 50, HOSTILE)
WORDS = ThresholdReport(
    "gopher_quality",
    "words",
    "below",
    (50,),
    ThresholdSide(297, 12_000, 40, (NEAR,)),
    ThresholdSide(2_962, 0, 7, (NEAR,)),
)
SILENT = ThresholdReport(
    "gopher_quality",
    "symbols",
    "above",
    (0.1, 0.2),
    ThresholdSide(),
    ThresholdSide(2_962, 0, 1, (NEAR,)),
)


def page(*borders: ThresholdReport) -> str:
    manifest = build_example_manifest().model_copy(update={"thresholds": borders})
    return re.sub(r"<script.*?</script>", "", render_report(None, manifest, []), flags=re.DOTALL)


def test_a_test_with_a_threshold_shows_both_sides_in_place_of_any_three() -> None:
    shown = page(WORDS, SILENT)
    assert "words &lt; 50 is dropped" in shown
    assert (
        "297 dropped (12 kB), 40 of them within 10% of the threshold; 2,962 kept in the end, 7 of "
        "them"
    ) in shown
    assert "Dropped, just below the threshold" in shown
    assert "Kept, at or just above the threshold" in shown
    assert "gopher_quality: words 11.2 &gt; 10" in page()
    assert "gopher_quality: words 11.2 &gt; 10" not in shown


def test_a_test_that_dropped_nothing_shows_what_came_nearest() -> None:
    assert "symbols &gt; 0.1 to 0.2 (by language) is dropped" in page(SILENT)
    assert "Tests that dropped nothing" in page(SILENT)
    assert "Tests that dropped nothing" not in page(WORDS)


def test_page_text_stays_text_and_an_endless_address_is_cut() -> None:
    shown = page(WORDS, SILENT)
    assert "<img" not in shown
    assert HOSTILE[:30] not in shown
    assert "x" * 270 in shown
    assert "x" * 2_001 not in shown
    assert "more characters" in shown


def test_no_two_bars_have_the_same_label() -> None:
    labels = [
        f"gopher repetition: share of characters in {what} 5-grams of all"
        for what in ("duplicate", "top")
    ]
    traces, _ = plots.build_bars(
        [*labels, *labels, labels[0]], [1, 2, 3, 4, 5], [""] * 5, "documents"
    )
    assert len(set(traces[0]["y"])) == 5
    assert all(len(line) <= 38 for label in traces[0]["y"] for line in label.split("<br>"))
