"""Items of ordered lists have the numbers that browsers show."""

import pytest

from llmsys.data_pipeline.extract.main_content import extract_article


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<ol><li>a<li>b</ol>", "1. a\n2. b"),
        ("<ol start=3><li>a<li>b</ol>", "3. a\n4. b"),
        ("<ol start=' -1x'><li>a<li>b</ol>", "-1. a\n0. b"),
        ("<ol start=x><li>a</ol>", "1. a"),
        ("<ol start=1234567890><li>a</ol>", "1. a"),
        ("<ol data-start=7><li>a</ol>", "1. a"),
        ("<ol><li value=5>a<li>b<li value=2>c</ol>", "5. a\n6. b\n2. c"),
        ("<ol reversed><li>a<li>b<li>c</ol>", "3. a\n2. b\n1. c"),
        ("<ol reversed start=9><li>a<li>b</ol>", "9. a\n8. b"),
        ("<ol reversed><li>a<li value=7>b<li>c</ol>", "3. a\n7. b\n6. c"),
        ("<ol reversed><li>a<li><li>c</ol>", "3. a\n1. c"),
        ("<ol><li>a<li><img src=x><li>c</ol>", "1. a\n3. c"),
        ("<ol><li>a<ol start=5><li>x<li>y</ol><li>b</ol>", "1. a\n  5. x\n  6. y\n2. b"),
        ("<ol><li>a<ul><li>x</ul>more<li>b</ol>", "1. a\n  - x\n   more\n2. b"),
        ("<ul><li>a<ol><li>x</ol><li>b</ul>", "- a\n  1. x\n- b"),
        ("<ol><li><p>a</p><p>b</p><li>c<br>d</ol>", "1. a\n   b\n2. c\n   d"),
        ("<ol start=10><li><p>a</p><p>b</p></ol>", "10. a\n    b"),
        ("<ol></ol><ol start=4><li>a</ol>", "4. a"),
        ("<ol><li></li></ol><ol><li>a</ol>", "1. a"),
        ("<ul><li value=7>a</ul>", "- a"),
    ],
)
def test_items_have_the_numbers_of_browsers(html: str, text: str) -> None:
    assert extract_article(html.encode()) == text


def test_large_lists_take_space_in_proportion() -> None:
    text = extract_article(b"<ol start=999999999>" + b"<li>item" * 20_000)
    assert text.startswith("999999999. item\n1000000000. item\n")
    assert text.endswith("1000019998. item")
    deep = extract_article(b"<ol start=99><li>a" * 1_000)
    assert len(deep) < 25 * 1_000
