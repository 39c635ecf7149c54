"""PDF is text with page breaks, or a loss with its reason that costs no more than its limits."""

import gzip
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmsys.config.cleaning import PdfiumConfig, ReadConfig
from llmsys.config.data import CrawlConfig
from llmsys.data_pipeline.graph.resource_files import list_extractor_versions
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.readers import pdf_text
from llmsys.data_pipeline.readers.page_batch import Page
from llmsys.data_pipeline.readers.page_reader import read_pages
from llmsys.errors import ConfigError
from tests.helpers.pdf_files import (
    build_bomb,
    build_encrypted_pdf,
    build_file,
    build_nested_forms,
    build_objects,
    build_page_tree,
    build_pdf,
    format_stream,
    format_text,
)
from tests.helpers.tiny_crawl import build_tiny_config, hash_files, write_sentences
from tests.helpers.warc_records import compress_members, format_response, record

LIMIT = 100_000
MEMORY = 1 << 28  # the least that is allowed
PDFIUM = {"kind": "pdfium", "max_memory_bytes": MEMORY, "max_cpu_seconds": 20, "max_pages": 50}
OPEN = -4  # every permission of revision 2
NO_COPIES = -4 & ~16


def read(path: Path, content: bytes, **config: Any) -> tuple[list[dict[str, Any]], list[str]]:
    path.write_bytes(content)
    chosen = ReadConfig(pdf=config or PDFIUM)
    pages: list[dict[str, Any]] = []
    reasons: list[str] = []
    for batch in read_pages(str(path), max_page_bytes=LIMIT, config=chosen):
        pages += batch.pages.to_pylist()
        reasons += [skip.reason for skip in batch.skipped]
    return pages, reasons


@pytest.mark.parametrize("name", ["a.pdf", "a.pdf.gz", "no_name"])
def test_pages_are_divided_by_form_feeds(tmp_path: Path, name: str) -> None:
    content = build_pdf("One line (of two)\nAnother line", "Seite zwei: Größe", "The end")
    packed = gzip.compress(content, mtime=0) if name.endswith(".gz") else content
    pages, reasons = read(tmp_path / name, packed)
    assert reasons == []
    assert [page["text"] for page in pages] == [
        "One line (of two)\nAnother line\n\fSeite zwei: Größe\n\fThe end"
    ]
    assert (pages[0]["content_type"], pages[0]["offset"]) == ("application/pdf", 0)


CASES: dict[str, tuple[bytes, str]] = {
    "password": (
        build_encrypted_pdf("secret", b"word", OPEN),
        "an encrypted PDF, which needs a password",
    ),
    "no copies": (
        build_encrypted_pdf("mine", b"", NO_COPIES),
        "a PDF whose owner forbids to copy its text",
    ),
    "no pages": (build_pdf(), "a damaged PDF"),
    "scans": (
        build_file(build_objects([format_stream(b"0 0 100 100 re f")] * 3)),
        "a PDF without text, such as of scanned pages",
    ),
    "pages": (build_pdf(*["page"] * 51), "a PDF of 51 pages: more than 50"),
    "text": (build_pdf(*["x" * 3_000] * 40), f"longer than {LIMIT} bytes"),
    "cut": (build_pdf("a page")[:60], "a damaged PDF"),
    "noise": (b"%PDF-1.7\n" + random.Random(0).randbytes(5_000), "a damaged PDF"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_pdf_without_readable_text_is_a_loss_with_its_reason(tmp_path: Path, case: str) -> None:
    content, reason = CASES[case]
    assert read(tmp_path / "a.pdf", content) == ([], [reason])


def test_an_encrypted_file_that_opens_and_allows_copies_is_read(tmp_path: Path) -> None:
    (page,), reasons = read(tmp_path / "a.pdf", build_encrypted_pdf("open to all", b"", OPEN))
    assert (page["text"], reasons) == ("open to all", [])


def test_a_long_file_is_not_given_to_pdfium(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pdf_text, "add_pdf_text", lambda *_: pytest.fail("it was read"))
    content = build_pdf("a page")
    for name, packed in (("a.pdf", content), ("a.pdf.gz", gzip.compress(content * 2, mtime=0))):
        _, reasons = read(tmp_path / name, packed, **(PDFIUM | {"max_bytes": len(content) - 1}))
        assert reasons == [f"a PDF longer than {len(content) - 1} bytes, data.read.pdf.max_bytes"]


def test_a_damaged_page_is_noted_and_the_others_are_kept(tmp_path: Path) -> None:
    objects = build_objects([format_stream(format_text(f"page {n}")) for n in range(3)])
    objects[12] = b"<< /Type /Nothing >>"
    (page,), reasons = read(tmp_path / "a.pdf", build_file(objects))
    assert (page["text"], reasons) == ("page 0\n\fpage 2", [])
    assert page["note"] == "damaged pages of a PDF are left out: 1"


_DAMAGED = "a damaged PDF: no page of it is readable"
_BROKEN = "a PDF that breaks pdfium (SIGABRT), such as by its need of memory"


@pytest.mark.parametrize(
    ("content", "memory", "reasons"),
    [
        (build_page_tree(20, is_cyclic=True), MEMORY, [_DAMAGED]),
        (build_page_tree(5_000, is_cyclic=False), MEMORY, [_DAMAGED]),
        (build_nested_forms(30, 10), MEMORY, [_BROKEN]),
        (build_nested_forms(30, 10), 32 * MEMORY, ["a PDF that takes more than 1 CPU seconds"]),
        (build_bomb(200 << 20), MEMORY, [_BROKEN]),
        (
            build_file({1: b"<< /Type /Catalog /Pages 2 0 R >>", 2: b"[" * 50_000}),
            MEMORY,
            ["a damaged PDF"],
        ),
        (build_pdf("a page").replace(b"trailer\n<<", b"trailer\n<< /Prev 20"), MEMORY, []),
    ],
    ids=["cycle", "deep tree", "memory", "time", "bomb", "deep array", "table in itself"],
)
def test_hostile_files_stay_within_memory_and_time(
    tmp_path: Path, content: bytes, memory: int, reasons: list[str]
) -> None:
    limits = PDFIUM | {"max_memory_bytes": memory, "max_cpu_seconds": 60 if memory == MEMORY else 1}
    pages, found = read(tmp_path / "a.pdf", content, **limits)
    assert (len(pages), found) == (1 - len(reasons), reasons)


def test_any_change_of_bytes_is_a_page_or_a_loss(tmp_path: Path) -> None:
    choose = random.Random(1)
    whole = build_pdf("one page", "another page")
    for _ in range(6):
        content = bytearray(whole)
        for _ in range(choose.randrange(1, 6)):
            content[choose.randrange(9, len(content))] = choose.randrange(256)
        pages, reasons = read(tmp_path / "a.pdf", bytes(content[: choose.randrange(200, 1_500)]))
        assert len(pages) + len(reasons) == 1


def test_a_crawl_has_pdf_where_the_config_says_so(tmp_path: Path) -> None:
    content = build_pdf("first page", "second page")
    header = "WARC-Target-URI: http://x.org/b.pdf\r\nContent-Type: application/pdf\r\n"
    parts = [
        format_response("http://x.org/a.pdf", content, content_type="application/pdf"),
        record("resource", content, header),
        format_response("http://x.org/c.pdf", content[:70], content_type="application/pdf"),
    ]
    warc = b"".join(compress_members(*parts))
    pages, reasons = read(tmp_path / "a.warc.gz", warc)
    assert [page["text"] for page in pages] == ["first page\n\fsecond page"] * 2
    assert [page["url"] for page in pages] == ["http://x.org/a.pdf", "http://x.org/b.pdf"]
    assert reasons == ["a damaged PDF"]
    pages, reasons = read(tmp_path / "a.warc.gz", warc, kind="none")
    assert (pages, reasons) == ([], ["not HTML: application/pdf"] * 2)
    _, reasons = read(tmp_path / "a.pdf", content, kind="none")
    assert reasons == [
        "a PDF: data.read.pdf.kind=pdfium reads its text, with pypdfium2 (pip install "
        "'llmsys[pdf]')"
    ]


def test_a_process_that_something_else_kills_is_an_error_and_no_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, -signal.SIGKILL, b"", b"killed")

    monkeypatch.setattr(subprocess, "run", end)
    page = Page(offset=0, url="", date="")
    with pytest.raises(RuntimeError, match=r"ended with status -9: killed\. Run the same command"):
        pdf_text.add_pdf_text(page, b"", LIMIT, PdfiumConfig())


def test_a_missing_library_is_named_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = build_tiny_config(tmp_path, ["a.pdf"], read={"pdf": PDFIUM}).data
    assert isinstance(config, CrawlConfig)
    assert list_extractor_versions(config)[0].startswith("pypdfium2==")
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigError, match=r"pypdfium2, which is not installed.*'llmsys\[pdf\]'"):
        list_extractor_versions(config)


def test_workers_change_no_byte(tmp_path: Path) -> None:
    choose = random.Random(3)
    for number in range(4):
        texts = ["\n".join(write_sentences(choose, 12)) for _ in range(3)]
        (tmp_path / f"{number}.pdf").write_bytes(build_pdf(*texts))
    (tmp_path / "4.pdf").write_bytes(CASES["password"][0])
    found = []
    for executor in ({"kind": "inline"}, {"kind": "local", "workers": 2}):
        folder = tmp_path / f"data {executor['kind']}"
        config = build_tiny_config(
            folder, [f"{tmp_path}/*.pdf"], executor=executor, read={"pdf": PDFIUM}
        )
        manifest = prepare_dataset(config, until="documents")
        assert [skip.reason for skip in manifest.read.skipped] == [CASES["password"][1]]
        found.append(hash_files(folder) | {"manifest.json": ""})
    assert found[0] == found[1]
