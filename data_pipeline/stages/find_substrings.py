"""Find long strings that occur more than once: two maps over files, each followed by a comparison
of keys.

`write_anchors` writes hashes of winnowing anchors. Of windows that contain a repeated anchor,
`write_repeated_windows` writes the hashes. All but the first of equal windows are removed later.

No suffix array is built. Every window of exactly L characters of a repeated string is repeated, and
every copy of a window but the first is a later occurrence. So the characters in a later copy of a
window are exactly those in a later occurrence of a string that a suffix array would find (Lee et
al. 2022).

Comparing all windows would cost more than the texts take. Each window is represented by its anchor:
the smallest piece of L / 2 characters, by a rolling hash (winnowing; Schleimer et al. 2003). Equal
windows have equal anchors. Only windows whose anchor occurs twice in the corpus are hashed (128
bits) and compared. About one piece in L / 4 is an anchor.

Invariants:
- No repeated string is missed.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from llmsys.config.deduplication import SubstringDedupConfig
from llmsys.data_pipeline.dedup.duplicate_decisions import (
    SUBSTRING,
    build_too_short_verdict,
    mask_remaining_rows,
    read_decisions,
    read_dropped_rows,
)
from llmsys.data_pipeline.dedup.keys import ITEM_SCHEMA, VALUE_SCHEMA, KeyWriter
from llmsys.data_pipeline.dedup.simplified_words import INVERSE_BASE, Hashes, RollingHasher
from llmsys.data_pipeline.dedup.text_segments import get_sentence_splitter
from llmsys.data_pipeline.executors.base import Report
from llmsys.data_pipeline.stages.compute_signatures import split_document_ids
from llmsys.data_pipeline.text.simplify_text import Codes, to_code_points
from llmsys.dataset.token_shards import read_batches

Integers = np.ndarray[Any, np.dtype[np.int64]]

_MIX = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)
_CHARACTERS_AT_ONCE = 1 << 20  # bounds the work tables at about 110 MB


def compute_winnowing_anchors(text: str, length: int) -> Hashes:
    """Compute the anchors of the windows of a text.

    Args:
        text: the text.
        length: characters of a window, L.

    Returns:
        (N,) uint64: hashes of the pieces of L / 2 characters that are the smallest of some window,
        once per position.
    """
    parts = [_compute_slice_anchors(codes, length) for _, codes in _slice_code_points(text, length)]
    return np.concatenate([np.zeros(0, np.uint64), *parts])


def iter_repeated_windows(text: str, length: int, repeated: Hashes) -> Iterator[Integers]:
    """Find the windows whose anchor occurs twice in the corpus.

    Args:
        text: the text.
        length: characters of a window, L.
        repeated: sorted uint64 hashes of the repeated anchors.

    Yields:
        (N,) int64 offsets of windows in characters, slice by slice of the text.
    """
    for start, codes in _slice_code_points(text, length) if len(repeated) else ():
        smallest = _compute_window_minima(
            _hash_pieces(codes, length // 2), length - length // 2 + 1
        )
        indices = np.minimum(np.searchsorted(repeated, smallest), len(repeated) - 1)
        yield start + np.flatnonzero(repeated[indices] == smallest)


def hash_windows(text: str, begins: Integers, length: int) -> Hashes:
    """Hash windows with xxh3_128.

    Args:
        text: the text.
        begins: (N,) offsets of windows in characters.
        length: characters of a window.

    Returns:
        (N, 2) uint64: the high and the low half of each hash.
    """
    windows = (
        text[begin : begin + length].encode("utf-8", "surrogatepass") for begin in begins.tolist()
    )
    digests = b"".join(map(xxhash.xxh3_128_digest, windows))
    return np.frombuffer(digests, ">u8").astype(np.uint64).reshape(-1, 2)


def remove_windows(text: str, begins: Sequence[int], length: int) -> str:
    """Remove windows from a text.

    Args:
        text: the text.
        begins: offsets of windows in characters, in any order.
        length: characters of a window.

    Returns:
        The stripped remaining pieces, joined by newlines.
    """
    kept = []
    position = 0
    for begin in sorted(begins):
        if begin > position:
            kept.append(text[position:begin])
        position = max(position, begin + length)
    kept.append(text[position:])
    return "\n".join(part for part in (part.strip() for part in kept) if part)


def _slice_code_points(text: str, length: int) -> list[tuple[int, Codes]]:
    """Return the code points of a text in overlapping slices that hold each window once, with
    their offsets.
    """
    codes = to_code_points(text)
    # At least four windows long, so that the overlap costs little.
    step = max(_CHARACTERS_AT_ONCE, 4 * length)
    return [
        (start, codes[start : start + step + length - 1])
        for start in range(0, len(codes) - length + 1, step)
    ]


def _compute_slice_anchors(codes: Codes, length: int) -> Hashes:
    hashes = _hash_pieces(codes, length // 2)
    width = length - length // 2 + 1
    smallest = _compute_window_minima(hashes, width)
    # A piece is the smallest of some window if the largest of the minima of its windows is its own
    # hash.
    padded = np.concatenate(
        [np.zeros(width - 1, np.uint64), smallest, np.zeros(width - 1, np.uint64)]
    )
    # The largest value is the complement of the smallest complement.
    found: Hashes = hashes[~_compute_window_minima(~padded, width) == hashes]
    return found


def _hash_pieces(codes: Codes, length: int) -> Hashes:
    """Hash every piece of `length` characters: its rolling hash divided by base^(length - 1),
    and mixed.
    """
    hashes = RollingHasher(codes).hash_windows(length)
    hashes *= np.uint64(pow(int(INVERSE_BASE), length - 1, 1 << 64))
    hashes = (hashes ^ (hashes >> _HALF)) * _MIX
    return hashes ^ (hashes >> _HALF)


def _compute_window_minima(values: Hashes, width: int) -> Hashes:
    """Return the minimum of every `width` neighbours (van Herk 1992: prefix and suffix minima of
    blocks).
    """
    count = len(values) - width + 1
    blocks = -(-len(values) // width)
    padded = np.full(blocks * width, np.iinfo(np.uint64).max, np.uint64)
    padded[: len(values)] = values
    table = padded.reshape(blocks, width)
    forward = np.minimum.accumulate(table, axis=1).ravel()
    backward = np.minimum.accumulate(table[:, ::-1], axis=1)[:, ::-1].ravel()
    minima: Hashes = np.minimum(backward[:count], forward[width - 1 : width - 1 + count])
    return minima


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
            for text, row, (rank, tie) in zip(
                batch.column("text").to_pylist(), rows.tolist(), halves, strict=True
            ):
                for begins in iter_repeated_windows(text, length, known):
                    digests = hash_windows(text, begins, length)
                    same = {"rank": rank, "tie": tie, "row": np.int64(row)}
                    columns = {name: np.full(len(begins), value) for name, value in same.items()}
                    place = begins.astype(np.int32)
                    writer.write(
                        {"high": digests[:, 0], "low": digests[:, 1], **columns, "place": place}
                    )
    return {"keys": writer.count}


def _iter_remaining_rows(
    report: Report, source: Path, gone: Any
) -> Iterator[tuple[pa.RecordBatch, Any]]:
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
