"""Prepare a dataset of many short crawl files for real, and print what grows with their number.

    python tools/bench/prepare_blocks.py [--blocks 100000] [--workers 2] [--folder FOLDER]

Makes WARC files of one English page each, so that every file is a block. Prepares their documents
with language identification, the Gopher quality rule, and duplicates by URL, text and MinHash.
Prints files, inodes (files and folders), CPU seconds of the driver and of all workers, and peak
memory of the driver and of the largest worker.
"""

import argparse
import gzip
import os
import random
import resource
import tempfile
import time
from pathlib import Path

from llmsys.config.data import CrawlConfig
from llmsys.config.run import RunConfig
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset

PROSE = """
the of and to with that have be house river stone garden winter morning people often walked along
narrow streets because they wanted to see old bridges while children played near water under tall
trees where birds were singing every evening before dinner many families told stories about distant
mountains travel weather harvest music and books
"""
WORDS = PROSE.split()


def write_inputs(folder: Path, blocks: int) -> None:
    """Write crawl files of one page, 1,000 in a folder."""
    choose = random.Random(0)
    for number in range(blocks):
        sentences = (
            " ".join(choose.choices(WORDS, k=choose.randrange(8, 16))).capitalize() + "."
            for _ in range(10)
        )
        page = "".join(f"<p>{sentence}</p>" for sentence in sentences)
        html = f"<html><head><title>x</title></head><body><main>{page}</main></body></html>"
        http = "HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n" + html
        header = (
            f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Record-ID: <urn:uuid:{number:032x}>\r\n"
            f"WARC-Target-URI: https://example.org/{number}\r\nWARC-Date: 2024-05-01T00:00:00Z\r\n"
            "Content-Type: application/http; msgtype=response\r\n"
            f"Content-Length: {len(http)}\r\n\r\n"
        )
        path = folder / f"{number // 1_000:05d}" / f"{number:08d}.warc.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress((header + http + "\r\n\r\n").encode(), mtime=0))


def measure_preparation(inputs: Path, folder: Path, workers: int) -> dict[str, float]:
    """Prepare the documents. Return the quantities of the module docstring by name."""
    section = {
        "name": "blocks",
        "folder": str(folder),
        "inputs": [f"{inputs}/*/*.warc.gz"],
        "rules": [{"kind": "gopher_quality", "min_words": 30}],
        "deduplicate": {
            "url": {"kind": "url"},
            "exact": {"kind": "text"},
            "minhash": {"kind": "minhash"},
        },
        "documents": {"num_shards": 2},
        "executor": {"kind": "local", "workers": workers},
    }
    tokenizer = {"kind": "sentencepiece", "vocab_size": 400}
    config = RunConfig.model_validate(
        {"data": CrawlConfig.model_validate(section), "tokenizer": tokenizer}
    )
    began = time.monotonic()
    prepare_dataset(config, until="documents")
    driver = resource.getrusage(resource.RUSAGE_SELF)
    worker = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = [(len(files), len(folders)) for _, folders, files in os.walk(folder)]
    return {
        "files": sum(files for files, _ in found),
        "inodes": sum(map(sum, found)) + 1,
        "driver_seconds": driver.ru_utime + driver.ru_stime,
        "worker_seconds": worker.ru_utime + worker.ru_stime,
        "driver_mib": driver.ru_maxrss / 1024,
        "largest_worker_mib": worker.ru_maxrss / 1024,
        "seconds": time.monotonic() - began,
    }


def main() -> None:
    """Measure one preparation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="a folder that is kept (default: a temporary)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        base = given.folder or Path(temporary)
        write_inputs(base / "inputs", given.blocks)
        for name, value in measure_preparation(
            base / "inputs", base / "dataset", given.workers
        ).items():
            print(f"{name}: {value:,.1f} ({value / given.blocks:.5f} per block)")


if __name__ == "__main__":
    main()
