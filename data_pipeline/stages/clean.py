"""Remove evaluation items and personal data from collected documents.

Reads one file of collected documents and its dropped ones. Writes the final documents and a
contamination report. Runs only if the config selects it; otherwise collected documents are final.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from llmsys.config.cleaning import PiiReplacementConfig
from llmsys.config.data import CrawlConfig
from llmsys.config.decontamination import NgramDecontaminationConfig
from llmsys.data_pipeline.core.document_schema import (
    DROPPED_SCHEMA,
    concat_batches,
    count_text_bytes,
    read_rows,
)
from llmsys.data_pipeline.core.funnel import DECONTAMINATE, PII, FunnelCounts, build_dropped_rows
from llmsys.data_pipeline.decontaminate.contamination_report import (
    ContaminationJudge,
    summarize_rows,
    write_contamination_report,
)
from llmsys.data_pipeline.decontaminate.evaluation_index import load_evaluation_index
from llmsys.data_pipeline.executors.base import Report
from llmsys.data_pipeline.stages.collect import LENGTH_EDGES
from llmsys.dataset.token_shards import ArrowFileWriter, read_batches, read_schema


@dataclass(frozen=True)
class ContaminationInput:
    """Location of the n-gram matches of one file of documents: batch `number` of `matches`.

    Attributes:
        matches: File of matches of all files, one batch each.
        number: Batch of this file.
        index: The n-gram index.
        items: The evaluation items of the index.
        fuzzy: The index of fuzzy matches; None without them.
        digest: Digest of the index; it keys the cache of loaded indexes.
        about: Results of indexing and matching: counts of the sets, and n-grams that are exempt.
    """

    matches: Path
    number: int
    index: Path
    items: Path
    fuzzy: Path | None
    digest: str
    about: Mapping[str, Any]


def clean_file(
    report: Report,
    *,
    source: tuple[Path, Path],
    outputs: Sequence[Path],
    made: Mapping[str, Any],
    contamination: ContaminationInput | None,
    config: CrawlConfig,
) -> dict[str, Any]:
    """Clean one file of documents. Progress is in documents.

    Args:
        report: Progress callback.
        source: Collected documents and dropped documents.
        outputs: Paths for documents, dropped documents and, with decontamination, the contamination
            report.
        made: Result of collecting the file. Its counts are carried over.
        contamination: Matches of this file. None without decontamination.
        config: The crawl section of a run.

    Returns:
        `made` with the counts of the cleaned file.
    """
    cleaner = _Cleaner(config, contamination)
    documents, dropped, *found = outputs
    schema = cleaner.build_schema(read_schema(source[0]))
    with (
        ArrowFileWriter(documents, schema, "zstd") as kept,
        ArrowFileWriter(dropped, read_schema(source[1]), "zstd") as gone,
    ):
        # Earlier drops come first: the file stays ordered by stage.
        for batch in read_batches(source[1]):
            gone.write(batch)
        for batch in read_batches(source[0]):
            before = batch.num_rows
            batch = cleaner.clean_batch(batch)
            if batch.num_rows:
                kept.write(pa.record_batch(batch.columns, schema=schema))
            report(before, before - batch.num_rows)
        if cleaner.drops:
            gone.write(cleaner.build_dropped_batch(read_schema(source[1])))
    for path in found:
        write_contamination_report(path, cleaner.findings)
    cleaner.tally.merge_counts(FunnelCounts(made["tally"]))
    about = {"contamination": contamination.about} if contamination else {}
    return {
        **made,
        **about,
        **cleaner.build_result(),
        "dropped_rows": made["dropped_rows"] + len(cleaner.drops),
    }


class _Cleaner:
    """Passes batches through decontamination and replacement, and counts."""

    def __init__(self, config: CrawlConfig, contamination: ContaminationInput | None) -> None:
        self.pii = config.pii if isinstance(config.pii, PiiReplacementConfig) else None
        self.tally = FunnelCounts()
        self.drops: list[dict[str, Any]] = []
        self._dropped_documents: list[pa.RecordBatch] = []
        self.findings: list[dict[str, Any]] = []
        self._lengths = np.zeros(len(LENGTH_EDGES) - 1, np.int64)
        self._text_bytes = self._rows = self._seen = 0
        self._matches: pa.RecordBatch | None = None
        if contamination is not None and isinstance(
            config.decontaminate, NgramDecontaminationConfig
        ):
            self._matches = next(read_batches(contamination.matches, [contamination.number]))
            index = load_evaluation_index(
                contamination.index, contamination.fuzzy, contamination.digest
            )
            self._findings = ContaminationJudge(config.decontaminate, index, contamination.items)

    def build_schema(self, schema: pa.Schema) -> pa.Schema:
        """Return the schema of the cleaned documents: one more column per kind of personal data."""
        fields = [
            pa.field(f"{PII}.{kind}", pa.float32()) for kind in (self.pii.kinds if self.pii else ())
        ]
        return pa.schema([*schema, *fields], schema.metadata)

    def build_dropped_batch(self, schema: pa.Schema) -> pa.RecordBatch:
        """Return the drops with the columns of the input that their documents had."""
        drops = pa.RecordBatch.from_pylist(self.drops, DROPPED_SCHEMA)
        documents = concat_batches(self._dropped_documents)
        columns = [
            (drops if name in DROPPED_SCHEMA.names else documents).column(name)
            for name in schema.names
        ]
        return pa.record_batch(columns, schema=schema)

    def clean_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the documents that stay, cleaned."""
        if self._matches is not None:
            batch = self._decontaminate_batch(batch, self._matches)
        if self.pii:
            batch = self._replace_batch_pii(batch, self.pii)
        self._rows += batch.num_rows
        self._text_bytes += int(count_text_bytes(batch.column("text")).sum())
        self._lengths += np.histogram(
            pc.utf8_length(batch.column("text")).to_numpy(), LENGTH_EDGES
        )[0]
        return batch

    def _decontaminate_batch(
        self, batch: pa.RecordBatch, matches: pa.RecordBatch
    ) -> pa.RecordBatch:
        self._add_batch_counts(DECONTAMINATE, batch, "in")
        # Matches count rows from the start of the file, batches from their own.
        rows = matches.column("row").to_numpy() - self._seen  # sorted, like the documents
        self._seen += batch.num_rows
        stays = np.ones(batch.num_rows, np.bool_)
        texts: dict[int, str] = {}
        for row in np.unique(rows[(rows >= 0) & (rows < batch.num_rows)]).tolist():
            document = read_rows(batch.slice(row, 1))[0]
            first, last = np.searchsorted(rows, [row, row + 1]).tolist()
            finding = self._findings.judge_document(document, matches.slice(first, last - first))
            self.findings += finding.rows
            if finding.verdict:
                stays[row] = False
                drops = build_dropped_rows([document], DECONTAMINATE, [finding.verdict])
                self.tally.add_drops(drops)
                self.drops += drops
                self._dropped_documents.append(batch.slice(row, 1))
            elif finding.text is not None:
                texts[row] = finding.text
                gone = len(document["text"]) - len(finding.text)
                self.tally.add_changes(DECONTAMINATE, {"documents cut": 1, "characters cut": gone})
        batch = _replace_texts(batch, texts).filter(pa.array(stays))
        self._add_batch_counts(DECONTAMINATE, batch, "out")
        return batch

    def _replace_batch_pii(
        self, batch: pa.RecordBatch, config: PiiReplacementConfig
    ) -> pa.RecordBatch:
        from llmsys.data_pipeline.text.pii_replacement import replace_pii, sum_counts

        self._add_batch_counts(PII, batch, "in")
        texts, counts = replace_pii(batch.column("text"), batch.column("id").to_pylist(), config)
        self.tally.add_changes(PII, sum_counts(counts, config.kinds))
        batch = batch.set_column(batch.schema.get_field_index("text"), "text", texts)
        for kind in config.kinds:
            batch = batch.append_column(f"{PII}.{kind}", pa.array(counts[kind], pa.float32()))
        self._add_batch_counts(PII, batch, "out")
        return batch

    def _add_batch_counts(self, stage: str, batch: pa.RecordBatch, side: str) -> None:
        size = int(count_text_bytes(batch.column("text")).sum())
        self.tally.add_amounts(
            stage, **{f"documents_{side}": batch.num_rows, f"bytes_{side}": size}
        )

    def build_result(self) -> dict[str, Any]:
        """Return the counts of the file."""
        return {
            "tally": self.tally.to_dict(),
            "lengths": self._lengths.tolist(),
            "text_bytes": self._text_bytes,
            "documents_rows": self._rows,
            "decontamination": summarize_rows(self.findings),
        }


def _replace_texts(batch: pa.RecordBatch, texts: Mapping[int, str]) -> pa.RecordBatch:
    """Return the batch with the texts of some rows replaced."""
    if not texts:
        return batch
    column = batch.column("text")
    changed = [texts.get(row, text) for row, text in enumerate(column.to_pylist())]
    return batch.set_column(
        batch.schema.get_field_index("text"), "text", pa.array(changed, column.type)
    )
