r"""Score extractors on pages with hand-marked text: token F1, precision, recall, and pages per CPU
second.

    python tools/bench/extract.py article-extraction-benchmark.tar.gz [--rounds 3]

The archive (or its unpacked folder) is Scrapinghub's article-extraction-benchmark:
`ground-truth.json` and `html/ID.html.gz`. The metric is theirs: multisets of 4-grams of `\w+`
tokens, precision and recall of each page, their means, and F1 of the two means. Every extractor
reads the same bytes in the same run, one process, in turn; the median of the rounds counts.
Trafilatura takes part when it is installed: pip install 'llmsys[trafilatura]'.

Each page belongs to one of two parts, by a hash of its id: `chosen-on`, which rules and constants
may be chosen on, and `held-out`, which only this bench reads. Both are printed; only the second may
be claimed.
"""

import argparse
import gzip
import hashlib
import json
import re
import statistics
import sys
import tarfile
import time
from collections import Counter
from importlib.util import find_spec
from itertools import compress
from pathlib import Path

import pyarrow as pa

from llmsys.config.cleaning import (
    ArticleExtractorConfig,
    ExtractConfig,
    ResiliparseExtractorConfig,
    TrafilaturaExtractorConfig,
)
from llmsys.data_pipeline.extract.extractor import extract_pages

EXTRACTORS: dict[str, ExtractConfig] = {
    "article": ArticleExtractorConfig(),
    "resiliparse, main content": ResiliparseExtractorConfig(),
    "resiliparse, all text": ResiliparseExtractorConfig(main_content=False),
    "trafilatura, precision": TrafilaturaExtractorConfig(),
    "trafilatura, balance": TrafilaturaExtractorConfig(favor="balance"),
}
NGRAM = 4
LEAST_SECONDS = 1.0
PARTS = ("chosen-on", "held-out")
TOKEN = re.compile(r"\w+")

Shingles = Counter[tuple[str, ...]]


def read_benchmark(path: Path) -> tuple[list[bytes], list[str], list[str]]:
    """Return pages, their marked texts, and the part of each page, in the order of their ids."""
    if path.is_dir():
        files = {
            file.relative_to(path).as_posix(): file.read_bytes()
            for file in path.rglob("*")
            if file.is_file()
        }
    else:
        with tarfile.open(path) as archive:
            members = [member for member in archive if member.isfile()]
            files = {
                member.name.removeprefix("./"): archive.extractfile(member).read()  # type: ignore[union-attr]
                for member in members
            }
    gold = json.loads(files["ground-truth.json"])
    ids = sorted(name for name in gold if f"html/{name}.html.gz" in files)
    pages = [gzip.decompress(files[f"html/{name}.html.gz"]) for name in ids]
    return pages, [gold[name]["articleBody"] for name in ids], list(map(find_part, ids))


def find_part(page_id: str) -> str:
    """Return the part that a page belongs to."""
    return PARTS[hashlib.sha256(page_id.encode()).digest()[0] % 2]


def compute_shingles(text: str) -> Shingles:
    """Return the 4-grams of a text's tokens; a text with fewer tokens is one shingle."""
    tokens = TOKEN.findall(text)
    if len(tokens) < NGRAM:
        return Counter([tuple(tokens)] if tokens else [])
    return Counter(zip(*(tokens[start:] for start in range(NGRAM)), strict=False))


def compute_scores(gold: list[str], found: list[str]) -> tuple[float, float, float]:
    """Return F1, precision and recall. A page counts for a measure that is defined on it."""
    precisions, recalls = [], []
    for true, made in zip(map(compute_shingles, gold), map(compute_shingles, found), strict=True):
        both = (true & made).total()
        if made:
            precisions.append(both / made.total())
        if true:
            recalls.append(both / true.total())
    precision = statistics.mean(precisions) if precisions else 0.0
    recall = statistics.mean(recalls) if recalls else 0.0
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return f1, precision, recall


def measure_extraction(pages: pa.RecordBatch, config: ExtractConfig) -> tuple[list[str], float]:
    """Return the texts and their CPU seconds, the mean of as many runs as fill `LEAST_SECONDS`."""
    start = time.process_time()
    times, seconds = 0, 0.0
    while seconds < LEAST_SECONDS:
        texts = extract_pages(pages, config).texts
        times, seconds = times + 1, time.process_time() - start
    return [text or "" for text in texts.to_pylist()], seconds / times


def print_part(title: str, gold: list[str], found: dict[str, list[str]], is_in: list[bool]) -> None:
    """Print the scores of each extractor on the pages of one part."""
    true = list(compress(gold, is_in))
    if not true:
        return
    print(f"{title + f', {len(true)} pages':26}      F1  precision  recall")
    for name, texts in found.items():
        f1, precision, recall = compute_scores(true, list(compress(texts, is_in)))
        print(f"{name:26}  {f1:.4f}     {precision:.4f}  {recall:.4f}")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmark", type=Path, help="archive or folder of the benchmark")
    parser.add_argument(
        "--rounds", type=int, default=3, help="times each extractor reads all pages (%(default)s)"
    )
    arguments = parser.parse_args()
    payloads, gold, parts = read_benchmark(arguments.benchmark)
    pages = pa.record_batch(
        {"charset": ["utf-8"] * len(gold), "payload": pa.array(payloads, pa.large_binary())}
    )
    extractors = {
        name: config
        for name, config in EXTRACTORS.items()
        if config.kind != "trafilatura" or find_spec("trafilatura")
    }
    found = {
        name: measure_extraction(pages.slice(0, 2), config)[0]
        for name, config in extractors.items()
    }  # loads libraries
    seconds: dict[str, list[float]] = {name: [] for name in extractors}
    for _ in range(arguments.rounds):
        for name, config in extractors.items():
            found[name], took = measure_extraction(pages, config)
            seconds[name].append(took)
    size = sum(map(len, payloads)) / 1e6
    print(
        f"{len(gold)} pages, {size:.1f} MB of HTML; 4-gram token F1, CPU seconds, median of "
        f"{arguments.rounds}"
    )
    print(f"{'':26}  pages/s  MB/s")
    for name in extractors:
        took = statistics.median(seconds[name])
        print(f"{name:26}  {len(gold) / took:7.0f}  {size / took:4.0f}")
    for part in (*PARTS, "all"):
        print_part(part, gold, found, [part in ("all", one) for one in parts])
    ours = statistics.median(seconds["article"])
    for name in extractors:
        if name != "article":
            print(
                f"article / {name}: {statistics.median(seconds[name]) / ours:.1f} times the pages "
                "per second"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
