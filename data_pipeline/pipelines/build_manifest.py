"""Build the manifest from the records of all stages, and publish it last.

Reads journal records. Writes manifest.json of the dataset folder.

Invariants:
    - The manifest holds nothing that differs between two runs of the same configuration over the
      same input: no clock, no folder, no number of workers.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from llmsys.config.data import CrawlConfig
from llmsys.config.input_files import sort_inputs
from llmsys.config.tokenizer import TokenizerConfig
from llmsys.data_pipeline.core.funnel import DECONTAMINATE, PII, FunnelCounts
from llmsys.data_pipeline.core.input_columns import ChosenColumns
from llmsys.data_pipeline.core.journal import compute_json_digest
from llmsys.data_pipeline.core.staging import find_output, is_change_unfinished
from llmsys.data_pipeline.core.task_record import TaskRecord
from llmsys.data_pipeline.dedup.duplicate_decisions import list_dedup_rules
from llmsys.data_pipeline.graph.stage_runner import StageRunner
from llmsys.data_pipeline.pipelines.output_stages import build_splits
from llmsys.data_pipeline.stages.apply_rules import list_stage_names
from llmsys.data_pipeline.stages.collect import LENGTH_EDGES
from llmsys.data_pipeline.tokenize.encode_documents import collect_usage
from llmsys.data_pipeline.tokenize.tokenizer_files import load_dataset_tokenizer
from llmsys.dataset.manifest import (
    DocumentFile,
    DocumentFiles,
    Histogram,
    LanguageCount,
    Manifest,
    ReadSummary,
    SkippedInput,
    TokenizerUsage,
    compute_dataset_fingerprint,
    load_manifest,
    write_manifest,
)
from llmsys.dataset.manifest_section import (
    DecontaminationSummary,
    SampledColumn,
    ThresholdReport,
)
from llmsys.dataset.token_shards import choose_token_dtype
from llmsys.errors import DataError, FormatError
from llmsys.log import get_logger, redact_values

_log = get_logger(__name__)


@dataclass
class StageRecords:
    """Records of each stage.

    Attributes:
        inputs: Paths or URLs of the crawl.
        extracted: One record per input block, quarantined ones included.
        filtered: One record per extracted block.
        rewritten: Records of each stage that removed repeats from texts.
        columns: Columns from further fields of the input; None where no input may have any.
        collected: One record per document file, after cleaning.
        exports: One record per exported file.
        thresholds: Documents nearest to each threshold.
        tokenizer: None if the preparation stops before it.
        encoded: One record per document file.
        sampled: Records of the sampling of encoded files; none without rules.
        tokens: One record per token file. None if the preparation stops before them.
        indexes: One record per split, with its sums.
    """

    inputs: Sequence[str]
    extracted: Sequence[TaskRecord]
    filtered: Sequence[TaskRecord] = ()
    rewritten: Sequence[Sequence[TaskRecord]] = ()
    columns: ChosenColumns | None = None
    collected: Sequence[TaskRecord] = ()
    exports: Sequence[TaskRecord] = ()
    thresholds: tuple[ThresholdReport, ...] = ()
    tokenizer: TaskRecord | None = None
    encoded: Sequence[TaskRecord] = ()
    sampled: Sequence[TaskRecord] = ()
    tokens: Sequence[TaskRecord] | None = None
    indexes: Sequence[TaskRecord] = ()

    def sum_blocks(self) -> "BlockSums":
        """Return the sums of all stages. Each record is read once."""
        tally = FunnelCounts()
        read = _ReadSums()
        for record in self.extracted:
            result = record.result
            read.add(result)
            skipped = sum(skip["count"] for skip in result["skipped"])
            tally.add_amounts(
                "read", documents_in=result["pages"] + skipped, bytes_in=result["html_bytes"]
            )
            tally.add_amounts("read", documents_out=result["pages"], bytes_out=result["html_bytes"])
            for skip in result["skipped"]:
                tally.add_drop_count("read", skip["reason"], skip["count"])
        languages = _LanguageSums()
        for record in self.filtered:
            result = record.result
            languages.add(result["languages"])
            tally.merge_counts(FunnelCounts(result["tally"]))
        for record in chain(*self.rewritten, self.collected):
            tally.merge_counts(FunnelCounts(record.result["tally"]))
        return BlockSums(tally, languages.to_counts(), read.to_summary(len(self.inputs)))

    def require_documents(self) -> None:
        """Raise DataError with the most frequent reasons if every page was dropped."""
        if any(record.result["documents_rows"] for record in self.collected):
            return
        sums = self.sum_blocks()
        tally = sums.tally
        pages = tally.stages.get("read", {}).get("documents_out", 0)
        largest = Counter(
            {f"{drop['rule']} ({drop['test']})": drop["documents"] for drop in tally.drops.values()}
        )
        reasons = (
            ", ".join(f"{count} by {name}" for name, count in largest.most_common(3))
            or "there were none"
        )
        files = f"{len(self.inputs)} file{'s' if len(self.inputs) > 1 else ''}"
        remedy = "Loosen data.rules or data.language, or give" if pages else "Give"
        raise DataError(
            f"no document is left of {pages} pages in {files}: {reasons}. "
            f"{_describe_languages(sums.languages)}{remedy} other input in data.inputs."
        )


@dataclass(frozen=True)
class BlockSums:
    """Sums over the records of all stages.

    Attributes:
        tally: Funnel counts.
        languages: Documents and bytes by language, most documents first.
        read: What was read and skipped.
    """

    tally: FunnelCounts
    languages: dict[str, LanguageCount]
    read: ReadSummary


def _describe_languages(languages: dict[str, LanguageCount]) -> str:
    """Return the most frequent languages of the pages; "" where no language was recognized."""
    found = list(languages.items())[:3]  # most documents first
    named = ", ".join(f"{code} ({count.documents})" for code, count in found)
    return f"Their languages: {named}. " if named else ""


def build_manifest(
    data: CrawlConfig, tokenizer: TokenizerConfig, outcome: StageRecords
) -> Manifest:
    """Build the manifest of a dataset of documents.

    Args:
        data: The crawl section of a run.
        tokenizer: The tokenizer section of a run.
        outcome: Records of all stages.

    Returns:
        The manifest, without secrets in URLs.
    """
    values = data.model_dump(mode="json", exclude={"folder", "executor"})
    config = {
        "data": values | {name: sort_inputs(values[name]) for name in ("inputs", "heldout_inputs")},
        "tokenizer": tokenizer.model_dump(mode="json"),
    }
    # The digest is over redacted values: a rotated secret is no other dataset.
    config = redact_values(config)
    tokenizer_result: dict[str, Any] = outcome.tokenizer.result if outcome.tokenizer else {}
    splits = build_splits(outcome.indexes)
    sums = outcome.sum_blocks()
    documents = _build_document_files(outcome.collected, 0, "documents_rows")
    digests = [record.digests[0] for record in outcome.tokens or ()] or [
        file.digest for file in documents.files
    ]
    return Manifest(
        name=data.name,
        fingerprint=compute_dataset_fingerprint(tokenizer_result.get("fingerprint"), digests),
        config=config,
        config_digest=compute_json_digest(config),
        vocab_size=tokenizer_result.get("vocab_size"),
        token_dtype=choose_token_dtype(tokenizer_result["vocab_size"])
        if tokenizer_result
        else None,
        tokenizer_fingerprint=tokenizer_result.get("fingerprint"),
        splits=splits,
        documents=documents,
        dropped=_build_document_files(outcome.collected, 1, "dropped_rows"),
        exports=_build_document_files(outcome.exports, 0, "documents_rows"),
        funnel=sums.tally.build_funnel(list_funnel_stages(data)),
        languages=sums.languages,
        lengths=_build_length_histogram(outcome.collected),
        read=sums.read,
        usage=_compute_usage(data.folder, outcome),
        decontamination=_build_decontamination_summary(outcome.collected),
        thresholds=outcome.thresholds,
        input_columns=outcome.columns.summary if outcome.columns else (),
        column_notes=outcome.columns.notes if outcome.columns else (),
        sampling=_summarize_sampling(data, outcome),
    )


def _summarize_sampling(data: CrawlConfig, outcome: StageRecords) -> tuple[SampledColumn, ...]:
    if not outcome.sampled:
        return ()
    # only where it is configured
    from llmsys.data_pipeline.pipelines.sampling_stages import summarize_sampling

    return summarize_sampling(data, outcome.sampled)


def publish_manifest(runner: StageRunner, manifest: Manifest) -> Manifest:
    """Remove orphaned files, publish staged files and write the manifest.

    Args:
        runner: The runner of all stages.
        manifest: The manifest of this run.

    Returns:
        The published manifest. A dataset that is complete already is not touched.
    """
    folder = runner.folder
    runner.remove_earlier_results()
    leftovers = runner.find_orphaned_files()
    present = _find_manifest(runner.folder)
    if present is not None and _is_up_to_date(present, manifest):
        manifest = present
        if not leftovers and not runner.num_run and not is_change_unfinished(folder):
            _log.info("%s is up to date (fingerprint %s)", folder, manifest.fingerprint)
            return manifest
    # Order matters: without a manifest an interrupted publication can be finished.
    runner.withdraw_manifest()
    for path in leftovers:
        path.unlink()
    runner.publish_files()
    write_manifest(folder, manifest)
    counts = f"{runner.num_run} tasks done, {runner.num_reused} reused"
    _log.info("%s: %s (fingerprint %s)", folder, counts, manifest.fingerprint)
    return manifest


def _is_up_to_date(present: Manifest, manifest: Manifest) -> bool:
    """Return whether the present manifest contains the new one. It may also have tokens that
    this run did not make.
    """
    if present == manifest:
        return True
    # A run up to the documents must not withdraw tokens that are still valid.
    later = {"fingerprint", "vocab_size", "token_dtype", "tokenizer_fingerprint", "splits", "usage"}
    same_documents = present.model_dump(exclude=later) == manifest.model_dump(exclude=later)
    asked_tokenizer = manifest.tokenizer_fingerprint in (None, present.tokenizer_fingerprint)
    return same_documents and asked_tokenizer and not manifest.splits


def _find_manifest(folder: Path) -> Manifest | None:
    try:
        return load_manifest(folder)
    except FormatError:
        raise
    except DataError:
        return None


def list_funnel_stages(data: CrawlConfig) -> list[str]:
    """List the stages of a dataset's funnel, in order."""
    late = {DECONTAMINATE: data.decontaminate.kind, PII: data.pii.kind}
    cleaned = [stage for stage, kind in late.items() if kind != "none"]
    return [*list_stage_names(data), *list_dedup_rules(data.deduplicate), *cleaned]


def _compute_usage(folder: Path, outcome: StageRecords) -> TokenizerUsage | None:
    if outcome.tokenizer is None or outcome.tokens is None:
        return None
    tokenizer = load_dataset_tokenizer(find_output(folder, outcome.tokenizer.outputs[0].name))
    pieces = [folder / record.outputs[1].name for record in outcome.encoded]
    return collect_usage(tokenizer, [record.result for record in outcome.encoded], pieces)


def _build_document_files(collected: Sequence[TaskRecord], output: int, rows: str) -> DocumentFiles:
    files = []
    for record in collected:
        file = record.outputs[output]
        name = Path(file.name).name
        files.append(
            DocumentFile(name=name, rows=record.result[rows], size=file.size, digest=file.digest)
        )
    return DocumentFiles(files=tuple(files))


class _LanguageSums:
    """Documents and bytes by language over all blocks."""

    def __init__(self) -> None:
        self._documents: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def add(self, languages: dict[str, tuple[int, int]]) -> None:
        """Add the documents and bytes of one block."""
        for code, (count, size) in languages.items():
            self._documents[code] += count
            self._bytes[code] += size

    def to_counts(self) -> dict[str, LanguageCount]:
        """Return the sums, most documents first."""
        documents = self._documents
        order = sorted(documents, key=lambda code: (-documents[code], code))
        return {
            code: LanguageCount(documents=documents[code], bytes=self._bytes[code])
            for code in order
        }


def _build_length_histogram(collected: Sequence[TaskRecord]) -> Histogram:
    counts: Any = np.sum([record.result["lengths"] for record in collected], axis=0, dtype=np.int64)
    return Histogram(edges=LENGTH_EDGES, counts=tuple(counts.tolist()))


class _ReadSums:
    """Sums of reads and skips over all blocks."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._skipped = _SkipSums()
        self._noted = _SkipSums()

    def add(self, result: dict[str, Any]) -> None:
        """Add the result of extracting one block."""
        for name in ("records", "html_bytes", "given_text_bytes"):
            self._counts[name] += result.get(name, 0)
        self._skipped.add(result["skipped"])
        self._noted.add(result["noted"])

    def to_summary(self, files: int) -> ReadSummary:
        """Return the sums, of a number of input files."""
        return ReadSummary(
            files=files,
            records=self._counts["records"],
            html_bytes=self._counts["html_bytes"],
            given_text_bytes=self._counts["given_text_bytes"],
            skipped=self._skipped.to_tuple(),
            noted=self._noted.to_tuple(),
        )


def _build_decontamination_summary(final: Sequence[TaskRecord]) -> DecontaminationSummary | None:
    about = next(
        (record.result["contamination"] for record in final if "contamination" in record.result),
        None,
    )
    if about is None:
        return None
    # only where it is configured
    from llmsys.data_pipeline.decontaminate.contamination_report import merge_summaries

    return merge_summaries(
        about["sets"], about["exempt"], [record.result["decontamination"] for record in final]
    )


class _SkipSums:
    """Sums of skips by file and reason over all blocks. Each sum has the smallest offset."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], dict[str, Any]] = {}

    def add(self, skips: Iterable[dict[str, Any]]) -> None:
        """Add the skips of one block."""
        for skip in skips:
            first = self._sums.setdefault((skip["file"], skip["reason"]), skip | {"count": 0})
            first["count"] += skip["count"]
            first["offset"] = min(first["offset"], skip["offset"])

    def to_tuple(self) -> tuple[SkippedInput, ...]:
        """Return the sums in the order of their first skip."""
        return tuple(SkippedInput(**skip) for skip in self._sums.values())
