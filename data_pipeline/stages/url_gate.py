"""Pages in, those that no URL list refuses out, and the others as rows that say why.

Reads record batches of pages before anything is extracted from them. Rows of refused pages carry their verdict in
columns of their own, which exist only when the config has URL lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from data_pipeline.core.document_schema import TEXT_SCHEMA
from llmsys.config.url import UrlConfig, UrlFilterConfig

if TYPE_CHECKING:
    from data_pipeline.rules.url import UrlFilter, UrlRejection

STAGE = "url"
_FIELDS = (
    ("url_test", pa.string()),
    ("url_value", pa.float64()),
    ("url_threshold", pa.float64()),
    ("url_reason", pa.string()),
)


def build_text_schema(config: UrlConfig) -> pa.Schema:
    """Return the schema of extracted texts: with the verdicts on URLs when there are lists."""
    return pa.schema([*TEXT_SCHEMA, *_FIELDS]) if isinstance(config, UrlFilterConfig) else TEXT_SCHEMA


class UrlGate:
    """Lets pages through, or not."""

    def __init__(self, config: UrlConfig, digests: tuple[str, ...]) -> None:
        """Load the lists, whose files have these digests, once per process."""
        self._rules: UrlFilter | None = None
        if isinstance(config, UrlFilterConfig):
            from data_pipeline.rules.url import load_url_filter  # tldextract: only where lists are configured

            self._rules = load_url_filter(config, digests)
        self._refusals: list[UrlRejection | None] = []

    def split_pages(self, pages: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Return the pages that go on, and those that do not."""
        if self._rules is None:
            return pages, pages.slice(0, 0)
        refusals = self._rules.apply(pages.column("url").to_pylist())
        refused = np.array([refusal is not None for refusal in refusals], np.bool_)
        self._refusals = [refusal for refusal in refusals if refusal is not None]
        return pages.filter(pa.array(~refused)), pages.filter(pa.array(refused))

    def add_empty_verdicts(self, texts: pa.RecordBatch) -> pa.RecordBatch:
        """Add empty verdicts to the texts of pages that went on."""
        return texts if self._rules is None else self._append_verdicts(texts, [None] * texts.num_rows)

    def add_verdicts(self, texts: pa.RecordBatch) -> pa.RecordBatch:
        """Add their verdicts to the rows of the pages that `split_pages` refused last."""
        return texts if self._rules is None else self._append_verdicts(texts, self._refusals)

    def _append_verdicts(self, texts: pa.RecordBatch, refusals: list[UrlRejection | None]) -> pa.RecordBatch:
        verdicts = [(one.test, one.value, one.threshold, one.reason) if one else (None,) * 4 for one in refusals]
        columns = zip(*verdicts, strict=True) if verdicts else [()] * 4
        arrays = [pa.array(column, kind) for column, (_, kind) in zip(columns, _FIELDS, strict=True)]
        return pa.record_batch([*texts.columns, *arrays], schema=pa.schema([*TEXT_SCHEMA, *_FIELDS]))
