"""Link near-duplicate documents, those with an equal MinHash key in the same bucket (Broder 1997),
and drop all but one
of each cluster (connected components as datatrove).

`write_link_forest` links the documents of one range of keys. The join of all links keeps the
longest document of a cluster, among equals the one with the smallest id; a cluster that contains a
document of an earlier dataset is dropped.

Invariants:
- Linking takes about 60 bytes per linked document and pair of one range.
- The memory of the join does not grow with the number of documents or links: rows are sorted
  externally, and documents, ids and decisions are read and written in order.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from llmsys.data_pipeline.dedup.dedup_index import (
    DocumentFiles,
    DocumentIdLookup,
    DocumentTable,
    EarlierDataset,
)
from llmsys.data_pipeline.dedup.duplicate_decisions import DROP_SCHEMA, NEAR, DecisionWriter
from llmsys.data_pipeline.dedup.duplicate_graph import (
    ExternalSorter,
    build_spanning_forest,
    find_components,
    find_labels,
)
from llmsys.data_pipeline.dedup.keys import Columns, mask_repeated_keys, take_rows
from llmsys.data_pipeline.executors.base import Report
from llmsys.data_pipeline.stages.compute_signatures import split_document_ids
from llmsys.data_pipeline.stages.find_equal_keys import KeyRange
from llmsys.data_pipeline.text.ragged_arrays import compute_offsets
from llmsys.storage.arrow_file import ArrowFileWriter, read_copied_batches

Indices = np.ndarray[Any, np.dtype[np.int64]]


def list_clusters(pairs: Indices) -> list[list[int]]:
    """Return the connected components of the pairs (P, 2), each sorted, ordered by their first
    members.
    """
    documents, first = find_components(pairs)
    order = np.lexsort([documents, first])
    edges = np.flatnonzero(np.diff(first[order], prepend=-1))
    return (
        [part.tolist() for part in np.split(documents[order], edges[1:])] if len(documents) else []
    )


LINK_SCHEMA = pa.schema([("left", pa.int64()), ("right", pa.int64())])


def write_link_forest(
    report: Report, *, key_range: KeyRange, documents: DocumentFiles, output: Path
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
    """Return pairs of adjacent documents among those with one key in one bucket, int64 of shape
    (pairs, 2).
    """
    order = np.lexsort([numbers, items["low"], items["high"]])
    high, low, numbers = items["high"][order], items["low"][order], numbers[order]
    equal = (high[1:] == high[:-1]) & (low[1:] == low[:-1]) & (numbers[1:] != numbers[:-1])
    return np.stack([numbers[:-1][equal], numbers[1:][equal]], axis=1)


# Rows that are sorted at a time; the whole join takes about 150 bytes for each.
ROWS_IN_MEMORY = 2_000_000
_IDS_AT_ONCE = 1 << 17  # ids as Python strings take 80 bytes each

# Ordered by cluster, then earlier datasets, longest text, smallest id, first in the crawl.
_MEMBER = pa.schema(
    [
        ("label", pa.int64()),
        ("is_own", pa.int8()),
        ("shortness", pa.int64()),
        ("high", pa.uint64()),
        ("low", pa.uint64()),
        ("document", pa.int64()),
    ]
)
_RANKED = pa.schema([("document", pa.int64()), ("is_own", pa.int8()), ("cluster", pa.int64())])
_CLUSTER = pa.schema([("kept", pa.int64()), ("size", pa.int64())])
_LATER = pa.schema([("kept", pa.int64()), ("document", pa.int64()), ("size", pa.int64())])
_NAMED = pa.schema(
    [
        ("document", pa.int64()),
        ("kept", pa.string()),
        ("earlier", pa.string()),
        ("size", pa.int64()),
    ]
)


def write_near_duplicates(
    report: Report,
    *,
    links: Sequence[Path],
    documents: DocumentFiles,
    earlier: Sequence[EarlierDataset],
    output: Path,
    rows_in_memory: int = ROWS_IN_MEMORY,
) -> dict[str, Any]:
    """Write the documents to drop because a near copy stays. Progress is in files of links.

    Args:
        report: Progress callback.
        links: Forests of all key ranges.
        documents: Signature files of documents, which give the numbering.
        earlier: Earlier datasets, in the order of the numbering.
        output: File of decisions.
        rows_in_memory: Rows that are sorted in memory at a time.

    Returns:
        Numbers of clusters, linked documents and dropped documents.
    """
    join = _Join(documents, earlier, output, rows_in_memory)
    linked = 0
    with ExternalSorter(output, _MEMBER, _MEMBER.names, rows_in_memory) as members:
        for labels, found in find_labels(_iter_links(report, links), output, rows_in_memory):
            for start in range(0, len(found), _IDS_AT_ONCE):
                part = slice(start, start + _IDS_AT_ONCE)
                members.add(
                    label=labels[part], document=found[part], **join.read_ranks(found[part])
                )
            linked += len(found)
        clusters = join.write_clusters(members.iter_sorted())
    with ExternalSorter(output, _NAMED, ["document"], rows_in_memory) as named:
        join.name_kept_documents(named)
        later = join.write_decisions(named)
    return {"clusters": clusters, "linked": linked, "later": later}


def _iter_links(report: Report, links: Sequence[Path]) -> Iterator[Indices]:
    for path in links:
        for batch in read_copied_batches(path):
            yield np.stack([batch.column(name).to_numpy() for name in ("left", "right")], axis=1)
        report(1, 0)


class _Join:
    """The steps of the join. Documents of earlier datasets are numbered after those of this one."""

    def __init__(
        self,
        documents: DocumentFiles,
        earlier: Sequence[EarlierDataset],
        output: Path,
        rows_in_memory: int,
    ) -> None:
        self._table, self._lookup = DocumentTable(documents), DocumentIdLookup(documents, earlier)
        self._num_own = int(self._table.starts[-1])
        self._earlier_starts = self._num_own + compute_offsets(
            [dataset.rows for dataset in earlier]
        )
        self._output, self._rows = output, rows_in_memory
        self._ranked, self._clusters = (
            output.with_name(f".{output.name}.{name}.tmp") for name in ("ranked", "clusters")
        )

    def read_ranks(self, documents: Indices) -> dict[str, Any]:
        """Return the sort keys of documents within their cluster. Those of earlier datasets come
        first.
        """
        own = documents < self._num_own
        shortness, halves = (
            np.zeros(len(documents), np.int64),
            np.zeros((len(documents), 2), np.uint64),
        )
        # Ascending, so that the longest text comes first.
        shortness[own] = -self._table.take_column(documents[own], "characters").to_numpy()
        halves[own] = split_document_ids(self._table.take_column(documents[own], "id").to_pylist())
        return {
            "is_own": own.astype(np.int8),
            "shortness": shortness,
            "high": halves[:, 0],
            "low": halves[:, 1],
        }

    def write_clusters(self, members: Iterator[pa.Table]) -> int:
        """Number the clusters of sorted members; write their members, and their first member and
        size. Return their
        number.
        """
        label, number, kept, size = -1, -1, 0, 0  # of the cluster that the next table may continue
        with (
            ArrowFileWriter(self._ranked, _RANKED) as ranked,
            ArrowFileWriter(self._clusters, _CLUSTER) as clusters,
        ):
            for table in members:
                labels, documents = (
                    table.column("label").to_numpy(),
                    table.column("document").to_numpy(),
                )
                fresh = np.diff(labels, prepend=label) != 0
                cluster = number + np.cumsum(fresh)
                own = table.column("is_own").combine_chunks()
                ranked.write(
                    pa.record_batch([pa.array(documents), own, pa.array(cluster)], schema=_RANKED)
                )
                # Entry 0 is the cluster that the table before has begun.
                firsts = np.concatenate([[kept], documents[fresh]])
                sizes = np.bincount(cluster - number, minlength=len(firsts)).astype(np.int64)
                sizes[0] += size
                _write_pairs(clusters, firsts[:-1], sizes[:-1], skip=int(number < 0))
                label, number, kept, size = (
                    int(labels[-1]),
                    int(cluster[-1]),
                    int(firsts[-1]),
                    int(sizes[-1]),
                )
            _write_pairs(clusters, np.array([kept]), np.array([size]), skip=int(number < 0))
        return number + 1

    def name_kept_documents(self, named: ExternalSorter) -> None:
        """Add the dropped documents with the id of the document that is kept instead of each."""
        with ExternalSorter(self._output, _LATER, ["kept", "document"], self._rows) as later:
            clusters = _ClusterReader(self._clusters)
            for batch in read_copied_batches(self._ranked):
                documents, cluster = (
                    batch.column("document").to_numpy(),
                    batch.column("cluster").to_numpy(),
                )
                kept, size = clusters.read_rows(cluster)
                # Documents of earlier datasets are never dropped.
                gone = (documents != kept) & (batch.column("is_own").to_numpy() == 1)
                later.add(kept=kept[gone], document=documents[gone], size=size[gone])
            for table in later.iter_sorted():
                for part in table.to_batches(max_chunksize=_IDS_AT_ONCE):
                    ids, datasets = self._read_names(part.column("kept").to_numpy())
                    named.add(
                        document=part.column("document"),
                        kept=ids,
                        earlier=datasets,
                        size=part.column("size"),
                    )
        self._ranked.unlink()
        self._clusters.unlink()

    def write_decisions(self, named: ExternalSorter) -> int:
        """Write the sorted decisions. Return their number."""
        rows = 0
        with DecisionWriter(self._output, DROP_SCHEMA) as writer:
            for table in named.iter_sorted():
                columns = {
                    name: table.column(name).combine_chunks()
                    for name in ("kept", "earlier", "size")
                }
                documents = table.column("document").to_numpy()
                source = self._table.get_source_numbers(documents)
                row = documents - self._table.starts[source]
                rule = pa.repeat(NEAR, len(documents))
                writer.write({"source": source, "row": row, "rule": rule, **columns})
                rows += len(documents)
        return rows

    def _read_names(self, numbers: Indices) -> tuple[pa.Array, pa.Array]:
        """Return ids and dataset names of globally numbered documents."""
        own = numbers < self._num_own
        source, row = self._table.get_source_numbers(numbers), numbers.copy()
        row[own] -= self._table.starts[source[own]]
        source[~own] = np.searchsorted(self._earlier_starts, numbers[~own], side="right") - 1
        row[~own] -= self._earlier_starts[source[~own]]
        return self._lookup.look_up_items(
            {"age": own.astype(np.uint8), "source": source, "row": row}
        )


def _write_pairs(writer: ArrowFileWriter, kept: Indices, size: Indices, skip: int) -> None:
    """Write rows of clusters. The first is `skip`ped if there is no cluster yet."""
    columns = [pa.array(kept[skip:], pa.int64()), pa.array(size[skip:], pa.int64())]
    writer.write(pa.record_batch(columns, schema=_CLUSTER))


class _ClusterReader:
    """The clusters in order, of which a window is in memory."""

    def __init__(self, path: Path) -> None:
        self._batches = read_copied_batches(path)
        self._first, self._kept, self._size = 0, np.zeros(0, np.int64), np.zeros(0, np.int64)

    def read_rows(self, numbers: Indices) -> tuple[Indices, Indices]:
        """Return the kept document and the size of clusters, given by numbers that never fall."""
        if not len(numbers):
            return numbers, numbers
        past = int(numbers[0]) - self._first
        # Numbers never fall: earlier clusters are not needed again.
        self._first, self._kept, self._size = int(numbers[0]), self._kept[past:], self._size[past:]
        while len(self._kept) <= int(numbers[-1]) - self._first:
            batch = next(self._batches)
            self._kept = np.concatenate([self._kept, batch.column("kept").to_numpy()])
            self._size = np.concatenate([self._size, batch.column("size").to_numpy()])
        return self._kept[numbers - self._first], self._size[numbers - self._first]
