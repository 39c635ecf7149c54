"""Texts in, columns of word ids out: the words of datatrove's English, found without splitting any chunk twice.

spaCy splits every stretch between white space by itself, so a memo from stretch to words gives its words at the speed
of a dictionary look-up. The memo is bounded, and what it holds never changes a result. Other kinds of words come from
other `ChunkSplitter`s.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data_pipeline.rules.chunk import EnglishChunks
from data_pipeline.rules.growing import GrowingArray
from data_pipeline.rules.vocabulary import PASSING, TERMINAL, Vocabulary

Integers = npt.NDArray[np.int64]

_SPACE_WORD = " "  # stands for a run of white space that is a token; no chunk looks like it
_STRETCH = re.compile(r"\s+|\S+")


@dataclass(frozen=True)
class WordColumns:
    """The words of some documents, one after another. W words, D documents.

    Attributes:
        ids_W: word ids.
        offsets: int64, D + 1 values: where each document starts in `ids_W`, and where the last one ends.
        vocabulary: what the ids mean.
    """

    ids_W: npt.NDArray[np.int32]
    offsets: Integers
    vocabulary: Vocabulary

    @cached_property
    def counts(self) -> Integers:
        """Words per document."""
        return np.diff(self.offsets)

    @cached_property
    def document_of_word(self) -> npt.NDArray[np.int32]:
        """Number of the document of each word."""
        return np.repeat(np.arange(len(self.counts), dtype=np.int32), self.counts)

    @cached_property
    def word_lengths(self) -> npt.NDArray[np.int32]:
        """Characters of each word."""
        return self.vocabulary.lengths[self.ids_W]

    @cached_property
    def word_flags(self) -> npt.NDArray[np.uint8]:
        """Flags of each word, see `vocabulary`."""
        return self.vocabulary.flags[self.ids_W]

    def count(self, chosen_W: npt.NDArray[np.bool_]) -> Integers:
        """How many words are chosen per document."""
        return self.total(chosen_W)

    def total(self, numbers_W: npt.NDArray[Any]) -> Integers:
        """The sum of a small number of each word per document."""
        return np.diff(offsets_of(numbers_W)[self.offsets])

    def take(self, keep: npt.NDArray[np.bool_]) -> "WordColumns":
        """The words of the documents that stay."""
        counts = self.counts
        return WordColumns(self.ids_W[np.repeat(keep, counts)], offsets_of(counts[keep]), self.vocabulary)


class ChunkSplitter(Protocol):
    """What makes words. The words of a chunk must not depend on the chunks beside it."""

    @property
    def sentence_marks(self) -> frozenset[str]:
        """Words that end a sentence."""

    def cut(self, text: str, /) -> list[str]:
        """The chunks of a text."""

    def split(self, chunks: Sequence[str]) -> list[list[str]]:
        """The words of each chunk; a chunk is not empty."""


class WordSplitter:
    """Splits texts into words and counts sentences, remembering every chunk it has seen.

    Args:
        chunks: how a text is cut and what words its chunks hold; English by default.
        memo_chunks: chunks to remember at most; about 250 bytes each. Beyond it the memo starts again from nothing.
        memo_characters: characters of chunks to remember at most.
    """

    def __init__(
        self, chunks: ChunkSplitter | None = None, *, memo_chunks: int = 500_000, memo_characters: int = 8_000_000
    ) -> None:
        self._splitter = chunks or EnglishChunks()
        self._memo_chunks = memo_chunks
        self._memo_characters = memo_characters
        self._forget()

    @property
    def cut(self) -> Callable[[str], list[str]]:
        """Gives the chunks of a text, which rules on lines count as words; in most scripts white space parts them."""
        return self._splitter.cut

    def stretches(self, line: str, chunks: list[str]) -> list[str]:
        """What `count_sentences` needs of a line that has been cut into `chunks`."""
        return stretches(line, chunks) if self._splitter.cut is str.split else chunks

    def split(self, texts: Sequence[str]) -> WordColumns:
        """The words of each text."""
        if len(self._memo) > self._memo_chunks or self._characters > self._memo_characters:
            self._forget()
        split = list(map(self._splitter.cut, texts))
        words_W, words_per_chunk = self._words(list(chain.from_iterable(split)))
        word_offsets = offsets_of(words_per_chunk)
        chunk_offsets = offsets_of(np.fromiter(map(len, split), np.int64, len(split)))
        return WordColumns(words_W, word_offsets[chunk_offsets], self._vocabulary)

    def count_sentences(self, lines: Sequence[Sequence[str]]) -> Integers:
        """Sentences of each line as spaCy's sentencizer finds them, a line being given as its `stretches`.

        A sentence starts at the first word of a line, and at the first word after a terminal mark that is no
        punctuation.
        """
        words_W, words_per_chunk = self._words(list(chain.from_iterable(lines)))
        chunks_per_line = np.fromiter(map(len, lines), np.int64, len(lines))
        word_offsets = offsets_of(words_per_chunk)[offsets_of(chunks_per_line)]
        words_per_line = np.diff(word_offsets)
        word_flags = self._vocabulary.flags[words_W]
        decisive = np.flatnonzero((word_flags & PASSING) == 0)
        line = np.repeat(np.arange(len(lines)), words_per_line)[decisive]
        terminal = (word_flags[decisive] & TERMINAL) != 0
        starts = terminal[:-1] & ~terminal[1:] & (line[:-1] == line[1:])
        return np.bincount(line[1:][starts], minlength=len(lines)) + (words_per_line > 0)

    def _words(self, chunks: list[str]) -> tuple[npt.NDArray[np.int32], Integers]:
        """All words of all chunks one after another, and the number of words of each chunk."""
        encoded = pa.array(chunks, pa.large_string()).dictionary_encode()
        distinct = encoded.dictionary.to_pylist()  # each is looked up once
        numbers = list(map(self._memo.get, distinct, repeat(-1)))
        if -1 in numbers:
            self._learn([chunk for chunk, number in zip(distinct, numbers, strict=True) if number < 0])
            numbers = list(map(self._memo.__getitem__, distinct))
        ids = np.array(numbers, np.int64)[encoded.indices.to_numpy()]
        counts = self._chunk_counts.view[ids].astype(np.int64)
        offsets = offsets_of(counts)
        sources = np.repeat(self._chunk_starts.view[ids] - offsets[:-1], counts) + np.arange(offsets[-1])
        return self._chunk_words.view[sources], counts

    def _learn(self, chunks: list[str]) -> None:
        """Split chunks that the memo does not hold, and remember them."""
        split = self._splitter.split(chunks)
        words = list(chain.from_iterable(split))
        index = self._vocabulary.index
        self._vocabulary.add([word for word in dict.fromkeys(words) if word not in index])
        counts = np.fromiter(map(len, split), np.int64, len(split))
        first = len(self._chunk_words)
        self._chunk_starts.extend(first + offsets_of(counts)[:-1])
        self._chunk_counts.extend(counts)
        self._chunk_words.extend(np.fromiter(map(index.__getitem__, words), np.int32, len(words)))
        self._memo.update(zip(chunks, range(len(self._memo), len(self._memo) + len(chunks)), strict=True))
        self._characters += sum(map(len, chunks))

    def _forget(self) -> None:
        """Start with a memo that knows only the run of white space. Columns already given keep their vocabulary."""
        self._vocabulary = Vocabulary(self._splitter.sentence_marks)
        self._vocabulary.add([_SPACE_WORD])
        self._memo: dict[str, int] = {_SPACE_WORD: 0}
        self._characters = 0
        self._chunk_starts, self._chunk_counts = GrowingArray(np.int64), GrowingArray(np.int32)
        self._chunk_words = GrowingArray(np.int32)
        self._chunk_starts.extend([0])
        self._chunk_counts.extend([1])
        self._chunk_words.extend([0])


def stretches(line: str, chunks: list[str]) -> list[str]:
    """What `count_sentences` needs of a line that has been split at white space into `chunks`.

    A run of white space is a token of its own when something is left of it after one leading U+0020; such a token can
    start a sentence, but one at an end of the line never makes one.
    """
    if " ".join(chunks) == line:
        return chunks
    found = _STRETCH.findall(line.strip())
    return [_SPACE_WORD if part.isspace() else part for part in found if part != " "]


def offsets_of(counts: npt.NDArray[Any]) -> Integers:
    """Where each of the groups starts, and where the last one ends."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets
