"""Measure the FineWeb rules next to datatrove's, on the same extracted texts of one crawl, in one
run.

    python tools/bench/rules.py 'crawl/*.warc.gz' [--datatrove PYTHON] [--limit 500]

PYTHON is an interpreter that has datatrove (`python -m venv ref; ref/bin/pip install
'datatrove[processing]==0.10.1'`); the two cannot share an environment. Prints CPU seconds of one
process (one cold run, and one of datatrove; the median of three warm), documents per second, the
ratios, and the share of documents with an equal verdict and text.
"""

import statistics
import sys
from collections.abc import Sequence

import pyarrow as pa

from llmsys.config.language import LanguageConfig
from llmsys.config.line_rules import C4DatatroveConfig
from llmsys.config.quality_rules import (
    FinewebQualityConfig,
    GopherQualityConfig,
    GopherRepetitionConfig,
)
from llmsys.data_pipeline.language.identify import compute_keep_mask, identify_languages
from llmsys.data_pipeline.rules.chain import RuleChain
from tools.bench import datatrove_reference as reference
from tools.bench.measurement import build_datatrove_parser, iter_crawl_texts, measure_cpu_seconds

RULES = (
    GopherRepetitionConfig(),
    GopherQualityConfig(),
    C4DatatroveConfig(end_marks=()),
    FinewebQualityConfig(),
)
BATCH = 128
WARM_RUNS = 3  # the median counts


def read_english_texts(patterns: Sequence[str], limit: int) -> list[str]:
    """Return extracted texts of the English pages, in crawl order."""
    language = LanguageConfig()
    texts: list[str] = []
    for _, found in iter_crawl_texts(patterns):
        texts += found.filter(
            compute_keep_mask(*identify_languages(found, language), language)
        ).to_pylist()
    return texts[:limit] if limit else texts


def apply_rules(chain: RuleChain, texts: Sequence[str]) -> list[str | None]:
    """Return the rewritten text of each kept document, None for a dropped one."""
    results: list[str | None] = []
    for start in range(0, len(texts), BATCH):
        batch = texts[start : start + BATCH]
        left = list(range(len(batch)))
        kept = pa.array(batch, pa.large_string())
        for outcome in chain.apply(kept):
            left = [
                place for place, stays in zip(left, outcome.keep.to_pylist(), strict=True) if stays
            ]
            kept = outcome.texts
        by_place = dict(zip(left, kept.to_pylist(), strict=True))
        results += [by_place.get(place) for place in range(len(batch))]
    return results


def main() -> int:
    """Measure and print."""
    arguments = build_datatrove_parser(__doc__, 500).parse_args()
    texts = read_english_texts(arguments.crawl, arguments.limit)
    if not texts:
        print(f"no English page in {' '.join(arguments.crawl)}", file=sys.stderr)
        return 2
    print(
        f"{len(texts)} documents, {sum(len(text.encode()) for text in texts) / 1e6:.1f} MB of "
        "text; CPU seconds"
    )
    apply_rules(RuleChain(RULES), ["Load the word splitter before the clock starts."])
    chain = RuleChain(RULES)
    runs: list[float] = []
    results: list[str | None] = []
    for _ in range(1 + WARM_RUNS):
        seconds, results = measure_cpu_seconds(lambda: apply_rules(chain, texts))
        runs.append(seconds)
    times = {"cold": runs[0], "warm": statistics.median(runs[1:])}
    for run, took in times.items():
        print(f"  ours, {run:<10} {took:8.2f} s {len(texts) / took:8.0f} documents/s")
    if arguments.datatrove:
        took, theirs = reference.measure_datatrove_rules(arguments.datatrove, texts, repeats=1)
        equal = sum(ours == other for ours, other in zip(results, theirs, strict=True))
        print(f"  datatrove        {took:8.2f} s {len(texts) / took:8.0f} documents/s")
        print(f"  ratio: {took / times['cold']:.1f} from cold, {took / times['warm']:.1f} warm")
        print(f"  equal verdict and text: {equal} of {len(texts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
