"""Filter extracted texts by language and rules.

Reads one file of extracted texts. Writes the kept documents with the statistics of the rules, and
the dropped ones with the test that dropped each.

Invariants:
    - Each record batch holds documents of one document file, so that collecting reads only the
      batches it needs.
    - Memory is bounded by the bytes of buffered text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from llmsys.config.cleaning import NoUnicodeRepair, NoUrlFilter, UnicodeConfig
from llmsys.config.data import CrawlConfig
from llmsys.config.language import LanguageConfig
from llmsys.data_pipeline.core.document_schema import (
    DROPPED_SCHEMA,
    PartitionWriter,
    add_fields_column,
    build_document_schema,
    concat_batches,
    count_text_bytes,
)
from llmsys.data_pipeline.core.funnel import (
    FunnelCounts,
    build_dropped_rows,
    format_reason,
    sort_in_file_order,
)
from llmsys.data_pipeline.core.input_fields import FIELDS
from llmsys.data_pipeline.executors.base import Report
from llmsys.data_pipeline.stages.extract_text import MARKDOWN
from llmsys.data_pipeline.stages.extract_text import URL_STAGE as URL
from llmsys.data_pipeline.text.markdown_lines import apply_line_changes
from llmsys.dataset.token_shards import read_batches, read_schema

if TYPE_CHECKING:
    from llmsys.data_pipeline.rules.language_chains import LanguageRuleChains
    from llmsys.data_pipeline.rules.rule import RuleOutcome
    from llmsys.data_pipeline.stages.changed_thresholds import EarlierFiltering


UNICODE = "unicode"
_EXTRACTED = "extracted_text"  # column of the texts before the first rule
_VERDICT = ("test", "value", "threshold", "reason")


def apply_rules_to_file(
    report: Report,
    *,
    source: Path,
    kept: Path,
    dropped: Path,
    config: CrawlConfig,
    rules: str,
    files: tuple[str, ...] = (),
    earlier: EarlierFiltering | None = None,
    earlier_files: Mapping[str, Path] | None = None,
    scores: Path | None = None,
) -> dict[str, Any]:
    """Filter the texts of one input block. Progress is in pages.

    Args:
        report: Progress callback.
        source: File of extracted texts.
        kept: File to write the kept documents to.
        dropped: File to write the dropped documents to.
        config: The crawl section of a run.
        rules: Rules of each language, as `serialize_language_rules` writes them.
        files: Digests of the lists and models that the rules name. They key the cache of loaded
            rules.
        earlier: What another config made of the same texts. The output does not depend on it.
        earlier_files: Files of the documents that it `kept` and `dropped`.
        scores: Folder of the scores that models gave, if a rule has such a model.

    Returns:
        Funnel counts (`tally`), documents and bytes per language, and [document file, rows] of the
        batches in both files.
    """
    with ExitStack() as stack:
        if scores is not None:
            from llmsys.data_pipeline.rules.encoder_classifier import ScoreFiles, keep_scores

            stack.enter_context(keep_scores(ScoreFiles(scores, kept.name)))
        paths = (source, kept, dropped)
        if earlier is not None and earlier_files is not None:
            before = (earlier, earlier_files)
            found = _filter_changed(report, paths, config, (rules, files), before)
            if found is not None:
                return found
        return _filter_all(report, paths, config, (rules, files))


def _filter_all(
    report: Report,
    paths: tuple[Path, Path, Path],
    config: CrawlConfig,
    settings: tuple[str, tuple[str, ...]],
) -> dict[str, Any]:
    """Filter all texts of a block."""
    # not where the stage is only planned
    from llmsys.data_pipeline.rules.language_chains import get_language_chains

    source, kept, dropped = paths
    document_filter = _DocumentFilter(
        get_language_chains(*settings), config.language, config.unicode
    )
    columns = document_filter.chains.list_columns()
    limit = config.documents.batch_bytes
    schemas = [build_document_schema(columns), DROPPED_SCHEMA]
    if FIELDS in read_schema(source).names:
        schemas = [add_fields_column(schema) for schema in schemas]
    with (
        PartitionWriter(kept, schemas[0], config.documents.num_shards, limit) as kept_writer,
        PartitionWriter(dropped, schemas[1], config.documents.num_shards, limit) as dropped_writer,
    ):
        for texts in read_batches(source):
            kept_batch, drops = document_filter.filter_batch(texts)
            kept_writer.write(kept_batch)
            dropped_writer.write(pa.RecordBatch.from_pylist(sort_in_file_order(drops), schemas[1]))
            document_filter.tally.add_drops(drops)
            report(texts.num_rows, len(drops))
    documents = document_filter.language_documents
    sizes = document_filter.language_bytes
    return {
        "tally": document_filter.tally.to_dict(),
        "languages": {code: [documents[code], sizes[code]] for code in sorted(documents)},
        "kept_batches": kept_writer.batches,
        "dropped_batches": dropped_writer.batches,
    }


def _filter_changed(
    report: Report,
    paths: tuple[Path, Path, Path],
    config: CrawlConfig,
    settings: tuple[str, tuple[str, ...]],
    before: tuple[EarlierFiltering, Mapping[str, Path]],
) -> dict[str, Any] | None:
    """Filter only the documents whose verdict may be another one than under an earlier config.
    Return None where that is not possible.
    """
    from llmsys.data_pipeline.rules.language_chains import get_language_chains
    from llmsys.data_pipeline.stages.changed_thresholds import compare_rules, take_over_rows

    source, kept, dropped = paths
    earlier, files = before
    changes = compare_rules(earlier.rules, settings[0])
    taken = changes and take_over_rows(source, files, changes)
    if not changes or not taken:
        return None
    tally = FunnelCounts(earlier.result["tally"])
    tally.drops.clear()  # counted anew, because their examples are those with the smallest ids
    batch = taken.kept
    drops: list[dict[str, Any]] = []
    titles = [rule.title for rule in next(iter(changes.values()))]
    if taken.texts.num_rows:
        filters = [
            _DocumentFilter(get_language_chains(text, own), config.language, config.unicode)
            for text, own in ((settings[0], settings[1]), (earlier.rules, settings[1]))
        ]
        reached = filters[0].select_documents(taken.texts, drops)
        if drops or reached.num_rows != taken.texts.num_rows:
            return None  # they reached the rules before
        found, drops = filters[0].filter_selected(reached, [])
        filters[1].filter_selected(reached, [])
        if found.schema != batch.schema:
            return None
        batch = concat_batches([batch, found])
        for title in titles:
            tally.replace_stage(title, filters[1].tally, filters[0].tally)
    rows = concat_batches([taken.dropped, pa.RecordBatch.from_pylist(drops, taken.dropped.schema)])
    tally.add_drops(rows.to_pylist())
    limit = config.documents.batch_bytes
    shards = config.documents.num_shards
    with (
        PartitionWriter(kept, batch.schema, shards, limit) as kept_writer,
        PartitionWriter(dropped, rows.schema, shards, limit) as dropped_writer,
    ):
        for kept_rows, dropped_rows in zip(
            taken.places.iter_batches(batch), taken.places.iter_batches(rows), strict=True
        ):
            kept_writer.write(kept_rows)
            order = np.argsort(dropped_rows.column("offset").to_numpy(), kind="stable")
            dropped_writer.write(dropped_rows.take(pa.array(order)))
            report(kept_rows.num_rows + dropped_rows.num_rows, dropped_rows.num_rows)
    return {
        "tally": tally.to_dict(),
        "languages": earlier.result["languages"],
        "kept_batches": kept_writer.batches,
        "dropped_batches": dropped_writer.batches,
    }


def prepare_rule_input(texts: pa.RecordBatch, config: CrawlConfig) -> pa.RecordBatch:
    """Return the documents of a batch of extracted texts as they reach the first rule.

    Args:
        texts: A batch of `TEXT_SCHEMA`.
        config: The crawl section of a run.

    Returns:
        Documents after URL filter, extraction failures, Unicode repair and language filter.
    """
    from llmsys.data_pipeline.rules.language_chains import NO_RULES, LanguageRuleChains

    without_rules = _DocumentFilter(LanguageRuleChains(NO_RULES), config.language, config.unicode)
    return _select_document_columns(without_rules.filter_texts(texts)[0])


def explain_one_page(
    page: pa.RecordBatch, config: CrawlConfig, rules: str
) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Trace one page through every stage.

    Args:
        page: A batch with one extracted page.
        config: The crawl section of a run.
        rules: Rules of each language, as `serialize_language_rules` writes them.

    Returns:
        Counts by stage in order, the document as it left each stage, and its row of
        `DROPPED_SCHEMA` if it was dropped.
    """
    from llmsys.data_pipeline.rules.language_chains import get_language_chains

    document_filter = _TracingDocumentFilter(
        get_language_chains(rules, ()), config.language, config.unicode
    )
    _, drops = document_filter.filter_batch(page)
    return document_filter.tally.stages, document_filter.left, drops


class _DocumentFilter:
    """Passes batches through extraction failures, language and rules, and counts."""

    def __init__(
        self, chains: LanguageRuleChains, language: LanguageConfig, unicode: UnicodeConfig
    ) -> None:
        self.chains = chains
        self.language = language
        self.unicode = unicode
        self.tally = FunnelCounts()
        self.language_documents: Counter[str] = Counter()
        self.language_bytes: Counter[str] = Counter()

    def filter_batch(self, texts: pa.RecordBatch) -> tuple[pa.RecordBatch, list[dict[str, Any]]]:
        """Return the documents that stay and the rows of those that do not."""
        drops: list[dict[str, Any]] = []
        return self.filter_selected(self.select_documents(texts, drops), drops)

    def filter_selected(
        self, batch: pa.RecordBatch, drops: list[dict[str, Any]]
    ) -> tuple[pa.RecordBatch, list[dict[str, Any]]]:
        """Return what the rules keep of documents in a wanted language as rows of the output, and
        all drops.
        """
        batch = self._apply_chains(batch, drops)
        if MARKDOWN in batch.schema.names:
            batch = _replace_by_markdown(batch)
        return _select_document_columns(batch), drops

    def filter_texts(self, texts: pa.RecordBatch) -> tuple[pa.RecordBatch, list[dict[str, Any]]]:
        """Return the documents that stay, as the last rule left them, and the rows of the others.
        Documents keep the columns of extracted texts.
        """
        drops: list[dict[str, Any]] = []
        return self._apply_chains(self.select_documents(texts, drops), drops), drops

    def select_documents(
        self, texts: pa.RecordBatch, drops: list[dict[str, Any]]
    ) -> pa.RecordBatch:
        """Return the documents in a wanted language, and add the rows of the others to `drops`."""
        batch = self._repair_unicode(
            self._drop_failed_extractions(self._drop_rejected_urls(texts, drops), drops)
        )
        return self._filter_by_language(batch, drops)

    def _apply_chains(self, batch: pa.RecordBatch, drops: list[dict[str, Any]]) -> pa.RecordBatch:
        """Return what the rules keep of documents in a wanted language, and add the rows of the
        others to `drops`.
        """
        if MARKDOWN in batch.schema.names:
            batch = batch.append_column(_EXTRACTED, batch.column("text"))
        for outcome in self.chains.apply(batch.column("text"), batch.column("language"), batch):
            batch = self._apply_outcome(outcome, batch, drops)
        return batch

    def _drop_rejected_urls(
        self, texts: pa.RecordBatch, drops: list[dict[str, Any]]
    ) -> pa.RecordBatch:
        """Remove the pages that the URL filter rejected."""
        if "url_test" not in texts.schema.names:
            return texts
        sizes = np.asarray(texts.column("bytes_html"))
        rejected = texts.column("url_test").is_valid()
        gone = texts.filter(rejected).to_pylist()
        rows = build_dropped_rows(
            gone, URL, [tuple(row[f"url_{name}"] for name in _VERDICT) for row in gone]
        )
        # A page without text counts by its HTML.
        drops += [
            {**drop, "bytes": row["bytes_html"]} for drop, row in zip(rows, gone, strict=True)
        ]
        stays = _invert_mask(rejected)
        left = int(sizes[np.asarray(stays)].sum())
        self.tally.add_amounts(URL, documents_in=len(sizes), bytes_in=int(sizes.sum()))
        self.tally.add_amounts(URL, documents_out=len(sizes) - len(gone), bytes_out=left)
        return texts.filter(stays)

    def _drop_failed_extractions(
        self, texts: pa.RecordBatch, drops: list[dict[str, Any]]
    ) -> pa.RecordBatch:
        found = texts.column("text").is_valid()
        html = np.asarray(texts.column("bytes_html"))
        self.tally.add_amounts("extract", documents_in=texts.num_rows, bytes_in=int(html.sum()))
        failed = texts.filter(_invert_mask(found)).to_pylist()
        drops += build_dropped_rows(
            failed, "extract", [_build_extract_verdict(row) for row in failed]
        )
        # A page without text counts by its HTML.
        for row, drop in zip(failed, drops[len(drops) - len(failed) :], strict=True):
            drop["bytes"] = row["bytes_html"]
        return self._add_output_counts("extract", texts.filter(found))

    def _repair_unicode(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if isinstance(self.unicode, NoUnicodeRepair):
            return batch
        self._add_input_counts(UNICODE, batch)
        # ftfy: only where repair is configured
        from llmsys.data_pipeline.text.unicode_repair import repair_texts

        repaired = repair_texts(batch.column("text"), self.unicode)
        self.tally.add_changes(UNICODE, repaired.changes)
        batch = _set_column(batch, "text", repaired.texts)
        if MARKDOWN in batch.schema.names:
            # a document that came as text has no Markdown
            markdown = batch.column(MARKDOWN).fill_null("")
            batch = _set_column(batch, MARKDOWN, repair_texts(markdown, self.unicode).texts)
        return self._add_output_counts(UNICODE, batch)

    def _filter_by_language(
        self, batch: pa.RecordBatch, drops: list[dict[str, Any]]
    ) -> pa.RecordBatch:
        from llmsys.data_pipeline.language.identify import (  # not where it is only planned
            compute_keep_mask,
            identify_languages,
        )

        self._add_input_counts("language", batch)
        codes, scores = identify_languages(batch.column("text"), self.language)
        for code, size in zip(
            codes.to_pylist(), count_text_bytes(batch.column("text")).tolist(), strict=True
        ):
            self.language_documents[code] += 1
            self.language_bytes[code] += size
        keep = compute_keep_mask(codes, scores, self.language)
        batch = batch.append_column("language", codes).append_column("language_score", scores)
        failed = batch.filter(_invert_mask(keep)).to_pylist()
        drops += build_dropped_rows(
            failed, "language", [self._build_language_verdict(row) for row in failed]
        )
        return self._add_output_counts("language", batch.filter(keep))

    def _build_language_verdict(
        self, row: dict[str, Any]
    ) -> tuple[str, float | None, float | None, str]:
        code = row["language"]
        score = row["language_score"]
        wanted = self.language.languages
        if wanted and code not in wanted:
            return (
                "language",
                None,
                None,
                f"language: {code} (score {score:.2f}) is not among {', '.join(wanted)}",
            )
        return (
            "score",
            score,
            self.language.min_score,
            format_reason("language", "score", score, self.language.min_score),
        )

    def _apply_outcome(
        self, outcome: RuleOutcome, batch: pa.RecordBatch, drops: list[dict[str, Any]]
    ) -> pa.RecordBatch:
        """Remove the documents that a rule drops. Add its statistics and rewritten texts."""
        self._add_input_counts(outcome.rule, batch)
        self.tally.add_changes(outcome.rule, outcome.changes)
        gone = _invert_mask(outcome.keep)
        columns = [
            column.filter(gone)
            for column in (outcome.test, outcome.value, outcome.threshold, outcome.match)
        ]
        verdicts = [
            (test, value, threshold, format_reason(outcome.rule, test, value, threshold, match))
            for test, value, threshold, match in zip(
                *(column.to_pylist() for column in columns), strict=True
            )
        ]
        drops += build_dropped_rows(batch.filter(gone).to_pylist(), outcome.rule, verdicts)
        batch = batch.filter(outcome.keep)
        batch = _set_column(batch, "text", outcome.texts)
        for name, column in (outcome.statistics | outcome.columns).items():
            batch = batch.append_column(f"{outcome.rule}.{name}", column)
        return self._add_output_counts(outcome.rule, batch)

    def _add_input_counts(self, stage: str, batch: pa.RecordBatch) -> None:
        size = int(count_text_bytes(batch.column("text")).sum())
        self.tally.add_amounts(stage, documents_in=batch.num_rows, bytes_in=size)

    def _add_output_counts(self, stage: str, batch: pa.RecordBatch) -> pa.RecordBatch:
        size = int(count_text_bytes(batch.column("text")).sum())
        self.tally.add_amounts(stage, documents_out=batch.num_rows, bytes_out=size)
        return batch


class _TracingDocumentFilter(_DocumentFilter):
    """Filters one document and records how it left each stage."""

    def __init__(
        self, chains: LanguageRuleChains, language: LanguageConfig, unicode: UnicodeConfig
    ) -> None:
        super().__init__(chains, language, unicode)
        self.left: dict[str, dict[str, Any]] = {}

    def _add_output_counts(self, stage: str, batch: pa.RecordBatch) -> pa.RecordBatch:
        for row in batch.to_pylist():
            self.left[stage] = row
        return super()._add_output_counts(stage, batch)


def _build_extract_verdict(row: dict[str, Any]) -> tuple[str, float | None, float | None, str]:
    """Return the verdict of a page without text: the limit it exceeds, or `no text`."""
    test = row["extract_test"]
    value = row["extract_value"]
    threshold = row["extract_threshold"]
    return (
        test or "no text",
        value,
        threshold,
        format_reason("extract", test or "no text", value, threshold),
    )


def _select_document_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    # Columns of rules have a dot in their name.
    schema = build_document_schema(field for field in batch.schema if "." in field.name)
    if FIELDS in batch.schema.names:
        schema = add_fields_column(schema)
    return pa.record_batch([batch.column(name) for name in schema.names], schema=schema)


def _set_column(batch: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    return batch.set_column(batch.schema.get_field_index(name), name, column)


def _replace_by_markdown(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Replace the texts by their Markdown, without what rules removed from the texts."""
    forms = zip(
        *(batch.column(name).to_pylist() for name in (_EXTRACTED, "text", MARKDOWN)), strict=True
    )
    documents = [
        apply_line_changes(before, after, markdown) if markdown else after
        for before, after, markdown in forms
    ]
    return _set_column(batch, "text", pa.array(documents, pa.large_string()))


def _invert_mask(mask: pa.BooleanArray) -> pa.BooleanArray:
    return pa.array(~np.asarray(mask.to_numpy(zero_copy_only=False), np.bool_))


def list_stage_names(data: CrawlConfig) -> list[str]:
    """List the funnel stages of reading and filtering.

    Args:
        data: The crawl section of a run.

    Returns:
        Stage names in order; optional stages only where configured.
    """
    urls = [] if isinstance(data.url, NoUrlFilter) else [URL]
    repair = [] if isinstance(data.unicode, NoUnicodeRepair) else [UNICODE]
    return ["read", *urls, "extract", *repair, "language", *(rule.title for rule in data.rules)]
