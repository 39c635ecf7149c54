"""Write the deduplication index of a dataset: ids of kept documents in crawl order, and sorted
keys.

`index.json` names all files with their digests and is written last, so that an existing index is
complete.

Invariants:
    - Documents are numbered in the order of crawl file and offset, and keys are sorted over all
      files.
    - The bytes do not depend on how files are split into blocks.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from llmsys.data_pipeline.core.task_record import FileRows
from llmsys.data_pipeline.dedup.dedup_index import INDEX_KEY_SCHEMA
from llmsys.data_pipeline.dedup.duplicate_decisions import mask_remaining_rows, read_dropped_rows
from llmsys.data_pipeline.dedup.keys import take_rows
from llmsys.data_pipeline.executors.base import Report
from llmsys.data_pipeline.stages.compute_signatures import DOCUMENT_SCHEMA
from llmsys.data_pipeline.stages.find_equal_keys import KeyRange
from llmsys.data_pipeline.text.ragged_arrays import compute_offsets
from llmsys.dataset.token_shards import ArrowFileWriter, read_batches
from llmsys.storage.atomic_write import write_bytes_atomically

ID_SCHEMA = pa.schema([("id", pa.string())])
_KEPT_SCHEMA = pa.schema([("id", pa.string()), ("row", pa.int64())])
_ROWS_PER_BATCH = 65_536


def write_index_documents(
    report: Report, *, number: int, dropped: Sequence[Path], documents: Path, output: Path
) -> dict[str, Any]:
    """Write ids and rows of the kept documents of one file in crawl order. Progress is in
    documents.

    Args:
        report: Progress callback.
        number: Index of the file, by which decisions name it.
        dropped: Files of decisions.
        documents: Signature file of documents.
        output: File to write.

    Returns:
        Number of kept documents.
    """
    table = pa.Table.from_batches(list(read_batches(documents)), DOCUMENT_SCHEMA)
    rows = np.arange(table.num_rows)
    rows = rows[mask_remaining_rows(rows, read_dropped_rows(dropped, number))]
    kept = table.select(["id", "offset"]).take(pa.array(rows)).append_column("row", pa.array(rows))
    # Offsets order one file; ids break ties of documents from one record.
    kept = kept.sort_by([(name, "ascending") for name in ("offset", "id", "row")]).select(
        _KEPT_SCHEMA.names
    )
    with ArrowFileWriter(output, _KEPT_SCHEMA) as writer:
        for batch in kept.combine_chunks().to_batches():
            writer.write(batch)
    report(table.num_rows, 0)
    return {"rows": kept.num_rows}


def write_index_ids(report: Report, *, sources: Sequence[Path], output: Path) -> dict[str, Any]:
    """Write the ids of all files, one after another. Progress is in files.

    Args:
        report: Progress callback.
        sources: Outputs of `write_index_documents`, in crawl order.
        output: File of ids, `ID_SCHEMA`.

    Returns:
        Nothing: an empty result.
    """
    with ArrowFileWriter(output, ID_SCHEMA) as writer:
        for ids in _iter_id_batches(report, sources):
            writer.write(pa.record_batch([pa.array(ids, pa.string())], schema=ID_SCHEMA))
    return {}


def _iter_id_batches(report: Report, sources: Sequence[Path]) -> Iterator[list[str]]:
    waiting: list[str] = []
    for path in sources:
        for batch in read_batches(path):
            waiting += batch.column("id").to_pylist()
            while len(waiting) >= _ROWS_PER_BATCH:
                yield waiting[:_ROWS_PER_BATCH]
                waiting = waiting[_ROWS_PER_BATCH:]
        report(1, 0)
    if waiting:
        yield waiting


def write_index_keys(
    report: Report,
    *,
    key_range: KeyRange,
    kept: Sequence[Path],
    counts: FileRows,
    first: int,
    output: Path,
) -> dict[str, Any]:
    """Write the sorted keys of kept documents in one range, with document numbers. Progress is in
    ranges.

    Args:
        report: Progress callback.
        key_range: The keys.
        kept: Outputs of `write_index_documents`, by file.
        counts: A list with the column `rows`: kept documents of each file.
        first: Number of the first document of these files.
        output: File of keys, `INDEX_KEY_SCHEMA`.

    Returns:
        Numbers of keys and candidates.
    """
    items = key_range.read_candidates()
    items = take_rows(items, np.argsort(items["source"], kind="stable"))
    edges = np.searchsorted(items["source"], np.arange(len(kept) + 1))
    starts = first + compute_offsets(counts.read_numbers("rows"))
    for path, start, begin, end in zip(kept, starts[:-1], edges[:-1], edges[1:], strict=True):
        if end > begin:
            items["row"][begin:end] = start + _number_kept_rows(path)[items["row"][begin:end]]
    order = np.lexsort([items["row"], items["low"], items["high"]])
    columns = [pa.array(items[field.name][order], field.type) for field in INDEX_KEY_SCHEMA]
    with ArrowFileWriter(output, INDEX_KEY_SCHEMA) as writer:
        writer.write(pa.record_batch(columns, schema=INDEX_KEY_SCHEMA))
    report(1, 0)
    return key_range.summarize_counts(len(order))


def _number_kept_rows(path: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return, by row of a file, the position of the document among the kept ones; -1 for dropped
    rows.
    """
    rows = np.concatenate(
        [np.zeros(0, np.int64), *(batch.column("row").to_numpy() for batch in read_batches(path))]
    )
    places = np.full(int(rows.max(initial=-1)) + 1, -1, np.int64)
    places[rows] = np.arange(len(rows))
    return places


def write_index(report: Report, *, content: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """Write `index.json`.

    Args:
        report: Progress callback.
        content: What `describe_index` returns.
        output: File to write.

    Returns:
        Nothing: an empty result.
    """
    write_bytes_atomically(output, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())
    report(1, 0)
    return {}
