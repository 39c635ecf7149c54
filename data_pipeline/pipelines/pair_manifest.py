"""Build the manifest of a dataset of pairs. It does not depend on the number of workers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from llmsys.config.data import LabelledTextConfig, PairsConfig
from llmsys.config.tokenizer import TokenizerConfig
from llmsys.data_pipeline.core.funnel import FunnelCounts
from llmsys.data_pipeline.core.journal import compute_json_digest
from llmsys.data_pipeline.core.task_record import TaskOutput, TaskRecord
from llmsys.data_pipeline.pairs import encode, read
from llmsys.data_pipeline.pipelines.pair_pipeline import SPLITS, PairStageRecords
from llmsys.data_pipeline.stages.collect import LENGTH_EDGES
from llmsys.dataset.manifest import (
    DocumentFile,
    DocumentFiles,
    Histogram,
    Manifest,
    ReadSummary,
    Split,
    SplitName,
    TokenFile,
    compute_dataset_fingerprint,
)
from llmsys.dataset.token_shards import choose_token_dtype
from llmsys.errors import DataError
from llmsys.log import redact_values


def build_pairs_manifest(
    data: PairsConfig | LabelledTextConfig, tokenizer: TokenizerConfig, outcome: PairStageRecords
) -> Manifest:
    """Build the manifest of a dataset of pairs or labelled texts.

    Args:
        data: The data section of a run.
        tokenizer: The tokenizer section of a run.
        outcome: Records of all stages.

    Returns:
        The manifest.

    Raises:
        DataError: If every training pair is longer than `data.max_tokens`.
    """
    # Folder and executor decide nothing in the dataset.
    config = {
        "data": data.model_dump(mode="json", exclude={"folder", "executor"}),
        "tokenizer": tokenizer.model_dump(mode="json"),
    }
    made: dict[str, Any] = outcome.tokenizer.result if outcome.tokenizer else {}
    splits = dict(iter_pair_splits(outcome.encoded))
    if splits and not splits["train"].documents:
        raise DataError(
            f"every training pair is longer than data.max_tokens={data.max_tokens}. Raise it."
        )
    documents = _build_document_files(outcome.read)
    digests = [file.digest for split in splits.values() for file in split.files]
    return Manifest(
        name=data.name,
        fingerprint=compute_dataset_fingerprint(
            made.get("fingerprint"), digests or [file.digest for file in documents.files]
        ),
        config=redact_values(config),
        config_digest=compute_json_digest(config),
        vocab_size=made.get("vocab_size"),
        token_dtype=choose_token_dtype(made["vocab_size"]) if made else None,
        tokenizer_fingerprint=made.get("fingerprint"),
        splits=splits,
        documents=documents,
        dropped=_build_dropped_files(outcome),
        funnel=_merge_counts(outcome).build_funnel(
            [read.STAGE, *([encode.STAGE] if splits else [])]
        ),
        languages={},
        lengths=_build_length_histogram(outcome.read),
        read=ReadSummary(
            files=sum(len(one) for one in outcome.files.values()),
            records=_count_lines(outcome),
            html_bytes=0,
        ),
        labels=outcome.labels or (),
    )


def iter_pair_splits(encoded: dict[str, list[TaskRecord]]) -> Iterator[tuple[SplitName, Split]]:
    """Yield the splits of targets and of sources with their token files; nothing before there
    are tokens.
    """
    names: tuple[tuple[SplitName, str, str], ...] = (
        ("train", "train", "targets"),
        ("heldout", "heldout", "targets"),
        ("train_source", "train", "sources"),
        ("heldout_source", "heldout", "sources"),
    )
    for name, split, side in names if encoded else ():
        files = tuple(TokenFile.model_validate(record.result[side]) for record in encoded[split])
        yield (
            name,
            Split(
                documents=sum(file.rows for file in files),
                tokens=sum(file.tokens for file in files),
                bytes=sum(file.text_bytes for file in files),
                files=files,
            ),
        )


def _build_document_files(found: dict[str, list[TaskRecord]]) -> DocumentFiles:
    records = [record for split in SPLITS for record in found[split]]
    return DocumentFiles(
        files=tuple(
            build_file_entry(record.outputs[0], sum(record.result["rows"])) for record in records
        )
    )


def _build_dropped_files(outcome: PairStageRecords) -> DocumentFiles:
    read_files = [(record.outputs[1], record) for split in SPLITS for record in outcome.read[split]]
    encoded = [
        (record.outputs[2], record) for records in outcome.encoded.values() for record in records
    ]
    return DocumentFiles(
        files=tuple(
            build_file_entry(made, _count_drops(record)) for made, record in [*read_files, *encoded]
        )
    )


def _count_drops(record: TaskRecord) -> int:
    return sum(drop["documents"] for drop in record.result["tally"]["drops"])


def build_file_entry(made: TaskOutput, rows: int) -> DocumentFile:
    """Return the manifest entry of a file of `rows` rows."""
    return DocumentFile(name=Path(made.name).name, rows=rows, size=made.size, digest=made.digest)


def _merge_counts(outcome: PairStageRecords) -> FunnelCounts:
    tally = FunnelCounts()
    for records in [*outcome.read.values(), *outcome.encoded.values()]:
        for record in records:
            tally.merge_counts(FunnelCounts(record.result["tally"]))
    return tally


def _build_length_histogram(found: dict[str, list[TaskRecord]]) -> Histogram:
    lengths = [record.result["lengths"] for records in found.values() for record in records]
    counts: Any = np.sum(lengths, axis=0, dtype=np.int64)
    return Histogram(edges=LENGTH_EDGES, counts=tuple(counts.tolist()))


def _count_lines(outcome: PairStageRecords) -> int:
    return _merge_counts(outcome).stages[read.STAGE]["documents_in"]
