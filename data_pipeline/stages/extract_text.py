"""Extract the texts of the pages of one input block.

Reads a crawl file or a file of documents. Writes one Arrow file of `TEXT_SCHEMA` with a row per
page, and one of `DROPPED_SCHEMA` with a row per unreadable place. HTML is extracted; a document
that is already text is taken as it is.

Separate pages that URL lists reject, before anything is extracted from them.

Rows of rejected pages carry their verdict in columns that exist only if the config has URL lists.

Invariants:
- Unreadable records are counted with their reason. They stop neither the file nor the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from llmsys.config.cleaning import UrlConfig, UrlFilterConfig
from llmsys.data_pipeline.core.document_schema import TEXT_SCHEMA

if TYPE_CHECKING:
    from llmsys.data_pipeline.rules.url import UrlFilter, UrlRejection


from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsys.config.cleaning import (
    ArticleExtractorConfig,
    ExtractConfig,
    NoUrlFilter,
    ReadConfig,
)
from llmsys.data_pipeline.core.document_schema import (
    DROPPED_SCHEMA,
    add_fields_column,
    compute_document_id,
)
from llmsys.data_pipeline.core.input_fields import FIELDS, FieldCounts
from llmsys.data_pipeline.core.native import count_core_pages
from llmsys.data_pipeline.executors.base import Report
from llmsys.data_pipeline.stages.split_inputs import compute_block_digest
from llmsys.dataset.token_shards import ArrowFileWriter
from llmsys.log import redact_url
from llmsys.storage.paths import is_remote

if TYPE_CHECKING:
    from llmsys.data_pipeline.extract.extractor import ExtractionResult
    from llmsys.data_pipeline.readers.page_batch import SkippedRecord


URL_STAGE = "url"
MARKDOWN = "markdown"  # column of the extracted texts as Markdown
_FIELDS = (
    ("url_test", pa.string()),
    ("url_value", pa.float64()),
    ("url_threshold", pa.float64()),
    ("url_reason", pa.string()),
)


def build_text_schema(urls: UrlConfig, extract: ExtractConfig, keeps_fields: bool) -> pa.Schema:
    """Return the schema of extracted texts, with a column of Markdown if documents are Markdown,
    one of further fields if they are kept, and verdict columns if there are URL lists.
    """
    schema = _build_page_schema(extract, keeps_fields)
    return pa.schema([*schema, *_FIELDS]) if isinstance(urls, UrlFilterConfig) else schema


def _build_page_schema(extract: ExtractConfig, keeps_fields: bool) -> pa.Schema:
    """Return the schema of texts without verdicts on their URLs."""
    schema = TEXT_SCHEMA
    if isinstance(extract, ArticleExtractorConfig) and extract.format == "markdown":
        schema = schema.append(pa.field(MARKDOWN, pa.large_string()))
    return add_fields_column(schema) if keeps_fields else schema


class UrlGate:
    """Splits pages into accepted and rejected ones."""

    def __init__(self, config: UrlConfig, digests: tuple[str, ...]) -> None:
        """Load the lists once per process. `digests` are those of their files."""
        self._rules: UrlFilter | None = None
        if isinstance(config, UrlFilterConfig):
            # tldextract: only where lists are configured
            from llmsys.data_pipeline.rules.url import load_url_filter

            self._rules = load_url_filter(config, digests)
        self._rejections: list[UrlRejection | None] = []

    def split_pages(self, pages: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Return the accepted and the rejected pages."""
        if self._rules is None:
            return pages, pages.slice(0, 0)
        rejections = self._rules.apply(pages.column("url").to_pylist())
        rejected = np.array([rejection is not None for rejection in rejections], np.bool_)
        self._rejections = [rejection for rejection in rejections if rejection is not None]
        return pages.filter(pa.array(~rejected)), pages.filter(pa.array(rejected))

    def add_empty_verdicts(self, texts: pa.RecordBatch) -> pa.RecordBatch:
        """Add empty verdicts to the texts of accepted pages."""
        return (
            texts if self._rules is None else self._append_verdicts(texts, [None] * texts.num_rows)
        )

    def add_verdicts(self, texts: pa.RecordBatch) -> pa.RecordBatch:
        """Add their verdicts to the rows of the pages that `split_pages` rejected last."""
        return texts if self._rules is None else self._append_verdicts(texts, self._rejections)

    def _append_verdicts(
        self, texts: pa.RecordBatch, rejections: list[UrlRejection | None]
    ) -> pa.RecordBatch:
        verdicts = [
            (rejection.test, rejection.value, rejection.threshold, rejection.reason)
            if rejection
            else (None,) * 4
            for rejection in rejections
        ]
        columns = zip(*verdicts, strict=True) if verdicts else [()] * 4
        arrays = [
            pa.array(column, kind) for column, (_, kind) in zip(columns, _FIELDS, strict=True)
        ]
        return pa.record_batch(
            [*texts.columns, *arrays], schema=pa.schema([*texts.schema, *_FIELDS])
        )


_MAX_REASONS = 1_000  # a hostile file may have a new reason for every record

_EVERY_URL = NoUrlFilter()


def extract_file(
    report: Report,
    *,
    source: str,
    output: Path,
    unread: Path,
    config: ExtractConfig,
    read: ReadConfig,
    start: int = 0,
    stop: int | None = None,
    urls: UrlConfig = _EVERY_URL,
    lists: tuple[str, ...] = (),
    identity: str = "",
) -> dict[str, Any]:
    """Extract one file, or a byte range of it. Progress is in (compressed) bytes of the file.

    Args:
        report: Progress callback.
        source: Path or URL.
        output: File to write the texts to.
        unread: File to write the unreadable places to.
        config: Extractor and limits per page.
        read: Field names, digests and retries.
        start: First byte of the range.
        stop: End of the range. None: the end of the file.
        urls: URL filter. Pages that it rejects are not extracted.
        lists: Digests of its list files. They key the cache of loaded lists.
        identity: Identity of a block of a local file; "" for any other.

    Returns:
        With an identity, that and the digest of the block; counts of records, pages and bytes;
        skips and notes by file and reason; names and kinds of further fields; `again`: whether its
        storage failed.
    """
    # not where the stage is only planned
    from llmsys.data_pipeline.readers.input_stream import format_file_name
    from llmsys.data_pipeline.readers.page_reader import read_pages

    # Just before its bytes are read: then the disk gives them once.
    digest = compute_block_digest(source, start, stop) if identity else ""
    gate = UrlGate(urls, lists)
    before = count_core_pages()
    records = pages = html_bytes = given_text_bytes = position = 0
    skipped = _SkipCounts()
    noted = _SkipCounts()
    dropped_batches = list[list[int]]()
    keeps_fields = read.keep_fields != "none"
    schema = build_text_schema(urls, config, keeps_fields)
    field_counts = FieldCounts() if keeps_fields else None
    with (
        ArrowFileWriter(output, schema, "zstd") as writer,
        ArrowFileWriter(unread, DROPPED_SCHEMA, "zstd") as unread_writer,
    ):
        for batch in read_pages(
            source, max_page_bytes=config.max_page_bytes, config=read, start=start, stop=stop
        ):
            given_text_bytes += _count_given_text_bytes(batch.pages)
            fields = batch.pages.column("fields")
            if field_counts is not None and fields.null_count < len(fields):
                field_counts.add_cells(fields.to_pylist(), batch.pages.column("offset").to_pylist())
            allowed, rejected = gate.split_pages(batch.pages)
            for texts in (
                gate.add_empty_verdicts(
                    _build_text_batch(allowed, config, keeps_fields, is_extracted=True)
                ),
                gate.add_verdicts(
                    _build_text_batch(rejected, config, keeps_fields, is_extracted=False)
                ),
            ):
                if texts.num_rows:
                    writer.write(texts)
                pages += texts.num_rows
                html_bytes += sum(texts.column("bytes_html").to_pylist())
            if batch.skipped:
                unread_writer.write(_build_unread_batch(batch.skipped))
                dropped_batches.append([0, len(batch.skipped)])
            records += batch.records
            report(max(0, batch.position - position), skipped.add_skips(batch.skipped))
            noted.add_skips(batch.noted)
            position = max(position, batch.position)
    counts: dict[str, Any] = {
        "records": records,
        "pages": pages,
        "html_bytes": html_bytes,
        "dropped_batches": dropped_batches,
    }
    counts["given_text_bytes"] = given_text_bytes
    after = count_core_pages()
    # for the event of the stage; no file depends on it
    counts["compiled_pages"] = after.compiled - before.compiled
    counts["left_pages"] = after.left - before.left
    if digest:
        counts |= {"identity": identity, "digest": digest}
    if field_counts is not None:
        counts["fields"] = field_counts.to_dict(
            redact_url(source) if is_remote(source) else format_file_name(source)
        )
    return counts | {
        "skipped": skipped.to_list(),
        "noted": noted.to_list(),
        "is_provisional": skipped.again,
    }


def _count_given_text_bytes(pages: pa.RecordBatch) -> int:
    """Return the UTF-8 bytes of documents that came as text."""
    import pyarrow.compute as pc  # slow to import

    return int(pc.sum(pc.binary_length(pages.column("text"))).as_py() or 0)


def _build_text_batch(
    pages: pa.RecordBatch, config: ExtractConfig, keeps_fields: bool, *, is_extracted: bool
) -> pa.RecordBatch:
    """Build rows of `TEXT_SCHEMA`, with Markdown and further fields if the config asks for them.
    Rejected pages are not extracted.
    """
    names = ("url", "date", "file", "offset", "note", FIELDS)
    columns = {name: pages.column(name) for name in names}
    given = pages.column("text").to_pylist()
    contents = [
        payload if text is None else text.encode()
        for text, payload in zip(given, pages.column("payload").to_pylist(), strict=True)
    ]
    named = zip(
        *(pages.column(name).to_pylist() for name in ("id", "url", "date")), contents, strict=True
    )
    # Files of documents may bring their own ids.
    ids = [name or compute_document_id(url, date, content) for name, url, date, content in named]
    columns["id"] = pa.array(ids, pa.string())
    columns["bytes_html"] = pa.array(map(len, contents), pa.int64())
    nulls = pa.nulls(len(given), pa.large_string())
    columns["text"], limit_hits, columns[MARKDOWN] = (
        _extract_missing_texts(pages, given, config)
        if is_extracted
        else (nulls, [None] * len(given), nulls)
    )
    for field in ("test", "value", "threshold"):
        limits = [violation and getattr(violation, field) for violation in limit_hits]
        columns[f"extract_{field}"] = pa.array(limits, TEXT_SCHEMA.field(f"extract_{field}").type)
    schema = _build_page_schema(config, keeps_fields)
    return pa.record_batch([columns[name] for name in schema.names], schema=schema)


def _extract_missing_texts(
    pages: pa.RecordBatch, given: list[str | None], config: ExtractConfig
) -> ExtractionResult:
    """Return the texts of a batch: given texts unchanged (null if blank), the others extracted.
    Given texts have no Markdown.
    """
    # not where the stage is only planned
    from llmsys.data_pipeline.extract.extractor import ExtractionResult, extract_pages

    if not any(text is not None for text in given):
        return extract_pages(pages, config)
    is_html = pa.array([text is None for text in given])
    html = extract_pages(pages.filter(is_html), config)
    made = zip(html.texts.to_pylist(), html.limit_hits, strict=True)
    both = [
        next(made) if text is None else (text if text.strip() else None, None) for text in given
    ]
    forms = iter(html.markdown.to_pylist() if html.markdown is not None else ())
    markdown = [next(forms, None) if text is None else None for text in given]
    return ExtractionResult(
        pa.array([text for text, _ in both], pa.large_string()),
        [violation for _, violation in both],
        pa.array(markdown, pa.large_string()),
    )


def _build_unread_batch(skips: Sequence[SkippedRecord]) -> pa.RecordBatch:
    """Return skips as dropped documents without URL and text."""
    rows = [
        {
            **dict.fromkeys(("url", "text"), ""),
            "id": compute_document_id(skip.file, str(skip.offset), skip.reason.encode()),
            "file": skip.file,
            "offset": skip.offset,
            **dict.fromkeys(("stage", "rule"), "read"),
            "test": skip.reason,
            "reason": skip.reason if skip.count == 1 else f"{skip.reason} ({skip.count} documents)",
            "bytes": 0,
        }
        for skip in skips
    ]
    return pa.RecordBatch.from_pylist(rows, DROPPED_SCHEMA)


class _SkipCounts:
    """Counts skips by file and reason, with the offset of the first."""

    def __init__(self) -> None:
        self._by_reason: dict[tuple[str, str], dict[str, Any]] = {}
        self.again = False

    def add_skips(self, skips: Iterable[SkippedRecord]) -> int:
        """Add skips and return the number of records they cover."""
        total = 0
        for skip in skips:
            reason = (
                skip.reason
                if len(self._by_reason) < _MAX_REASONS
                else "for one of many other reasons"
            )
            first = {"file": skip.file, "offset": skip.offset, "reason": reason, "count": 0}
            self._by_reason.setdefault((skip.file, reason), first)["count"] += skip.count
            self.again = self.again or skip.is_retryable
            total += skip.count
        return total

    def to_list(self) -> list[dict[str, Any]]:
        return list(self._by_reason.values())
