"""Words and lines of a batch of documents as columns, so that rules need no strings.

`WordSplitter` fills them without splitting any chunk twice. spaCy splits every chunk between white
space independently, so that a cache of chunks gives its words at the speed of a look-up. Other
kinds of words come from other `WordTokenizer`s."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from llmsys.data_pipeline.text.compiled_words import CompiledWords, build_compiled_words
from llmsys.data_pipeline.text.ragged_arrays import Integers, compute_chunk_spans, compute_offsets
from llmsys.data_pipeline.text.spacy_tokenizer import SpacyTokenizer
from llmsys.data_pipeline.text.vocabulary import PASSING, TERMINAL, Vocabulary
from llmsys.data_pipeline.text.word_cache import SPACE_NUMBER, WordCache, WordTokenizer


@dataclass(frozen=True)
class WordColumns:
    """Words of some documents, concatenated. W words, D documents.

    Attributes:
        ids_W: Word ids.
        offsets: Start of each document in `ids_W` and end of the last one, int64 of shape (D + 1,).
        vocabulary: Columns by word id.
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
        """Document number of each word."""
        return np.repeat(np.arange(len(self.counts), dtype=np.int32), self.counts)

    @cached_property
    def word_lengths(self) -> npt.NDArray[np.int32]:
        """Characters of each word."""
        return self.vocabulary.lengths[self.ids_W]

    @cached_property
    def word_flags(self) -> npt.NDArray[np.uint8]:
        """Flags of each word, see `vocabulary.py`."""
        return self.vocabulary.flags[self.ids_W]

    def count_per_document(self, chosen_W: npt.NDArray[np.bool_]) -> Integers:
        """Count chosen words per document.

        Args:
            chosen_W: True for each word that counts.

        Returns:
            int64 (D,).
        """
        return self.sum_per_document(chosen_W)

    def sum_per_document(self, numbers_W: npt.NDArray[Any]) -> Integers:
        """Sum a number of each word per document.

        Args:
            numbers_W: Integers or booleans; their sum over all documents must fit int64.

        Returns:
            int64 (D,).
        """
        return np.diff(compute_offsets(numbers_W)[self.offsets])

    def select_documents(self, keep: npt.NDArray[np.bool_]) -> "WordColumns":
        """Return the words of the documents in the mask."""
        counts = self.counts
        return WordColumns(
            self.ids_W[np.repeat(keep, counts)], compute_offsets(counts[keep]), self.vocabulary
        )


@dataclass(frozen=True)
class LineColumns:
    """Counts per line of some documents. L lines, D documents.

    Attributes:
        chunks_L: Chunks of each line.
        words_L: Words of each line.
        sentences_L: Sentences of each line, counted from its start.
        offsets: First line of each document and end of the last one, int64 of shape (D + 1,).
    """

    chunks_L: Integers
    words_L: Integers
    sentences_L: Integers
    offsets: Integers

    def group_by_document(self, column_L: Integers) -> list[list[int]]:
        """Divide a column of lines by document.

        Args:
            column_L: A column of this object, or one computed from them.

        Returns:
            The values of the lines of each document, as Python integers.
        """
        numbers = column_L.tolist()
        return [numbers[start:end] for start, end in pairwise(self.offsets.tolist())]


class WordSplitter:
    """Splits texts into words and counts sentences. Caches every chunk.

    Args:
        chunks: Tokenizer; English by default.
        memo_chunks: Maximum number of cached chunks, about 200 bytes each. The cache is cleared
            above it.
        memo_characters: Maximum number of characters of all cached chunks.
    """

    def __init__(
        self,
        chunks: WordTokenizer | None = None,
        *,
        memo_chunks: int = 500_000,
        memo_characters: int = 8_000_000,
    ) -> None:
        self._splitter = chunks or SpacyTokenizer()
        # Splitting at white space has a faster way, without strings.
        self._at_spaces = self._splitter.split_chunks is str.split
        self._limits = memo_chunks, memo_characters

    @cached_property
    def _compiled(self) -> CompiledWords | None:
        """The words by the compiled core, None where Python finds them."""
        return build_compiled_words(self._splitter, *self._limits)

    @cached_property
    def _memory(self) -> WordCache:
        return WordCache(self._splitter, *self._limits)

    @property
    def split_chunks(self) -> Callable[[str], list[str]]:
        """Function from a text to its chunks, which line rules count as words. Most scripts
        split at white space.
        """
        return self._splitter.split_chunks

    def split_words(self, texts: Sequence[str]) -> WordColumns:
        """Split texts into words.

        Args:
            texts: D texts.

        Returns:
            The words of all texts. Their ids belong to the `vocabulary` of this result; after the
            cache was cleared, other results have another one.
        """
        if self._compiled is not None:
            return WordColumns(*self._compiled.split_words(texts))
        self._memory.evict_if_full()
        if self._at_spaces:
            spans = compute_chunk_spans(texts)
            numbers = self._memory.look_up_spans(spans)
            chunks = spans.chunks_per_text
        else:
            cut = list(map(self._splitter.split_chunks, texts))
            numbers = self._memory.look_up_chunks(list(chain.from_iterable(cut)))
            chunks = _count_items(cut)
        words_W, words_per_chunk = self._memory.get_words(numbers)
        return WordColumns(
            words_W,
            compute_offsets(words_per_chunk)[compute_offsets(chunks)],
            self._memory.vocabulary,
        )

    def compute_line_columns(
        self, texts: Sequence[str], lines: Sequence[Sequence[str]]
    ) -> LineColumns:
        """Count chunks, words and sentences of each line.

        In most scripts spaCy treats white space between two words of a line as a word, unless it is
        a single U+0020. It can start a sentence but is not counted.

        Args:
            texts: D texts.
            lines: The lines of each text, as `str.splitlines` finds them.

        Returns:
            The counts of the lines of all texts.
        """
        counts = _count_items(lines)
        if self._compiled is not None:
            return LineColumns(*self._compiled.count_lines(texts, counts), compute_offsets(counts))
        self._memory.evict_if_full()
        total = int(counts.sum())
        if self._at_spaces:
            spans = compute_chunk_spans(texts)
            line_C, spaces = spans.compute_line_numbers(counts)
            numbers_C = self._memory.look_up_spans(spans)
        else:
            cut = [
                self._splitter.split_chunks(line)
                for document_lines in lines
                for line in document_lines
            ]
            line_C = np.repeat(np.arange(total), _count_items(cut))
            spaces = np.zeros(0, np.int64)
            numbers_C = self._memory.look_up_chunks(list(chain.from_iterable(cut)))
        words_W, words_per_chunk = self._memory.get_words(
            np.insert(numbers_C, spaces, SPACE_NUMBER)
        )
        line_W = np.repeat(np.insert(line_C, spaces, line_C[spaces]), words_per_chunk)
        chunks, words, not_counted = (
            np.bincount(column, minlength=total) for column in (line_C, line_W, line_C[spaces])
        )
        return LineColumns(
            chunks,
            words - not_counted,
            self._count_sentences(words_W, line_W, words),
            compute_offsets(counts),
        )

    def _count_sentences(
        self, words_W: npt.NDArray[np.int32], line_W: Integers, words_L: Integers
    ) -> Integers:
        """Count the sentences of each line as spaCy's sentencizer does.

        A sentence starts at the first word of a line, and at the first word after a terminal mark
        that is no punctuation.
        """
        word_flags = self._memory.vocabulary.flags[words_W]
        # Punctuation after a terminal mark (a closing quote) still belongs to the sentence.
        decisive = np.flatnonzero((word_flags & PASSING) == 0)
        line = line_W[decisive]
        terminal = (word_flags[decisive] & TERMINAL) != 0
        starts = terminal[:-1] & ~terminal[1:] & (line[:-1] == line[1:])
        return np.bincount(line[1:][starts], minlength=len(words_L)) + (words_L > 0)


def _count_items(groups: Sequence[Sequence[str]]) -> Integers:
    return np.fromiter(map(len, groups), np.int64, len(groups))
