"""The page in a real Chromium: every plot is drawn with data, the console is silent, and page
text stays text.
"""

import math
import re

import pytest

from llmsys.dataset.manifest import LanguageCount, LanguageUsage, TokenizerUsage, write_manifest
from llmsys.report import html_page as page_module
from llmsys.report.html_page import write_report
from tests.helpers.browser import LOOKS, MAX_PAGE_BYTES, PHONE, needs_chromium, open_page
from tests.helpers.example_run import build_example_manifest, run_events, write_dataset, write_run

pytestmark = [pytest.mark.browser, needs_chromium]

MARKS = {
    "plot-yardstick": 3,
    "plot-loss": 2,
    "plot-learning-rate": 1,
    "plot-gradient-norm": 1,
    "plot-tokens-per-second": 1,
    "plot-utilisation": 1,
    "plot-data-wait": 1,
    "plot-norms-activation": 1,
    "plot-norms-gradient": 1,
    "plot-norms-update": 1,
    "plot-experts": 1,
    "plot-balance": 3,
    "plot-funnel": 16,
    "plot-drops": 13,
    "plot-languages": 8,
    "plot-lengths": 1,
}
"""Lines, bars and heat maps that the example has in each plot."""


@pytest.fixture
def folders(tmp_path):
    return write_run(tmp_path / "run"), write_dataset(tmp_path / "data")


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_every_plot_is_drawn_and_the_page_is_fit_to_read(folders, width, dark):
    opened = open_page(write_report(*folders), width, dark=dark)
    assert opened.console == []
    assert opened.defects == []
    assert opened.marks() == MARKS
    assert 'data-plots="drawn"' in opened.dom
    # the hostile page's script would have changed it
    assert "<title>demo: training run" in opened.dom
    blues = {False: "rgb(0, 114, 178)", True: "rgb(86, 180, 233)"}
    page = re.sub("<style.*?</style>", "", opened.dom, flags=re.DOTALL)
    assert f"stroke: {blues[dark]}" in page
    assert blues[not dark] not in page


def write_awkward_run(folder):
    """One step, whose loss is not a number, of a run with a long name."""
    events = [event for event in run_events(steps=4, every=1) if event.get("step", 0) <= 1]
    events[-1:] = [
        event | {"loss": math.nan, "gradient_norm": math.nan}
        for event in events
        if event["event"] == "step"
    ]
    run = write_run(folder, events)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("name: demo", f"name: run-{'x' * 90}"))
    return run


def test_awkward_runs_and_datasets_make_pages_fit_to_read(tmp_path):
    languages = {
        f"{first}{second}_Latn": LanguageCount(documents=9, bytes=90)
        for first in "abcdef"
        for second in "mnopqrs"
    }
    usage = {name: LanguageUsage(documents=9, bytes=90, words=20, tokens=30, unknown_tokens=0,
        byte_tokens=1)
             for name in languages}  # fmt: skip
    tokenizer = TokenizerUsage(
        languages=usage,
        pieces=8192,
        dead_pieces=2,
        dead_examples=("quarry", "x" * 60),
        checked_documents=9,
    )
    data = tmp_path / "data"
    write_manifest(
        data,
        build_example_manifest().model_copy(update={"languages": languages, "usage": tokenizer}),
    )
    for folders in ((write_awkward_run(tmp_path / "run"), None), (None, data)):
        page = write_report(*folders)
        assert page.stat().st_size < MAX_PAGE_BYTES
        opened = open_page(page, PHONE)
        assert opened.console == []
        assert opened.defects == []


@pytest.mark.parametrize(
    ("keep", "plots"),
    [
        (["start"], set()),
        (
            ["start", "step"],
            {
                "plot-loss",
                "plot-learning-rate",
                "plot-gradient-norm",
                "plot-tokens-per-second",
                "plot-utilisation",
                "plot-data-wait",
            },
        ),
    ],
)
def test_a_run_just_started_makes_a_page_without_errors(tmp_path, keep, plots):
    run = write_run(tmp_path / "run", [event for event in run_events() if event["event"] in keep])
    opened = open_page(write_report(run, None))
    assert opened.console == []
    assert set(opened.marks()) == plots
    assert all(opened.marks().values())


def _with_script(monkeypatch, change):
    """Let the page be written with another script; its policy is made for that one too."""
    asset = page_module._read_asset
    monkeypatch.setattr(
        page_module,
        "_read_asset",
        lambda name: change(asset(name)) if name == "page.js" else asset(name),
    )


def test_buttons_and_slider_change_what_is_drawn(folders, tmp_path, monkeypatch):
    use = """
    addEventListener("load", () => {
      document.querySelector("#training [data-view='1']").click();
      const slider = document.querySelector("#experts input[type=range]");
      slider.value = 0;
      slider.dispatchEvent(new Event("input"));
    });"""
    before = open_page(write_report(*folders))
    _with_script(monkeypatch, lambda script: script + use)
    after = open_page(write_report(*folders))
    assert after.console == []
    assert after.marks() == MARKS
    for opened, unit, step in ((before, "nats per token", "400"), (after, "bits per byte", "20")):
        assert re.search(rf'aria-pressed="true">{unit}<', opened.dom)
        assert re.search(rf'class="ytitle"[^>]*>{unit}<', opened.dom)
        assert f"<output>step {step}</output>" in opened.dom
    image = re.compile(r'id="plot-experts".*?xlink:href="(data:image/png[^"]*)"', re.DOTALL)
    heat_maps = [image.search(opened.dom)[1] for opened in (before, after)]
    assert heat_maps[0] != heat_maps[1]


# --- The checks above can fail ---


def test_an_error_in_the_page_script_is_seen(folders, tmp_path, monkeypatch):
    _with_script(monkeypatch, lambda script: script.replace("Plotly.react(", "Plotly.reakt("))
    opened = open_page(write_report(*folders))
    assert any("Plotly.reakt is not a function" in line for line in opened.console)
    assert set(opened.marks().values()) == {0}


def test_an_empty_curve_is_seen(tmp_path):
    events = [
        event | {"gradient_norm": 1.0 if event.get("step") == 5 else None}
        if event["event"] == "step"
        else event
        for event in run_events()
    ]
    opened = open_page(write_report(write_run(tmp_path / "run", events), None))
    assert opened.marks()["plot-gradient-norm"] == 0


def test_defects_are_seen(folders):
    path = write_report(*folders)
    spoil = """
      <div style="width: 2000px">wide</div><p style="color: #bbb">pale</p>
      <div style="width: 40px; overflow: hidden; white-space: nowrap">a text that is cut</div>
      <div class="plot" id="nothing"></div>"""
    path.write_text(path.read_text().replace("</main>", spoil + "</main>"))
    opened = open_page(path, PHONE)
    expected = [
        "the page is 2012 pixels wide, not 390",
        "“pale” has a contrast of 1.79",
        "“a text that is cut” is cut",
    ]
    for words in [*expected, "nothing is empty"]:
        assert any(one.startswith(words) for one in opened.defects), opened.defects


def test_a_script_that_got_into_the_page_does_not_run(folders, tmp_path):
    path = write_report(*folders)
    path.write_text(
        path.read_text().replace("<main>", "<main><script>document.title = 'broken out'</script>")
    )
    opened = open_page(path)
    assert "<title>demo: training run" in opened.dom
    assert any("Content Security Policy" in line for line in opened.console)
