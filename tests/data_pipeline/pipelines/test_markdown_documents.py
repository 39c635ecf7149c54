"""Documents are Markdown if the config asks for it, and the decisions about them stay the same."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from llmsys.config.data import CrawlConfig
from llmsys.data_pipeline.inspection.explain_page import explain_url
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.dataset.token_shards import read_batches
from tests.helpers.tiny_crawl import (
    build_tiny_config,
    format_page,
    format_record,
    hash_files,
    write_sentences,
)

STRUCTURE = (
    "</p><h2>Steps</h2><ol><li>first step<pre><code class=language-sh>ls -l</code></pre></li><li>"
    "second step</li></ol><table><tr><th>A<th>B<tr><td>1<td>2</table><p>so x<sup>2</sup> = <script "
    "type='math/tex'>a</script>"
)
RULES = [
    {"kind": "gopher_quality", "min_words": 30},
    # removes lines with the word javascript, and marks of sources
    {"kind": "c4_datatrove", "end_marks": [], "min_words_per_line": 1, "min_sentences": 1},
]


@pytest.fixture(scope="module")
def crawl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crawl")
    choose = random.Random(0)
    records = []
    for number in range(12):
        paragraphs = write_sentences(choose, 12)
        paragraphs[3] = STRUCTURE
        paragraphs[6] = "Please enable Javascript to read this page."
        page = format_page(paragraphs[: 1 if number == 5 else 12])
        url = f"https://example.org/{number}"
        records.append(format_record(url, f"2024-05-01T00:00:{number:02d}Z", page))
    (folder / "crawl.warc.gz").write_bytes(b"".join(records))
    rows = [
        {"text": "# Given\n\n" + " ".join(write_sentences(choose, 12)), "url": f"https://b.org/{n}"}
        for n in range(4)
    ]
    (folder / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def prepare(folder: Path, crawl: Path, **extract: Any) -> dict[str, dict[str, Any]]:
    """Return the documents by URL."""
    inputs = [str(crawl / "crawl.warc.gz"), str(crawl / "given.jsonl")]
    sections: dict[str, Any] = {
        "extract": {"kind": "article", **extract},
        "rules": RULES,
        "deduplicate": {},
    }
    prepare_dataset(build_tiny_config(folder, inputs, **sections))
    return read_rows(folder / "documents")


def read_rows(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        row["url"]: row
        for path in sorted(folder.glob("*.arrow"))
        for batch in read_batches(path)
        for row in batch.to_pylist()
    }


@pytest.fixture(scope="module")
def folders(crawl: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    plain = tmp_path_factory.mktemp("plain") / "data"
    markdown = tmp_path_factory.mktemp("markdown") / "data"
    prepare(plain, crawl)
    prepare(markdown, crawl, format="markdown")
    return plain, markdown


def test_rules_decide_by_the_text_form(folders: tuple[Path, Path]) -> None:
    plain, markdown = (read_rows(folder / "documents") for folder in folders)
    assert len(plain) > 12
    assert list(plain) == list(markdown)
    for url, row in plain.items():
        other = markdown[url]
        assert {name: row[name] for name in row if name != "text"} == {
            name: other[name] for name in other if name != "text"
        }
    dropped = [read_rows(folder / "dropped") for folder in folders]
    assert dropped[0] == dropped[1]
    assert "https://example.org/5" in dropped[0]


def test_documents_have_the_structure_and_not_the_removed_lines(
    folders: tuple[Path, Path],
) -> None:
    plain, markdown = (read_rows(folder / "documents") for folder in folders)
    url = "https://example.org/0"
    structure = (
        "## Steps\n\n1. first step\n\n   ```sh\n   ls -l\n   ```\n2. second step\n\n"
        "| A | B |\n| --- | --- |\n| 1 | 2 |\n\nso x^2 = $a$\n\n"
    )
    assert structure in markdown[url]["text"]
    assert "1. first step\nls -l\n2. second step\nA | B\n1 | 2\n" in plain[url]["text"].replace(
        "\n\n", "\n"
    )
    assert "Javascript" not in plain[url]["text"] + markdown[url]["text"]


def test_documents_that_came_as_text_stay(folders: tuple[Path, Path]) -> None:
    plain, markdown = (read_rows(folder / "documents") for folder in folders)
    given = [url for url in plain if url.startswith("https://b.org")]
    assert len(given) > 2
    assert all(plain[url]["text"] == markdown[url]["text"] for url in given)


def test_two_preparations_give_the_same_bytes(
    folders: tuple[Path, Path], crawl: Path, tmp_path: Path
) -> None:
    prepare(tmp_path / "data", crawl, format="markdown")
    assert hash_files(tmp_path / "data") == hash_files(folders[1])


def test_a_page_is_explained_by_its_text(folders: tuple[Path, Path]) -> None:
    data = CrawlConfig(folder=folders[1])
    (capture,) = explain_url(data, "https://example.org/0")
    assert [step[0] for step in capture.steps[:2]] == ["read", "extract"]
    assert "first step" in capture.excerpt
