"""Shared parts of the data benches: CPU seconds, texts of a crawl's pages, and the options for
datatrove.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pyarrow as pa

from llmsys.config.cleaning import ResiliparseExtractorConfig
from llmsys.data_pipeline.extract.extractor import extract_text
from llmsys.data_pipeline.readers.input_files import find_inputs
from llmsys.data_pipeline.readers.page_reader import read_pages

Result = TypeVar("Result")


def measure_cpu_seconds(work: Callable[[], Result]) -> tuple[float, Result]:
    """Return the CPU seconds of this process in one run, and the result."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def measure_median_seconds(work: Callable[[], Result], runs: int) -> tuple[float, Result]:
    """Return the median of the CPU seconds of so many runs, and the last result."""
    measured = [measure_cpu_seconds(work) for _ in range(runs)]
    return statistics.median(seconds for seconds, _ in measured), measured[-1][1]


def iter_crawl_texts(patterns: Sequence[str]) -> Iterator[tuple[pa.Array, pa.Array]]:
    """Yield URLs and texts of the pages of a crawl that resiliparse extracts a text from, batch by
    batch, in crawl
    order.
    """
    extract = ResiliparseExtractorConfig()
    for path in find_inputs(patterns):
        for batch in read_pages(path, max_page_bytes=extract.max_page_bytes):
            texts = extract_text(batch.pages, extract)
            yield batch.pages.column("url").filter(texts.is_valid()), texts.drop_null()


def build_datatrove_parser(description: str | None, limit: int) -> argparse.ArgumentParser:
    """Return a parser for crawl files, datatrove's interpreter and the number of documents
    (default `limit`).
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("crawl", nargs="+", help="WARC files or patterns")
    parser.add_argument("--datatrove", metavar="PYTHON", help="an interpreter that has datatrove")
    parser.add_argument(
        "--limit", type=int, default=limit, help="documents; 0 takes all (default: %(default)s)"
    )
    return parser
