"""Read pairs from text files: line n of one file translates line n of another, or each line has a
label.

Reads UTF-8 files, plain or .gz. Writes usable pairs and dropped lines in the order of the lines.

Invariants:
    - Only `\\n` ends a line, so that all files are counted alike.
    - Parallel files with different numbers of lines are an error.
    - Every unusable line is counted with its reason.
"""

import gzip
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import pyarrow as pa

from llmsys.data_pipeline.core.document_schema import DROPPED_SCHEMA
from llmsys.data_pipeline.core.funnel import FunnelCounts, build_dropped_rows
from llmsys.data_pipeline.executors.base import Report
from llmsys.data_pipeline.stages.collect import LENGTH_EDGES
from llmsys.dataset.token_shards import ArrowFileWriter
from llmsys.errors import DataError
from llmsys.storage.stored_formats import PAIRS

LABELLED_SUFFIXES = (".tsv", ".jsonl")


class LineProblem(NamedTuple):
    """Reason for dropping a line: test, measured value, threshold and a sentence."""

    test: str
    value: float | None
    threshold: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class TextPair:
    """A source and its target, or a text and its label. `number` counts lines from 1, as editors
    do.
    """

    number: int
    source: str
    target: str
    problem: LineProblem | None = None


def iter_text_pairs(files: tuple[Path, ...]) -> Iterator[TextPair]:
    """Yield the pairs of a source and a target file, or the labelled texts of a single file.

    Raises:
        DataError: If a file is unreadable or of an unknown kind, or the numbers of lines differ.
    """
    if len(files) == 2:
        return _iter_parallel_pairs(*files)
    return _iter_labelled_texts(files[0])


def _iter_parallel_pairs(source: Path, target: Path) -> Iterator[TextPair]:
    number = 0
    # zip_longest: a shorter file must be noticed.
    for number, (left, right) in enumerate(
        zip_longest(iter_raw_lines(source), iter_raw_lines(target)), start=1
    ):
        if left is None or right is None:
            raise DataError(_describe_length_mismatch(source, target, number - 1))
        yield _build_pair(number, left, right)
    if not number:
        raise DataError(f"{source} is empty. Give a file with one sentence per line.")


def _describe_length_mismatch(source: Path, target: Path, common: int) -> str:
    counts = [sum(1 for _ in iter_raw_lines(path)) for path in (source, target)]
    return (
        f"{source} has {counts[0]:,} lines and {target} has {counts[1]:,}: line n of one must be "
        f"the translation of line n of the other, but one ends after line {common:,}. Give files "
        "with equal numbers of lines."
    )


def _build_pair(number: int, left: bytes, right: bytes) -> TextPair:
    texts, problem = ["", ""], None
    for place, (side, raw) in enumerate((("source", left), ("target", right))):
        texts[place], found = _decode_line(side, raw)
        problem = problem or found
    return TextPair(number, texts[0], texts[1], problem)


def _decode_line(side: str, raw: bytes) -> tuple[str, LineProblem | None]:
    try:
        text = raw.decode().strip()
    except UnicodeDecodeError as error:
        reason = f"the {side} is not UTF-8: byte {error.start} is 0x{raw[error.start]:02x}"
        return raw.decode(errors="replace").strip(), LineProblem(
            f"{side}_not_utf8", error.start, None, reason
        )
    return text, None if text else LineProblem(
        f"{side}_empty", 0, 1, f"the {side} has 0 characters, less than 1"
    )


def _iter_labelled_texts(path: Path) -> Iterator[TextPair]:
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix not in LABELLED_SUFFIXES:
        raise DataError(
            f"{path}: labelled texts are read from .tsv and .jsonl, not from '{suffix}'. Rename "
            "or convert."
        )
    for number, raw in enumerate(iter_raw_lines(path), start=1):
        text, problem = _decode_line("line", raw)
        if problem is not None:
            yield TextPair(number, text, "", problem)
            continue
        yield (
            _parse_json_line(number, text) if suffix == ".jsonl" else _parse_tsv_line(number, text)
        )


def _parse_tsv_line(number: int, text: str) -> TextPair:
    label, tab, body = text.partition("\t")
    if not tab or not body.strip():
        return TextPair(
            number,
            text,
            "",
            LineProblem("no_label_and_text", None, None, "the line is not label<TAB>text"),
        )
    return TextPair(number, body.strip(), label.strip())


def _parse_json_line(number: int, text: str) -> TextPair:
    try:
        record = json.loads(text)
        body, label = record["text"], record["label"]
    except (ValueError, KeyError, TypeError):
        body, label = None, None
    if not isinstance(body, str) or not body.strip() or not isinstance(label, str | int):
        reason = 'the line is not {"text": …, "label": …} with a text that has characters'
        return TextPair(number, text, "", LineProblem("no_label_and_text", None, None, reason))
    return TextPair(number, body.strip(), str(label))


def iter_raw_lines(path: Path) -> Iterator[bytes]:
    """Read the lines of a file.

    Args:
        path: The file; .gz is decompressed.

    Yields:
        Bytes of each line, with its end.

    Raises:
        DataError: The file is unreadable.
    """
    # In binary mode, because text mode also splits at \r.
    opening = gzip.open if path.suffix == ".gz" else open
    try:
        with cast(BinaryIO, opening(path, "rb")) as file:
            yield from file
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"{path} cannot be read: {reason}. Correct the path (relative paths start in the "
            "working directory)."
        ) from None


STAGE = "lines"
BATCH_PAIRS = 10_000

PAIR_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("file", pa.string()),
        ("line", pa.int64()),
        ("source", pa.large_string()),
        ("target", pa.large_string()),
    ],
    PAIRS.arrow_metadata,
)


def read_pairs(
    report: Report,
    *,
    files: tuple[Path, ...],
    output: Path,
    dropped: Path,
    labels: tuple[str, ...] | None,
) -> dict[str, Any]:
    """Read a source and a target file, or one labelled file. Progress is in files.

    Args:
        report: Progress callback.
        files: Source and target, or a single labelled file.
        output: File to write the pairs to.
        dropped: File to write the unusable lines to.
        labels: Known labels. None for translations.

    Returns:
        Rows of each record batch, funnel counts, histogram of source lengths, and occurrences by
        label.
    """
    tally, found, lines = FunnelCounts(), dict.fromkeys(labels or (), 0), iter_text_pairs(files)
    lengths = np.zeros(len(LENGTH_EDGES) - 1, np.int64)
    rows: list[int] = []
    with (
        ArrowFileWriter(output, PAIR_SCHEMA, "zstd") as kept,
        ArrowFileWriter(dropped, DROPPED_SCHEMA, "zstd") as rejected,
    ):
        while batch := list(islice(lines, BATCH_PAIRS)):
            good = [line for line in batch if line.problem is None]
            bad = list(_iter_dropped_rows(batch, files[0]))
            tally.add_drops(bad)
            tally.add_amounts(STAGE, documents_in=len(batch), documents_out=len(good))
            tally.add_amounts(STAGE, bytes_in=_count_bytes(batch), bytes_out=_count_bytes(good))
            lengths += np.histogram([len(line.source) for line in good], LENGTH_EDGES)[0]
            if labels is not None:
                for line in good:
                    found[line.target] = found.get(line.target, 0) + 1
            if good:
                kept.write(_build_batch(good, files[0]))
                rows.append(len(good))
            if bad:
                rejected.write(pa.RecordBatch.from_pylist(bad, schema=DROPPED_SCHEMA))
            report(0, len(bad))
    report(1, 0)
    return {"rows": rows, "tally": tally.to_dict(), "lengths": lengths.tolist(), "labels": found}


def compute_pair_id(file: Path, number: int, source: str, target: str) -> str:
    """Return 32 hex digits that identify one line of one file."""
    return hashlib.blake2b(
        f"{file.name}\0{number}\0{source}\0{target}".encode(), digest_size=16
    ).hexdigest()


def _count_bytes(lines: list[TextPair]) -> int:
    return sum(len(line.source.encode()) + len(line.target.encode()) for line in lines)


def _build_batch(lines: list[TextPair], file: Path) -> pa.RecordBatch:
    columns = [
        [compute_pair_id(file, line.number, line.source, line.target) for line in lines],
        [str(file)] * len(lines),
        [line.number for line in lines],
        [line.source for line in lines],
        [line.target for line in lines],
    ]
    arrays = [
        pa.array(column, field.type) for column, field in zip(columns, PAIR_SCHEMA, strict=True)
    ]
    return pa.record_batch(arrays, schema=PAIR_SCHEMA)


def _iter_dropped_rows(lines: list[TextPair], file: Path) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.problem is not None:
            yield build_dropped_pair_row(
                line, compute_pair_id(file, line.number, line.source, line.target), file, STAGE
            )


def build_dropped_pair_row(
    line: TextPair, name: str, file: Path | str, stage: str
) -> dict[str, Any]:
    """Build a row of `DROPPED_SCHEMA` for a line with a problem."""
    assert line.problem is not None
    text = f"{line.source} ||| {line.target}"
    document = {
        "id": name,
        "url": f"{file}:{line.number}",
        "file": str(file),
        "offset": line.number,
        "text": text,
    }
    return build_dropped_rows([document], stage, [line.problem])[0]
