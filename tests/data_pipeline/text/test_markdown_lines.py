"""What rules remove from the text form of a document is removed from its Markdown."""

import random

import pytest

from llmsys.data_pipeline.extract.extractor import clean_text
from llmsys.data_pipeline.extract.main_content import extract_article_forms
from llmsys.data_pipeline.text.markdown_lines import apply_line_changes
from tests.data_pipeline.core.test_native import list_shard_pages

PAGE = (
    "<h2>Head</h2><p>one<br>two</p><ol><li>first<pre><code class=language-sh>ls\n  -l</code></pre>"
    "<li>second [1] item</ol><table><tr><td>a<td>b<tr><td>c<td>d<tr><td>e<td>f</table><p>end</p>"
)
MARKDOWN = (
    "## Head\n\none\ntwo\n\n1. first\n\n   ```sh\n   ls\n     -l\n   ```\n2. second [1] item\n\n"
    "| a | b |\n| --- | --- |\n| c | d |\n| e | f |\n\nend"
)


def get_forms(html: str) -> tuple[str, str]:
    text, markdown = map(clean_text, extract_article_forms(html.encode()))
    return text, markdown


@pytest.mark.parametrize(
    ("removed", "gone"),
    [
        ([], []),
        (["one"], ["one\n"]),
        (["Head"], ["## Head\n\n"]),
        (["1. first"], ["1. first\n\n"]),
        (["c | d"], ["| c | d |\n"]),
        (["a | b"], ["| a | b |\n| --- | --- |\n"]),
        (["ls"], ["   ls\n"]),
        (["ls", "  -l"], ["\n   ```sh\n   ls\n     -l\n   ```"]),
        (["one", "two"], ["one\ntwo\n\n"]),
        (["end"], ["\n\nend"]),
    ],
)
def test_removed_lines_are_removed(removed: list[str], gone: list[str]) -> None:
    text, markdown = get_forms(PAGE)
    assert markdown == MARKDOWN
    assert all(line in text.split("\n") for line in removed)
    # Rules drop blank lines and indentation too, which Markdown keeps.
    lines = [line.strip() for line in text.split("\n") if line.strip() and line not in removed]
    expected = MARKDOWN
    for part in gone:
        expected = expected.replace(part, "", 1)
    assert apply_line_changes(text, "\n".join(lines), markdown) == expected


def test_cut_lines_are_cut() -> None:
    text, markdown = get_forms(PAGE)
    after = text.replace(" [1]", "").replace("Head\n", "")
    assert apply_line_changes(text, after, markdown) == MARKDOWN.replace(" [1]", "").replace(
        "## Head\n\n", ""
    )


def test_a_document_without_lines_is_empty() -> None:
    text, markdown = get_forms(PAGE)
    assert apply_line_changes(text, "", markdown) == ""


def test_every_other_line_of_real_pages_stays() -> None:
    choose = random.Random(0)
    words = 0
    for html in list_shard_pages()[:80]:
        text, markdown = get_forms(html.decode())
        lines = list(dict.fromkeys(line.strip() for line in text.split("\n") if line.strip()))
        gone = {line for line in lines if choose.random() < 0.3}
        after = "\n".join(
            line.strip() for line in text.split("\n") if line.strip() and line.strip() not in gone
        )
        left = apply_line_changes(text, after, markdown)
        place = 0
        for word in after.replace("|", " ").split():
            if any(map(str.isalpha, word)):
                place = left.find(word, place) + len(word)
                assert place >= len(word), word
                words += 1
        long = [line for line in gone if len(line) > 60 and "|" not in line and "`" not in line]
        assert [line for line in long if line in left and line not in after] == []
    assert words > 10_000


def test_hostile_lines_take_bounded_time() -> None:
    text = "\n".join(["a" * 200, "b"] * 20_000)
    after = "\n".join(["a" * 100 + "c", "b"] * 20_000)
    assert apply_line_changes(text, after, text).count("b") == 20_000
    assert apply_line_changes(text, "b\n" * 20_000, text).count("b") == 20_000
