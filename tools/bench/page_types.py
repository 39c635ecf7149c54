r"""Score extractors on pages whose main content is labelled by hand, by page type and language.

    python tools/bench/page_types.py [FOLDER | CRAWL.warc.gz ...] [--articles ARCHIVE] [--worst 10]

The pages that `tests/data` ships are always read; others are found in the folders (paths of the
labels are below them) and crawl files that are named. Prints how many of the labelled pages were
found. Every extractor reads the same bytes in the same run. The score is that of
tools/bench/extract.py: 4-grams of `\w+` tokens, F1 of mean precision and mean recall.

`--articles` adds the archive of tools/bench/extract.py as the type `article`, with its own parts.
Rules may be chosen on `chosen-on`; `held-out` is only reported. `--worst` lists the pages of
`chosen-on` on which the article extractor has the least F1, `--show NAME` prints the marked and the
extracted text of one of them.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa

from llmsys.config.cleaning import ExtractConfig
from llmsys.data_pipeline.extract.extractor import extract_pages
from tools.bench.extract import EXTRACTORS, compute_scores, read_benchmark
from tools.bench.labelled_pages import (
    PARTS,
    SHIPPED,
    assign_parts,
    collect_pages,
    read_labels,
    read_marked_text,
)

COMPARED = (
    "article",
    "trafilatura, precision",
    "trafilatura, balance",
    "resiliparse, main content",
)
OURS = COMPARED[0]


@dataclass(frozen=True, slots=True)
class MarkedPage:
    """A page in UTF-8 with the text that its label marks."""

    name: str
    page_type: str
    language: str
    part: str
    content: bytes
    text: str


def read_marked_pages(places: Iterable[Path]) -> tuple[list[MarkedPage], int]:
    """Read the labelled pages.

    Args:
        places: Folders and crawl files besides those of the repository.

    Returns:
        The pages that are found, and how many are labelled.
    """
    labels = read_labels()
    parts = assign_parts(labels)
    found = collect_pages(labels, (*SHIPPED, *places))
    pages = [
        MarkedPage(
            name=label.name,
            page_type=label.page_type,
            language=label.language,
            part=parts[label.family],
            content=found[label.sha256],
            text=read_marked_text(label, found[label.sha256]),
        )
        for label in labels
        if label.sha256 in found
    ]
    return pages, len(labels)


def read_articles(archive: Path) -> list[MarkedPage]:
    """Read the archive of tools/bench/extract.py."""
    pages, texts, parts = read_benchmark(archive)
    return [
        MarkedPage(f"article {number}", "article", "en", part, page, text)
        for number, (page, text, part) in enumerate(zip(pages, texts, parts, strict=True))
    ]


def extract_texts(pages: list[MarkedPage], config: ExtractConfig) -> list[str]:
    """Return the text of each page; "" for none."""
    batch = pa.record_batch(
        {
            "charset": ["utf-8"] * len(pages),
            "payload": pa.array([page.content for page in pages], pa.large_binary()),
        }
    )
    return [text or "" for text in extract_pages(batch, config).texts.to_pylist()]


def print_scores(
    pages: list[MarkedPage], found: dict[str, list[str]], get_group: Callable[[MarkedPage], str]
) -> None:
    """Print F1 (precision, recall) of each extractor by a group of pages."""
    print("| | pages | " + " | ".join(found) + " |")
    print("|---" * (2 + len(found)) + "|")
    for group in sorted({get_group(page) for page in pages}):
        rows = [number for number, page in enumerate(pages) if get_group(page) == group]
        gold = [pages[row].text for row in rows]
        cells = []
        for texts in found.values():
            f1, precision, recall = compute_scores(gold, [texts[row] for row in rows])
            cells.append(f"{f1:.3f} ({precision:.3f}, {recall:.3f})")
        print(f"| {group} | {len(rows)} | " + " | ".join(cells) + " |")


def print_worst(pages: list[MarkedPage], texts: list[str], count: int) -> None:
    """Print the pages of `chosen-on` on which the article extractor has the least F1."""
    scored = [
        (*compute_scores([page.text], [text]), page.page_type, page.name)
        for page, text in zip(pages, texts, strict=True)
        if page.part == PARTS[0]
    ]
    print(f"\nThe {count} pages of {PARTS[0]} with the least F1 of {OURS}:")
    for f1, precision, recall, page_type, name in sorted(scored)[:count]:
        print(f"{f1:.3f} ({precision:.3f}, {recall:.3f}) {page_type:13} {name}")


def show_page(pages: list[MarkedPage], texts: list[str], name: str) -> None:
    """Print the marked and the extracted text of the pages of `chosen-on` with a name."""
    for page, text in zip(pages, texts, strict=True):
        if name in page.name and page.part == PARTS[0]:
            print(f"=== {page.name}: marked\n{page.text}\n=== {page.name}: {OURS}\n{text}")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("places", type=Path, nargs="*", help="folders and crawl files with pages")
    parser.add_argument("--articles", type=Path, help="archive of tools/bench/extract.py")
    parser.add_argument("--worst", type=int, default=0, help="pages to list (%(default)s)")
    parser.add_argument("--show", metavar="NAME", help="print the texts of a page of chosen-on")
    arguments = parser.parse_args()
    pages, count = read_marked_pages(arguments.places)
    print(f"{len(pages)} of {count} labelled pages found")
    if arguments.articles:
        pages += read_articles(arguments.articles)
    if arguments.show:
        show_page(pages, extract_texts(pages, EXTRACTORS[OURS]), arguments.show)
        return 0
    found = {
        name: extract_texts(pages, EXTRACTORS[name])
        for name in COMPARED
        if EXTRACTORS[name].kind != "trafilatura" or find_spec("trafilatura")
    }
    for part in PARTS:
        print(f"\n{part}: F1 (precision, recall) by page type\n")
        rows = [number for number, page in enumerate(pages) if page.part == part]
        of_part = {name: [texts[row] for row in rows] for name, texts in found.items()}
        print_scores([pages[row] for row in rows], of_part, lambda page: page.page_type)
    print("\nBoth parts, without articles: F1 (precision, recall) by language\n")
    rows = [number for number, page in enumerate(pages) if page.page_type != "article"]
    labelled = {name: [texts[row] for row in rows] for name, texts in found.items()}
    print_scores([pages[row] for row in rows], labelled, lambda page: page.language)
    if arguments.worst:
        print_worst(pages, found[OURS], arguments.worst)
    return 0


if __name__ == "__main__":
    sys.exit(main())
