"""The article extractor on pages whose main content is labelled by hand, by page type."""

import pytest

from llmsys.data_pipeline.extract.main_content import extract_article
from tools.bench.extract import compute_scores
from tools.bench.page_types import MarkedPage, read_marked_pages

# F1 of the pages in the repository, rounded down. Raise a number when a rule gets better.
LEAST_F1 = {
    "documentation": 0.969,
    "forum": 0.738,
    "listing": 0.690,
    "mathematics": 0.933,
    "product": 0.816,
}


@pytest.fixture(scope="module")
def shipped() -> list[MarkedPage]:
    return read_marked_pages([])[0]


@pytest.mark.parametrize("page_type", LEAST_F1)
def test_no_page_type_gets_worse(page_type: str, shipped: list[MarkedPage]) -> None:
    pages = [page for page in shipped if page.page_type == page_type]
    f1, _, _ = compute_scores(
        [page.text for page in pages], [extract_article(page.content) for page in pages]
    )
    assert f1 >= LEAST_F1[page_type]


def test_every_type_and_many_languages_are_shipped(shipped: list[MarkedPage]) -> None:
    assert {page.page_type for page in shipped} == set(LEAST_F1)
    assert len({page.language for page in shipped}) >= 14
    assert len(shipped) >= 85
