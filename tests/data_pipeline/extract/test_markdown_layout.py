"""Markdown has the headings, lists, code, tables and formulas of a page."""

import pytest
from markdown_it import MarkdownIt

from llmsys.data_pipeline.extract.extractor import clean_text
from llmsys.data_pipeline.extract.html_tree import parse_tree
from llmsys.data_pipeline.extract.main_content import extract_article_forms
from llmsys.data_pipeline.extract.markdown_layout import find_code_language
from tests.data_pipeline.core.test_native import list_shard_pages
from tests.helpers.hostile_pages import list_hostile_pages

SENTENCE = "Some long sentence, which reads like prose; it has marks."


def extract(html: str) -> str:
    """Return the Markdown of a fragment between two paragraphs."""
    page = f"<p>{SENTENCE}</p>{html}<p>{SENTENCE}</p>"
    markdown = clean_text(extract_article_forms(page.encode())[1])
    assert markdown.startswith(f"{SENTENCE}\n\n")
    assert markdown.endswith(f"\n\n{SENTENCE}")
    return markdown[len(SENTENCE) + 2 : -len(SENTENCE) - 2]


@pytest.mark.parametrize(
    ("html", "markdown"),
    [
        ("<h2>A<br>b &lt;c&gt;</h2>", "## A b <c>"),
        ("<h6>A</h6><p>a<br>b</p>", "###### A\n\na\nb"),
        ("<ul><li>a<li>b</ul>", "- a\n- b"),
        ("<ol start=3><li>a<li>b</ol>", "3. a\n4. b"),
        ("<ul><li>a<ol><li>x<li>y</ol><li>b</ul>", "- a\n  1. x\n  2. y\n- b"),
        ("<ol><li>a<ul><li>x</ul></ol>", "1. a\n   - x"),
        ("<ol><li><p>a</p><p>b</p></ol>", "1. a\n\n   b"),
        ("<ol><li><ul><li>a<li>b</ul><li>c</ol>", "1. - a\n   - b\n2. c"),
        ("<ol><li>a<pre>x\ny</pre>b</ol>", "1. a\n\n   ```\n   x\n   y\n   ```\n\n   b"),
        ("<ul><li><pre>x</pre></ul>", "- ```\n  x\n  ```"),
        ("<pre>x = 1\n\n  y</pre>", "```\nx = 1\n\n  y\n```"),
        ("<pre>a ``` b</pre>", "````\na ``` b\n````"),
        ("<pre><code class='language-python'>x</code></pre>", "```python\nx\n```"),
        ("<table><tr><th>A<th>B<tr><td>1<td>2</table>", "| A | B |\n| --- | --- |\n| 1 | 2 |"),
        ("<table><tr><td>a|b<td>c</table>", "| a\\|b | c |\n| --- | --- |"),
        (
            "<table><tr><td>a<td>b<tr><td><td>d<br>e</table>",
            "| a | b |\n| --- | --- |\n|  | d e |",
        ),
        (
            "<table><caption>C</caption><tr><td>a<td>b</table>",
            "C\n\n| a | b |\n| --- | --- |",
        ),
        ("<table><tr><td><p>a</p><p>b</p></table>", "a\n\nb"),
        ("<dl><dt>a<dd>b</dl>", "a\n\nb"),
        (
            "<p>so <script type='math/tex'>x^2</script> and <math display=block><mi>y</mi></math>",
            "so $x^2$ and\n$$y$$",
        ),
        ("<p>x<sup>2</sup>", "x^2"),
    ],
)
def test_structure_is_written_as_markdown(html: str, markdown: str) -> None:
    assert extract(html) == markdown


@pytest.mark.parametrize(
    ("html", "language"),
    [
        ("<pre><code class='hljs language-c++'>x", "c++"),
        ("<pre><code class='lang-JS'>x", "js"),
        ("<pre class='language-rust'>x", "rust"),
        ("<pre lang=go>x", "go"),
        ("<pre data-lang=sql>x", "sql"),
        ("<div class='highlight highlight-source-shell'><pre>x", "shell"),
        ("<div class='highlight-python3 notranslate'><div class=highlight><pre>x", "python3"),
        ("<div class='highlight-default notranslate'><div class=highlight><pre>x", ""),
        ("<div class='highlight-box'><pre>x", ""),
        ("<div class=sourceCode><pre class='sourceCode haskell'>x", "haskell"),
        ("<pre class='brush: csharp; gutter: false'>x", "csharp"),
        ("<pre class='language-none'>x", ""),
        ("<div lang=en><pre>x", ""),
        ("<pre class='language-<b>'>x", ""),
        ("<pre>x<code class='language-a'>y</code><code class='language-b'>z</code>", "a"),
    ],
)
def test_code_has_the_language_that_the_page_names(html: str, language: str) -> None:
    tree = parse_tree(html.encode())
    assert find_code_language(tree, tree.tag.index("pre")) == language


def test_a_reader_of_markdown_finds_the_blocks_again() -> None:
    html = (
        "<h2>Title</h2><ol start=4><li>one<pre><code class=language-sh>ls\n\n  -l</code></pre>"
        "<li>two<ul><li>in<li>ner</ul></ol><table><tr><th>A<th>B<tr><td>1<td>2</table>"
    )
    tokens = MarkdownIt().enable("table").parse(extract(html))
    (heading,) = [token for token in tokens if token.type == "heading_open"]
    (ordered,) = [token for token in tokens if token.type == "ordered_list_open"]
    (fence,) = [token for token in tokens if token.type == "fence"]
    items = [token.level for token in tokens if token.type == "list_item_open"]
    cells = [token for token in tokens if token.type in ("th_open", "td_open")]
    assert heading.tag == "h2"
    assert ordered.attrs == {"start": 4}
    assert (fence.info, fence.content) == ("sh", "ls\n\n  -l\n")
    assert items == [1, 1, 3, 3]
    assert len(cells) == 4


def test_both_forms_have_the_same_words_in_the_same_order() -> None:
    """Markdown adds marks, numbers of items and languages, and no words of the page."""
    pages = list_shard_pages()[:60]
    for html in pages + list_hostile_pages(5, 60, pages):
        text, markdown = map(clean_text, extract_article_forms(html))
        place = 0
        for line in text.split("\n"):
            for word in line.replace("|", " ").split():
                if any(map(str.isalpha, word)):
                    place = markdown.find(word, place) + len(word)
                    assert place >= len(word), word


@pytest.mark.parametrize(
    "html",
    [
        "<ul><li>" * 2_000 + "x",
        "<ol><li>a" * 1_500,
        "<table><tr>" + "<td>" * 30_000 + "x" + "<tr><td>y" * 3_000,
        "<pre>" + "`" * 100_000 + "\n" + "```\n" * 20_000,
        "<div class='" + "language- " * 50_000 + "'><pre>x",
        "<pre>x<code class=a>" * 5_000,
    ],
    ids=lambda html: html[:40],
)
def test_hostile_structure_takes_bounded_space(html: str) -> None:
    _, markdown = extract_article_forms(f"<p>{SENTENCE}{html}".encode())
    assert len(markdown) <= 40 * len(html)
