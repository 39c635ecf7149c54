"""An index of all n-grams of all evaluation sets, sorted by hash, with the items of each n-gram.

`write_ngram_index` reads the sets and writes two Arrow files, n-grams and items, and with fuzzy
matches that of `FuzzyParts`. `NgramIndex` loads the n-grams and finds them in columns of words.
Memory: about 20 bytes per distinct n-gram, once per process.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, assert_never

import numpy as np
import pyarrow as pa

from llmsys.config.decontamination import (
    CoverageFuzzyMatchConfig,
    NgramDecontaminationConfig,
    NoFuzzyMatch,
)
from llmsys.data_pipeline.decontaminate.evaluation_items import (
    ItemNgrams,
    extract_item_ngrams,
    list_item_words,
    read_items,
)
from llmsys.data_pipeline.decontaminate.fuzzy_index import FuzzyParts
from llmsys.data_pipeline.decontaminate.sorted_hashes import SortedHashes
from llmsys.data_pipeline.executors.base import Report
from llmsys.data_pipeline.text.ragged_arrays import Integers, compute_positions
from llmsys.data_pipeline.text.word_hashes import HashedWords, WordHasher, iter_ngram_hashes
from llmsys.dataset.token_shards import ArrowFileWriter, read_batches
from llmsys.errors import DataError

PARTS = ("query", "label", "overlap")
GRAM_SCHEMA = pa.schema(
    [
        ("hash", pa.uint64()),
        ("words", pa.uint8()),
        ("items", pa.list_(pa.int32())),
        ("parts", pa.list_(pa.uint8())),
    ]
)
ITEM_SCHEMA = pa.schema([("set", pa.string()), ("item", pa.string())])

# items stored per n-gram and set: enough for twins, without all items that share an opening
NAMED_ITEMS = 4


def write_ngram_index(
    report: Report,
    *,
    grams: Path,
    items: Path,
    config: NgramDecontaminationConfig,
    fuzzy: Path | None = None,
) -> dict[str, Any]:
    """Write the n-grams and items of the evaluation sets.

    Args:
        report: progress callback, in sets.
        grams: the file of n-grams to write (`GRAM_SCHEMA`).
        items: the file of items to write (`ITEM_SCHEMA`).
        config: sets, length of n-grams and parts of items.
        fuzzy: the file of short n-grams to write (`FUZZY_SCHEMA`); needed if the
            config has fuzzy matches.

    Returns:
        Under `sets`, per set: numbers of `items`, `ngrams` and `too_short` parts; and of
        `only_exact` parts, which have too few words for a fuzzy match.

    Raises:
        DataError: if a set cannot be read, or no item is long enough.
    """
    words = WordHasher()
    loose = _build_fuzzy_parts(config)
    found: list[tuple[int, ItemNgrams]] = []
    names: list[dict[str, str]] = []
    counts: dict[str, dict[str, int]] = {}
    for dataset in config.sets:
        first = len(names)
        short = 0
        parts = len(found)
        for item in read_items(dataset):
            own, too_short = extract_item_ngrams(item, config, words)
            short += too_short
            found += [(len(names), part) for part in own]
            if loose is not None:
                for name, whole in list_item_words(item, config, words):
                    loose.add_part(len(counts), len(names), PARTS.index(name), whole)
            names.append({"set": dataset.name, "item": item.name})
        ngrams = sum(len(part.hashes) for _, part in found[parts:])
        counts[dataset.name] = {"items": len(names) - first, "ngrams": ngrams, "too_short": short}
        report(1, 0)
    if not found:
        raise DataError(
            f"no item of {', '.join(counts)} has {config.min_item_words} words "
            "(data.decontaminate.min_item_words). Lower it, or name other fields in "
            "data.decontaminate.sets."
        )
    sets = np.repeat(np.arange(len(counts)), [count["items"] for count in counts.values()])
    _write_ngrams(grams, found, sets)
    if loose is not None and fuzzy is not None:
        unsearched = loose.write(fuzzy)
        for number, count in enumerate(counts.values()):
            count["only_exact"] = unsearched[number]
    with ArrowFileWriter(items, ITEM_SCHEMA, "zstd") as writer:
        writer.write(pa.RecordBatch.from_pylist(names, ITEM_SCHEMA))
    return {"sets": counts}


def _build_fuzzy_parts(config: NgramDecontaminationConfig) -> FuzzyParts | None:
    match config.fuzzy:
        case NoFuzzyMatch():
            return None
        case CoverageFuzzyMatchConfig():
            return FuzzyParts(config.fuzzy, NAMED_ITEMS)
        case unreachable:
            assert_never(unreachable)


def _write_ngrams(path: Path, found: Sequence[tuple[int, ItemNgrams]], sets: Integers) -> None:
    """Write each n-gram once, with the first items of each set that have it and in which part;
    `sets` is by item.
    """
    sizes = [len(part.hashes) for _, part in found]
    hashes = np.concatenate([part.hashes for _, part in found])
    items = np.repeat(np.array([item for item, _ in found], np.int32), sizes)
    words = np.repeat(np.array([part.words for _, part in found], np.uint8), sizes)
    parts = np.repeat(np.array([PARTS.index(part.part) for _, part in found], np.uint8), sizes)
    order = np.lexsort((items, hashes))  # stable: of two parts of an item the first is kept
    same_gram = hashes[order[1:]] == hashes[order[:-1]]
    order = order[np.append(True, ~same_gram | (items[order[1:]] != items[order[:-1]]))]
    same_set = (hashes[order[1:]] == hashes[order[:-1]]) & (
        sets[items[order[1:]]] == sets[items[order[:-1]]]
    )
    begins = np.flatnonzero(np.append(True, ~same_set))
    # The position of an item among those of its n-gram and set.
    rank = np.arange(len(order)) - np.repeat(begins, np.diff(np.append(begins, len(order))))
    order = order[rank < NAMED_ITEMS]
    distinct, first = np.unique(hashes[order], return_index=True)
    ends = pa.array(np.append(first, len(order)), pa.int32())
    lists = (pa.ListArray.from_arrays(ends, pa.array(column[order])) for column in (items, parts))
    columns = [pa.array(distinct), pa.array(words[order][first]), *lists]
    with ArrowFileWriter(path, GRAM_SCHEMA, "zstd") as writer:
        writer.write(pa.record_batch(columns, schema=GRAM_SCHEMA))


class NgramIndex:
    """The n-grams of evaluation items, and the search for them among words."""

    def __init__(self, path: Path) -> None:
        batch = next(read_batches(path))
        self._hashes = SortedHashes(batch.column("hash").to_numpy())
        self.words = batch.column("words").to_numpy()
        self._ends = batch.column("items").offsets.to_numpy()
        self._items, self._parts = (
            batch.column(name).values.to_numpy() for name in ("items", "parts")
        )
        self._lengths = frozenset(np.unique(self.words).tolist())

    def find_matches(self, words: HashedWords) -> tuple[Integers, Integers]:
        """Find the n-grams of the evaluation items among words.

        Args:
            words: Hashed words of some texts, from a `WordHasher`. A match lies within one text.

        Returns:
            Index of the first word in `words.hashes` and number of the n-gram of each match, (M,)
            each, sorted by position, longer n-grams first.
        """
        positions = [np.zeros(0, np.int64)]
        numbers = [np.zeros(0, np.int64)]
        ends = np.repeat(words.offsets[1:], np.diff(words.offsets))
        for n, hashes in iter_ngram_hashes(words.hashes, max(self._lengths)):
            if n not in self._lengths:
                continue
            here, found = self._hashes.find(hashes)
            # No n-gram goes over the end of its text.
            hit = (here + n <= ends[here]) & (self.words[found] == n)
            positions.append(here[hit])
            numbers.append(found[hit])
        position = np.concatenate(positions)
        number = np.concatenate(numbers)
        order = np.lexsort((-self.words[number].astype(np.int64), position))
        return position[order], number[order]

    def get_items(self, numbers: Integers) -> tuple[Integers, Integers, Integers]:
        """Return the items of n-grams as three arrays: index into `numbers`, item, index into
        `PARTS`.
        """
        starts = self._ends[numbers]
        counts = self._ends[numbers + 1] - self._ends[numbers]
        which = np.repeat(np.arange(len(numbers)), counts)
        positions = compute_positions(starts, counts)
        return (
            which,
            self._items[positions].astype(np.int64),
            self._parts[positions].astype(np.int64),
        )


def read_item_names(path: Path) -> pa.RecordBatch:
    """Read the names of the items of an index.

    Args:
        path: The index.

    Returns:
        The columns set and item; an item's number is its row.
    """
    return next(read_batches(path))
