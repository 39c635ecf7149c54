"""Documents in, the long strings in them that occur earlier out: two maps over files, each with an exchange behind it.

`anchor_file` writes the hashes of anchors; once it is known which occur twice, `window_file` writes the windows that
stand behind these, and of equal windows all but the first are taken out.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline.dedup.decisions import dropped_in, read_decisions, without_rows
from data_pipeline.dedup.keys import ITEM_SCHEMA, VALUE_SCHEMA, KeyWriter
from data_pipeline.dedup.naming import SUBSTRING, too_little
from data_pipeline.dedup.strings import anchors, repeated_windows, window_digests, without_windows
from data_pipeline.dedup.units import sentence_splitter
from data_pipeline.executors.event import Report
from data_pipeline.stages.sign import id_halves
from llmsys.config.deduplicate import SubstringDuplicates
from llmsys.shards import read_batches


def anchor_file(
    report: Report, *, source: Path, number: int, dropped: Sequence[Path], output: Path, length: int
) -> dict[str, Any]:
    """Write the anchors of the windows of a file; progress is in documents."""
    with KeyWriter(output, VALUE_SCHEMA) as writer:
        for batch, _ in _left(report, source, dropped_in(dropped, number)):
            for text in batch.column("text").to_pylist():
                writer.write({"high": anchors(text, length)})
    return {"keys": writer.count}


def window_file(
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
        for batch, rows in _left(report, source, dropped_in(dropped, number)):
            halves = id_halves(batch.column("id").to_pylist())
            for text, row, (rank, tie) in zip(batch.column("text").to_pylist(), rows.tolist(), halves, strict=True):
                for begins in repeated_windows(text, length, known):
                    digests = window_digests(text, begins, length)
                    same = {"rank": rank, "tie": tie, "row": np.int64(row)}
                    columns = {name: np.full(len(begins), value) for name, value in same.items()}
                    place = begins.astype(np.int32)
                    writer.write({"high": digests[:, 0], "low": digests[:, 1], **columns, "place": place})
    return {"keys": writer.count}


def _left(report: Report, source: Path, gone: Any) -> Iterator[tuple[pa.RecordBatch, Any]]:
    """The batches of a file without dropped rows, and the numbers of the rows."""
    row = 0
    for batch in read_batches(source):
        rows = np.arange(row, row + batch.num_rows)
        stays = without_rows(rows, gone)
        yield batch.filter(pa.array(stays)), rows[stays]
        row += batch.num_rows
        report(batch.num_rows, 0)


class StringEdit:
    """Takes windows out."""

    rule = SUBSTRING

    def __init__(self, config: SubstringDuplicates) -> None:
        self.config = config

    def shorten(self, text: str, places: Sequence[int]) -> str:
        """Return the text without the windows that begin at the places."""
        return without_windows(text, places, self.config.min_characters)

    def verdict(self, text: str) -> tuple[str, float | None, float | None, str] | None:
        """Too few words, or nothing."""
        words = sentence_splitter().split([text])[0].words
        return too_little(self.rule, text, {"words": (words, self.config.min_words)})
