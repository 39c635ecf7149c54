"""Link near-duplicate documents: those with an equal MinHash key in the same bucket (Broder 1997).

`write_link_forest` links the documents of one range of keys. `join_near_duplicates.py` joins the links of all ranges.

Invariants:
- Memory is about 60 bytes per linked document and pair of one range.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline.dedup.dedup_index import DocumentFiles, DocumentTable
from data_pipeline.dedup.duplicate_graph import build_spanning_forest, find_components
from data_pipeline.dedup.keys import Columns, mask_repeated_keys, take_rows
from data_pipeline.executors.base import Report
from data_pipeline.stages.find_equal_keys import KeyRange
from data_pipeline.text.ragged_arrays import compute_offsets
from llmsys.token_shards import ArrowFileWriter

Indices = np.ndarray[Any, np.dtype[np.int64]]


def list_clusters(pairs: Indices) -> list[list[int]]:
    """Return the connected components of the pairs (P, 2), each sorted, ordered by their first members."""
    documents, first = find_components(pairs)
    order = np.lexsort([documents, first])
    edges = np.flatnonzero(np.diff(first[order], prepend=-1))
    return [part.tolist() for part in np.split(documents[order], edges[1:])] if len(documents) else []


LINK_SCHEMA = pa.schema([("left", pa.int64()), ("right", pa.int64())])


def write_link_forest(report: Report, *, key_range: KeyRange, documents: DocumentFiles, output: Path) -> dict[str, Any]:
    """Write a spanning forest of the links of one key range. Progress is in ranges.

    Documents are numbered globally: those of this dataset, then those of the earlier datasets.

    Args:
        report: Progress callback.
        key_range: The MinHash keys.
        documents: Signature files of documents, which give the numbering.
        output: File of links, `LINK_SCHEMA`.

    Returns:
        Numbers of keys, candidates and links.
    """
    items = key_range.read_candidates()
    # Keys that occur once link nothing: most rows go here.
    items = take_rows(items, mask_repeated_keys(items["high"]))
    starts = DocumentTable(documents).starts
    first_earlier = starts[-1] + compute_offsets([dataset.rows for dataset in key_range.earlier])
    own = items["age"] == 1
    numbers = items["row"].copy()
    numbers[own] += starts[items["source"][own]]
    numbers[~own] += first_earlier[items["source"][~own]]
    links = build_spanning_forest(_list_equal_pairs(items, numbers))
    with ArrowFileWriter(output, LINK_SCHEMA) as writer:
        columns = [pa.array(np.ascontiguousarray(links[:, side])) for side in (0, 1)]
        writer.write(pa.record_batch(columns, schema=LINK_SCHEMA))
    report(1, 0)
    return key_range.summarize_counts(len(links))


def _list_equal_pairs(items: Columns, numbers: Indices) -> Indices:
    """Return pairs of adjacent documents among those with one key in one bucket, int64 of shape (pairs, 2)."""
    order = np.lexsort([numbers, items["low"], items["high"]])
    high, low, numbers = items["high"][order], items["low"][order], numbers[order]
    equal = (high[1:] == high[:-1]) & (low[1:] == low[:-1]) & (numbers[1:] != numbers[:-1])
    return np.stack([numbers[:-1][equal], numbers[1:][equal]], axis=1)
