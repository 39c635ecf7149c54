"""One crawl file in, the texts of its pages out.

Reads a WARC file, writes one Arrow file of `TEXT_SCHEMA` with a row per page. What could not be read is counted with
its reason and stops neither the file nor the others.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_pipeline.document import TEXT_SCHEMA, document_id
from data_pipeline.executors.event import Report
from data_pipeline.extract.html import extract_text
from data_pipeline.readers.page import PAGE_SCHEMA, PageBatch, Skip
from data_pipeline.readers.warc import read_pages
from llmsys.config.text import ExtractConfig
from llmsys.shards import ShardWriter


def extract_file(report: Report, *, source: str, output: Path, config: ExtractConfig) -> dict[str, Any]:
    """Extract one crawl file; progress is in its (compressed) bytes."""
    records = pages = html_bytes = position = 0
    skips: list[Skip] = []
    with ShardWriter(output, TEXT_SCHEMA, "zstd") as writer:
        for batch in _read(source, config.max_page_bytes):
            texts = _texts(batch.pages, config)
            if texts.num_rows:
                writer.write(texts)
            records += batch.records
            pages += texts.num_rows
            html_bytes += sum(texts.column("bytes_html").to_pylist())
            skips += batch.skipped
            report(max(0, batch.position - position), len(batch.skipped))
            position = max(position, batch.position)
    size = Path(source).stat().st_size if Path(source).exists() else 0
    report(max(0, size - position), 0)
    return {"records": records, "pages": pages, "html_bytes": html_bytes, "skipped": _summed(skips)}


def _read(source: str, max_page_bytes: int) -> Iterator[PageBatch]:
    """Read the pages of a file; an error of the file system ends the file as a counted skip."""
    position = 0
    try:
        for batch in read_pages(source, max_page_bytes=max_page_bytes):
            position = batch.position
            yield batch
    except OSError as error:
        skip = Skip(source, position, f"cannot be read: {error.strerror or error}")
        yield PageBatch(PAGE_SCHEMA.empty_table().combine_chunks().to_batches()[0], [skip], 0, position)


def _texts(pages: pa.RecordBatch, config: ExtractConfig) -> pa.RecordBatch:
    """Extract a batch of pages and give each its id."""
    columns = {name: pages.column(name) for name in ("url", "date", "file", "offset")}
    payloads = pages.column("payload").to_pylist()
    urls, dates = columns["url"].to_pylist(), columns["date"].to_pylist()
    columns["id"] = pa.array(map(document_id, urls, dates, payloads), pa.string())
    columns["bytes_html"] = pa.array(map(len, payloads), pa.int64())
    columns["text"] = extract_text(pages, config)
    return pa.record_batch([columns[name] for name in TEXT_SCHEMA.names], schema=TEXT_SCHEMA)


def _summed(skips: list[Skip]) -> list[dict[str, Any]]:
    """Count skips by file and reason, with the offset of the first."""
    summed: dict[tuple[str, str], dict[str, Any]] = {}
    for skip in skips:
        first = {"file": skip.file, "offset": skip.offset, "reason": skip.reason, "count": 0}
        summed.setdefault((skip.file, skip.reason), first)["count"] += 1
    return list(summed.values())
