"""The FineWeb chain of rules beside datatrove's, on the same extracted texts of one crawl, in one run.

    python tools/bench/rules.py 'crawl/*.warc.gz' [--datatrove PYTHON] [--limit 500]

PYTHON is an interpreter that has datatrove (`python -m venv ref; ref/bin/pip install 'datatrove[processing]==0.10.1'`);
the two cannot share an environment. Prints CPU seconds of one process, from cold and warm (the median of three runs),
documents per second, the ratios, and the share of documents with an equal verdict and text.
"""

import argparse
import glob
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from data_pipeline.extract.html import extract_text
from data_pipeline.language.identify import identify, keep_mask
from data_pipeline.readers.read import read_pages
from data_pipeline.rules.chain import RuleChain
from llmsys.config.extract import ResiliparseExtract
from llmsys.config.language import LanguageConfig
from llmsys.config.line_rules import C4DatatroveConfig
from llmsys.config.text import (
    FinewebQualityConfig,
    GopherQualityConfig,
    GopherRepetitionConfig,
)

RULES = (GopherRepetitionConfig(), GopherQualityConfig(), C4DatatroveConfig(end_marks=()), FinewebQualityConfig())
BATCH = 128
WARM_RUNS = 3  # the median counts

# Runs under the other interpreter: verdicts and rewritten texts of datatrove's filters, twice, with CPU seconds.
REFERENCE = """
import json, sys, time
from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4QualityFilter, FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter)
filters = [GopherRepetitionFilter(), GopherQualityFilter(),
           C4QualityFilter(filter_no_terminal_punct=False), FineWebQualityFilter()]
def judge(text):
    document = Document(text=text, id="0", metadata={})
    return document.text if all(one.filter(document) is True for one in filters) else None
texts = [json.loads(line) for line in open(sys.argv[1])]
judge(texts[0])
start = time.process_time()
results = [judge(text) for text in texts]
json.dump({"seconds": time.process_time() - start, "results": results}, open(sys.argv[2], "w"))
"""


def english_texts(patterns: Sequence[str], limit: int) -> list[str]:
    """Extracted texts of the English pages, in the order of the crawl."""
    extract, language = ResiliparseExtract(), LanguageConfig()
    texts: list[str] = []
    for path in sorted(path for pattern in patterns for path in glob.glob(pattern)):
        for batch in read_pages(path, max_page_bytes=extract.max_page_bytes):
            found = extract_text(batch.pages, extract).drop_null()
            codes, scores = identify(found, language)
            texts += found.filter(keep_mask(codes, scores, language)).to_pylist()
    return texts[:limit] if limit else texts


def judge(chain: RuleChain, texts: Sequence[str]) -> list[str | None]:
    """The rewritten text of each document that stays, None for one that goes."""
    results: list[str | None] = []
    for start in range(0, len(texts), BATCH):
        batch = texts[start : start + BATCH]
        left = list(range(len(batch)))
        kept = pa.array(batch, pa.large_string())
        for outcome in chain.apply(kept):
            left = [place for place, stays in zip(left, outcome.keep.to_pylist(), strict=True) if stays]
            kept = outcome.texts
        by_place = dict(zip(left, kept.to_pylist(), strict=True))
        results += [by_place.get(place) for place in range(len(batch))]
    return results


def reference(python: str, texts: Sequence[str]) -> tuple[float, list[str | None]]:
    """CPU seconds and results of datatrove under another interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "texts.jsonl"), Path(folder, "results.json")
        given.write_text("".join(json.dumps(text) + "\n" for text in texts))
        subprocess.run([python, "-c", REFERENCE, str(given), str(made)], check=True)
        found = json.loads(made.read_text())
    return float(found["seconds"]), found["results"]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("crawl", nargs="+", help="WARC files or patterns")
    parser.add_argument("--datatrove", metavar="PYTHON", help="an interpreter that has datatrove")
    parser.add_argument("--limit", type=int, default=500, help="documents; 0 takes all (default: %(default)s)")
    arguments = parser.parse_args()
    texts = english_texts(arguments.crawl, arguments.limit)
    if not texts:
        print(f"no English page in {' '.join(arguments.crawl)}", file=sys.stderr)
        return 2
    print(f"{len(texts)} documents, {sum(len(text.encode()) for text in texts) / 1e6:.1f} MB of text; CPU seconds")
    judge(RuleChain(RULES), ["Load the word splitter before the clock starts."])
    chain = RuleChain(RULES)
    runs: list[float] = []
    results: list[str | None] = []
    for _ in range(1 + WARM_RUNS):
        start = time.process_time()
        results = judge(chain, texts)
        runs.append(time.process_time() - start)
    seconds = {"cold": runs[0], "warm": statistics.median(runs[1:])}
    for run, took in seconds.items():
        print(f"  ours, {run:<10} {took:8.2f} s {len(texts) / took:8.0f} documents/s")
    if arguments.datatrove:
        took, theirs = reference(arguments.datatrove, texts)
        equal = sum(ours == other for ours, other in zip(results, theirs, strict=True))
        print(f"  datatrove        {took:8.2f} s {len(texts) / took:8.0f} documents/s")
        print(f"  ratio: {took / seconds['cold']:.1f} from cold, {took / seconds['warm']:.1f} warm")
        print(f"  equal verdict and text: {equal} of {len(texts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
