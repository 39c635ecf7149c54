"""A text file is one document, or one place with a reason."""

import bz2
import codecs
import gzip
import lzma
from pathlib import Path

import pytest

from llmsys.data_pipeline.readers.page_reader import read_pages


def read(path: Path, limit: int = 100) -> tuple[list[str], list[str]]:
    """The texts and the reasons of a file."""
    batches = list(read_pages(str(path), max_page_bytes=limit))
    texts = [text for batch in batches for text in batch.pages.column("text").to_pylist()]
    return texts, [skip.reason for batch in batches for skip in batch.skipped]


@pytest.mark.parametrize(
    ("name", "content", "texts", "reason"),
    [
        ("a.txt", b"One line.\n\nAnother \xc3\xa9.\n", ["One line.\n\nAnother é.\n"], ""),
        ("a.md", b"\xef\xbb\xbf# Title\n", ["# Title\n"], ""),
        ("a.txt", b"latin \xe9", [], "not UTF-8: convert it, such as with iconv -t UTF-8"),
        ("a.txt", b"x" * 200, [], "longer than 100 bytes: split it, one document per file"),
        ("a.txt", b"", [], "empty file"),
        ("a.txt.gz", gzip.compress(b"packed", mtime=0), ["packed"], ""),
        ("a.txt.bz2", bz2.compress(b"packed"), ["packed"], ""),
        ("a.txt.xz", lzma.compress(b"packed"), ["packed"], ""),
        ("a.txt", b"BZhang wrote it.", ["BZhang wrote it."], ""),
        ("a.txt.xz", lzma.compress(b"cut")[:-9], [], "truncated"),
        (
            "a.txt.bz2",
            bz2.compress(b"x" * 200),
            [],
            "longer than 100 bytes: split it, one document per file",
        ),
        ("a.jsonl", b'{"text": "a row"}\n', ["a row"], ""),
    ],
)
def test_a_file_is_one_document(
    tmp_path: Path, name: str, content: bytes, texts: list[str], reason: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path / name) == (texts, [reason] if reason else [])


@pytest.mark.parametrize("charset", ["utf-8", "iso-8859-1"])
def test_a_saved_page_is_extracted_from_its_own_charset(charset: str, tmp_path: Path) -> None:
    line = "Größere Städte führen über schöne Brücken, und jede hat einen alten Namen. " * 4
    page = f'<html><head><meta charset="{charset}"></head><body><p>{line}</p></body></html>'
    (tmp_path / "a.html").write_bytes(page.encode(charset))
    (batch,) = read_pages(str(tmp_path / "a.html"), max_page_bytes=10_000)
    (found,) = batch.pages.column("charset").to_pylist()
    assert codecs.lookup(found).name in {charset, "cp1252"}
    assert batch.skipped == []


def test_a_page_that_is_too_long_is_a_loss_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "a.htm").write_bytes(b"<p>" + b"x" * 200)
    found = list(read_pages(str(tmp_path / "a.htm"), max_page_bytes=100))
    assert [skip.reason for batch in found for skip in batch.skipped] == [
        "page longer than 100 bytes: raise data.read.max_page_bytes"
    ]
