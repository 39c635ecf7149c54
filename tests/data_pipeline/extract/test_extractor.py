"""Laws of extraction: text is valid and normalised, paragraphs stay apart, depth and length are
bounded.
"""

import unicodedata

import pyarrow as pa
import pytest

from llmsys.config.cleaning import ArticleExtractorConfig, ExtractConfig, ResiliparseExtractorConfig
from llmsys.data_pipeline.extract.extractor import clean_text, estimate_nesting_depth, extract_text

ARTICLE = "".join(
    f"<p>Paragraph {number} tells a story about the old mill by the river, at length.</p>"
    for number in range(6)
)
PAGE = (
    "<html><head><title>T</title><script>var x = 1;</script></head><body><nav><ul><li><a "
    "href='/'>Home</a></li></ul></nav><main><article><h1>The "
    f"mill</h1>{ARTICLE}<ul><li>first</li><li>second</li></ul></article></main><footer>Copyright</footer></body></html>"
)


CONFIGS: dict[str, ExtractConfig] = {
    "article": ArticleExtractorConfig(),
    "resiliparse": ResiliparseExtractorConfig(),
    "all": ResiliparseExtractorConfig(main_content=False),
}
each_extractor = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def extract(html: str | bytes, config: ExtractConfig, charset: str = "utf-8") -> str | None:
    payload = html if isinstance(html, bytes) else html.encode(charset)
    pages = pa.record_batch(
        {"charset": [charset], "payload": pa.array([payload], pa.large_binary())}
    )
    texts = extract_text(pages, config)
    assert texts.type == pa.large_string()
    return texts[0].as_py()


@pytest.mark.parametrize(
    "config",
    [ArticleExtractorConfig(), ResiliparseExtractorConfig()],
    ids=["article", "resiliparse"],
)
def test_main_content_keeps_paragraphs_apart_and_leaves_navigation(config: ExtractConfig) -> None:
    text = extract(PAGE, config)
    assert text is not None
    blocks = text.split("\n\n")
    assert blocks[:2] == [
        "The mill",
        "Paragraph 0 tells a story about the old mill by the river, at length.",
    ]
    assert not {"Home", "Copyright", "var x = 1;"} & set(text.split("\n"))


def test_all_text_is_a_choice() -> None:
    text = extract(PAGE, CONFIGS["all"])
    assert text is not None
    assert "• first\n• second" in "\n".join(line.strip() for line in text.split("\n") if line)
    assert text.endswith("Copyright")


@each_extractor
@pytest.mark.parametrize("charset", ["utf-8", "gb18030", "utf-16-le", "cp932"])
def test_text_is_decoded_by_the_charset_of_the_page(config: ExtractConfig, charset: str) -> None:
    assert extract("<p>日本語。</p>", config, charset) == "日本語。"


@each_extractor
@pytest.mark.parametrize(
    "html", ["", "   ", "<html></html>", "<script>x</script>", "\0\0", "<!-- -->"]
)
def test_nothing_is_null(config: ExtractConfig, html: str) -> None:
    assert extract(html, config) is None


@each_extractor
def test_text_is_valid_normalised_and_free_of_controls(config: ExtractConfig) -> None:
    html = b"<p>caf\x65\xcc\x81 \x00nul \x07bell &#xD800; &#0; \xff\xfe tab\there</p>"
    text = extract(html, config)
    assert text is not None
    assert text.encode("utf-8").decode("utf-8") == text
    assert unicodedata.is_normalized("NFC", text)
    assert "café" in text
    assert not any(
        unicodedata.category(character) == "Cc" and character not in "\n\t" for character in text
    )


def test_clean_leaves_no_stray_space() -> None:
    assert clean_text("  a \t\r\nb\u00a0\n\n\n\n c\ud800\n ") == "a\nb\n\n c?"


def test_longer_pages_than_the_limit_give_nothing() -> None:
    assert extract("<p>" + "a" * 1000, ArticleExtractorConfig(max_page_bytes=1000)) is None
    assert extract("<p>" + "a" * 1000, ArticleExtractorConfig(max_page_bytes=2000)) is not None


@pytest.mark.parametrize(
    ("html", "depth"),
    [
        (b"<div>" * 500, 500),
        (b"<div>" * 500 + b"</div>" * 500, 500),
        (b"<b><i>" * 100, 200),
        (b"<p>text<br><li>item<img src=x>" * 5000, 0),
        (b"<div>a</div>" * 5000, 64),
    ],
)
def test_nesting_is_estimated_without_parsing(html: bytes, depth: int) -> None:
    assert estimate_nesting_depth(html) == depth


def test_a_page_of_many_nested_elements_ends() -> None:
    assert extract("<div>" * 100_000 + "deep inside", ResiliparseExtractorConfig()) == "deep inside"


def test_a_batch_without_pages_is_fine() -> None:
    pages = pa.record_batch(
        {"charset": pa.array([], pa.string()), "payload": pa.array([], pa.large_binary())}
    )
    assert extract_text(pages, ArticleExtractorConfig()).to_pylist() == []
