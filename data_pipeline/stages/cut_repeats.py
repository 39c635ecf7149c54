"""Remove repeated segments from documents.

`write_segment_keys` maps a file to keys of its paragraphs, lines or runs of sentences.
`cut_repeats_from_file` applies all pending decisions about a file. It writes the remaining
documents, and those dropped because too little text remains.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from llmsys.data_pipeline.core.document_schema import (
    DROPPED_SCHEMA,
    add_fields_column,
    count_text_bytes,
)
from llmsys.data_pipeline.core.funnel import FunnelCounts, build_dropped_rows, sort_in_file_order
from llmsys.data_pipeline.core.input_fields import FIELDS
from llmsys.data_pipeline.dedup.duplicate_decisions import (
    SPANS,
    DuplicateFilter,
    build_too_short_verdict,
    mask_remaining_rows,
    read_decisions,
    read_dropped_rows,
)
from llmsys.data_pipeline.dedup.keys import ITEM_SCHEMA, KeyWriter, hash_texts
from llmsys.data_pipeline.dedup.text_segments import (
    SpansConfig,
    get_run_length,
    get_sentence_splitter,
    remove_segment_runs,
    split_segments,
)
from llmsys.data_pipeline.executors.base import Report
from llmsys.data_pipeline.stages.compute_signatures import split_document_ids
from llmsys.dataset.token_shards import ArrowFileWriter, read_batches, read_schema


def write_segment_keys(
    report: Report,
    *,
    source: Path,
    number: int,
    dropped: Sequence[Path],
    output: Path,
    config: SpansConfig,
) -> dict[str, Any]:
    """Write the keys of the segments of one file. Progress is in documents.

    Args:
        report: Progress callback.
        source: File of documents.
        number: Its index, by which decisions name it.
        dropped: Files of decisions; dropped rows get no keys.
        output: File of keys, `ITEM_SCHEMA`.
        config: Kind of segment.

    Returns:
        Numbers of rows and keys.
    """
    gone = read_dropped_rows(dropped, number)
    row = 0
    with KeyWriter(output, ITEM_SCHEMA) as writer:
        for batch in read_batches(source):
            rows = np.arange(row, row + batch.num_rows)
            stays = mask_remaining_rows(rows, gone)
            left = batch.filter(pa.array(stays))
            found = split_segments(left.column("text").to_pylist(), config)
            writer.write(build_segment_keys(left, rows[stays], [units.keys for units in found]))
            row += batch.num_rows
            report(batch.num_rows, 0)
    return {"rows": row, "keys": writer.count}


def build_segment_keys(
    batch: pa.RecordBatch, rows: Any, keys_per_document: Sequence[Sequence[str | None]]
) -> dict[str, Any]:
    """Return key columns of the segments of a batch, ordered by document id and position."""
    places = [
        (document, place)
        for document, keys in enumerate(keys_per_document)
        for place, key in enumerate(keys)
        if key
    ]
    hashes = hash_texts(key for keys in keys_per_document for key in keys if key)
    documents = np.array([document for document, _ in places], np.int64)
    halves = split_document_ids(batch.column("id").to_pylist())
    return {
        "high": hashes[:, 0],
        "low": hashes[:, 1],
        "rank": halves[documents, 0],
        "tie": halves[documents, 1],
        "row": rows[documents],
        "place": np.array([place for _, place in places], np.int32),
    }


class TextCutter(Protocol):
    """Removes positions from a text and decides whether enough text remains; picklable."""

    rule: str

    def cut_text(self, text: str, places: Sequence[int]) -> str:
        """Return the text without the segments that begin at `places`."""

    def judge_remainder(self, text: str) -> tuple[str, float | None, float | None, str] | None:
        """Return test, value, threshold and reason if too little text remains, else None."""


class SegmentCutter:
    """Removes runs of paragraphs, lines or sentences."""

    rule = SPANS

    def __init__(self, config: SpansConfig) -> None:
        self.config = config

    def cut_text(self, text: str, places: Sequence[int]) -> str:
        """Return the text without the runs that begin at `places`."""
        return remove_segment_runs(
            text, split_segments([text], self.config)[0], places, get_run_length(self.config)
        )

    def judge_remainder(self, text: str) -> tuple[str, float | None, float | None, str] | None:
        """Return a verdict if too few words or sentences remain, else None."""
        ends, words = get_sentence_splitter().find_boundaries([text])[0]
        limits = {
            "words": (words, self.config.min_words),
            "sentences": (len(ends), self.config.min_sentences),
        }
        return build_too_short_verdict(self.rule, text, limits)


def cut_repeats_from_file(
    report: Report,
    *,
    source: Path,
    number: int,
    decisions: Sequence[Path],
    rules: Sequence[str],
    places: Sequence[Path],
    cutter: TextCutter,
    kept: Path,
    dropped: Path,
    kept_batches: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Write the remaining and the dropped documents of one file. Progress is in documents.

    Args:
        report: Progress callback.
        source: File of documents.
        number: Its index, by which decisions name it.
        decisions: Files of documents to drop, by the rules in `rules`.
        rules: Rules of the decisions, in order.
        places: Files of positions to remove.
        cutter: Removes the positions.
        kept: File to write the remaining documents to.
        dropped: File to write the dropped documents to.
        kept_batches: [document file, rows] of each batch of `source`. Written batches keep their
            document file.

    Returns:
        Funnel counts, and [document file, rows] of the batches in both files.
    """
    tally = FunnelCounts()
    row = 0
    duplicate_filter = DuplicateFilter(decisions, number, rules, tally)
    file_cutter = _Cutter(cutter, places, number, tally)
    present = read_schema(source)
    schema = pa.schema(
        [*present, (f"{cutter.rule}.removed_characters", pa.float32())], present.metadata
    )
    gone_schema = add_fields_column(DROPPED_SCHEMA) if FIELDS in present.names else DROPPED_SCHEMA
    batches: dict[str, list[list[int]]] = {"kept_batches": [], "dropped_batches": []}
    with (
        ArrowFileWriter(kept, schema, "zstd") as kept_out,
        ArrowFileWriter(dropped, gone_schema, "zstd") as gone_out,
    ):
        for (owner, count), batch in zip(kept_batches, read_batches(source), strict=True):
            batch, stays, drops = duplicate_filter.filter_batch(batch, row)
            batch, more = file_cutter.cut_batch(batch, np.flatnonzero(stays) + row)
            gone = pa.RecordBatch.from_pylist(sort_in_file_order([*drops, *more]), gone_schema)
            for name, part, writer in (
                ("kept_batches", batch, kept_out),
                ("dropped_batches", gone, gone_out),
            ):
                if part.num_rows:
                    writer.write(part)
                    batches[name].append([owner, part.num_rows])
            row += count
            report(count, gone.num_rows)
    return {"tally": tally.to_dict(), **batches}


class _Cutter:
    """Removes positions from the texts of one file."""

    def __init__(
        self, cutter: TextCutter, places: Sequence[Path], number: int, tally: FunnelCounts
    ) -> None:
        table = read_decisions(places, number)
        assert table is not None  # there is at least one key range
        self._rows = table.column("row").to_numpy()
        self._places = table.column("place").to_numpy()
        self.cutter = cutter
        self.tally = tally

    def cut_batch(
        self, batch: pa.RecordBatch, rows: Any
    ) -> tuple[pa.RecordBatch, list[dict[str, Any]]]:
        """Return the batch after cutting, with a count of removed characters, and the drops. `rows`
        are the numbers of
        its rows.
        """
        rule = self.cutter.rule
        self._add_batch_counts("in", batch)
        removed = np.zeros(len(rows), np.float32)
        stays = np.ones(len(rows), np.bool_)
        texts: dict[int, str] = {}
        drops: list[dict[str, Any]] = []
        # Only rows with positions to remove are decoded.
        firsts = np.searchsorted(self._rows, rows)
        lasts = np.searchsorted(self._rows, rows, side="right")
        for index in np.flatnonzero(lasts > firsts).tolist():
            text = batch.column("text")[index].as_py()
            texts[index] = self.cutter.cut_text(
                text, self._places[firsts[index] : lasts[index]].tolist()
            )
            removed[index] = len(text) - len(texts[index])
            verdict = self.cutter.judge_remainder(texts[index]) if texts[index] != text else None
            if verdict is not None:
                stays[index] = False
                drops += build_dropped_rows(batch.slice(index, 1).to_pylist(), rule, [verdict])
        self.tally.add_drops(drops)
        batch = _replace_texts(batch, texts).append_column(
            f"{rule}.removed_characters", pa.array(removed)
        )
        batch = batch.filter(pa.array(stays))
        self._add_batch_counts("out", batch)
        return batch, drops

    def _add_batch_counts(self, side: str, batch: pa.RecordBatch) -> None:
        size = int(count_text_bytes(batch.column("text")).sum())
        self.tally.add_amounts(
            self.cutter.rule, **{f"documents_{side}": batch.num_rows, f"bytes_{side}": size}
        )


def _replace_texts(batch: pa.RecordBatch, texts: dict[int, str]) -> pa.RecordBatch:
    if not texts:
        return batch
    column = batch.column("text").to_pylist()
    for index, text in texts.items():
        column[index] = text
    return batch.set_column(
        batch.schema.get_field_index("text"), "text", pa.array(column, pa.large_string())
    )
