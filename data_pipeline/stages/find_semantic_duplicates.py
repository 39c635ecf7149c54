"""Find documents whose embedding is near that of a longer one in their cluster (SemDeDup, Abbas et
al. 2023), for one range of clusters per task.

Reads the embeddings of all files by cluster. Writes decisions.

A cluster is taken by falling length, ties by the smallest id. A document is dropped if its cosine
with one that stays reaches the threshold, and the decision names the nearest of those.

Invariants:
    - What stays of a cluster depends on its documents alone, not on files, blocks or ranges.
    - Memory: two blocks of `ROWS_AT_ONCE` embeddings and the products of their pairs, about 50 MB
      for 768 numbers, and what is sorted at a time (`_SORTED_BYTES`, or a block of each of its
      runs). The documents that stay of a cluster are in a temporary file.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from llmsys.config.deduplication import SemanticDedupConfig
from llmsys.data_pipeline.dedup.dedup_index import DocumentFiles, DocumentIdLookup
from llmsys.data_pipeline.dedup.duplicate_decisions import (
    SEMANTIC,
    SEMANTIC_SCHEMA,
    DecisionWriter,
)
from llmsys.data_pipeline.dedup.duplicate_graph import ExternalSorter
from llmsys.data_pipeline.dedup.embeddings import (
    Floats,
    Integers,
    build_assigned_schema,
    compute_cosines,
    find_nearest,
    mask_near_pairs,
    round_embeddings,
)
from llmsys.data_pipeline.dedup.keys import build_key_column, read_key_column, read_range
from llmsys.data_pipeline.executors.base import Report

ROWS_AT_ONCE = 2_048
_SORTED_BYTES = 256_000_000
_ORDER = ("high", "shortness", "id_high", "id_low", "source", "row")
_DECISIONS_AT_ONCE = 1 << 17
_FOUND = pa.schema([("source", pa.int64()), *SEMANTIC_SCHEMA])


@dataclass
class ClusterRange:
    """The embeddings of a range of clusters; picklable.

    Attributes:
        sources: Embeddings by cluster, one file per filtered file or per group of them.
        number: Index of the range, below `ranges`.
        ranges: Number of ranges.
    """

    sources: Sequence[Path]
    number: int
    ranges: int

    def iter_parts(self) -> Iterator[dict[str, Any]]:
        """Yield columns of the embeddings with the number of their filtered file, in pieces."""
        for index, path in enumerate(self.sources):
            for part in read_range(path, self.number, self.ranges):
                part.setdefault("source", np.full(len(part["high"]), index))
                yield part


def write_semantic_duplicates(
    report: Report,
    *,
    cluster_range: ClusterRange,
    config: SemanticDedupConfig,
    documents: DocumentFiles,
    output: Path,
    sorted_bytes: int = _SORTED_BYTES,
) -> dict[str, Any]:
    """Write the documents of a range to drop because one that says the same stays. Progress is in
    ranges.

    Args:
        report: Progress callback.
        cluster_range: The embeddings.
        config: The semantic duplicates.
        documents: Signature files of documents, for the ids of those that stay.
        output: File of decisions.
        sorted_bytes: Bytes of embeddings that are sorted in memory at a time.

    Returns:
        Numbers of compared and of dropped documents, and the documents of the largest cluster.
    """
    schema = build_assigned_schema(config.precision).append(pa.field("source", pa.int64()))
    counts = {"compared": 0, "later": 0, "largest": 0}
    output.parent.mkdir(parents=True, exist_ok=True)
    found = _FoundDuplicates(DocumentIdLookup(documents, ()), config.threshold)
    with (
        _MemberSorter(output, schema, sorted_bytes) as members,
        ExternalSorter(output, _FOUND, ["source", "row"], _DECISIONS_AT_ONCE) as drops,
    ):
        for part in cluster_range.iter_parts():
            members.add(part)
        with _KeptDocuments(config.threshold, output.parent) as kept:
            cluster = None
            size = 0
            for table in members.iter_sorted():
                for key, block in _iter_blocks(table):
                    if key != cluster:
                        kept.clear()
                        cluster = key
                        size = 0
                    size += len(block["row"])
                    counts["compared"] += len(block["row"])
                    counts["largest"] = max(counts["largest"], size)
                    counts["later"] += found.add_drops(drops, block, kept.compare_block(block))
        found.flush(drops)
        with DecisionWriter(output, SEMANTIC_SCHEMA) as writer:
            for table in drops.iter_sorted():
                columns = {name: table.column(name).combine_chunks() for name in _FOUND.names}
                writer.write(columns)
    report(1, counts["later"])
    return counts


class _MemberSorter:
    """Sorts embeddings by cluster and rank."""

    def __init__(self, output: Path, schema: pa.Schema, sorted_bytes: int) -> None:
        self._output = output
        self._schema = schema
        self._bytes = sorted_bytes
        self._sorter: ExternalSorter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._sorter is not None:
            self._sorter.__exit__(*error)

    def add(self, part: dict[str, Any]) -> None:
        """Add rows."""
        if self._sorter is None:
            row_bytes = part["embedding"].shape[1] * part["embedding"].itemsize
            run_rows = max(1, self._bytes // row_bytes)
            self._sorter = ExternalSorter(self._output, self._schema, _ORDER, run_rows)
        self._sorter.add(
            **{field.name: build_key_column(part[field.name], field.type) for field in self._schema}
        )

    def iter_sorted(self) -> Iterator[pa.Table]:
        """Yield all rows in order."""
        return iter(()) if self._sorter is None else self._sorter.iter_sorted()


def _iter_blocks(table: pa.Table) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the key of a cluster and at most `ROWS_AT_ONCE` of its documents."""
    keys = table.column("high").to_numpy()
    edges = np.flatnonzero(np.diff(keys, prepend=np.uint64(0), append=np.uint64(0)) != 0)
    for start, stop in pairwise(sorted({0, len(keys), *edges.tolist()})):
        for first in range(start, stop, ROWS_AT_ONCE):
            part = table.slice(first, min(ROWS_AT_ONCE, stop - first)).combine_chunks()
            (batch,) = part.to_batches()
            names = ("source", "row", "embedding")
            yield int(keys[start]), {name: read_key_column(batch.column(name)) for name in names}


@dataclass(frozen=True)
class _Nearest:
    """For each document of a block the nearest that stays: cosine (-inf for none), and its
    place.
    """

    cosine: npt.NDArray[np.float64]
    source: Integers
    row: Integers


class _KeptDocuments:
    """The documents of one cluster that stay, in a temporary file without a name."""

    def __init__(self, threshold: float, folder: Path) -> None:
        self._threshold = threshold
        self._file = TemporaryFile(dir=folder)  # noqa: SIM115 closed with this block
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def clear(self) -> None:
        """Begin another cluster."""
        self._file.seek(0)
        self._file.truncate()
        self._count = 0

    def compare_block(self, block: dict[str, Any]) -> _Nearest:
        """Compare the next documents with those that stay, and keep those that are near none."""
        values: Floats = block["embedding"]
        kind = np.dtype(
            [("source", "<i8"), ("row", "<i8"), ("embedding", values.dtype, values.shape[1:])]
        )
        nearest = _Nearest(
            np.full(len(values), -np.inf),
            np.full(len(values), -1, np.int64),
            np.full(len(values), -1, np.int64),
        )
        self._file.seek(0)
        for first in range(0, self._count, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, self._count - first)
            earlier = np.frombuffer(self._file.read(count * kind.itemsize), kind)
            cosines, places = find_nearest(values, earlier["embedding"], self._threshold)
            # Of equally near ones the first stays named.
            closer = cosines > nearest.cosine
            nearest.cosine[closer] = cosines[closer]
            nearest.source[closer] = earlier["source"][places[closer]]
            nearest.row[closer] = earlier["row"][places[closer]]
        stays = self._compare_within(block, nearest)
        rows = np.zeros(int(stays.sum()), kind)
        for name in ("source", "row", "embedding"):
            rows[name] = block[name][stays]
        self._file.write(rows.tobytes())
        self._count += len(rows)
        return nearest

    def _compare_within(self, block: dict[str, Any], nearest: _Nearest) -> npt.NDArray[np.bool_]:
        """Compare each document with those before it in the block that stay. Return which do."""
        values: Floats = block["embedding"]
        whole = round_embeddings(values)
        near = np.tril(mask_near_pairs(whole, whole, self._threshold), -1)
        stays: npt.NDArray[np.bool_] = np.isneginf(nearest.cosine)
        for place in np.flatnonzero(near.any(axis=1)).tolist():
            others = np.flatnonzero(near[place, :place] & stays[:place])
            if not len(others):
                continue
            cosines = compute_cosines(values[[place] * len(others)], values[others])
            best = int(cosines.argmax())
            if cosines[best] >= self._threshold and cosines[best] > nearest.cosine[place]:
                nearest.cosine[place] = cosines[best]
                nearest.source[place] = block["source"][others[best]]
                nearest.row[place] = block["row"][others[best]]
                stays[place] = False
        return stays


class _FoundDuplicates:
    """Dropped documents on their way to a sorter, with the ids of those that stay."""

    def __init__(self, lookup: DocumentIdLookup, threshold: float) -> None:
        self._lookup = lookup
        self._threshold = threshold
        self._waiting = list[dict[str, Any]]()
        self._rows = 0

    def add_drops(self, drops: ExternalSorter, block: dict[str, Any], nearest: _Nearest) -> int:
        """Add the documents of a block that have a near one. Return their number."""
        gone = nearest.cosine > -np.inf
        count = int(gone.sum())
        if count:
            columns = {"source": block["source"], "row": block["row"], "cosine": nearest.cosine}
            columns |= {"kept_source": nearest.source, "kept_row": nearest.row}
            self._waiting.append({name: column[gone] for name, column in columns.items()})
            self._rows += count
            if self._rows >= _DECISIONS_AT_ONCE:
                self.flush(drops)
        return count

    def flush(self, drops: ExternalSorter) -> None:
        """Give the sorter what waits: ids are looked up for many at once."""
        if not self._rows:
            return
        columns = {
            name: np.concatenate([part[name] for part in self._waiting])
            for name in self._waiting[0]
        }
        self._waiting = []
        self._rows = 0
        age = np.ones(len(columns["row"]), np.uint8)
        place = {"age": age, "source": columns["kept_source"], "row": columns["kept_row"]}
        kept, earlier = self._lookup.look_up_items(place)
        drops.add(
            source=columns["source"],
            row=columns["row"],
            rule=pa.repeat(SEMANTIC, len(age)),
            kept=kept,
            earlier=earlier,
            size=np.zeros(len(age), np.int64),
            value=columns["cosine"],
            threshold=np.full(len(age), self._threshold),
        )
