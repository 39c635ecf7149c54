"""Laws of a report that does not flatter: sizes beside comparisons, units of the input, labels
that are whole.
"""

from pathlib import Path

import pytest

from llmsys.dataset.manifest import Manifest
from llmsys.dataset.manifest_section import format_record_place
from llmsys.launch.commands.demo import compare_with_compressors, describe_evaluation
from llmsys.launch.commands.train import format_evaluation
from llmsys.report import plots
from llmsys.report.compressor_comparison import MIN_HELDOUT_BYTES, describe_heldout_bytes
from llmsys.report.dataset_sections import build_dataset_numbers, build_dataset_sections
from llmsys.report.run_record import read_run
from llmsys.report.run_sections import build_run_numbers, build_run_sections
from tests.helpers.example_run import build_example_manifest, run_events, write_run

FEW = "too few for a comparison (less than 50,000)"


@pytest.mark.parametrize("size", [MIN_HELDOUT_BYTES, MIN_HELDOUT_BYTES - 1])
def test_every_comparison_with_a_compressor_names_its_bytes_and_says_when_they_are_few(
    tmp_path: Path, size: int
) -> None:
    events = [
        event | ({"evaluated_bytes": size} if event["event"] == "evaluation" else {})
        for event in run_events()
    ]
    record = read_run(write_run(tmp_path, events))
    evaluation = record.last_evaluation
    assert evaluation is not None
    (card,) = [remark for what, _, remark in build_run_numbers(record) if what == "bits per byte"]
    (plot,) = [
        figure
        for part in build_run_sections(record, None)
        for figure in part.figures
        if figure.title.startswith("Against")
    ]
    printed = format_evaluation({"perplexity": 1.0, **evaluation})
    for said in (card, plot.caption, printed, describe_evaluation(evaluation)):
        assert f"on {size:,} held-out bytes" in said
        assert (FEW in said) == (size < MIN_HELDOUT_BYTES)
    assert ("fewer bits than" in plot.caption) == (size >= MIN_HELDOUT_BYTES)
    assert compare_with_compressors(evaluation)[0].endswith(f" heldout_bytes={size}")
    assert describe_heldout_bytes(None) == "on an unknown number of held-out bytes"


def with_given_text(given: int) -> Manifest:
    manifest = build_example_manifest()
    return manifest.model_copy(
        update={"read": manifest.read.model_copy(update={"given_text_bytes": given})}
    )


@pytest.mark.parametrize(
    ("given", "unit", "note"),
    [
        (0, "612 MB of HTML", "Bytes are HTML before extraction and UTF-8 text after it."),
        (
            600_000_000,
            "12 MB of HTML and 600 MB of text",
            "Bytes are HTML (or text, for text input) before extraction and UTF-8 text after it.",
        ),
        (
            612_000_000,
            "MB of text",
            "Bytes are UTF-8 text: the input was text, so nothing was extracted.",
        ),
    ],
)
def test_units_are_those_of_the_input(given: int, unit: str, note: str) -> None:
    manifest = with_given_text(given)
    remarks = {what: remark for what, _, remark in build_dataset_numbers(manifest)}
    page = "".join(block for part in build_dataset_sections(manifest) for block in part.content)
    assert unit in remarks["clean text"]
    assert unit in page
    assert note in page
    assert ("HTML" in remarks["clean text"] + note) == (given < 612_000_000)


def test_a_place_in_a_table_is_a_row_and_in_other_files_a_byte() -> None:
    assert format_record_place("s3://b/x.parquet", 1234) == "s3://b/x.parquet at row 1,234"
    assert format_record_place("a/b.jsonl.zst", 1234) == "a/b.jsonl.zst at byte 1,234"


LONG = "a test whose name is longer than a line beside the bars: " + "x" * 90


def test_labels_are_whole_and_have_room() -> None:
    traces, layout = plots.build_bars(
        [LONG, LONG, "<b>short</b>"], [3, 2, 1], ["1,234,567,890,123", "2", "1"], "documents"
    )
    labels = [label.replace("<br>", "") for label in traces[0]["y"]]
    wanted = LONG.replace(" ", "")
    assert labels[0].replace(" ", "") == wanted
    assert labels[1].replace(" ", "") == f"{wanted}(2)"
    assert labels[2] == "&lt;b&gt;short&lt;/b&gt;"
    assert max(len(line) for label in traces[0]["y"] for line in label.split("<br>")) <= 40
    lines = len(plots.wrap_label(LONG))
    assert lines > 3
    assert (
        plots.compute_bars_height(3, [LONG, "a"])
        >= 3 * 15 * lines
        > plots.compute_bars_height(3, ["a"]) - 90
    )
    assert layout["margin"]["r"] >= 7 * len("1,234,567,890,123")
