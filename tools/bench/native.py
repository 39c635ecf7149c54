"""Measure extraction by the compiled core next to Python's and to lexbor's bare parse, in one run.

    python tools/bench/native.py 'crawl/*.warc.gz' [--repeats 3]

Prints pages per CPU second, medians of the repeats, and how many texts differ.
"""

import argparse
import glob
import statistics
import sys
import time
import unicodedata
from collections.abc import Callable, Sequence

from selectolax.lexbor import LexborHTMLParser

from llmsys.config.cleaning import ArticleExtractorConfig, ReadConfig
from llmsys.data_pipeline.core.native import NativeCore, load_core
from llmsys.data_pipeline.extract.extractor import clean_text, iter_accepted_pages
from llmsys.data_pipeline.extract.main_content import extract_article
from llmsys.data_pipeline.readers.page_reader import read_pages


def measure_cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds of this process that some work takes."""
    began = time.process_time()
    work()
    return time.process_time() - began


def main(words: Sequence[str]) -> int:
    """Print a table row for each way, and return 1 if a text differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pattern", help="Pattern of crawl files, in quotes.")
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args(words)
    core = load_core()
    if not isinstance(core, NativeCore):
        print(f"there is no compiled core: {core}", file=sys.stderr)
        return 2
    config = ArticleExtractorConfig()
    pages = [
        page
        for file in sorted(glob.glob(asked.pattern))
        for batch in read_pages(file, max_page_bytes=config.max_page_bytes, config=ReadConfig())
        for page in iter_accepted_pages(batch.pages, config)
    ]
    ways: dict[str, Callable[[], object]] = {
        "Python": lambda: [clean_text(extract_article(page)) for page in pages],
        "lexbor's parse alone": lambda: [LexborHTMLParser(page) for page in pages],
        "compiled core": lambda: core.extract_articles(pages),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    # In turn, so that other work on the machine meets all of them.
    for _ in range(asked.repeats):
        for name, work in ways.items():
            seconds[name].append(measure_cpu_seconds(work))
    print("| | pages / CPU s | times Python's |\n|---|---|---|")
    python = statistics.median(seconds["Python"])
    for name, found in seconds.items():
        middle = statistics.median(found)
        print(f"| {name} | {len(pages) / middle:,.0f} | {python / middle:.1f} |")
    different = sum(
        text is not None
        and unicodedata.normalize("NFC", text.decode()) != clean_text(extract_article(page))
        for page, text in zip(pages, core.extract_articles(pages), strict=True)
    )
    print(f"\n{len(pages):,} pages, {different} with another text")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
