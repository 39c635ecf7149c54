"""The compiled core gives the texts of the Python extractor, or says why it is not used."""

import shutil
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from llmsys.config.cleaning import ArticleExtractorConfig, ReadConfig, ResiliparseExtractorConfig
from llmsys.data_pipeline.core import native
from llmsys.data_pipeline.core.native import (
    CoreUnavailableError,
    NativeCore,
    compute_source_digest,
    count_core_pages,
    describe_core,
    load_core,
)
from llmsys.data_pipeline.extract import extractor
from llmsys.data_pipeline.extract.extractor import clean_text, extract_pages, iter_accepted_pages
from llmsys.data_pipeline.extract.main_content import extract_article
from llmsys.data_pipeline.readers.page_reader import read_pages
from llmsys.data_pipeline.stages.extract_text import extract_file
from tests.helpers.hostile_pages import list_hostile_pages, list_structured_pages
from tests.helpers.native_core import build_core, needs_compiler
from tests.helpers.stage_digest import ROOT

SHARD = ROOT / "tests" / "data" / "sample_crawl" / "shard-00000.warc.gz"
CONFIG = ArticleExtractorConfig()


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> NativeCore:
    return build_core(tmp_path_factory.mktemp("native"))


def read_shard() -> list[pa.RecordBatch]:
    limit = CONFIG.max_page_bytes
    return [
        batch.pages for batch in read_pages(str(SHARD), max_page_bytes=limit, config=ReadConfig())
    ]


def list_shard_pages() -> list[bytes]:
    """Return the pages that the extractor gets, in UTF-8 and within the limits."""
    return [page for pages in read_shard() for page in iter_accepted_pages(pages, CONFIG)]


def find_differences(core: NativeCore, pages: Sequence[bytes]) -> list[tuple[bytes, str, str]]:
    texts = core.extract_articles(pages)
    pairs = [
        (page, unicodedata.normalize("NFC", text.decode()), clean_text(extract_article(page)))
        for page, text in zip(pages, texts, strict=True)
        if text is not None
    ]
    return [pair for pair in pairs if pair[1] != pair[2]]


@needs_compiler
def test_real_pages_have_the_texts_of_the_python_extractor(core: NativeCore) -> None:
    pages = list_shard_pages()
    assert len(pages) > 200
    assert find_differences(core, pages) == []


@needs_compiler
def test_hostile_pages_have_the_same_texts_in_both_orders(core: NativeCore) -> None:
    """A page must not depend on the one before it, whose state a parser may keep."""
    pages = list_hostile_pages(0, 400, list_shard_pages()[:100])
    assert find_differences(core, pages) == []
    assert find_differences(core, pages[::-1]) == []
    texts = core.extract_articles(pages)
    assert sum(text is None for text in texts) < len(pages) // 5
    assert sum(bool(text) for text in texts) > len(pages) // 2


@needs_compiler
def test_a_page_in_quirks_mode_leaves_no_trace(core: NativeCore) -> None:
    text = "A paragraph with a comma, and more words than a heading has. " * 4
    quirks = f"<p>{text}</p><p>{text * 3}</p><p class=related>a<table><tr><td>{text}".encode()
    standard = b"<!doctype html>" + quirks
    assert find_differences(core, [standard]) == []
    assert clean_text(extract_article(standard)) != clean_text(extract_article(quirks))
    assert find_differences(core, [quirks, standard, quirks, standard]) == []


@needs_compiler
@pytest.mark.parametrize(
    "page",
    [
        b"<p>a<xmp><p>b</xmp>",
        b"<p>a<PLAINTEXT>b",
        '<body class="postid-1²"><p>a'.encode(),
        "<p>Read more² of it</p><p>a".encode(),
        b'<math><section id="x">a</section></math>',
        b"<math><mi>x</mi></math>",
        b'<p>a<script type="math/tex">x</script>',
        b'<img class="size-full latex" alt="x">',
        b'<img class="mwe-math-fallback-image-inline" alt="x">',
        b'<img src="https://latex.codecogs.com/svg.latex?x">',
    ],
)
def test_pages_whose_texts_depend_on_more_than_the_tree_are_left(
    core: NativeCore, page: bytes
) -> None:
    body = b"<p>" + b"Some long sentence, which reads like prose; it has marks. " * 9
    assert core.extract_articles([page + body]) == [None]
    assert core.extract_articles([body]) != [None]


@needs_compiler
def test_pages_with_formulas_are_left_and_superscripts_and_lists_are_not(core: NativeCore) -> None:
    pages: list[dict[str, Any]] = yaml.safe_load(
        (ROOT / "tests" / "data" / "formula_pages.yaml").read_text()
    )
    html = [page["html"].encode() for page in pages]
    assert find_differences(core, html) == []
    compiled = [
        page["name"]
        for page, text in zip(pages, core.extract_articles(html), strict=True)
        if text is not None
    ]
    assert compiled == [
        "LaTeX in plain text",
        "pictures are no formulas",
        "powers and units",
        "molecules and ions",
        "indices",
        "powers of powers",
        "Cyrillic units",
    ]


@needs_compiler
def test_superscripts_and_lists_are_those_of_the_python_extractor(core: NativeCore) -> None:
    pages = list_structured_pages(0, 4_000)
    assert find_differences(core, pages) == []
    texts = [text or b"" for text in core.extract_articles(pages)]
    assert sum(b"^" in text or b"_" in text for text in texts) > len(pages) // 3
    assert sum(b"7. " in text for text in texts) > 20


@needs_compiler
def test_a_base_is_looked_for_as_far_back_as_the_python_extractor_looks(core: NativeCore) -> None:
    # The bracket that opens a base comes to lie outside of what is read.
    pages = [
        f"<p>Sum of all: ({'1' * length})<sup>2</sup> and more of it.</p>".encode()
        for length in range(30, 60)
    ]
    assert find_differences(core, pages) == []
    marked = [b"^" in (text or b"") for text in core.extract_articles(pages)]
    assert marked[0]
    assert not marked[-1]


@needs_compiler
def test_batches_are_the_same_with_the_core_on_and_off(
    core: NativeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = read_shard()[0]
    raw = b"<plaintext>" + b"A sentence that is kept, because it reads like prose. " * 9
    payloads = [*batch.column("payload").to_pylist(), raw, b"", b"<p>" * 600_000, b"\xff\xfe<p>"]
    charsets = [*batch.column("charset").to_pylist(), "utf-8", "utf-8", "utf-8", "utf-16"]
    pages = pa.record_batch(
        {"payload": pa.array(payloads, pa.large_binary()), "charset": pa.array(charsets)}
    )
    monkeypatch.setattr(extractor, "load_core", lambda: core)
    before = count_core_pages()
    on = extract_pages(pages, CONFIG)
    after = count_core_pages()
    assert after.left - before.left == 1
    assert after.compiled - before.compiled == len(payloads) - 2  # one is above a limit
    monkeypatch.setattr(extractor, "load_core", lambda: CoreUnavailableError("off"))
    off = extract_pages(pages, CONFIG)
    assert on.texts.equals(off.texts)
    assert on.limit_hits == off.limit_hits
    assert sum(hit is not None for hit in on.limit_hits) == 1


@needs_compiler
def test_another_extractor_does_not_ask_the_core(
    core: NativeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extractor, "load_core", lambda: core)
    before = count_core_pages()
    extract_pages(read_shard()[0], ResiliparseExtractorConfig())
    assert count_core_pages() == before


@needs_compiler
def test_a_file_counts_the_pages_of_the_core(
    core: NativeCore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(extractor, "load_core", lambda: core)
    counts = extract_file(
        lambda amount, dropped: None,
        source=str(SHARD),
        output=tmp_path / "texts.arrow",
        unread=tmp_path / "unread.arrow",
        config=CONFIG,
        read=ReadConfig(),
    )
    assert counts["compiled_pages"] + counts["left_pages"] <= counts["pages"]
    assert counts["compiled_pages"] > 200


def test_the_switch_turns_the_core_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMSYS_NATIVE", "0")
    load_core.cache_clear()
    try:
        assert describe_core() == (
            "Python core; the compiled one is not used: LLMSYS_NATIVE=0 turns it off"
        )
        assert isinstance(load_core(), CoreUnavailableError)
    finally:
        load_core.cache_clear()


def test_a_missing_library_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(CoreUnavailableError, match=r"it was not built. Install a C\+\+ compiler"):
        NativeCore(tmp_path / "llmsys_core.so")


def test_another_file_is_no_core(tmp_path: Path) -> None:
    path = tmp_path / "llmsys_core.so"
    path.write_bytes(b"\x7fELF, or not")
    with pytest.raises(CoreUnavailableError, match="cannot be loaded"):
        NativeCore(path)


@needs_compiler
def test_another_abi_is_refused(core: NativeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "ABI", native.ABI + 1)
    with pytest.raises(
        CoreUnavailableError, match=r"has ABI 3, and this version needs 4. Run make"
    ):
        NativeCore(Path(core._library._name))


@needs_compiler
def test_a_library_of_other_sources_is_refused(
    core: NativeCore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    changed = shutil.copytree(ROOT / "native", tmp_path / "native")
    (changed / "text.h").write_text("// other\n")
    monkeypatch.setattr(native, "SOURCES", Path(changed))
    with pytest.raises(CoreUnavailableError, match="was built from other sources"):
        NativeCore(Path(core._library._name))


@needs_compiler
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("lxb_dom_node_next_noi", "lxb_dom_node_prev_noi"),
        ("lxb_dom_node_first_child_noi", "lxb_dom_node_last_child_noi"),
        ("lxb_dom_element_next_attribute_noi", "lxb_dom_element_prev_attribute_noi"),
    ],
)
def test_another_lexbor_is_refused(
    core: NativeCore, monkeypatch: pytest.MonkeyPatch, name: str, other: str
) -> None:
    """Functions that read other fields stand for a lexbor whose fields are elsewhere."""
    names = [other if each == name else each for each in native._LEXBOR_FUNCTIONS]
    monkeypatch.setattr(native, "_LEXBOR_FUNCTIONS", tuple(names))
    with pytest.raises(CoreUnavailableError, match="has another lexbor than the core knows"):
        NativeCore(Path(core._library._name))
    monkeypatch.setattr(native, "_LEXBOR_FUNCTIONS", ("lxb_gone",))
    with pytest.raises(CoreUnavailableError, match="does not have the functions of lexbor"):
        NativeCore(Path(core._library._name))


def test_the_digest_follows_every_source_and_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.h").write_text("1")
    (tmp_path / "b.cpp").write_text("2")
    before = compute_source_digest(tmp_path)
    (tmp_path / "a.h").write_text("12")
    (tmp_path / "b.cpp").write_text("")
    assert compute_source_digest(tmp_path) != before
    (tmp_path / "a.h").write_text("1")
    (tmp_path / "b.cpp").write_text("2")
    assert compute_source_digest(tmp_path) == before
    monkeypatch.setattr(native, "FLAGS", ("-O3",))
    assert compute_source_digest(tmp_path) != before
