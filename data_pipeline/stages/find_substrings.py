"""Find long strings that occur more than once: two maps over files, each followed by a comparison of keys.

`write_anchors` writes hashes of winnowing anchors. Of windows that contain a repeated anchor, `write_repeated_windows`
writes the hashes. All but the first of equal windows are removed later.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline.dedup.duplicate_decisions import (
    SUBSTRING,
    build_too_short_verdict,
    mask_remaining_rows,
    read_decisions,
    read_dropped_rows,
)
from data_pipeline.dedup.keys import ITEM_SCHEMA, VALUE_SCHEMA, KeyWriter
from data_pipeline.dedup.repeated_substrings import (
    compute_winnowing_anchors,
    hash_windows,
    iter_repeated_windows,
    remove_windows,
)
from data_pipeline.dedup.text_segments import get_sentence_splitter
from data_pipeline.executors.base import Report
from data_pipeline.stages.compute_signatures import split_document_ids
from llmsys.config.deduplication import SubstringDedupConfig
from llmsys.token_shards import read_batches


def write_anchors(
    report: Report, *, source: Path, number: int, dropped: Sequence[Path], output: Path, length: int
) -> dict[str, Any]:
    """Write the anchors of the windows of one file. Progress is in documents.

    Args:
        report: Progress callback.
        source: File of documents.
        number: Its index, by which decisions name it.
        dropped: Files of decisions; dropped rows have no anchors.
        output: File of keys, `VALUE_SCHEMA`.
        length: Characters of a window.

    Returns:
        Number of keys.
    """
    with KeyWriter(output, VALUE_SCHEMA) as writer:
        for batch, _ in _iter_remaining_rows(report, source, read_dropped_rows(dropped, number)):
            for text in batch.column("text").to_pylist():
                writer.write({"high": compute_winnowing_anchors(text, length)})
    return {"keys": writer.count}


def write_repeated_windows(
    report: Report,
    *,
    source: Path,
    number: int,
    dropped: Sequence[Path],
    repeated: Sequence[Path],
    output: Path,
    length: int,
) -> dict[str, Any]:
    """Write the windows of one file that may occur more than once. Progress is in documents.

    Args:
        report: Progress callback.
        source: File of documents.
        number: Its index, by which decisions name it.
        dropped: Files of decisions; dropped rows have no windows.
        repeated: Files of the anchors of each file that occur more than once.
        output: File of keys, `ITEM_SCHEMA`.
        length: Characters of a window.

    Returns:
        Number of keys.
    """
    values = read_decisions(repeated, number)
    # A file without repeated anchors has no entry.
    known = np.zeros(0, np.uint64) if values is None else values.column("high").to_numpy()
    with KeyWriter(output, ITEM_SCHEMA) as writer:
        for batch, rows in _iter_remaining_rows(report, source, read_dropped_rows(dropped, number)):
            halves = split_document_ids(batch.column("id").to_pylist())
            for text, row, (rank, tie) in zip(batch.column("text").to_pylist(), rows.tolist(), halves, strict=True):
                for begins in iter_repeated_windows(text, length, known):
                    digests = hash_windows(text, begins, length)
                    same = {"rank": rank, "tie": tie, "row": np.int64(row)}
                    columns = {name: np.full(len(begins), value) for name, value in same.items()}
                    place = begins.astype(np.int32)
                    writer.write({"high": digests[:, 0], "low": digests[:, 1], **columns, "place": place})
    return {"keys": writer.count}


def _iter_remaining_rows(report: Report, source: Path, gone: Any) -> Iterator[tuple[pa.RecordBatch, Any]]:
    """Yield the batches of a file without dropped rows, with the numbers of the rows."""
    row = 0
    for batch in read_batches(source):
        rows = np.arange(row, row + batch.num_rows)
        stays = mask_remaining_rows(rows, gone)
        yield batch.filter(pa.array(stays)), rows[stays]
        row += batch.num_rows
        report(batch.num_rows, 0)


class SubstringCutter:
    """Removes repeated windows."""

    rule = SUBSTRING

    def __init__(self, config: SubstringDedupConfig) -> None:
        self.config = config

    def cut_text(self, text: str, places: Sequence[int]) -> str:
        """Return the text without the windows that begin at `places`."""
        return remove_windows(text, places, self.config.min_characters)

    def judge_remainder(self, text: str) -> tuple[str, float | None, float | None, str] | None:
        """Return a verdict if too few words remain, else None."""
        words = get_sentence_splitter().find_boundaries([text])[0].words
        return build_too_short_verdict(self.rule, text, {"words": (words, self.config.min_words)})
