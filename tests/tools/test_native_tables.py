"""The tables of the compiled core are those of the Python extractor, in every version of Python,
and of one version of Unicode.
"""

import unicodedata

from llmsys.data_pipeline.core.native import UNICODE_VERSION
from tools.native_tables import (
    PATH,
    UNICODE_PATH,
    format_tables,
    format_unicode_tables,
    list_choices,
    list_ranges,
)


def test_the_tables_are_what_the_tool_makes_of_the_python_constants() -> None:
    assert PATH.read_text() == format_tables()


def test_the_tables_of_unicode_are_those_of_the_version_that_they_name() -> None:
    """Another Python compares what it says of each character with the core when it loads it."""
    written = UNICODE_PATH.read_text()
    assert f"// version {UNICODE_VERSION}: do not edit." in written
    if unicodedata.unidata_version == UNICODE_VERSION:
        assert written == format_unicode_tables()


def test_ranges_have_their_first_and_last_characters() -> None:
    assert list_ranges(lambda character: character in "abcx\U0010ffff") == [
        (97, 99), (120, 120), (0x10FFFF, 0x10FFFF),
    ]  # fmt: skip


def test_choices_of_an_expression_are_written_out() -> None:
    assert list_choices(r"a (?:news )?tip\b") == ["a news tip\\b", "a tip\\b"]
    assert list_choices(r"(?:the|our) (?:app|best)\b") == [
        "the app\\b", "the best\\b", "our app\\b", "our best\\b",
    ]  # fmt: skip
    assert list_choices("rights reserved") == ["rights reserved"]
