"""Measure MinHash, repeated sentences and repeated strings: speed, and agreement with datatrove on
the same texts.

    python tools/bench/dedup.py 'crawl/*.warc.gz' [--datatrove PYTHON] [--limit 500] [--runs 3]

PYTHON is an interpreter that has datatrove (`python -m venv ref; ref/bin/pip install
'datatrove[processing]==0.10.1'`); the two cannot share an environment. Prints CPU seconds of one
process. Signatures: median of the runs, of a signer's first pass (cold) and second (warm).
Sentences, strings and datatrove: one run, the first in its process. Also prints how many
signatures, clusters and texts without repeated sentences are equal. Texts are in crawl order; of
copies the first is kept.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from llmsys.config.deduplication import MinHashDedupConfig, SentenceDedupConfig
from llmsys.data_pipeline.dedup.bloom_filter import CountingBloomFilter
from llmsys.data_pipeline.dedup.minhash import MinHasher
from llmsys.data_pipeline.dedup.text_segments import (
    get_sentence_splitter,
    remove_segment_runs,
    split_segments,
)
from llmsys.data_pipeline.stages.find_substrings import compute_winnowing_anchors
from llmsys.data_pipeline.stages.join_near_duplicates import list_clusters
from tools.bench.measurement import build_datatrove_parser, iter_crawl_texts, measure_cpu_seconds

BATCH = 128
SPANS = SentenceDedupConfig()

# Runs under the other interpreter: signatures and what is left of repeated sentences, each with CPU
# seconds.
REFERENCE = """
import json, sys, tempfile, time
from datatrove.data import Document
from datatrove.pipeline.dedup import MinhashDedupSignature, SentenceDedupSignature
from datatrove.pipeline.dedup import SentenceDedupFilter, SentenceFindDedups
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.dedup.sentence_dedup import SentDedupConfig
from datatrove.utils.hashing import HashConfig
texts = [json.loads(line) for line in open(sys.argv[1])]
folder = tempfile.mkdtemp()
sha1 = HashConfig(hash_fc="sha1", precision=64)
signer = MinhashDedupSignature(folder + "/m", config=MinhashConfig(hash_config=sha1))
def sign(text):
    shingles = signer.get_shingles(text)
    if not shingles.size:
        return None
    return [[int(x) for x in bucket] for bucket in signer.get_signature(shingles)]
sign(texts[0])
start = time.process_time()
signatures = [sign(text) for text in texts]
minhash = time.process_time() - start
config = SentDedupConfig(only_dedup_in_index=False, hash_config=sha1)
def documents():
    return [Document(text=text, id=str(number), metadata={}) for number, text in enumerate(texts)]
start = time.process_time()
SentenceDedupSignature(folder + "/s", config=config).run(documents())
SentenceFindDedups(folder + "/s", folder + "/f", config=config).run()
kept = SentenceDedupFilter(folder + "/f", config=config).run(documents())
left = {int(one.id): one.text for one in kept}
spans = time.process_time() - start
json.dump({"minhash": minhash, "signatures": signatures, "spans": spans,
           "left": [left.get(number) for number in range(len(texts))]}, open(sys.argv[2], "w"))
"""


def map_batches(work: Callable[[Sequence[str]], Any], texts: Sequence[str]) -> list[Any]:
    """Return the results of `work` on batches of texts, joined."""
    return [
        one for start in range(0, len(texts), BATCH) for one in work(texts[start : start + BATCH])
    ]


def measure_cold_and_warm(
    make: Callable[[], Callable[[], Any]], runs: int
) -> tuple[float, float, Any]:
    """Return median CPU seconds of a first and of a second call of the function that `make`
    builds, and the result.
    """
    cold, warm = [], []
    for _ in range(runs):
        call = make()
        cold.append(measure_cpu_seconds(call)[0])
        seconds, result = measure_cpu_seconds(call)
        warm.append(seconds)
    return statistics.median(cold), statistics.median(warm), result


def build_signer_factory(texts: Sequence[str], kind: Any) -> Callable[[], Callable[[], Any]]:
    """Return a function that builds a signer without cached words, and its work."""

    def build_signer() -> Callable[[], Any]:
        signer = MinHasher(MinHashDedupConfig(hash=kind))
        signer.compute_signatures(["Load the word splitter before the clock starts: naïve 5km."])
        return lambda: map_batches(
            lambda batch: list(zip(*signer.compute_signatures(batch), strict=True)), texts
        )

    return build_signer


def remove_repeated_spans(texts: Sequence[str]) -> list[str | None]:
    """Return each text without its repeated runs of three sentences; None when too little is
    left.
    """
    units = map_batches(lambda batch: split_segments(batch, SPANS), texts)
    before: set[str] = set()
    left: list[str | None] = []
    for text, found in zip(texts, units, strict=True):
        places = []
        for place, key in enumerate(found.keys):
            if key is not None and key in before:
                places.append(place)
            if key is not None:
                before.add(key)
        shorter = remove_segment_runs(text, found, places, SPANS.sentences) if places else text
        left.append(shorter if shorter == text or _is_enough(shorter) else None)
    return left


def _is_enough(text: str) -> bool:
    """Return whether a cut text has the minimum of words and sentences."""
    ends, words = get_sentence_splitter().find_boundaries([text])[0]
    return bool(text) and words >= SPANS.min_words and len(ends) >= SPANS.min_sentences


def cluster_by_bucket(signatures: Sequence[Any]) -> list[list[int]]:
    """Return clusters of documents that agree in a whole bucket of 8 of their 112 hashes."""
    first: dict[tuple[int, ...], int] = {}
    pairs = []
    for document, signature in enumerate(signatures):
        for bucket in range(14) if signature is not None else ():
            key = (bucket, *signature[8 * bucket : 8 * bucket + 8])
            pairs.append((first.setdefault(key, document), document))
    return list_clusters(
        np.array([pair for pair in pairs if pair[0] != pair[1]], np.int64).reshape(-1, 2)
    )


def run_datatrove(python: str, texts: Sequence[str]) -> dict[str, Any]:
    """Return CPU seconds and results of datatrove under another interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "texts.jsonl"), Path(folder, "results.json")
        given.write_text("".join(json.dumps(text) + "\n" for text in texts))
        subprocess.run(
            [python, "-c", REFERENCE, str(given), str(made)], check=True, capture_output=True
        )
        found: dict[str, Any] = json.loads(made.read_text())
    signatures = found["signatures"]
    found["signatures"] = [
        row and [value for bucket in row for value in bucket] for row in signatures
    ]
    return found


def print_measurement(
    name: str, seconds: float, texts: Sequence[str], theirs: float | None
) -> None:
    """Print one measurement."""
    ratio = f"{theirs / seconds:8.1f} times" if theirs else ""
    size = sum(len(text.encode()) for text in texts) / 1e6
    print(
        f"  {name:<34}{seconds:9.2f} s {len(texts) / seconds:9.0f} documents/s "
        f"{size / seconds:8.2f} MB/s{ratio}"
    )


def print_filter_errors() -> None:
    """Print the error rate of the filter, requested and measured."""
    generator = np.random.default_rng(0)
    keys = generator.integers(0, 1 << 64, size=1_000_000, dtype=np.uint64)
    for asked in (0.1, 0.01, 0.001):
        found = CountingBloomFilter(len(keys) + 100_000, asked)
        for part in np.split(keys, 10):
            found.add_keys(part)
        found.add_keys(keys[:100_000])
        mask = found.query_repeated(keys)
        size = 2 * found.counters / 8 / (len(keys) + 100_000)
        print(
            f"  filter: asked {asked:g}, let through {mask[100_000:].mean():.5f} of 900,000 "
            f"unique keys, missed {100_000 - int(mask[:100_000].sum())} of 100,000 repeats, "
            f"{size:.1f} bytes a key"
        )


def main() -> int:
    """Measure and print."""
    parser = build_datatrove_parser(__doc__, 500)
    parser.add_argument(
        "--runs",
        type=int,
        default=3,
        help="of signatures; the median counts (default: %(default)s)",
    )
    arguments = parser.parse_args()
    pages = (text for _, texts in iter_crawl_texts(arguments.crawl) for text in texts.to_pylist())
    texts = list(islice(pages, arguments.limit or None))
    if not texts:
        print(f"no page in {' '.join(arguments.crawl)}", file=sys.stderr)
        return 2
    print(
        f"{len(texts)} documents, {sum(len(text.encode()) for text in texts) / 1e6:.1f} MB of "
        "text; CPU seconds"
    )
    theirs = run_datatrove(arguments.datatrove, texts) if arguments.datatrove else {}
    if theirs:
        print_measurement("datatrove signatures, sha1", theirs["minhash"], texts, None)
    signatures: list[Any] = []
    for kind in ("combined", "sha1"):
        cold, warm, signatures = measure_cold_and_warm(
            build_signer_factory(texts, kind), arguments.runs
        )
        print_measurement(f"signatures, {kind}, cold", cold, texts, theirs.get("minhash"))
        print_measurement(f"signatures, {kind}, warm", warm, texts, theirs.get("minhash"))
    seconds, left = measure_cpu_seconds(lambda: remove_repeated_spans(texts))
    if theirs:
        print_measurement("datatrove 3-sentence spans", theirs["spans"], texts, None)
    print_measurement("3-sentence spans", seconds, texts, theirs.get("spans"))
    seconds, _ = measure_cpu_seconds(
        lambda: [compute_winnowing_anchors(text, 250) for text in texts]
    )
    print_measurement("anchors of strings of 250", seconds, texts, None)
    print_filter_errors()
    if theirs:
        found = [row.tolist() if present else None for row, present in signatures]
        equal = sum(ours == other for ours, other in zip(found, theirs["signatures"], strict=True))
        print(f"  equal signatures, all 112 values: {equal} of {len(texts)}")
        both = cluster_by_bucket(found), cluster_by_bucket(theirs["signatures"])
        same = len([cluster for cluster in both[0] if cluster in both[1]])
        print(
            f"  equal clusters: {same} of {len(both[1])}, with {sum(map(len, both[1]))} documents"
        )
        equal = sum(ours == other for ours, other in zip(left, theirs["left"], strict=True))
        changed = sum(text != other for text, other in zip(texts, theirs["left"], strict=True))
        print(
            f"  equal texts after 3-sentence spans: {equal} of {len(texts)}, {changed} of them "
            "changed or dropped"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
