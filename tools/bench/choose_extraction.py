"""Choose the constants of `article` on one part of the labelled pages, and print the score of the
other part.

    python tools/bench/choose_extraction.py article-extraction-benchmark.tar.gz [--rounds 2]

Reads the archive of tools/bench/extract.py, and splits the pages alike. Each constant in turn is
decreased and increased by a quarter and a half, and the value with the best F1 on `chosen-on` is
kept. `held-out` is scored at the beginning and at the end and decides nothing. Prints the values
that differ; changes no file.
"""

import argparse
import importlib
from collections.abc import Sequence
from itertools import compress
from pathlib import Path

from llmsys.data_pipeline.extract.main_content import extract_article
from tools.bench.extract import PARTS, compute_scores, read_benchmark

CONSTANTS = {
    "content_score": ("_SENTENCE", "_BODY_WEIGHT", "_GROWTH", "_SHORT_POST"),
    "boilerplate": (
        "PARAGRAPH",
        "_LARGEST_SIDE",
        "_MAX_PARAGRAPHS",
        "_LEAST_PARAGRAPHS",
        "_LARGEST_NAMED_MAIN",
        "_ENOUGH",
    ),
}
FACTORS = (0.5, 0.75, 1.25, 1.5)


def score_pages(pages: Sequence[bytes], gold: list[str]) -> float:
    """Return the F1 of `article` with the constants as they are now."""
    f1, _, _ = compute_scores(gold, [extract_article(page) for page in pages])
    return f1


def choose(pages: Sequence[bytes], gold: list[str], rounds: int) -> dict[str, tuple[float, float]]:
    """Set each constant to the value with the best F1, and return the old and the new value of
    those that changed.
    """
    best = score_pages(pages, gold)
    changed: dict[str, tuple[float, float]] = {}
    for _ in range(rounds):
        for room, names in CONSTANTS.items():
            module = importlib.import_module(f"llmsys.data_pipeline.extract.{room}")
            for name in names:
                kept = getattr(module, name)
                for value in [type(kept)(kept * factor) for factor in FACTORS]:
                    setattr(module, name, value)
                    found = score_pages(pages, gold)
                    if found > best:
                        first = changed.get(f"{room}.{name}", (kept, kept))[0]
                        best, kept, changed[f"{room}.{name}"] = found, value, (first, value)
                setattr(module, name, kept)
    return changed


def main() -> None:
    """Choose, and print both parts before and after."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmark", type=Path, help="archive or folder of the benchmark")
    parser.add_argument(
        "--rounds", type=int, default=2, help="times each constant is tried (%(default)s)"
    )
    arguments = parser.parse_args()
    pages, gold, parts = read_benchmark(arguments.benchmark)
    data = {
        part: (
            list(compress(pages, [one == part for one in parts])),
            list(compress(gold, [one == part for one in parts])),
        )
        for part in PARTS
    }
    before = {part: score_pages(*data[part]) for part in PARTS}
    changed = choose(*data[PARTS[0]], arguments.rounds)
    for part in PARTS:
        print(
            f"{part:10} {len(data[part][0]):4} pages   F1 {before[part]:.4f} → "
            f"{score_pages(*data[part]):.4f}"
        )
    for name, (old, new) in changed.items():
        print(f"{name}: {old:g} → {new:g}")


if __name__ == "__main__":
    main()
