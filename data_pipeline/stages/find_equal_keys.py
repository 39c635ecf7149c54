"""Find rows with equal keys among all files, for one range of keys per task.

`write_equal_duplicates` decides about documents (URL, text), `write_repeat_positions` about
segments and strings, and `write_repeated_keys` finds keys that occur more than once. Memory holds
the keys of one range, or with a Bloom filter its counters and the few keys that may repeat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from llmsys.config.deduplication import BloomKeyFilterConfig, ExactKeyFilterConfig
from llmsys.data_pipeline.dedup.dedup_index import (
    DocumentFiles,
    DocumentIdLookup,
    EarlierDataset,
    read_earlier_items,
)
from llmsys.data_pipeline.dedup.duplicate_decisions import (
    DROP_SCHEMA,
    PLACE_SCHEMA,
    iter_source_rows,
    mask_remaining_rows,
    number_rows,
    read_dropped_rows,
    write_decisions,
)
from llmsys.data_pipeline.dedup.keys import (
    VALUE_SCHEMA,
    Columns,
    KeyWriter,
    compute_group_size,
    concat_columns,
    find_later_items,
    mask_repeated_keys,
    read_key_column,
    read_range,
    take_rows,
)
from llmsys.data_pipeline.executors.base import Report
from llmsys.dataset.token_shards import read_batches, read_schema

if TYPE_CHECKING:
    from llmsys.data_pipeline.dedup.bloom_filter import CountingBloomFilter

_OF_FILES = (("source", pa.int64()), ("age", pa.uint8()))
KeysConfig = ExactKeyFilterConfig | BloomKeyFilterConfig


@dataclass
class KeyRange:
    """One range of the keys of all files, without rows that were dropped before; picklable.

    Attributes:
        sources: Key files, one per filtered file or one per group of them.
        num_sources: Number of filtered files.
        schema: Columns of the key files of single filtered files.
        dropped: Per rule, files of decisions about the filtered files: any number, or one per
            group.
        number: Index of the range, below `ranges`.
        ranges: Number of ranges.
        config: Sort all keys, or only those that pass a Bloom filter.
        earlier: Earlier datasets whose keys of `relation` count too.
        relation: `url`, `exact` or `minhash` where earlier datasets are compared, else "".
    """

    sources: Sequence[Path]
    num_sources: int
    schema: pa.Schema
    dropped: Sequence[Sequence[Path]]
    number: int
    ranges: int
    config: KeysConfig
    earlier: Sequence[EarlierDataset] = ()
    relation: str = ""

    def read_candidates(self) -> Columns:
        """Return the keys that may occur more than once, here or in an earlier dataset. Without
        a filter: all keys.
        """
        suspected = self._build_repeat_filter()
        parts = []
        self.keys = 0
        for part in self._iter_key_parts():
            self.keys += len(part["high"])
            parts.append(
                take_rows(part, suspected.query_repeated(part["high"])) if suspected else part
            )
        found = concat_columns(parts, self._build_joined_schema())
        self.candidates = len(found["high"])
        if not self.earlier:
            return found
        there = read_earlier_items(
            self.earlier, self.relation, self.number, self.ranges, found["high"]
        )
        return concat_columns([found, there], self._build_joined_schema())

    def summarize_counts(self, later: int) -> dict[str, Any]:
        """Return the result of a task: numbers of keys, candidates and later copies."""
        return {"keys": self.keys, "candidates": self.candidates, "later": later}

    def _build_repeat_filter(self) -> CountingBloomFilter | None:
        if not isinstance(self.config, BloomKeyFilterConfig):
            return None
        from llmsys.data_pipeline.dedup.bloom_filter import CountingBloomFilter

        # Two passes over the keys: the filter is sized by their number.
        suspected = CountingBloomFilter(
            sum(map(len, self._iter_all_keys())), self.config.error_rate
        )
        for keys in self._iter_all_keys():
            suspected.add_keys(keys)
        return suspected

    def _iter_all_keys(self) -> Iterator[Any]:
        """Yield the keys of the range in pieces, of this dataset and of earlier ones."""
        yield from (part["high"] for part in self._iter_key_parts())
        for path in (path for dataset in self.earlier for path in dataset.keys[self.relation]):
            yield from (part["high"] for part in read_range(path, self.number, self.ranges))

    def _iter_key_parts(self) -> Iterator[Columns]:
        """Yield the keys of each file in pieces. A file is opened once, and each file of
        decisions too.
        """
        is_grouped = len(self.sources) != self.num_sources
        files = [] if is_grouped else [path for rule in self.dropped for path in rule]
        gone = read_dropped_rows(files, 0, self.num_sources)
        size = compute_group_size(self.num_sources)
        for index, path in enumerate(self.sources):
            if is_grouped:
                gone = read_dropped_rows(
                    [rule[index] for rule in self.dropped], index * size, (index + 1) * size
                )
            for part in read_range(path, self.number, self.ranges):
                source = part.setdefault("source", np.full(len(part["high"]), index))
                part["age"] = np.ones(len(source), np.uint8)
                if len(gone):
                    part = take_rows(
                        part, mask_remaining_rows(number_rows(source, part["row"]), gone)
                    )
                yield part

    def _build_joined_schema(self) -> pa.Schema:
        return pa.schema([*self.schema, *_OF_FILES])


def write_group_keys(
    report: Report, *, sources: Sequence[Path], first: int, schema: pa.Schema, output: Path
) -> dict[str, Any]:
    """Gather the keys of a group of files in one file of sorted runs. Progress is in files.

    A range then opens one file per group. Memory holds one run.

    Args:
        report: Progress callback.
        sources: Key files of the group.
        first: Number of the first of them.
        schema: Their columns.
        output: File of keys with the column `source`.

    Returns:
        Number of keys.
    """
    with KeyWriter(output, pa.schema([*schema, ("source", pa.int64())])) as writer:
        for source, path in enumerate(sources, first):
            for batch in read_batches(path):
                columns = {name: read_key_column(batch.column(name)) for name in schema.names}
                writer.write({**columns, "source": np.full(batch.num_rows, source)})
            report(1, 0)
    return {"keys": writer.count}


def write_group_decisions(
    report: Report, *, decisions: Sequence[Path], first: int, last: int, output: Path
) -> dict[str, Any]:
    """Gather the decisions about a group of source files in one file. Progress is in files.

    Args:
        report: Progress callback.
        decisions: Files of decisions of one rule, all with equal columns.
        first: Number of the first source file of the group.
        last: Number after that of the last.
        output: File to write.

    Returns:
        Nothing: an empty result.
    """
    schema = pa.schema(list(read_schema(decisions[0]))[1:])
    found = [batch for path in decisions for batch in iter_source_rows(path, first, last)]
    table = pa.Table.from_batches(found, read_schema(decisions[0])).combine_chunks()
    columns = {
        name: pa.concat_arrays([pa.array([], column.type), *column.chunks])
        for name, column in zip(table.schema.names, table.columns, strict=True)
    }
    write_decisions(output, schema, columns.pop("source").to_numpy(), columns)
    report(len(decisions), 0)
    return {}


def write_equal_duplicates(
    report: Report, *, rule: str, key_range: KeyRange, documents: DocumentFiles, output: Path
) -> dict[str, Any]:
    """Write the documents of a range whose key equals that of a document that stays. Progress is in
    ranges.

    Args:
        report: Progress callback.
        rule: Name of the rule in the decisions.
        key_range: The keys.
        documents: Signature files of documents, for the ids of documents that stay.
        output: File of decisions.

    Returns:
        Numbers of keys, candidates and dropped documents.
    """
    items, first, sizes = find_later_items(key_range.read_candidates())
    kept, datasets = DocumentIdLookup(documents, key_range.earlier).look_up_items(first)
    columns = {
        "row": items["row"],
        "rule": pa.repeat(rule, len(kept)),
        "kept": kept,
        "earlier": datasets,
        "size": sizes,
    }
    write_decisions(output, DROP_SCHEMA, items["source"], columns)
    report(1, len(kept))
    return key_range.summarize_counts(len(kept))


def write_repeat_positions(report: Report, *, key_range: KeyRange, output: Path) -> dict[str, Any]:
    """Write the positions of a range that repeat an earlier one. Progress is in ranges.

    Args:
        report: Progress callback.
        key_range: The keys.
        output: File of positions.

    Returns:
        Numbers of keys, candidates and repeats.
    """
    items, _, _ = find_later_items(key_range.read_candidates())
    write_decisions(output, PLACE_SCHEMA, items["source"], items)
    report(1, 0)
    return key_range.summarize_counts(len(items["row"]))


def write_repeated_keys(report: Report, *, key_range: KeyRange, output: Path) -> dict[str, Any]:
    """Write the distinct keys of each file that occur more than once in all files. Progress is in
    ranges.

    Args:
        report: Progress callback.
        key_range: The keys.
        output: File of keys.

    Returns:
        Numbers of keys, candidates and repeated keys.
    """
    items = key_range.read_candidates()
    items = take_rows(items, mask_repeated_keys(items["high"]))
    items = take_rows(items, np.lexsort([items["high"], items["source"]]))
    # One row per key and file is enough to find the key there.
    fresh = np.ones(len(items["high"]), np.bool_)
    fresh[1:] = (np.diff(items["high"]) != 0) | (np.diff(items["source"]) != 0)
    items = take_rows(items, fresh)
    write_decisions(output, VALUE_SCHEMA, items["source"], items)
    report(1, 0)
    return key_range.summarize_counts(len(items["high"]))
