"""Documents in, the long strings in them that occur earlier out: two maps over files, each with an exchange behind it.

`write_anchors` writes the hashes of anchors; once it is known which occur twice, `write_repeated_windows` writes the
windows that stand behind these, and of equal windows all but the first are taken out.
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
    """Write the anchors of the windows of a file; progress is in documents."""
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
    """Write the windows of a file that may occur more than once; progress is in documents.

    Args:
        report: told how many documents are done.
        source: the file.
        number: its number among the files that decisions speak of.
        dropped: files of decisions.
        repeated: files that say which anchors of each file occur more than once.
        output: where the windows go.
        length: characters of a window.
    """
    values = read_decisions(repeated, number)
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
    """The batches of a file without dropped rows, and the numbers of the rows."""
    row = 0
    for batch in read_batches(source):
        rows = np.arange(row, row + batch.num_rows)
        stays = mask_remaining_rows(rows, gone)
        yield batch.filter(pa.array(stays)), rows[stays]
        row += batch.num_rows
        report(batch.num_rows, 0)


class SubstringCutter:
    """Takes windows out."""

    rule = SUBSTRING

    def __init__(self, config: SubstringDedupConfig) -> None:
        self.config = config

    def cut_text(self, text: str, places: Sequence[int]) -> str:
        """Return the text without the windows that begin at the places."""
        return remove_windows(text, places, self.config.min_characters)

    def judge_remainder(self, text: str) -> tuple[str, float | None, float | None, str] | None:
        """Too few words, or nothing."""
        words = get_sentence_splitter().find_boundaries([text])[0].words
        return build_too_short_verdict(self.rule, text, {"words": (words, self.config.min_words)})
