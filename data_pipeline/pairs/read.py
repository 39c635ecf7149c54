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
from data_pipeline.funnel import Tally, dropped_rows
from data_pipeline.pairs.line import Line, lines_of
from data_pipeline.stages.collect import LENGTH_EDGES
from llmsys.shards import ShardWriter

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
    tally, found, lines = Tally(), dict.fromkeys(labels or (), 0), lines_of(files)
    lengths = np.zeros(len(LENGTH_EDGES) - 1, np.int64)
    rows: list[int] = []
    with ShardWriter(output, PAIR_SCHEMA, "zstd") as kept, ShardWriter(dropped, DROPPED_SCHEMA, "zstd") as refused:
        while batch := list(islice(lines, BATCH_PAIRS)):
            good = [line for line in batch if line.problem is None]
            bad = list(_dropped(batch, files[0]))
            tally.drop(bad)
            tally.count(STAGE, documents_in=len(batch), documents_out=len(good))
            tally.count(STAGE, bytes_in=_bytes(batch), bytes_out=_bytes(good))
            lengths += np.histogram([len(line.source) for line in good], LENGTH_EDGES)[0]
            if labels is not None:
                for line in good:
                    found[line.target] = found.get(line.target, 0) + 1
            if good:
                kept.write(_batch(good, files[0]))
                rows.append(len(good))
            if bad:
                refused.write(pa.RecordBatch.from_pylist(bad, schema=DROPPED_SCHEMA))
            report(0, len(bad))
    report(1, 0)
    return {"rows": rows, "tally": tally.plain(), "lengths": lengths.tolist(), "labels": found}


def pair_id(file: Path, number: int, source: str, target: str) -> str:
    """32 hex digits that name one line of one file."""
    return hashlib.blake2b(f"{file.name}\0{number}\0{source}\0{target}".encode(), digest_size=16).hexdigest()


def _bytes(lines: list[Line]) -> int:
    return sum(len(line.source.encode()) + len(line.target.encode()) for line in lines)


def _batch(lines: list[Line], file: Path) -> pa.RecordBatch:
    columns = [
        [pair_id(file, line.number, line.source, line.target) for line in lines],
        [str(file)] * len(lines),
        [line.number for line in lines],
        [line.source for line in lines],
        [line.target for line in lines],
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, PAIR_SCHEMA, strict=True)]
    return pa.record_batch(arrays, schema=PAIR_SCHEMA)


def _dropped(lines: list[Line], file: Path) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.problem is not None:
            yield dropped_pair(line, pair_id(file, line.number, line.source, line.target), file, STAGE)


def dropped_pair(line: Line, name: str, file: Path | str, stage: str) -> dict[str, Any]:
    """A row of `DROPPED_SCHEMA` for a line with a problem."""
    assert line.problem is not None
    text = f"{line.source} ||| {line.target}"
    document = {"id": name, "url": f"{file}:{line.number}", "file": str(file), "offset": line.number, "text": text}
    return dropped_rows([document], stage, [line.problem])[0]
