"""The tables of the compiled core are those of the Python extractor, in every version of Python."""

from tools.native_tables import PATH, format_tables, list_choices


def test_the_tables_are_what_the_tool_makes_of_the_python_constants() -> None:
    assert PATH.read_text() == format_tables()


def test_choices_of_an_expression_are_written_out() -> None:
    assert list_choices(r"a (?:news )?tip\b") == ["a news tip\\b", "a tip\\b"]
    assert list_choices(r"(?:the|our) (?:app|best)\b") == [
        "the app\\b", "the best\\b", "our app\\b", "our best\\b",
    ]  # fmt: skip
    assert list_choices("rights reserved") == ["rights reserved"]
