"""Laws of looking at runs: one page compares them, and a terminal shows one of them while it
trains.
"""

import json
import re
from pathlib import Path

import pytest

from llmsys.errors import DataError
from llmsys.launch.main import main
from llmsys.report.compare_page import (
    Comparability,
    compute_training_hours,
    find_comparability,
    list_differing_keys,
    read_compared_runs,
    write_comparison,
)
from llmsys.report.html_page import write_report
from llmsys.report.run_record import read_run
from llmsys.report.terminal_view import draw_blocks, format_run_view
from tests.helpers.browser import MAX_PAGE_BYTES, needs_chromium, open_in_both_looks
from tests.helpers.example_run import run_events, write_run


def write_two_runs(folder: Path) -> list[Path]:
    first = write_run(folder / "a", run_events(steps=400))
    second = write_run(folder / "b", run_events(steps=200, layers=0))
    text = (second / "config.yaml").read_text()
    (second / "config.yaml").write_text(
        re.sub("name: .*", "name: smaller", text, count=1) + "\nextra: {key: 7}\n"
    )
    return [first, second]


def test_the_page_has_curves_over_tokens_time_and_flops_scores_and_differing_keys(
    tmp_path: Path,
) -> None:
    page = write_comparison(
        read_compared_runs(write_two_runs(tmp_path)), tmp_path / "page.html"
    ).read_text()
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page)
    assert found is not None
    by_name = {figure["id"]: figure["traces"] for figure in json.loads(found[1])}
    assert list(by_name) == ["plot-tokens", "plot-time", "plot-flops"]
    first = read_run(tmp_path / "a")
    tokens = list(first.curves.columns["tokens"])
    # 6 N D with the active parameters, and every event at its speed
    assert by_name["plot-flops"][0]["x"][-1] == pytest.approx(6 * 4_120_000 * tokens[-1], rel=1e-4)
    speeds = first.curves.columns["tokens_per_second"]
    size = tokens[0]
    assert compute_training_hours(first)[-1] == pytest.approx(
        sum(size / one for one in speeds) / 3600
    )
    names = [trace["name"] for trace in by_name["plot-tokens"]]
    assert names == ["demo", "demo, held out", "smaller", "smaller, held out"]
    assert re.search(
        r'>extra\.key</td><td[^>]* data-title="demo">–</td><td[^>]* data-title="smaller">7</td>',
        page,
    )
    assert "logarithmic" not in page
    assert "Differing keys" in page
    assert "61.0%" in page
    assert len(page) < MAX_PAGE_BYTES


HELD_OUT = {"evaluated_bytes": 900, "evaluated_tokens": 300, "gzip_bits_per_byte": 2.5}


def write_evaluated_runs(folder: Path, *changes: dict[str, object]) -> list[Path]:
    """One run for each change to the evaluation of an equal one."""
    found = []
    for number, change in enumerate(changes):
        events = [
            event | HELD_OUT | change if event["event"] == "evaluation" else event
            for event in run_events(steps=400)
        ]
        found.append(write_run(folder / str(number), events))
    return found


def test_equal_held_out_tokens_are_compared_by_bits_per_byte_and_loss(tmp_path: Path) -> None:
    runs = write_evaluated_runs(tmp_path, {"bits_per_byte": 1.5}, {"bits_per_byte": 1.25})
    assert find_comparability([read_run(run) for run in runs]) == Comparability("nats per token")
    page = write_comparison(read_compared_runs(runs), tmp_path / "page.html").read_text()
    assert "1.2500" in page
    assert f"bits per byte, held out: {runs[1]}" in page
    assert "not comparable" not in page


def test_other_tokenizers_are_compared_by_bits_per_byte_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = write_evaluated_runs(
        tmp_path, {"bits_per_byte": 1.5}, {"bits_per_byte": 1.25, "evaluated_tokens": 200}
    )
    page = write_comparison(read_compared_runs(runs), tmp_path / "page.html").read_text()
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page)
    assert found is not None
    for figure in json.loads(found[1]):
        assert [set(trace["y"]) for trace in figure["traces"]] == [{1.5}, {1.25}]
    assert f"bits per byte, held out: {runs[1]}" in page
    words = [*map(str, runs), "--output", str(tmp_path / "page.html"), "--json"]
    assert main(["compare", *words]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["compared_by"] == "bits per byte"
    assert "cut the same text into different numbers of tokens" in told["reason"]


@pytest.mark.parametrize(
    "change",
    [{"evaluated_bytes": 800}, {"gzip_bits_per_byte": 2.4}, {"xz_bits_per_byte": 2.3}],
)
def test_losses_on_other_texts_have_no_winner(tmp_path: Path, change: dict[str, object]) -> None:
    runs = write_evaluated_runs(tmp_path, {}, change)
    page = write_comparison(read_compared_runs(runs), tmp_path / "page.html").read_text()
    assert "lowest loss" not in page
    assert "Their held-out texts differ" in page


def test_losses_of_other_objectives_have_no_winner(tmp_path: Path) -> None:
    runs = write_evaluated_runs(tmp_path, {}, {})
    (runs[1] / "config.yaml").write_text(
        (runs[1] / "config.yaml").read_text() + "\nobjective: {kind: masked}\n"
    )
    found = find_comparability([read_run(run) for run in runs])
    assert found.measure == "nothing"
    assert "Their objectives differ" in found.reason


def test_equal_configs_and_runs_that_cannot_be_compared(tmp_path: Path) -> None:
    config = {"run": {"name": "a", "folder": "x"}, "train": {"tokens": 3, "list": [1, 2]}}
    other = {"run": {"name": "b", "folder": "y"}, "train": {"tokens": 4, "list": [1, 2]}}
    assert list_differing_keys([config, other]) == [("train.tokens", ["3", "4"])]
    run = write_run(tmp_path / "a")
    started = write_run(tmp_path / "b", run_events()[:1])
    with pytest.raises(DataError, match=r"b has no logged step, so there is nothing to compare"):
        write_comparison(read_compared_runs([run, started]), tmp_path / "page.html")
    with pytest.raises(DataError, match=r"1 runs cannot be compared on one page\. Give 2 to 16"):
        write_comparison(read_compared_runs([run, run]), tmp_path / "page.html")


@needs_chromium
@pytest.mark.browser
def test_the_page_is_drawn_on_a_phone_and_a_desk_in_both_colours(tmp_path: Path) -> None:
    runs = write_two_runs(tmp_path)
    # a run of another length and a long name
    long = write_run(tmp_path / "c", run_events(steps=8_000, every=20))
    text = (long / "config.yaml").read_text().replace("name: demo", f"name: {'a-long-name-' * 7}")
    (long / "config.yaml").write_text(
        text + f"inputs: {[f'part-{number:05d}.warc.gz' for number in range(99)]}"
    )
    page = write_comparison(read_compared_runs([*runs, long]), tmp_path / "page.html")
    for opened in open_in_both_looks(page):
        # three lines of training each; diamonds are points and not counted
        assert opened.marks() == {"plot-tokens": 3, "plot-time": 3, "plot-flops": 3}
        assert opened.dom.count("the axis is logarithmic") == 3
        assert "more characters" in opened.dom


def test_a_run_is_shown_in_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        event
        for event in run_events(steps=400)
        if event.get("step", 0) <= 200 or event["event"] == "start"
    ]
    folder = write_run(tmp_path / "run", events)
    text = format_run_view(read_run(folder), 80)
    lines = dict(line.split(maxsplit=1) for line in text.splitlines() if not line.startswith(" "))
    assert lines["run"].startswith("demo: unfinished")
    assert "200 of 400 (50%)" in lines["step"]
    assert re.search(r"18\.\d k a second, .* left", lines["speed"])
    assert set(lines["loss"]) <= set("▁▂▃▄▅▆▇█")
    assert lines["loss"][0] == "█"
    assert "bits per byte" in text
    assert max(map(len, text.splitlines())) <= 80
    assert main(["watch", str(folder), "--once", "--page"]) == 0
    # a page of a run that trains loads itself again; that of a finished one does not
    assert '<meta http-equiv="refresh" content="5">' in (folder / "report.html").read_text()
    write_run(folder, run_events(steps=400))
    assert main(["watch", str(folder), "--page", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["state"] == "finished"
    assert 'http-equiv="refresh"' not in (folder / "report.html").read_text()
    assert write_report(folder, None).is_file()


def test_blocks_go_from_the_lowest_to_the_highest_value() -> None:
    assert draw_blocks([0, 1, 2, 7]) == "▁▂▃█"
    assert draw_blocks([3.0, 3.0]) == "▁▁"
    assert draw_blocks([]) == ""
