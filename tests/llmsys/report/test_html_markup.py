"""Laws of markup: whatever text comes in, it stays text."""

import html
import json
from html.parser import HTMLParser

import pytest

from llmsys.report.html_markup import (
    Html,
    build_table,
    build_tag,
    dump_script_json,
    format_amount,
    format_bytes,
    format_number,
    format_percent,
    format_user_text,
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
    reader = _read(build_tag("p", HOSTILE, title=HOSTILE))
    assert reader.tags == ["p"]
    assert reader.text == HOSTILE
    assert reader.attributes["title"] == HOSTILE


def test_only_html_passes_unescaped():
    assert build_tag("p", Html("<b>x</b>"), "<b>", [None, "&"]) == "<p><b>x</b>&lt;b&gt;&amp;</p>"


def test_attributes_are_written_by_name():
    written = build_tag("input", class_="a", data_view="1", checked=True, hidden=False)
    assert written == '<input class="a" data-view="1" checked>'


def test_a_table_escapes_its_cells():
    assert _read(build_table(["<i>"], [[HOSTILE]])).tags == [
        "div",
        "table",
        "thead",
        "tr",
        "th",
        "tbody",
        "tr",
        "td",
    ]


def test_long_text_is_cut_and_says_so():
    reader = _read(format_user_text("a" * 2_500, 2_000))
    assert reader.text == "a" * 2_000 + " … 500 more characters"


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
