"""Laws of the limits on a page: small pages that would grow without end are refused, and say by
which count.
"""

import pyarrow as pa
import pytest

from llmsys.config.cleaning import (
    ArticleExtractorConfig,
    ExtractConfig,
    ResiliparseExtractorConfig,
    TrafilaturaExtractorConfig,
)
from llmsys.data_pipeline.extract.extractor import build_trafilatura_extractor, extract_pages
from llmsys.data_pipeline.extract.page_limits import (
    LimitViolation,
    count_attributes,
    count_open_elements,
    find_limit_violation,
)
from llmsys.errors import ConfigError

MANY = 4_000
FORMATTING = "<p>" + "".join(f"<b id={n}>" for n in range(MANY)) + "<p>x" * MANY


def beyond(html: str, config: ExtractConfig) -> LimitViolation | None:
    pages = pa.record_batch(
        {"charset": ["utf-8"], "payload": pa.array([html.encode()], pa.large_binary())}
    )
    extracted = extract_pages(pages, config)
    assert (extracted.texts.null_count == 1) >= (extracted.limit_hits[0] is not None)
    return extracted.limit_hits[0]


@pytest.mark.parametrize(
    ("html", "test"),
    [
        ("<p>x" * 600_000, "nodes"),
        (FORMATTING, "nodes"),
        # end tags that close something else
        (FORMATTING.replace("<p>x", "<i></i></b><p>x", MANY // 2), "nodes"),
        (
            "".join(f"<b id={n}><table><td></b></table>" for n in range(MANY)) + "<p>x" * MANY,
            "nodes",
        ),
        ("<div>" * 100_000, "steps"),
        ("<div></b>" * 60_000, "steps"),
        ("<ul><li>" * 60_000, "steps"),
        ("<select>" + "<option>x" * 100_000, "steps"),
        ("<p " + " ".join(f"a{n}" for n in range(20_000)) + ">x", "attributes"),
        ("<p " + " ".join(f'a{n}="{n}>"' for n in range(20_000)) + ">x", "attributes"),
        ("<p " + "/".join(f"a{n}" for n in range(20_000)) + ">x", "attributes"),
    ],
)
def test_a_page_that_would_grow_is_refused_by_name(html: str, test: str) -> None:
    found = beyond(html, ArticleExtractorConfig())
    assert found is not None
    assert found.test == test
    assert found.value > found.threshold


@pytest.mark.parametrize(
    "config",
    [ArticleExtractorConfig(max_page_bytes=100), ResiliparseExtractorConfig(max_page_bytes=100)],
)
def test_long_pages_say_their_length(config: ExtractConfig) -> None:
    assert beyond("<p>" + "a" * 98, config) == LimitViolation("bytes", 101, 100)
    assert beyond("<p>" + "a" * 97, config) is None


@pytest.mark.parametrize(
    "html",
    [
        "<p>" + "".join(f"<b>{n}</b> and <i>{n}</i> " for n in range(MANY)),
        "<table>" + "<tr><td><a href=x>y</a>" * MANY,
        "<div><span>sloppy</div>" * MANY,
        "<script>" + "a < b && c < d; " * MANY + "</script>",
        '<div data-json="' + "{&quot;a&quot;: [1, 2, 3]} " * MANY + '">x</div>',
    ],
)
def test_ordinary_pages_are_not_refused(html: str) -> None:
    assert beyond(html + "<p>text", ArticleExtractorConfig()) is None


def test_open_elements_are_never_counted_too_low() -> None:
    assert count_open_elements(b"<div><p><b><i></p>" * 5)[:2] == (15, 10)
    assert count_open_elements(b"<div></div>" * 5)[:2] == (1, 0)
    # the end tag does not leave the table
    assert count_open_elements(b"<div><table></div>" * 5)[0] == 10
    assert count_open_elements(b"<b>x</b>" * 5)[1] == 1


def test_counts_do_not_depend_on_the_case_of_names() -> None:
    html = FORMATTING.encode()
    limits = {"nesting": "square", "max_nodes": 10**6, "max_attributes": 10**3}
    assert find_limit_violation(html.upper(), **limits) == find_limit_violation(html, **limits)  # type: ignore[arg-type]


def test_trafilatura_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(
        ConfigError, match=r"not installed\. Install it with: pip install 'llmsys\[trafilatura\]'"
    ):
        build_trafilatura_extractor(TrafilaturaExtractorConfig())


def test_trafilatura_is_an_extractor() -> None:
    pytest.importorskip("trafilatura")
    html = (
        "<article>"
        + "<p>A paragraph about the mill by the river, at some length.</p>" * 5
        + "</article>"
    )
    pages = pa.record_batch(
        {"charset": ["utf-8"], "payload": pa.array([html.encode()], pa.large_binary())}
    )
    assert (
        "mill by the river" in extract_pages(pages, TrafilaturaExtractorConfig()).texts[0].as_py()
    )


def test_attributes_are_counted_as_nodes() -> None:
    element = "<p " + " ".join(f"a{n}" for n in range(900)) + ">"
    config = ArticleExtractorConfig(max_nodes=5_000)
    assert beyond(element * 5, config) is None
    assert beyond(element * 6, config) == LimitViolation("nodes", 5_001, 5_000)


@pytest.mark.parametrize("value", ["'a b > c'", '"a b"', "a"])
def test_values_of_attributes_are_no_attributes(value: str) -> None:
    assert count_attributes(f"<p x={value} y = {value} z><a\tb>".encode(), 100) == 4


@pytest.mark.parametrize("name", ["b", "B", "font", "CODE"])
def test_elements_that_are_closed_at_once_stay_cheap(name: str) -> None:
    html = f'<p><{name} class="x">a<span>b</span></{name}> <i>c</i></p>' * 3_000
    assert (
        find_limit_violation(html.encode(), nesting="square", max_nodes=10**6, max_attributes=10**3)
        is None
    )
