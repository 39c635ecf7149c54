"""Labels of main content: they find their pages, and mark what they say."""

from collections import defaultdict

import pytest

from tools.bench.labelled_pages import (
    PARTS,
    SHIPPED,
    LabelledPage,
    assign_parts,
    collect_pages,
    read_labels,
    read_marked_text,
)


def label(keep: str, drop: str = "", formulas: str = "") -> LabelledPage:
    return LabelledPage("t", "t", "forum", "en", "page.html", "", keep, drop, formulas)


def test_a_name_of_a_shipped_page_has_the_bytes_of_its_label() -> None:
    labels = read_labels()
    written = [page for page in labels if (SHIPPED[0] / page.name).is_file()]
    assert len(written) == len(list(SHIPPED[0].iterdir()))
    found = collect_pages(labels, SHIPPED)
    assert [page.name for page in written if page.sha256 not in found] == []


def test_a_family_is_in_one_part_and_every_type_in_both() -> None:
    labels = read_labels()
    parts = assign_parts(labels)
    by_type = defaultdict(set)
    for page in labels:
        by_type[page.page_type].add(parts[page.family])
    assert [name for name, found in by_type.items() if found != set(PARTS)] == []
    assert parts == assign_parts(labels)


def test_a_label_marks_kept_elements_without_what_is_dropped_in_them() -> None:
    html = (
        "<nav>menu</nav><div class=post>One <b>wo</b>rd<p class=sig>gone</p>"
        "<div class=post>two<!-- no --></div></div><script>x</script>"
    )
    text = read_marked_text(label(".post", ".sig"), html.encode())
    assert text == "One word\ntwo"


def test_a_label_reads_formulas_as_tex() -> None:
    html = (
        "<p>If <script type='math/tex'>a &lt; b</script> then <img class=m alt='x^2'> and "
        "<img class=m alt='{\\displaystyle y_1}'>.</p>"
    )
    text = read_marked_text(label("p", formulas="script[type], img.m"), html.encode())
    assert text == "If a &lt; b then x^2 and y_1 ."


def test_a_label_that_finds_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"page\.html: no element matches \.post of t"):
        read_marked_text(label(".post"), b"<p>text</p>")
