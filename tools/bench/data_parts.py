"""Run each part of the pipeline alone, in this process, with its CPU seconds: our side of
tools/bench/data.py.
"""

import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from fastwarc.warc import ArchiveIterator, WarcRecordType

from llmsys.config.data import CrawlConfig
from llmsys.config.deduplication import DeduplicationConfig, MinHashDedupConfig
from llmsys.config.executor import InlineExecutorConfig
from llmsys.config.run import RunConfig
from llmsys.data_pipeline.dedup.minhash import MinHasher
from llmsys.data_pipeline.language.identify import compute_keep_mask, identify_languages
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.readers.input_stream import open_input_stream
from llmsys.data_pipeline.readers.page_batch import NonPageRecord
from llmsys.data_pipeline.readers.warc_records import iter_records
from llmsys.data_pipeline.rules.chain import RuleChain
from llmsys.data_pipeline.stages.extract_text import extract_file
from llmsys.dataset.token_shards import read_batches
from tools.bench.measurement import measure_cpu_seconds, measure_median_seconds
from tools.bench.rules import RULES, apply_rules

BATCH = 128
NO_DUPLICATES = DeduplicationConfig.model_validate(
    {"exact": {"kind": "none"}, "minhash": {"kind": "none"}}
)


def ignore_progress(amount: float, dropped: int) -> None:
    """Accept progress and show none."""


def read_llmsys_records(files: Sequence[str]) -> tuple[int, int]:
    """Return the number of records and the bytes of payloads, read as a preparation reads them."""
    records = size = 0

    def count_record(record: Any) -> NonPageRecord:
        nonlocal records, size
        records, size = records + 1, size + len(record.block or b"")
        return NonPageRecord(record.offset)

    for path in files:
        with open_input_stream(path) as source:
            for _ in iter_records(source, count_record, 1 << 30):
                pass
    return records, size


def read_fastwarc_records(files: Sequence[str]) -> tuple[int, int]:
    """Return the same counts by FastWARC alone."""
    kinds = (
        WarcRecordType.response
        | WarcRecordType.resource
        | WarcRecordType.conversion
        | WarcRecordType.continuation
    )
    records = size = 0
    for path in files:
        with open(path, "rb") as stream:
            for record in ArchiveIterator(stream, record_types=kinds, parse_http=False):
                records, size = records + 1, size + len(record.reader.read())
    return records, size


def prepare_documents(files: Sequence[str], config: CrawlConfig) -> dict[str, int]:
    """Prepare filtered documents from WARC in this process, without deduplication; return the
    counts.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = {"folder": Path(folder), "inputs": tuple(files), "deduplicate": NO_DUPLICATES}
        data = config.model_copy(update=given | {"executor": InlineExecutorConfig()})
        manifest = prepare_dataset(RunConfig(data=data), until="documents")
    kept = sum(file.rows for file in manifest.documents.files)
    return {
        "html": manifest.read.html_bytes,
        "pages": manifest.funnel[0].documents_out,
        "kept": kept,
    }


def extract_english_texts(files: Sequence[str], config: CrawlConfig) -> tuple[list[str], list[str]]:
    """Return texts and URLs of the English pages, in crawl order."""
    texts: list[str] = []
    addresses: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, path in enumerate(files):
            output = Path(folder, str(number))
            unread = output.with_suffix(".unread")
            extract_file(
                ignore_progress,
                source=path,
                output=output,
                unread=unread,
                config=config.extract,
                read=config.read,
            )
            for batch in read_batches(output):
                batch = batch.filter(batch.column("text").is_valid())
                stays = compute_keep_mask(
                    *identify_languages(batch.column("text"), config.language), config.language
                )
                texts += batch.filter(stays).column("text").to_pylist()
                addresses += batch.filter(stays).column("url").to_pylist()
    return texts, addresses


def measure_rule_chain(texts: Sequence[str], repeats: int) -> tuple[float, float, list[str | None]]:
    """Return CPU seconds of FineWeb's rules cold and warm, and the rewritten text of each kept
    document.
    """
    apply_rules(RuleChain(RULES), ["Load the word splitter before the clock starts."])
    cold, warm = [], []
    for _ in range(repeats):
        memory = RuleChain(RULES)
        again = partial(apply_rules, memory, texts)
        cold.append(measure_cpu_seconds(again)[0])
        took, results = measure_cpu_seconds(again)
        warm.append(took)
    return statistics.median(cold), statistics.median(warm), results


def measure_minhash(texts: Sequence[str], kind: str, repeats: int) -> tuple[float, list[Any]]:
    """Return CPU seconds of signatures with a hash, and the signatures; None for a text that is
    too short.
    """
    signer = MinHasher(MinHashDedupConfig.model_validate({"hash": kind}))

    def compute_signatures() -> list[Any]:
        found: list[Any] = []
        for start in range(0, len(texts), BATCH):
            table, present = signer.compute_signatures(
                pa.array(texts[start : start + BATCH], pa.large_string())
            )
            found += [
                row if is_there else None
                for row, is_there in zip(table, present.tolist(), strict=True)
            ]
        return found

    compute_signatures()
    return measure_median_seconds(compute_signatures, repeats)


def compute_equal_share(ours: Sequence[Any], theirs: Sequence[list[list[int]]]) -> float:
    """Return the share of texts with bit-equal signatures. A text that is too short has none on
    our side.
    """
    same = 0
    for mine, other in zip(ours, theirs, strict=True):
        flat = np.array(other, np.uint64).reshape(-1) if other else None
        same += (
            mine is None
            if flat is None or not len(flat)
            else mine is not None and bool(np.array_equal(mine, flat))
        )
    return same / max(1, len(theirs))
