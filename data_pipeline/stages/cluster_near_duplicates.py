"""Cluster near-duplicate documents and drop all but one of each cluster (Broder 1997; connected components as
datatrove).

`write_link_forest` links documents with an equal MinHash key in the same bucket, for one range of keys.
`write_near_duplicates` merges the forests by union-find and keeps the longest document of each cluster, among equals
the one with the smallest id. A cluster that contains a document of an earlier dataset is dropped entirely.

Cluster pairs of documents into connected components, independently of the order of the pairs.

Invariants:
- Memory is about 60 bytes per linked document and pair. Spanning forests of partial pairs (the fewest pairs with the
  same components) are joined one by one, so that the pairs of one part at a time are in memory.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline.dedup.dedup_index import DocumentIdLookup, DocumentTable, EarlierDataset
from data_pipeline.dedup.duplicate_decisions import DROP_SCHEMA, NEAR, write_decisions
from data_pipeline.dedup.keys import Columns, mask_repeated_keys, take_rows
from data_pipeline.executors.base import Report
from data_pipeline.stages.compute_signatures import split_document_ids
from data_pipeline.stages.find_equal_keys import KeyRange
from data_pipeline.text.ragged_arrays import compute_offsets
from llmsys.token_shards import ArrowFileWriter, read_batches

Indices = np.ndarray[Any, np.dtype[np.int64]]


def find_components(pairs: Indices) -> tuple[Indices, Indices]:
    """Find the connected components of pairs.

    Args:
        pairs: (P, 2) document numbers, in any order.

    Returns:
        The distinct documents (D,), sorted, and for each the smallest document of its component (D,).
    """
    from scipy.sparse import coo_array  # slow to import, and only clustering needs it
    from scipy.sparse.csgraph import connected_components

    documents, indices = np.unique(pairs, return_inverse=True)
    indices = indices.reshape(-1, 2)
    size = len(documents)
    links = coo_array((np.ones(len(indices), np.int8), (indices[:, 0], indices[:, 1])), shape=(size, size))
    _, labels = connected_components(links, directed=False)
    first = np.zeros(0 if not size else int(labels.max()) + 1, np.int64)
    first[labels[::-1]] = documents[::-1]  # the last write per label wins: the smallest document
    return documents.astype(np.int64), first[labels]


def build_spanning_forest(pairs: Indices) -> Indices:
    """Reduce pairs to the fewest with the same components.

    Args:
        pairs: (P, 2) document numbers, in any order.

    Returns:
        (F, 2) pairs of the smallest document of a component and another of its documents; at most one per document.
    """
    documents, first = find_components(pairs)
    linked = documents != first
    return np.stack([first[linked], documents[linked]], axis=1)


def list_clusters(pairs: Indices) -> list[list[int]]:
    """Return the connected components of the pairs (P, 2), each sorted, ordered by their first members."""
    documents, first = find_components(pairs)
    order = np.lexsort([documents, first])
    edges = np.flatnonzero(np.diff(first[order], prepend=-1))
    return [part.tolist() for part in np.split(documents[order], edges[1:])] if len(documents) else []


_IDS_AT_ONCE = 1 << 18  # ids as Python strings take 80 bytes each
LINK_SCHEMA = pa.schema([("left", pa.int64()), ("right", pa.int64())])


def write_link_forest(
    report: Report, *, key_range: KeyRange, documents: Sequence[Path], output: Path
) -> dict[str, Any]:
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


def write_near_duplicates(
    report: Report, *, links: Sequence[Path], documents: Sequence[Path], earlier: Sequence[EarlierDataset], output: Path
) -> dict[str, Any]:
    """Write the documents to drop because a near copy stays. Progress is in files of links.

    Args:
        report: Progress callback.
        links: Forests of all key ranges.
        documents: Signature files of documents, which give the numbering.
        earlier: Earlier datasets, in the order of the numbering.
        output: File of decisions, one batch per signature file.

    Returns:
        Numbers of clusters, linked documents and dropped documents.
    """
    joined = np.zeros((0, 2), np.int64)
    for path in links:
        for batch in read_batches(path):
            pairs = np.stack([batch.column(name).to_numpy() for name in ("left", "right")], axis=1)
            # Reduced after every batch, which bounds memory by the documents, not the links.
            joined = build_spanning_forest(np.concatenate([joined, pairs]))
        report(1, 0)
    members, label = find_components(joined)
    table = DocumentTable(documents)
    order = _rank_members(members, label, table)
    members, label = members[order], label[order]
    fresh = np.diff(label, prepend=-1) != 0
    cluster = np.cumsum(fresh) - 1
    sizes = np.bincount(cluster, minlength=0).astype(np.int64)
    # Documents of earlier datasets are never dropped.
    gone = np.flatnonzero(~fresh & (members < table.starts[-1]))
    kept, datasets = _read_document_names(members[np.flatnonzero(fresh)][cluster[gone]], table, documents, earlier)
    dropped = members[gone]
    source = table.get_source_numbers(dropped)
    rule = pa.repeat(NEAR, len(gone))
    columns = {"row": dropped - table.starts[source], "rule": rule, "kept": kept, "earlier": datasets}
    write_decisions(output, DROP_SCHEMA, source, {**columns, "size": sizes[cluster[gone]]}, len(documents))
    return {"clusters": int(fresh.sum()), "linked": len(members), "later": len(gone)}


def _rank_members(members: Indices, label: Indices, table: DocumentTable) -> Any:
    """Return the order by cluster, then earlier datasets, then longest text, smallest id, first in the crawl."""
    own = members < table.starts[-1]
    characters = np.zeros(len(members), np.int64)
    characters[own] = table.take_column(members[own], "characters").to_numpy()
    halves = np.zeros((len(members), 2), np.uint64)
    for start in range(0, len(members), _IDS_AT_ONCE):
        part = np.flatnonzero(own[start : start + _IDS_AT_ONCE]) + start
        halves[part] = split_document_ids(table.take_column(members[part], "id").to_pylist())
    return np.lexsort([members, halves[:, 1], halves[:, 0], -characters, own, label])


def _read_document_names(
    numbers: Indices, table: DocumentTable, documents: Sequence[Path], earlier: Sequence[EarlierDataset]
) -> tuple[pa.Array, pa.Array]:
    """Return ids and dataset names of globally numbered documents."""
    own = numbers < table.starts[-1]
    first_earlier = table.starts[-1] + compute_offsets([dataset.rows for dataset in earlier])
    source, row = table.get_source_numbers(numbers), numbers.copy()
    row[own] -= table.starts[source[own]]
    source[~own] = np.searchsorted(first_earlier, numbers[~own], side="right") - 1
    row[~own] -= first_earlier[source[~own]]
    return DocumentIdLookup(documents, earlier).look_up_items(
        {"age": own.astype(np.uint8), "source": source, "row": row}
    )
