"""What stays of all files in, the dataset's index out: ids of documents in the order of the crawl, and sorted keys.

Documents are numbered through in the order of crawl file and offset, and keys are sorted over all files, so that the
bytes of an index follow from what stays: where files were cut into blocks shows nowhere. `index.json` names all files
with their digests and comes last, so that an index that is there is whole.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline.dedup.dedup_index import INDEX_KEY_SCHEMA
from data_pipeline.dedup.duplicate_decisions import mask_remaining_rows, read_dropped_rows
from data_pipeline.executors.base import Report
from data_pipeline.stages.compute_signatures import DOCUMENT_SCHEMA
from data_pipeline.stages.find_equal_keys import KeyRange
from llmsys.atomic_write import write_bytes_atomically
from llmsys.token_shards import ArrowFileWriter, read_batches

ID_SCHEMA = pa.schema([("id", pa.string())])
_KEPT_SCHEMA = pa.schema([("id", pa.string()), ("row", pa.int64())])
_ROWS_PER_BATCH = 65_536


def write_index_documents(
    report: Report, *, number: int, dropped: Sequence[Path], documents: Path, output: Path
) -> dict[str, Any]:
    """Write ids and rows of the documents of a file that stay, in the order of the crawl; progress is in documents."""
    table = pa.Table.from_batches(list(read_batches(documents)), DOCUMENT_SCHEMA)
    rows = np.arange(table.num_rows)
    rows = rows[mask_remaining_rows(rows, read_dropped_rows(dropped, number))]
    kept = table.select(["id", "offset"]).take(pa.array(rows)).append_column("row", pa.array(rows))
    kept = kept.sort_by([(name, "ascending") for name in ("offset", "id", "row")]).select(_KEPT_SCHEMA.names)
    with ArrowFileWriter(output, _KEPT_SCHEMA) as writer:
        for batch in kept.combine_chunks().to_batches():
            writer.write(batch)
    report(table.num_rows, 0)
    return {"rows": kept.num_rows}


def write_index_ids(report: Report, *, sources: Sequence[Path], output: Path) -> dict[str, Any]:
    """Write the ids of all files, one after another; progress is in files."""
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
    report: Report, *, key_range: KeyRange, kept: Sequence[Path], starts: Sequence[int], output: Path
) -> dict[str, Any]:
    """Write the keys of a range of what stays, sorted, with the numbers of their documents; progress is in ranges.

    Args:
        report: told when it is done.
        part: the range.
        kept: what `write_index_documents` wrote of each file.
        starts: the number of the first document of each file.
        output: where the keys go.
    """
    items = key_range.read_candidates()
    edges = np.searchsorted(items["source"], np.arange(len(kept) + 1))
    for path, start, begin, end in zip(kept, starts, edges[:-1], edges[1:], strict=True):
        if end > begin:
            items["row"][begin:end] = start + _number_kept_rows(path)[items["row"][begin:end]]
    order = np.lexsort([items["row"], items["low"], items["high"]])
    columns = [pa.array(items[field.name][order], field.type) for field in INDEX_KEY_SCHEMA]
    with ArrowFileWriter(output, INDEX_KEY_SCHEMA) as writer:
        writer.write(pa.record_batch(columns, schema=INDEX_KEY_SCHEMA))
    report(1, 0)
    return key_range.summarize_counts(len(order))


def _number_kept_rows(path: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    """By row of a file: the place of the document among those that stay."""
    rows = np.concatenate([np.zeros(0, np.int64), *(batch.column("row").to_numpy() for batch in read_batches(path))])
    places = np.full(int(rows.max(initial=-1)) + 1, -1, np.int64)
    places[rows] = np.arange(len(rows))
    return places


def write_index(report: Report, *, content: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """Publish `index.json`."""
    write_bytes_atomically(output, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())
    report(1, 0)
    return {}
