"""Our side of tools/bench/data.py: each part of the pipeline alone, in this process, with its CPU seconds."""

import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from fastwarc.warc import ArchiveIterator, WarcRecordType

from data_pipeline.dedup.minhash import Signer
from data_pipeline.language.identify import identify, keep_mask
from data_pipeline.pipeline import prepare
from data_pipeline.readers.page import Other
from data_pipeline.readers.record import walk
from data_pipeline.readers.source import open_source
from data_pipeline.rules.chain import RuleChain
from data_pipeline.stages.extract import extract_file
from llmsys.config.data import CrawlConfig
from llmsys.config.deduplicate import DeduplicateConfig, MinhashDuplicates
from llmsys.config.executor import InlineExecutor
from llmsys.config.run import RunConfig
from llmsys.shards import read_batches
from tools.bench.measure import cpu_seconds, median_seconds
from tools.bench.rules import RULES, judge

BATCH = 128
NO_DUPLICATES = DeduplicateConfig.model_validate({"exact": {"kind": "none"}, "minhash": {"kind": "none"}})


def silent(amount: float, dropped: int) -> None:
    """Progress that nobody sees."""


def iterate_ours(files: Sequence[str]) -> tuple[int, int]:
    """Records and bytes of payloads, read as a preparation reads them."""
    records = size = 0

    def take(record: Any) -> Other:
        nonlocal records, size
        records, size = records + 1, size + len(record.block or b"")
        return Other(record.offset)

    for path in files:
        with open_source(path) as source:
            for _ in walk(source, take, 1 << 30):
                pass
    return records, size


def iterate_fastwarc(files: Sequence[str]) -> tuple[int, int]:
    """The same records by FastWARC alone."""
    kinds = WarcRecordType.response | WarcRecordType.resource | WarcRecordType.conversion | WarcRecordType.continuation
    records = size = 0
    for path in files:
        with open(path, "rb") as stream:
            for record in ArchiveIterator(stream, record_types=kinds, parse_http=False):
                records, size = records + 1, size + len(record.reader.read())
    return records, size


def to_documents(files: Sequence[str], config: CrawlConfig) -> dict[str, int]:
    """From WARC to filtered documents by a whole preparation in this process, without comparing documents."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"folder": Path(folder), "inputs": tuple(files), "deduplicate": NO_DUPLICATES}
        data = config.model_copy(update=given | {"executor": InlineExecutor()})
        manifest = prepare(RunConfig(data=data), until="documents")
    kept = sum(file.rows for file in manifest.documents.files)
    return {"html": manifest.read.html_bytes, "pages": manifest.funnel[0].documents_out, "kept": kept}


def english(files: Sequence[str], config: CrawlConfig) -> tuple[list[str], list[str]]:
    """Texts and addresses of the English pages, in the order of the crawl."""
    texts: list[str] = []
    addresses: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, path in enumerate(files):
            output = Path(folder, str(number))
            unread = output.with_suffix(".unread")
            extract_file(silent, source=path, output=output, unread=unread, config=config.extract, read=config.read)
            for batch in read_batches(output):
                batch = batch.filter(batch.column("text").is_valid())
                stays = keep_mask(*identify(batch.column("text"), config.language), config.language)
                texts += batch.filter(stays).column("text").to_pylist()
                addresses += batch.filter(stays).column("url").to_pylist()
    return texts, addresses


def chain(texts: Sequence[str], repeats: int) -> tuple[float, float, list[str | None]]:
    """CPU seconds of FineWeb's rules from cold and once warm, and the rewritten text of each document that stays."""
    judge(RuleChain(RULES), ["Load the word splitter before the clock starts."])
    cold, warm = [], []
    for _ in range(repeats):
        memory = RuleChain(RULES)
        again = partial(judge, memory, texts)
        cold.append(cpu_seconds(again)[0])
        took, results = cpu_seconds(again)
        warm.append(took)
    return statistics.median(cold), statistics.median(warm), results


def minhash(texts: Sequence[str], kind: str, repeats: int) -> tuple[float, list[Any]]:
    """CPU seconds of signatures with a hash, and the signatures; None for a text too short for one."""
    signer = Signer(MinhashDuplicates.model_validate({"hash": kind}))

    def all_of_them() -> list[Any]:
        found: list[Any] = []
        for start in range(0, len(texts), BATCH):
            table, present = signer.signatures(pa.array(texts[start : start + BATCH], pa.large_string()))
            found += [row if is_there else None for row, is_there in zip(table, present.tolist(), strict=True)]
        return found

    all_of_them()
    return median_seconds(all_of_them, repeats)


def equal_signatures(ours: Sequence[Any], theirs: Sequence[list[list[int]]]) -> float:
    """The share of texts whose signatures have the same bits; a text too short for one has none on our side."""
    same = 0
    for mine, other in zip(ours, theirs, strict=True):
        flat = np.array(other, np.uint64).reshape(-1) if other else None
        same += mine is None if flat is None or not len(flat) else mine is not None and bool(np.array_equal(mine, flat))
    return same / max(1, len(theirs))
