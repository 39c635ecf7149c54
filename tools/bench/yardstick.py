"""Measure a whole preparation, from crawl files to documents, next to datatrove and to lexbor's
parse.

    python tools/bench/yardstick.py 'crawl/*.warc.gz' [--datatrove PYTHON] [--repeats 3]

Each preparation is a process of its own, whose start and whose workers count; the cache folder was
filled before. English: FineWeb's rules, inline, without deduplication; datatrove with trafilatura
on all the same pages, its start and its language filter not counted. All languages: the config that
`llmsys init` writes, inline and with two workers. Parse: lexbor through selectolax, and by its C
function with one document for all pages. Prints CPU seconds, medians of the repeats, all measured
in turn.
"""

import argparse
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from selectolax import lexbor
from selectolax.lexbor import LexborHTMLParser

from llmsys.config.cleaning import ArticleExtractorConfig, ReadConfig
from llmsys.config.data import CrawlConfig
from llmsys.data_pipeline.extract.extractor import iter_accepted_pages
from llmsys.data_pipeline.readers.input_files import find_inputs
from llmsys.data_pipeline.readers.page_reader import read_pages
from tools.bench import data_parts as ours
from tools.bench import datatrove_reference as theirs
from tools.bench.rules import RULES

PREPARE = """
import json, sys
from llmsys.data_pipeline.executors.garbage_collection import collect_less_often
collect_less_often()
from llmsys.config.run import RunConfig
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
config = RunConfig.model_validate(json.loads(sys.argv[1]))
manifest = prepare_dataset(config, until="documents")
print(manifest.fingerprint)
"""
ENGLISH: dict[str, Any] = {
    "rules": [rule.model_dump(mode="json") for rule in RULES],
    "deduplicate": {"exact": {"kind": "none"}, "minhash": {"kind": "none"}},
}
ALL_LANGUAGES: dict[str, Any] = {
    "language": {"languages": []},
    "rules": [
        {"kind": "gopher_repetition"},
        {"kind": "gopher_quality"},
        {"kind": "c4_datatrove", "end_marks": []},
    ],
    "deduplicate": {"exact": {"kind": "text"}, "minhash": {"kind": "minhash"}},
    "split": {"heldout_fraction": 0.05},
}
INLINE = {"kind": "inline"}
TWO_WORKERS = {"kind": "local", "workers": 2}


def prepare(files: Sequence[str], settings: dict[str, Any], executor: dict[str, Any]) -> float:
    """Return the CPU seconds of a preparation and of its workers."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"kind": "crawl", "folder": f"{folder}/data", "inputs": list(files)}
        config = json.dumps({"data": given | settings | {"executor": executor}})
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", PREPARE, config]
        subprocess.run(command, check=True, capture_output=True, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def parse_by_selectolax(pages: Sequence[bytes]) -> float:
    """Return the CPU seconds of a parse of each page."""
    began = time.process_time()
    for page in pages:
        LexborHTMLParser(page)
    return time.process_time() - began


def parse_by_lexbor(pages: Sequence[bytes]) -> float:
    """Return the CPU seconds of the same by lexbor's function, into one document."""
    library = ctypes.CDLL(str(lexbor.__file__))
    library.lxb_html_document_create.restype = ctypes.c_void_p
    document = ctypes.c_void_p(library.lxb_html_document_create())
    began = time.process_time()
    for page in pages:
        library.lxb_html_document_clean(document)
        library.lxb_html_document_parse(document, ctypes.c_char_p(page), ctypes.c_size_t(len(page)))
    return time.process_time() - began


def main(words: Sequence[str]) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pattern", help="Pattern of crawl files, in quotes.")
    parser.add_argument(
        "--datatrove",
        metavar="PYTHON",
        help="An interpreter with datatrove[io,processing]==0.10.1, spacy and lxml_html_clean.",
    )
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args(words)
    files = [str(Path(file).resolve()) for file in find_inputs([asked.pattern])]
    config = ArticleExtractorConfig()
    pages = [
        page
        for file in files
        for batch in read_pages(file, max_page_bytes=config.max_page_bytes, config=ReadConfig())
        for page in iter_accepted_pages(batch.pages, config)
    ]
    ways: dict[str, Callable[[], float]] = {
        "English, inline": lambda: prepare(files, ENGLISH, INLINE),
        "all languages, inline": lambda: prepare(files, ALL_LANGUAGES, INLINE),
        "all languages, two workers": lambda: prepare(files, ALL_LANGUAGES, TWO_WORKERS),
        "lexbor's parse, by selectolax": lambda: parse_by_selectolax(pages),
        "lexbor's parse, one document": lambda: parse_by_lexbor(pages),
    }
    if asked.datatrove:
        addresses = ours.extract_english_texts(files, CrawlConfig(rules=RULES))[1]
        ways["datatrove, English"] = lambda: theirs.measure_datatrove_pipeline(
            asked.datatrove, files, addresses, -1, 1
        )[0]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(asked.repeats):
        for name, work in ways.items():
            seconds[name].append(work())
            print(f"{name}: {seconds[name][-1]:.2f} s", file=sys.stderr, flush=True)
    print("| | CPU s | pages / CPU s |\n|---|---|---|")
    for name, found in seconds.items():
        middle = statistics.median(found)
        print(f"| {name} | {middle:.2f} | {len(pages) / middle:,.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
