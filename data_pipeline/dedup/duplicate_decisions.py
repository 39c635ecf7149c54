"""The names of what deduplication does: rules in their order, what each tests, and how a drop reads.

Reads the config, gives names and reasons; imports nothing of the pipeline.

What was decided about the rows of a judged file: which to drop and why, or what to take out of their texts.

Reads and writes Arrow files with one record batch per judged file, so that whoever reads a judged file finds what
concerns it, and nothing else, in each of the files that the comparing tasks have written.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from llmsys.config.deduplication import DeduplicationConfig
from llmsys.token_shards import ArrowFileWriter, read_batches

URL, EXACT, SPANS = "url_duplicates", "exact_duplicates", "duplicate_spans"
NEAR, SUBSTRING = "near_duplicates", "duplicate_substrings"

_TESTS = {URL: "same url", EXACT: "same text", NEAR: "shares a bucket"}


def list_dedup_rules(config: DeduplicationConfig) -> list[str]:
    """Return the rules of a config in the order in which they act."""
    kinds = {
        URL: config.url.kind,
        EXACT: config.exact.kind,
        SPANS: config.repeated_segments.kind,
        NEAR: config.minhash.kind,
        SUBSTRING: config.substring.kind,
    }
    return [rule for rule, kind in kinds.items() if kind != "none"]


def build_duplicate_verdict(
    rule: str, kept: str, earlier: str, size: int
) -> tuple[str, float | None, float | None, str]:
    """Return test, value, threshold and reason of a document that another one stays for."""
    test = _TESTS[rule]
    if earlier:
        test = f"{test} as an earlier dataset" if rule != NEAR else f"{test} with an earlier dataset"
        return test, float(size), 1.0, f"{rule}: {_TESTS[rule]} with {kept} of the earlier dataset {earlier}"
    return test, float(size), 1.0, f"{rule}: {test} with {kept}, which stays of {size} documents"


def build_too_short_verdict(
    rule: str, text: str, limits: Mapping[str, tuple[int, int]]
) -> tuple[str, float | None, float | None, str] | None:
    """Return the verdict on a text that was cut, or None when enough is left: nothing at all, or a count below its
    limit.
    """
    if not text:
        return "empty", 0.0, None, f"{rule}: nothing is left"
    for test, (count, limit) in limits.items():
        if count < limit:
            return test, float(count), float(limit), f"{rule}: {count} {test} left < {limit}"
    return None


# kept: the id that stays; earlier: the dataset it stays in, "" for this one; size: documents of the group.
DROP_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("rule", pa.string()),
        ("kept", pa.string()),
        ("earlier", pa.string()),
        ("size", pa.int64()),
    ]
)
PLACE_SCHEMA = pa.schema([("row", pa.int64()), ("place", pa.int32())])  # a unit or a string of a row, by its place


def write_decisions(path: Path, schema: pa.Schema, source: Any, columns: Mapping[str, Any], sources: int) -> None:
    """Write rows of `columns`, which come from the judged files numbered in `source`, sorted by file and first column.

    Args:
        path: the file to write.
        schema: its columns.
        source: the judged file of each row.
        columns: numpy or Arrow arrays, as long as `source`.
        sources: how many judged files there are.
    """
    found = [columns[field.name] for field in schema]
    table = [
        column if isinstance(column, pa.Array) else pa.array(column, field.type)
        for column, field in zip(found, schema, strict=True)
    ]
    keys = [np.asarray(columns[field.name]) for field in reversed(schema) if not pa.types.is_string(field.type)]
    order = np.lexsort([*keys, source])
    edges = np.searchsorted(np.asarray(source)[order], np.arange(sources + 1))
    batch = pa.record_batch(table, schema=schema).take(pa.array(order))
    with ArrowFileWriter(path, schema) as writer:
        for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            writer.write(batch.slice(begin, end - begin))


def read_decisions(paths: Sequence[Path], source: int) -> pa.RecordBatch | None:
    """Return what all files say about one judged file, in the order of their first column; None without files."""
    if not paths:
        return None
    table = pa.Table.from_batches([next(read_batches(path, [source])) for path in paths])
    table = table.sort_by([(name, "ascending") for name in table.schema.names])
    return table.combine_chunks().to_batches()[0] if table.num_rows else next(read_batches(paths[0], [source]))


def read_dropped_rows(paths: Sequence[Path], source: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the rows of a judged file that are dropped, sorted."""
    rows = [next(read_batches(path, [source])).column("row").to_numpy() for path in paths]
    return np.sort(np.concatenate([np.zeros(0, np.int64), *rows]))


def mask_remaining_rows(rows: Any, dropped: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
    """Return a mask of the rows that are not among the sorted dropped ones."""
    if not len(dropped):
        return np.ones(len(rows), np.bool_)
    places = np.minimum(np.searchsorted(dropped, rows), len(dropped) - 1)
    return dropped[places] != rows
