"""Texts in, the words of their simplified form out, as columns: hashes and lengths, without simplifying a text whole.

Whatever simplification does it does between white space, and spaCy splits there too. So a memo from a chunk of the raw
text ("State-of-the-art,") to the words of its simplified form gives the words of a text at the speed of a dictionary,
and only chunks that were never seen are simplified and split. The memo is bounded; what it holds changes no result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_pipeline.dedup.parts import Hashes, Integers, PartSplitter, offsets_of
from data_pipeline.rules.growing import GrowingArray


@dataclass(frozen=True)
class SimplifiedWords:
    """The words of some documents, one after another. W words, D documents.

    Attributes:
        hashes_W: 64-bit hash of each word's spelling.
        offsets: D + 1 values: where each document starts, and where the last one ends.
        bytes_W: UTF-8 bytes of each word and one more, for the space behind it.
        spelled: per document its words joined by spaces, UTF-8; no documents unless spellings are kept.
    """

    hashes_W: Hashes
    offsets: Integers
    bytes_W: Integers
    spelled: Sequence[bytes]


class SimplifyingSplitter:
    """Splits texts into simplified words, remembering every chunk it has seen.

    Args:
        spelling: keep the spelling of words, which SHA-1 needs and the combined hash does not.
        memo_chunks: chunks to remember at most; about 200 bytes each. Beyond it the memo starts again from nothing.
        memo_characters: characters of chunks to remember at most.
    """

    def __init__(self, spelling: bool, memo_chunks: int = 500_000, memo_characters: int = 8_000_000) -> None:
        self._parts = PartSplitter()
        self._spelling = spelling
        self._limits = memo_chunks, memo_characters
        self._forget()

    def split(self, texts: Sequence[str] | pa.Array) -> SimplifiedWords:
        """The words of each text."""
        if len(self._memo) > self._limits[0] or self._characters > self._limits[1]:
            self._forget()
        ids, chunk_offsets = self._chunks(texts if isinstance(texts, pa.Array) else pa.array(texts, pa.large_string()))
        counts = self._counts.view[ids]
        word_offsets = offsets_of(counts)
        places = np.repeat(self._starts.view[ids] - word_offsets[:-1], counts) + np.arange(word_offsets[-1])
        spelled = self._spell(ids[counts > 0], offsets_of(counts > 0)[chunk_offsets]) if self._spelling else []
        hashes, sizes = self._hashes.view[places], self._bytes.view[places]
        return SimplifiedWords(hashes, word_offsets[chunk_offsets], sizes, spelled)

    def _chunks(self, texts: pa.Array) -> tuple[Integers, Integers]:
        """The memo's number of each chunk of all texts, and where each text starts among them."""
        lists = pc.utf8_split_whitespace(texts)
        offsets = lists.offsets.to_numpy().astype(np.int64)
        coded = lists.values.dictionary_encode()
        spellings = coded.dictionary.to_pylist()
        spelled_ids = self._ids(spellings)
        empty = spelled_ids < 0  # white space at an end of a text leaves an empty chunk there
        ids = spelled_ids[coded.indices.to_numpy()]
        if empty.any():
            kept = ids >= 0
            return ids[kept], offsets_of(kept)[offsets]
        return ids, offsets

    def _ids(self, chunks: list[str]) -> Integers:
        """The number of each of some distinct chunks in the memo, which learns new ones; -1 for the empty one."""
        ids = np.fromiter(map(self._memo.get, chunks, repeat(-1)), np.int64, len(chunks))
        unseen = [number for number in np.flatnonzero(ids < 0).tolist() if chunks[number]]
        if unseen:
            first = len(self._memo)
            self._learn([chunks[number] for number in unseen])
            ids[unseen] = np.arange(first, len(self._memo))
        return ids

    def _learn(self, chunks: list[str]) -> None:
        """Simplify and split chunks that the memo does not hold, and remember them."""
        words = self._parts.split(chunks)
        self._starts.extend(len(self._hashes) + offsets_of(words.counts)[:-1])
        self._counts.extend(words.counts)
        self._hashes.extend(words.hashes)
        self._bytes.extend(words.sizes)
        if self._spelling:
            self._spellings += words.spelled()
        self._memo.update(zip(chunks, range(len(self._memo), len(self._memo) + len(chunks)), strict=True))
        self._characters += sum(map(len, chunks))

    def _spell(self, ids: Integers, ends: Integers) -> list[bytes]:
        """The words of each document joined by spaces; `ids` are its chunks that have words."""
        spellings = list(map(self._spellings.__getitem__, ids.tolist()))
        return [b" ".join(spellings[begin:end]) for begin, end in pairwise(ends.tolist())]

    def _forget(self) -> None:
        self._memo: dict[str, int] = {}
        self._spellings: list[bytes] = []
        self._characters = 0
        self._starts, self._counts = GrowingArray(np.int64), GrowingArray(np.int64)
        self._hashes, self._bytes = GrowingArray(np.uint64), GrowingArray(np.int64)
