"""Measure reading of crawl files next to FastWARC alone, on the same files in the same process.

    python tools/bench/read.py 'tests/data/sample_crawl/*.warc.gz' [--repeats 5]

Prints, in CPU seconds (medians) and MB of the compressed files per second: iterating over all
records; reading the bodies of all responses; and making batches of pages, decoded, with digests
verified and without.
"""

import argparse
import glob
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

from fastwarc.warc import ArchiveIterator

from llmsys.config.cleaning import ReadConfig
from llmsys.data_pipeline.readers.input_stream import open_input_stream
from llmsys.data_pipeline.readers.page_batch import NonPageRecord
from llmsys.data_pipeline.readers.page_reader import read_pages
from llmsys.data_pipeline.readers.warc_records import iter_records

_RESPONSE = 4
_KEEP_BYTES = 5 << 20


def count_fastwarc_records(path: str) -> int:
    """Count the records of a file with FastWARC."""
    return sum(1 for _ in ArchiveIterator(path, parse_http=False, fsspec_args=False))


def count_our_records(path: str) -> int:
    """Count the records with our reader, which resyncs after corruption and verifies the end of
    the file.
    """
    with open_input_stream(path) as source:
        return sum(1 for _ in iter_records(source, lambda record: NonPageRecord(record.offset), 0))


def count_fastwarc_bodies(path: str) -> int:
    """Read the body of every response with FastWARC."""
    count = 0
    for record in ArchiveIterator(path, parse_http=False, fsspec_args=False):
        if int(record.record_type) == _RESPONSE:
            record.parse_http()
            count += bool(record.reader.read())
    return count


def count_our_pages(path: str, config: ReadConfig) -> int:
    """Make batches of pages and count them."""
    return sum(
        batch.pages.num_rows
        for batch in read_pages(path, max_page_bytes=_KEEP_BYTES, config=config)
    )


def main() -> None:
    """Measure each way in turn, as often as asked, and print the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pattern")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    files = sorted(glob.glob(arguments.pattern))
    size = sum(map(os.path.getsize, files)) / 1e6
    ways: dict[str, Callable[[str], int]] = {
        "FastWARC, records": count_fastwarc_records,
        "ours, records": count_our_records,
        "FastWARC, bodies": count_fastwarc_bodies,
        "ours, pages": partial(count_our_pages, config=ReadConfig(on_digest_mismatch="ignore")),
        "ours, pages, digests": partial(count_our_pages, config=ReadConfig()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    counts = dict.fromkeys(ways, 0)
    for _ in range(arguments.repeats):
        for name, way in ways.items():
            began = time.process_time()
            counts[name] = sum(map(way, files))
            seconds[name].append(time.process_time() - began)
    for name, times in seconds.items():
        median = statistics.median(times)
        print(
            f"{name:<22} {counts[name]:7,} {median:7.2f} s {size / median:6.0f} MB/s "
            f"{counts[name] / median:9,.0f}/s"
        )


if __name__ == "__main__":
    main()
