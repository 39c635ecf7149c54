"""The deduplication index of a dataset, with which later datasets compare their documents.

Reads `index/`: the ids of the documents that were kept, numbered in order, and their sorted keys of
URL, text and MinHash buckets, one file per range. `index.json` names all files with their digests
and the MinHash parameters.

Look up the ids of documents by number: those of this dataset by input file and row, those of
earlier ones by index.

Reads the files of document columns that the stage `signatures` wrote. They are memory-mapped, not
loaded.

Invariants:
- A file that does not match its digest in the index is rejected before it is used.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from llmsys.config.deduplication import DeduplicationConfig, MinHashDedupConfig
from llmsys.data_pipeline.core.task_record import FileRows
from llmsys.data_pipeline.dedup.keys import Columns, compute_group_size, read_range, take_rows
from llmsys.data_pipeline.text.ragged_arrays import compute_offsets
from llmsys.dataset.token_shards import read_batches
from llmsys.errors import DataError
from llmsys.storage.stored_formats import DEDUP_INDEX, DEDUP_KEYS, VERSION_KEY, build_format_error

INDEX = "index"
INDEX_FILE = "index.json"
INDEX_KEY_SCHEMA = pa.schema(
    [("high", pa.uint64()), ("low", pa.uint64()), ("row", pa.int64())], DEDUP_KEYS.arrow_metadata
)


@dataclass(frozen=True)
class EarlierDataset:
    """A dataset that was prepared before, as its index describes it; picklable.

    Attributes:
        name: the name of the dataset.
        documents: files of ids, whose documents are numbered across files.
        rows: number of documents.
        keys: the key files of each relation ("url", "exact", "minhash"); their rows are document
            numbers.
        digest: digest of its `index.json`, on which the tasks that read it depend.
    """

    name: str
    documents: tuple[Path, ...]
    rows: int
    keys: Mapping[str, tuple[Path, ...]]
    digest: str


def describe_index(
    name: str,
    rows: Mapping[str, int],
    keys: Mapping[str, Sequence[str]],
    digests: Mapping[str, str],
    config: DeduplicationConfig,
    by_characters: Mapping[str, bool],
) -> Any:
    """Build the content of `index.json`.

    Args:
        name: the name of the dataset.
        rows: number of documents in each file of ids, by file name, in order.
        keys: names of the key files, by relation.
        digests: digest of every file of the index, by file name.
        config: the deduplication, for its MinHash parameters.
        by_characters: per language, whether near duplicates are found by characters instead of
            words.

    Returns:
        A JSON-serializable mapping.
    """
    documents = [{"name": file, "rows": count} for file, count in rows.items()]
    top = {
        VERSION_KEY: DEDUP_INDEX.version,
        "dataset": name,
        "minhash": get_minhash_parameters(config),
        "by_characters": by_characters,
    }
    return {**top, "documents": documents, "keys": keys, "files": digests}


def load_earlier_dataset(
    folder: Path,
    config: DeduplicationConfig,
    by_characters: Mapping[str, bool],
    digest_of_file: Callable[[Path], str],
) -> EarlierDataset:
    """Load the index of an earlier dataset.

    Args:
        folder: the dataset's folder.
        config: the deduplication that will use the index.
        by_characters: per language, whether near duplicates are found by characters instead of
            words.
        digest_of_file: computes the digest of a file.

    Returns:
        The description of the earlier dataset.

    Raises:
        DataError: if there is no index, a file differs from its digest, or the index was built with
            other parameters.
    """
    path = folder / INDEX / INDEX_FILE
    try:
        content = json.loads(path.read_bytes())
        version = content.get(VERSION_KEY, content.get("format"))
        name = content["dataset"]
        files = content["files"]
        theirs = dict(content["by_characters"])
        documents = {
            folder / INDEX / part["name"]: int(part["rows"]) for part in content["documents"]
        }
        keys = {
            kind: tuple(folder / INDEX / name for name in names)
            for kind, names in content["keys"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise DataError(
            f"{folder} has no index for data.deduplicate.earlier_datasets . Prepare it with "
            "data.deduplicate.index.kind=kept, or take it out of the list."
        ) from None
    if version != DEDUP_INDEX.version:
        raise build_format_error(DEDUP_INDEX, version, path)
    _require_relations(folder, content, config)
    _require_same_words(folder, theirs, by_characters)
    for file, digest in files.items():
        if digest_of_file(folder / INDEX / file) != digest:
            raise DataError(
                f"{folder / INDEX / file} does not match {path}: it was corrupted or changed. "
                "Delete it and run llmsys prepare again with the config of that dataset."
            )
    return EarlierDataset(
        name, tuple(documents), sum(documents.values()), keys, digest_of_file(path)
    )


def _require_relations(folder: Path, content: dict[str, Any], config: DeduplicationConfig) -> None:
    """Reject an index that lacks a configured relation or has other MinHash parameters."""
    wanted = {"url": config.url.kind, "exact": config.exact.kind, "minhash": config.minhash.kind}
    missing = [
        relation
        for relation, kind in wanted.items()
        if kind != "none" and relation not in content["keys"]
    ]
    if missing:
        raise DataError(
            f"the index of {folder} holds {', '.join(sorted(content['keys'])) or 'nothing'}, but "
            f"no {missing[0]} keys. Prepare that dataset with the same data.deduplicate, or turn "
            "this comparison off."
        )
    if isinstance(config.minhash, MinHashDedupConfig) and content[
        "minhash"
    ] != get_minhash_parameters(config):
        raise DataError(
            f"the index of {folder} was made with data.deduplicate.minhash {content['minhash']}, "
            f"but this config has {get_minhash_parameters(config)}. Use the same values in both."
        )


def _require_same_words(folder: Path, theirs: Mapping[str, bool], ours: Mapping[str, bool]) -> None:
    """Reject an index that compared a language by characters where this config compares by
    words, or the reverse.
    """
    other = [code for code in sorted(theirs.keys() & ours.keys()) if theirs[code] != ours[code]]
    if other:
        raise DataError(
            f"the index of {folder} was made with near duplicates in {', '.join(other)} found by "
            f"{'characters' if theirs[other[0]] else 'words'}, and this config's "
            f"data.language.profiles ask for {'characters' if ours[other[0]] else 'words'}. Use "
            "the same profiles in both."
        )


def get_minhash_parameters(config: DeduplicationConfig) -> dict[str, Any] | None:
    """Return the parameters that must be equal for MinHash keys to be comparable.

    Args:
        config: The section `data.deduplicate`.

    Returns:
        Parameters by name; None without MinHash.
    """
    return (
        config.minhash.model_dump(mode="json")
        if isinstance(config.minhash, MinHashDedupConfig)
        else None
    )


def read_earlier_items(
    earlier: Sequence[EarlierDataset],
    relation: str,
    number: int,
    ranges: int,
    wanted: np.ndarray[Any, Any],
) -> Columns:
    """Read the items of one key range of earlier datasets whose keys are wanted.

    Args:
        earlier: the datasets.
        relation: "url", "exact" or "minhash".
        number: number of the key range.
        ranges: total number of key ranges.
        wanted: uint64 keys.

    Returns:
        Columns of `ITEM_SCHEMA`, with `source` (number of the dataset) and `age` (0). `row` is the
        number of the document in its dataset.
    """
    wanted = np.unique(wanted)
    parts: list[Columns] = []
    for source, dataset in enumerate(earlier):
        for path in dataset.keys[relation]:
            parts += [
                _to_items(take_rows(found, np.isin(found["high"], wanted)), source)
                for found in read_range(path, number, ranges)
            ]
    names = ("high", "low", "rank", "tie", "row", "place", "source", "age")
    return {
        name: np.concatenate([np.zeros(0, np.uint8), *(part[name] for part in parts)])
        for name in names
    }


def _to_items(found: Columns, dataset: int) -> Columns:
    """Return items of an earlier dataset in the columns of `ITEM_SCHEMA`."""
    count = len(found["high"])
    zeros = np.zeros(count, np.uint64)
    return {
        "high": found["high"],
        "low": found["low"],
        "rank": zeros,
        "tie": zeros,
        "row": found["row"],
        "place": zeros,
        "source": np.full(count, dataset),
        # Age 0 puts an earlier document first in its group: it stays.
        "age": np.zeros(count, np.uint8),
    }


Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class DocumentFiles:
    """Signature files of documents; picklable.

    Attributes:
        paths: One file per filtered file, or one per group of them, see `compute_group_size`.
        counts: A list with the column `rows`: documents of each filtered file.
    """

    paths: Sequence[Path]
    counts: FileRows


class DocumentTable:
    """The documents of several files, numbered across files; columns are read on demand.

    Files are mapped one after another, because a crawl can have more than a process can map.
    """

    def __init__(self, files: DocumentFiles | Sequence[Path]) -> None:
        """Number the documents of some files, from 0 in the order of the files.

        Args:
            files: The files of a deduplication with their counted rows. Plain paths are opened one
                after another to count theirs.
        """
        if isinstance(files, DocumentFiles):
            self._paths = files.paths
            self.starts = compute_offsets(files.counts.read_numbers("rows"))
            step = (
                1
                if len(files.counts) == len(files.paths)
                else compute_group_size(len(files.counts))
            )
        else:
            self._paths = files
            step = 1
            self.starts = compute_offsets(
                [sum(batch.num_rows for batch in read_batches(path)) for path in files]
            )
        self._file_starts = np.append(self.starts[:-1:step], self.starts[-1])

    def take_column(self, documents: Integers, column: str) -> pa.Array:
        """Read a column of some documents. A call opens each file that holds one of them once.

        Args:
            documents: (N,) numbers in any order; they may repeat.
            column: `id`, or an int64 column.

        Returns:
            (N,) values in the order of `documents`.
        """
        order = np.argsort(documents, kind="stable")
        wanted = documents[order]
        edges = np.searchsorted(wanted, self._file_starts)
        pieces = [pa.array([], pa.string() if column == "id" else pa.int64())]
        for number in np.flatnonzero(np.diff(edges)).tolist():
            rows = wanted[edges[number] : edges[number + 1]] - self._file_starts[number]
            found = pa.chunked_array(
                [batch.column(column) for batch in read_batches(self._paths[number])]
            )
            pieces += found.take(pa.array(rows)).chunks
        inverse = np.empty(len(order), np.int64)
        inverse[order] = np.arange(len(order))
        return pa.concat_arrays(pieces).take(pa.array(inverse))

    def get_source_numbers(self, documents: Integers) -> Integers:
        """Find the files that documents come from.

        Args:
            documents: (N,) numbers.

        Returns:
            (N,) numbers of the filtered files, also where a file of this table holds a group of
            them.
        """
        found: Integers = np.searchsorted(self.starts, documents, side="right") - 1
        return found


class DocumentIdLookup:
    """Ids of documents of this dataset and of earlier ones."""

    def __init__(self, documents: DocumentFiles, earlier: Sequence[EarlierDataset]) -> None:
        """Name the datasets. No file is read before the first id is asked for.

        Args:
            documents: The files of this dataset.
            earlier: The earlier datasets, in the order in which items number them.
        """
        self._files = documents
        self._earlier = earlier

    @cached_property
    def _own_table(self) -> DocumentTable:
        return DocumentTable(self._files)

    @cached_property
    def _earlier_tables(self) -> list[DocumentTable]:
        return [DocumentTable(dataset.documents) for dataset in self._earlier]

    def look_up_items(self, items: Columns) -> tuple[pa.Array, pa.Array]:
        """Look up the ids of items.

        Args:
            items: `age` (1 in this dataset, 0 in an earlier one), `source` and `row`, each (N,). An
                item of this dataset has its filtered file as source and its row there. An earlier
                item has the number of its dataset as source and its document number as row.

        Returns:
            (N,) ids, and (N,) names of the earlier datasets, "" for this one.
        """
        own = items["age"] == 1
        home = np.where(own, 0, np.asarray(items["source"]).astype(np.int64) + 1)
        pieces = [pa.array([], pa.string())]
        places = [np.zeros(0, np.int64)]
        for number in range(len(self._earlier) + 1):
            here = np.flatnonzero(home == number)
            if len(here):
                pieces.append(self._take_ids(number, items["source"][here], items["row"][here]))
                places.append(here)
        names = pa.concat_arrays(pieces).take(pa.array(np.argsort(np.concatenate(places))))
        datasets = pa.array(["", *(dataset.name for dataset in self._earlier)], pa.string())
        return names, datasets.take(pa.array(home))

    def _take_ids(self, number: int, source: Integers, row: Integers) -> pa.Array:
        """Return the ids of documents of this dataset (number 0) or of an earlier one."""
        if number:
            return self._earlier_tables[number - 1].take_column(row, "id")
        return self._own_table.take_column(self._own_table.starts[source] + row, "id")
