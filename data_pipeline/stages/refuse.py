"""Pages in, those that no URL list refuses out, and the others as rows that say why.

Reads record batches of pages before anything is extracted from them. Rows of refused pages carry their verdict in
columns of their own, which exist only when the config has URL lists.
"""

import numpy as np
import pyarrow as pa

from data_pipeline.document import TEXT_SCHEMA
from data_pipeline.rules.url import Refusal, UrlRules, url_rules
from llmsys.config.url import UrlConfig, UrlLists

STAGE = "url"
_FIELDS = (
    ("url_test", pa.string()),
    ("url_value", pa.float64()),
    ("url_threshold", pa.float64()),
    ("url_reason", pa.string()),
)


def text_schema(config: UrlConfig) -> pa.Schema:
    """Return the schema of extracted texts: with the verdicts on URLs when there are lists."""
    return pa.schema([*TEXT_SCHEMA, *_FIELDS]) if isinstance(config, UrlLists) else TEXT_SCHEMA


class Gate:
    """Lets pages through, or not."""

    def __init__(self, config: UrlConfig, digests: tuple[str, ...]) -> None:
        """Load the lists, whose files have these digests, once per process."""
        self._rules: UrlRules | None = url_rules(config, digests) if isinstance(config, UrlLists) else None
        self._refusals: list[Refusal | None] = []

    def split(self, pages: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Return the pages that go on, and those that do not."""
        if self._rules is None:
            return pages, pages.slice(0, 0)
        refusals = self._rules.judge(pages.column("url").to_pylist())
        refused = np.array([refusal is not None for refusal in refusals], np.bool_)
        self._refusals = [refusal for refusal in refusals if refusal is not None]
        return pages.filter(pa.array(~refused)), pages.filter(pa.array(refused))

    def passed(self, texts: pa.RecordBatch) -> pa.RecordBatch:
        """Add empty verdicts to the texts of pages that went on."""
        return texts if self._rules is None else self._with(texts, [None] * texts.num_rows)

    def refused(self, texts: pa.RecordBatch) -> pa.RecordBatch:
        """Add their verdicts to the rows of the pages that `split` refused last."""
        return texts if self._rules is None else self._with(texts, self._refusals)

    def _with(self, texts: pa.RecordBatch, refusals: list[Refusal | None]) -> pa.RecordBatch:
        verdicts = [(one.test, one.value, one.threshold, one.reason) if one else (None,) * 4 for one in refusals]
        columns = zip(*verdicts, strict=True) if verdicts else [()] * 4
        arrays = [pa.array(column, kind) for column, (_, kind) in zip(columns, _FIELDS, strict=True)]
        return pa.record_batch([*texts.columns, *arrays], schema=pa.schema([*TEXT_SCHEMA, *_FIELDS]))
