r"""Score extractors on the pages of WCXB, by page type.

    git clone https://github.com/Murrough-Foley/web-content-extraction-benchmark
    python tools/bench/wcxb.py web-content-extraction-benchmark [--worst 20]

WCXB (Foley 2026, arXiv:2605.21097; CC BY 4.0) has 2,008 pages of seven types with their main
content. Its score is that of its authors: F1 of the multisets of `\w+` tokens of a page, and the
mean over pages. Every extractor reads the same bytes in the same run. Rules are chosen on `dev`;
of `test` only the sums are looked at.
"""

import argparse
import gzip
import json
import re
import statistics
import sys
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from tools.bench.extract import EXTRACTORS
from tools.bench.page_types import COMPARED, OURS, MarkedPage, extract_texts

PARTS = ("dev", "test")
SAMPLES = 2_000
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Score:
    """Hold how much of a page's main content a text has, and how much of it is."""

    f1: float
    precision: float
    recall: float


def score_text(text: str, content: str) -> Score:
    """Compare the tokens of a text with those of the main content, each as often as it occurs.

    Args:
        text: The extracted text.
        content: The main content.

    Returns:
        The score; two empty texts are equal.
    """
    found = Counter(_WORD.findall(text.lower()))
    wanted = Counter(_WORD.findall(content.lower()))
    if not found or not wanted:
        equal = float(not found and not wanted)
        return Score(equal, equal, equal)
    shared = (found & wanted).total()
    precision = shared / found.total()
    recall = shared / wanted.total()
    f1 = 2 * precision * recall / (precision + recall) if shared else 0.0
    return Score(f1, precision, recall)


def read_pages(folder: Path, part: str) -> list[MarkedPage]:
    """Read the pages of one part.

    Args:
        folder: The checkout of the benchmark.
        part: `dev` or `test`.

    Returns:
        The pages that have a main content.
    """
    pages: list[MarkedPage] = []
    for path in sorted((folder / part / "ground-truth").glob("*.json")):
        label = json.loads(path.read_text())
        text = label["ground_truth"].get("main_content")
        if text is None:
            continue
        content = gzip.decompress((folder / part / "html" / f"{path.stem}.html.gz").read_bytes())
        page_type = label["_internal"]["page_type"]["primary"]
        pages.append(MarkedPage(path.stem, page_type, "", part, content, text))
    return pages


def compute_interval(f1_of_types: list[list[float]]) -> tuple[float, float]:
    """Return the 90 % interval of the mean of types when pages of each type are drawn again."""
    draw = np.random.default_rng(0)
    means = [
        draw.choice(values, (SAMPLES, len(values))).mean(1) for values in map(np.array, f1_of_types)
    ]
    low, high = np.quantile(np.mean(means, axis=0), [0.05, 0.95])
    return float(low), float(high)


def print_part(pages: list[MarkedPage], scores: dict[str, list[Score]]) -> None:
    """Print F1 (precision, recall) by page type, and the mean of the types."""
    print("| | pages | " + " | ".join(scores) + " |")
    print("|---" * (2 + len(scores)) + "|")
    rows_of_type = {
        page_type: [row for row, page in enumerate(pages) if page.page_type == page_type]
        for page_type in sorted({page.page_type for page in pages})
    }
    for page_type, rows in rows_of_type.items():
        cells = []
        for scores_of_pages in scores.values():
            chosen = [scores_of_pages[row] for row in rows]
            f1 = statistics.mean(score.f1 for score in chosen)
            precision = statistics.mean(score.precision for score in chosen)
            recall = statistics.mean(score.recall for score in chosen)
            cells.append(f"{f1:.3f} ({precision:.3f}, {recall:.3f})")
        print(f"| {page_type} | {len(rows)} | " + " | ".join(cells) + " |")
    cells = []
    for scores_of_pages in scores.values():
        f1_of_types = [[scores_of_pages[row].f1 for row in rows] for rows in rows_of_type.values()]
        low, high = compute_interval(f1_of_types)
        cells.append(
            f"{statistics.mean(map(statistics.mean, f1_of_types)):.3f} [{low:.3f}, {high:.3f}]"
        )
    print(f"| mean of types, 90 % | {len(pages)} | " + " | ".join(cells) + " |")
    cells = [f"{statistics.mean(score.f1 for score in found):.3f}" for found in scores.values()]
    print(f"| all pages | {len(pages)} | " + " | ".join(cells) + " |")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="checkout of the benchmark")
    parser.add_argument("--worst", type=int, default=0, help="pages of dev to list (%(default)s)")
    arguments = parser.parse_args()
    names = [
        name
        for name in COMPARED
        if EXTRACTORS[name].kind != "trafilatura" or find_spec("trafilatura")
    ]
    for part in PARTS:
        pages = read_pages(arguments.folder, part)
        scores = {
            name: [
                score_text(text, page.text)
                for text, page in zip(extract_texts(pages, EXTRACTORS[name]), pages, strict=True)
            ]
            for name in names
        }
        print(f"\n{part}: F1 (precision, recall) by page type\n")
        print_part(pages, scores)
        if part == PARTS[0] and arguments.worst:
            print(f"\nThe {arguments.worst} pages of {part} with the least F1 of {OURS}:")
            ranked = sorted(zip(scores[OURS], pages, strict=True), key=lambda pair: pair[0].f1)
            for score, page in ranked[: arguments.worst]:
                print(f"{score.f1:.3f} {page.page_type:13} {page.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
