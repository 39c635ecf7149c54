"""Keys of all files in, the rows that come after the first of their group out: one range of keys per task.

`drop_same` decides about documents (URL, text), `drop_places` about parts of documents (spans, strings), and
`repeated_values` finds keys that occur more than once. Memory holds the keys of one range, or with a Bloom filter its
counters and the few keys that may repeat.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline.dedup.bloom import RepeatFilter
from data_pipeline.dedup.decisions import (
    DROP_SCHEMA,
    PLACE_SCHEMA,
    dropped_in,
    without_rows,
    write_decisions,
)
from data_pipeline.dedup.group import later_items, repeated
from data_pipeline.dedup.index import EarlierDataset, earlier_items
from data_pipeline.dedup.keys import VALUE_SCHEMA, Columns, joined, read_range, taken
from data_pipeline.dedup.names import DocumentNames
from data_pipeline.executors.event import Report
from llmsys.config.deduplicate import BloomKeys, ExactKeys

_OF_FILES = (("source", pa.int64()), ("age", pa.uint8()))
KeysConfig = ExactKeys | BloomKeys


@dataclass
class Range:
    """One range of the keys of all files, without those of rows that were dropped before; picklable.

    Attributes:
        sources: key files, one per judged file.
        schema: their columns.
        dropped: files of decisions about the judged files.
        number: of the range, below `ranges`.
        ranges: how many there are.
        config: how keys are compared.
        earlier: datasets whose keys of `relation` count too.
        relation: "url", "text" or "near", where earlier datasets are compared with.
    """

    sources: Sequence[Path]
    schema: pa.Schema
    dropped: Sequence[Path]
    number: int
    ranges: int
    config: KeysConfig
    earlier: Sequence[EarlierDataset] = ()
    relation: str = ""

    def items(self) -> Columns:
        """Return the keys that may occur more than once, here or in an earlier dataset; without a filter all keys."""
        suspected = self._filter()
        parts = []
        self.keys = 0
        for part in self._parts():
            self.keys += len(part["high"])
            parts.append(taken(part, suspected.may_repeat(part["high"])) if suspected else part)
        found = joined(parts, self._joined_schema())
        self.candidates = len(found["high"])
        if not self.earlier:
            return found
        there = earlier_items(self.earlier, self.relation, self.number, self.ranges, found["high"])
        return joined([found, there], self._joined_schema())

    def counts(self, later: int) -> dict[str, Any]:
        """Return what a task tells the journal."""
        return {"keys": self.keys, "candidates": self.candidates, "later": later}

    def _filter(self) -> RepeatFilter | None:
        if not isinstance(self.config, BloomKeys):
            return None
        suspected = RepeatFilter(sum(map(len, self._all_keys())), self.config.error_rate)
        for keys in self._all_keys():
            suspected.count(keys)
        return suspected

    def _all_keys(self) -> Iterator[Any]:
        """The keys of the range, here and in earlier datasets, part by part."""
        yield from (part["high"] for part in self._parts())
        for path in (path for dataset in self.earlier for path in dataset.keys[self.relation]):
            yield from (part["high"] for part in read_range(path, self.number, self.ranges))

    def _parts(self) -> Iterator[Columns]:
        for source, path in enumerate(self.sources):
            gone = dropped_in(self.dropped, source)
            for part in read_range(path, self.number, self.ranges):
                count = len(part["high"])
                part |= {"source": np.full(count, source), "age": np.ones(count, np.uint8)}
                yield taken(part, without_rows(part["row"], gone)) if len(gone) else part

    def _joined_schema(self) -> pa.Schema:
        return pa.schema([*self.schema, *_OF_FILES])


def drop_same(report: Report, *, rule: str, part: Range, documents: Sequence[Path], output: Path) -> dict[str, Any]:
    """Write the documents of a range that have the same key as one that stays; progress is in ranges."""
    items, first, sizes = later_items(part.items())
    kept, datasets = DocumentNames(documents, part.earlier).of_items(first)
    columns = {
        "row": items["row"],
        "rule": pa.repeat(rule, len(kept)),
        "kept": kept,
        "earlier": datasets,
        "size": sizes,
    }
    write_decisions(output, DROP_SCHEMA, items["source"], columns, len(part.sources))
    report(1, len(kept))
    return part.counts(len(kept))


def drop_places(report: Report, *, part: Range, output: Path) -> dict[str, Any]:
    """Write the places of a range that repeat an earlier one; progress is in ranges."""
    items, _, _ = later_items(part.items())
    write_decisions(output, PLACE_SCHEMA, items["source"], items, len(part.sources))
    report(1, 0)
    return part.counts(len(items["row"]))


def repeated_values(report: Report, *, part: Range, output: Path) -> dict[str, Any]:
    """Write which distinct keys of each file occur more than once anywhere; progress is in ranges."""
    items = part.items()
    items = taken(items, repeated(items["high"]))
    items = taken(items, np.lexsort([items["high"], items["source"]]))
    fresh = np.ones(len(items["high"]), np.bool_)
    fresh[1:] = (np.diff(items["high"]) != 0) | (np.diff(items["source"]) != 0)
    items = taken(items, fresh)
    write_decisions(output, VALUE_SCHEMA, items["source"], items, len(part.sources))
    report(1, 0)
    return part.counts(len(items["high"]))
