"""Laws of markup: whatever text comes in, it stays text."""

import html
import json
import re
from html.parser import HTMLParser

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from llmsys.report.html_markup import (
    TEMPLATES,
    build_details,
    build_paragraph,
    build_table,
    dump_script_json,
    format_amount,
    format_bytes,
    format_number,
    format_percent,
    render_template,
)
from tests.helpers.example_run import HOSTILE


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.attributes: dict[str, str | None] = {}

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.update(attrs)

    def handle_data(self, data):
        self.text += data


def _read(written):
    reader = _Reader()
    reader.feed(written)
    return reader


def test_text_survives_as_text_and_makes_no_elements():
    reader = _read(build_paragraph(HOSTILE))
    assert reader.tags == ["p"]
    assert reader.text == HOSTILE


def test_a_table_escapes_its_cells_and_the_titles_that_stacked_rows_repeat():
    reader = _read(build_table([HOSTILE, "number"], [[HOSTILE, "1"], ["<b>", "2"]], numeric=[1]))
    assert reader.tags == [
        *["div", "table", "thead", "tr", "th", "th", "tbody"],
        *["tr", "td", "td"] * 2,
    ]
    stacked = _read(build_table(["name", HOSTILE], [["a", "b"]]))
    assert stacked.attributes["data-title"] == HOSTILE
    assert "data-title" not in reader.attributes


def test_only_markup_passes_unescaped():
    shown = build_details("<i>", build_paragraph("&"), Markup("<b>x</b>"))
    assert shown == "<details><summary>&lt;i&gt;</summary><p>&amp;</p><b>x</b></details>"


def test_no_template_takes_text_for_markup_but_the_scripts_of_the_page():
    trusted = {
        (file.name, expression)
        for file in TEMPLATES.glob("*.html")
        for expression in re.findall(r"{{ *([^}]*?) *\| *safe", file.read_text())
    }
    assert trusted == {("page.html", "library.text"), ("page.html", "script")}
    assert not [file for file in TEMPLATES.glob("*.html") if "autoescape" in file.read_text()]


def test_a_name_that_a_template_is_not_given_is_an_error():
    with pytest.raises(UndefinedError, match="numeric"):
        render_template("table.html", head=["a"], rows=[["b"]])


def test_json_cannot_close_its_script():
    written = dump_script_json({"text": HOSTILE})
    assert not set("<>&\u2028") & set(written)
    assert html.unescape(written) == written
    assert json.loads(written) == {"text": HOSTILE}


@pytest.mark.parametrize(
    ("value", "counted", "scaled", "sized"),
    [
        (0, "0", "0", "0 B"),
        (950, "950", "950", "950 B"),
        (999.6, "999.6", "1 k", "1 kB"),
        (12_345, "12,345", "12.3 k", "12.3 kB"),
        (4.56e9, "4,560,000,000", "4.56 B", "4.56 GB"),
    ],
)
def test_numbers_read_well(value, counted, scaled, sized):
    assert (format_number(value), format_amount(value), format_bytes(value)) == (
        counted,
        scaled,
        sized,
    )


def test_shares_are_never_shown_as_nothing_or_all_unless_they_are():
    assert [format_percent(part, 10_000) for part in (0, 1, 4_567, 9_999, 10_000)] == [
        "0 %",
        "< 0.1 %",
        "45.7 %",
        "> 99.9 %",
        "100 %",
    ]
    assert format_percent(1, 0) == "–"
