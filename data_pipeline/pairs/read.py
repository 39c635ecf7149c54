"""The first stage: files of lines in, pairs that can be used and pairs that cannot out, in the order of the lines."""

import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline.document import DROPPED_SCHEMA
from data_pipeline.executors.event import Report
from data_pipeline.funnel import FunnelCounts, build_dropped_rows
from data_pipeline.pairs.line import TextPair, iter_text_pairs
from data_pipeline.stages.collect import LENGTH_EDGES
from llmsys.shards import ArrowFileWriter

STAGE = "lines"
BATCH_PAIRS = 10_000

PAIR_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("file", pa.string()),
        ("line", pa.int64()),
        ("source", pa.large_string()),
        ("target", pa.large_string()),
    ]
)


def read_pairs(
    report: Report, *, files: tuple[Path, ...], output: Path, dropped: Path, labels: tuple[str, ...] | None
) -> dict[str, Any]:
    """Read one source and target file, or one labelled file; progress is in files.

    The result has the rows of each record batch, the tally, the histogram of lengths and, for labelled texts
    (`labels` is not None), how often each label was found.
    """
    tally, found, lines = FunnelCounts(), dict.fromkeys(labels or (), 0), iter_text_pairs(files)
    lengths = np.zeros(len(LENGTH_EDGES) - 1, np.int64)
    rows: list[int] = []
    with ArrowFileWriter(output, PAIR_SCHEMA, "zstd") as kept, ArrowFileWriter(dropped, DROPPED_SCHEMA, "zstd") as refused:
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
                refused.write(pa.RecordBatch.from_pylist(bad, schema=DROPPED_SCHEMA))
            report(0, len(bad))
    report(1, 0)
    return {"rows": rows, "tally": tally.to_dict(), "lengths": lengths.tolist(), "labels": found}


def compute_pair_id(file: Path, number: int, source: str, target: str) -> str:
    """32 hex digits that name one line of one file."""
    return hashlib.blake2b(f"{file.name}\0{number}\0{source}\0{target}".encode(), digest_size=16).hexdigest()


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
    arrays = [pa.array(column, field.type) for column, field in zip(columns, PAIR_SCHEMA, strict=True)]
    return pa.record_batch(arrays, schema=PAIR_SCHEMA)


def _iter_dropped_rows(lines: list[TextPair], file: Path) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.problem is not None:
            yield build_dropped_pair_row(line, compute_pair_id(file, line.number, line.source, line.target), file, STAGE)


def build_dropped_pair_row(line: TextPair, name: str, file: Path | str, stage: str) -> dict[str, Any]:
    """A row of `DROPPED_SCHEMA` for a line with a problem."""
    assert line.problem is not None
    text = f"{line.source} ||| {line.target}"
    document = {"id": name, "url": f"{file}:{line.number}", "file": str(file), "offset": line.number, "text": text}
    return build_dropped_rows([document], stage, [line.problem])[0]
