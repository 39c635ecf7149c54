"""Find evaluation items whose words were changed, by the share of their words in a passage.

A part of an item (a query or a label) is found where n-grams that it shares with a passage cover
enough of its words. `FuzzyParts` collects the parts and writes their n-grams; `FuzzyIndex` loads
them and finds passages among words. Writes and reads one Arrow file.

Invariants:
- An n-gram that occurs more than `MAX_OCCURRENCES` times among all distinct parts does not count,
  nor does a word that only such n-grams cover. So a shared n-gram stands for few parts.
- A passage is at most `_PASSAGE_LENGTH` times as long as the part; passages that overlap, such as
  those of two copies with few words between them, are one.
- Memory: about 40 bytes per n-gram of the items, whatever the number of documents.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from llmsys.config.decontamination import CoverageFuzzyMatchConfig
from llmsys.data_pipeline.decontaminate.sorted_hashes import SortedHashes
from llmsys.data_pipeline.text.ragged_arrays import Integers, compute_offsets, compute_positions
from llmsys.data_pipeline.text.word_hashes import HashedWords, Hashes, iter_ngram_hashes
from llmsys.dataset.token_shards import ArrowFileWriter, read_batches
from llmsys.errors import DataError

# One row per distinct part. `items` and `parts` name the items that have it and as which part;
# `hashes` are its n-grams that count, `places` their first words in the part; `distinctive` is the
# number of words that they cover, `needed` the number to find.
FUZZY_SCHEMA = pa.schema(
    [
        ("items", pa.list_(pa.int32())),
        ("parts", pa.list_(pa.uint8())),
        ("words", pa.int32()),
        ("distinctive", pa.int32()),
        ("needed", pa.int32()),
        ("ngram_words", pa.uint8()),
        ("hashes", pa.list_(pa.uint64())),
        ("places", pa.list_(pa.int32())),
    ]
)

MAX_OCCURRENCES = 10
_PASSAGE_LENGTH = 1.5


class _Owner(NamedTuple):
    """An item that has a part: the number of its set, its own, and the index of the part's name."""

    dataset: int
    item: int
    part: int


class FuzzyParts:
    """The parts of all items, as they are read."""

    def __init__(self, config: CoverageFuzzyMatchConfig, max_named: int) -> None:
        """Begin without parts.

        Args:
            config: Length of n-grams, and the shares of words to find.
            max_named: Maximum number of items of a set to name per part.
        """
        self._config = config
        self._max_named = max_named
        self._words: list[Hashes] = []
        self._owners: list[list[_Owner]] = []
        self._numbers: dict[bytes, int] = {}

    def add_part(self, dataset: int, item: int, part: int, words: Hashes) -> None:
        """Add a query or label of an item.

        Args:
            dataset: Number of the evaluation set.
            item: Number of the item.
            part: Index of the name of the part.
            words: Its words. Parts of the same words are one part of several items.
        """
        number = self._numbers.setdefault(words.tobytes(), len(self._words))
        if number == len(self._words):
            self._words.append(words)
            self._owners.append([])
        self._owners[number].append(_Owner(dataset, item, part))

    def write(self, path: Path) -> Counter[int]:
        """Write the parts that have enough words to search for.

        Args:
            path: The file to write (`FUZZY_SCHEMA`).

        Returns:
            By the number of a set, its parts that are searched by exact n-grams alone.

        Raises:
            DataError: if no part has enough words.
        """
        n = self._config.ngram_words
        sizes = np.array([max(len(words) - n + 1, 0) for words in self._words], np.int64)
        hashes = np.concatenate([_hash_ngrams(words, n) for words in self._words])
        _, inverse, counts = np.unique(hashes, return_inverse=True, return_counts=True)
        is_counted = counts[inverse] <= MAX_OCCURRENCES
        bounds = compute_offsets(sizes)
        rows = []
        unsearched: Counter[int] = Counter()
        for number, words in enumerate(self._words):
            own = slice(bounds[number], bounds[number + 1])
            places = np.flatnonzero(is_counted[own])
            distinctive = count_covered_words(places, n)
            if distinctive < self._config.min_item_words:
                unsearched.update(owner.dataset for owner in self._owners[number])
                continue
            # The tolerance keeps 0.6 * 15 = 9.000…1 words at 9.
            needed = math.ceil(self._config.min_share * distinctive - 1e-9)
            rows.append(
                {
                    **self._name_items(number),
                    "words": len(words),
                    "distinctive": distinctive,
                    "needed": needed,
                    "ngram_words": n,
                    "hashes": hashes[own][places],
                    "places": places,
                }
            )
        if not rows:
            raise DataError(
                f"no query or label of an evaluation set has {self._config.min_item_words} words "
                "in n-grams that count (data.decontaminate.fuzzy.min_item_words). Lower it, or "
                "use data.decontaminate.fuzzy.kind=none."
            )
        with ArrowFileWriter(path, FUZZY_SCHEMA, "zstd") as writer:
            writer.write(pa.RecordBatch.from_pylist(rows, FUZZY_SCHEMA))
        return unsearched

    def _name_items(self, number: int) -> dict[str, list[int]]:
        """Return the first items of each set that have a part."""
        by_set: dict[int, dict[int, int]] = {}
        for owner in self._owners[number]:
            by_set.setdefault(owner.dataset, {}).setdefault(owner.item, owner.part)
        named = [pair for one in by_set.values() for pair in islice(one.items(), self._max_named)]
        return {"items": [item for item, _ in named], "parts": [part for _, part in named]}


def _hash_ngrams(words: Hashes, n: int) -> Hashes:
    """Return the hashes of the n-grams of n words; none if there are fewer words."""
    if len(words) < n:
        return words[:0]
    return dict(iter_ngram_hashes(words, n))[n]


def count_covered_words(places: Integers, n: int) -> int:
    """Count the words that n-grams cover.

    Args:
        places: First word of each n-gram, ascending.
        n: Words per n-gram.

    Returns:
        The number of words in at least one n-gram.
    """
    return int(np.minimum(np.diff(places), n).sum()) + n if len(places) else 0


class Passages(NamedTuple):
    """Passages that contain parts of items, each array (M,): the first word and the word after the
    last, the number of the part, and the share of its words that count.
    """

    first: Integers
    last: Integers
    part: Integers
    share: np.ndarray[tuple[int], np.dtype[np.float64]]


class FuzzyIndex:
    """The short n-grams of evaluation items, and the search for passages that contain an item."""

    def __init__(self, path: Path) -> None:
        batch = next(read_batches(path))
        numbers = {
            name: batch.column(name).to_numpy().astype(np.int64)
            for name in ("words", "distinctive", "needed", "ngram_words")
        }
        self.words = numbers["words"]
        self._distinctive = numbers["distinctive"]
        self._needed = numbers["needed"]
        self._n = int(numbers["ngram_words"][0])
        self._reach = (self.words * _PASSAGE_LENGTH).astype(np.int64)
        self._item_ends = batch.column("items").offsets.to_numpy()
        self._items, self._names = (
            batch.column(name).values.to_numpy().astype(np.int64) for name in ("items", "parts")
        )
        hashes = batch.column("hashes").values.to_numpy()
        sizes = np.diff(batch.column("hashes").offsets.to_numpy())
        order = np.argsort(hashes, kind="stable")
        self._parts = np.repeat(np.arange(len(sizes)), sizes)[order]
        self._places = batch.column("places").values.to_numpy().astype(np.int64)[order]
        distinct, self._starts = np.unique(hashes[order], return_index=True)
        self._counts = np.diff(np.append(self._starts, len(hashes)))
        self._hashes = SortedHashes(distinct)

    def __len__(self) -> int:
        return len(self.words)

    def find_passages(self, words: HashedWords) -> Passages:
        """Find passages that contain a part of an item.

        Args:
            words: Hashed words of some texts. A passage lies within one text.

        Returns:
            The passages, by text and part.
        """
        n = self._n
        ends = np.repeat(words.offsets[1:], np.diff(words.offsets))
        hits, numbers = self._hashes.find(_hash_ngrams(words.hashes, n))
        # No n-gram goes over the end of its text.
        numbers = numbers[hits + n <= ends[hits]]
        hits = hits[hits + n <= ends[hits]]
        occurrences = compute_positions(self._starts[numbers], self._counts[numbers])
        hits = np.repeat(hits, self._counts[numbers])
        texts = np.searchsorted(words.offsets, hits, side="right") - 1
        pairs = texts * len(self) + self._parts[occurrences]
        order = np.argsort(pairs, kind="stable")  # of a pair, by position
        hits = hits[order]
        pairs = pairs[order]
        places = self._places[occurrences[order]]
        found = []
        for pair in self._select_pairs(pairs, hits).tolist():
            begin, end = np.searchsorted(pairs, [pair, pair + 1]).tolist()
            part = pair % len(self)
            for first, last, covered in self._list_passages(
                part, hits[begin:end].tolist(), places[begin:end].tolist()
            ):
                found.append((first, last, part, covered / self._distinctive[part]))
        columns = np.array(found, np.float64).reshape(-1, 4).T
        first, last, parts = columns[:3].astype(np.int64)
        return Passages(first, last, parts, columns[3])

    def _select_pairs(self, pairs: Integers, hits: Integers) -> Integers:
        """Select the pairs of text and part with enough n-grams within the length of a passage.

        An n-gram covers at most n words, so most pairs are dismissed without counting words.
        """
        parts = pairs % len(self)
        fewest = -(-self._needed[parts] // self._n)
        following = np.arange(len(pairs)) + fewest - 1
        inside = np.flatnonzero(following < len(pairs))
        following = following[inside]
        near = hits[following] + self._n - hits[inside] <= self._reach[parts[inside]]
        return np.unique(pairs[inside[near & (pairs[following] == pairs[inside])]])

    def _list_passages(
        self, part: int, hits: Sequence[int], places: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        """List first word, word after the last, and most covered words of the passages of one
        text that contain a part; passages that overlap are one.
        """
        n = self._n
        counts: Counter[int] = Counter()
        covered = 0
        low = 0
        found: list[tuple[int, int, int]] = []
        for hit, place in zip(hits, places, strict=True):
            for word in range(place, place + n):
                covered += not counts[word]
                counts[word] += 1
            while hit + n - hits[low] > self._reach[part]:
                for word in range(places[low], places[low] + n):
                    counts[word] -= 1
                    covered -= not counts[word]
                low += 1
            if covered < self._needed[part]:
                continue
            if found and hits[low] < found[-1][1]:
                first, _, most = found[-1]
                found[-1] = (first, hit + n, max(most, covered))
            else:
                found.append((hits[low], hit + n, covered))
        return found

    def get_items(self, parts: Integers) -> tuple[Integers, Integers, Integers]:
        """Return the items of parts as three arrays: index into `parts`, item, index of the name
        of the part.
        """
        counts = self._item_ends[parts + 1] - self._item_ends[parts]
        positions = compute_positions(self._item_ends[parts], counts)
        return (
            np.repeat(np.arange(len(parts)), counts),
            self._items[positions],
            self._names[positions],
        )
