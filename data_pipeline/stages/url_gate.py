"""Separate pages that URL lists reject, before anything is extracted from them.

Rows of rejected pages carry their verdict in columns that exist only if the config has URL lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from data_pipeline.core.document_schema import TEXT_SCHEMA
from llmsys.config.cleaning import UrlConfig, UrlFilterConfig

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
    """Return the schema of extracted texts, with verdict columns if there are URL lists."""
    return pa.schema([*TEXT_SCHEMA, *_FIELDS]) if isinstance(config, UrlFilterConfig) else TEXT_SCHEMA


class UrlGate:
    """Splits pages into accepted and rejected ones."""

    def __init__(self, config: UrlConfig, digests: tuple[str, ...]) -> None:
        """Load the lists once per process. `digests` are those of their files."""
        self._rules: UrlFilter | None = None
        if isinstance(config, UrlFilterConfig):
            from data_pipeline.rules.url import load_url_filter  # tldextract: only where lists are configured

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
        return texts if self._rules is None else self._append_verdicts(texts, [None] * texts.num_rows)

    def add_verdicts(self, texts: pa.RecordBatch) -> pa.RecordBatch:
        """Add their verdicts to the rows of the pages that `split_pages` rejected last."""
        return texts if self._rules is None else self._append_verdicts(texts, self._rejections)

    def _append_verdicts(self, texts: pa.RecordBatch, rejections: list[UrlRejection | None]) -> pa.RecordBatch:
        verdicts = [
            (rejection.test, rejection.value, rejection.threshold, rejection.reason) if rejection else (None,) * 4
            for rejection in rejections
        ]
        columns = zip(*verdicts, strict=True) if verdicts else [()] * 4
        arrays = [pa.array(column, kind) for column, (_, kind) in zip(columns, _FIELDS, strict=True)]
        return pa.record_batch([*texts.columns, *arrays], schema=pa.schema([*TEXT_SCHEMA, *_FIELDS]))
