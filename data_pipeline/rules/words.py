"""Texts in, columns of word ids out: the words of datatrove's English, found without splitting any chunk twice.

spaCy splits every stretch between white space by itself, so a memory of what each is split into gives its words at the
speed of a look-up. Other kinds of words come from other `ChunkSplitter`s.
"""

import re
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from data_pipeline.rules.chunk import EnglishChunks
from data_pipeline.rules.chunk_memory import SPACE_NUMBER, SPACE_WORD, ChunkMemory, ChunkSplitter
from data_pipeline.rules.spans import spans_of
from data_pipeline.rules.vocabulary import PASSING, TERMINAL
from data_pipeline.rules.word_columns import Integers, LineColumns, WordColumns, offsets_of

_STRETCH = re.compile(r"\s+|\S+")


class WordSplitter:
    """Splits texts into words and counts sentences, remembering every chunk it has seen.

    Args:
        chunks: how a text is cut and what words its chunks hold; English by default.
        memo_chunks: chunks to remember at most; about 200 bytes each. Beyond it the memo starts again from nothing.
        memo_characters: characters of chunks to remember at most.
    """

    def __init__(
        self, chunks: ChunkSplitter | None = None, *, memo_chunks: int = 500_000, memo_characters: int = 8_000_000
    ) -> None:
        self._splitter = chunks or EnglishChunks()
        self._at_spaces = self._splitter.cut is str.split
        self._memory = ChunkMemory(self._splitter, memo_chunks, memo_characters)

    @property
    def cut(self) -> Callable[[str], list[str]]:
        """Gives the chunks of a text, which rules on lines count as words; in most scripts white space parts them."""
        return self._splitter.cut

    def stretches(self, line: str, chunks: list[str]) -> list[str]:
        """What `count_sentences` needs of a line that has been cut into `chunks`."""
        return stretches(line, chunks) if self._at_spaces else chunks

    def split(self, texts: Sequence[str]) -> WordColumns:
        """The words of each text."""
        self._memory.tidy()
        if self._at_spaces:
            spans = spans_of(texts)
            numbers, chunks = self._memory.at(spans), spans.chunks_per_text
        else:
            cut = list(map(self._splitter.cut, texts))
            numbers, chunks = self._memory.of(list(chain.from_iterable(cut))), _lengths(cut)
        words_W, words_per_chunk = self._memory.words(numbers)
        return WordColumns(words_W, offsets_of(words_per_chunk)[offsets_of(chunks)], self._memory.vocabulary)

    def lines(self, texts: Sequence[str], lines: Sequence[list[str]]) -> LineColumns:
        """What rules ask of the lines of each text, which are given as `str.splitlines` finds them."""
        counts = _lengths(lines)
        total = int(counts.sum())
        if self._at_spaces:
            spans = spans_of(texts)
            line_C, spaces = spans.lines(counts)
            chunks = np.bincount(line_C, minlength=total)
            numbers = np.insert(self._memory.at(spans), spaces, SPACE_NUMBER)
            line_C = np.insert(line_C, spaces, line_C[spaces])
        else:
            cut = [self._splitter.cut(line) for one in lines for line in one]
            chunks = _lengths(cut)
            numbers, line_C = self._memory.of(list(chain.from_iterable(cut))), np.repeat(np.arange(total), chunks)
        return LineColumns(chunks, self._sentences(numbers, line_C, total), offsets_of(counts))

    def count_sentences(self, lines: Sequence[Sequence[str]]) -> Integers:
        """Sentences of each line as spaCy's sentencizer finds them, a line being given as its `stretches`.

        A sentence starts at the first word of a line, and at the first word after a terminal mark that is no
        punctuation.
        """
        line_C = np.repeat(np.arange(len(lines)), _lengths(lines))
        return self._sentences(self._memory.of(list(chain.from_iterable(lines))), line_C, len(lines))

    def _sentences(self, numbers_C: Integers, line_C: Integers, num_lines: int) -> Integers:
        """Sentences of each line, from chunks and their lines."""
        words_W, words_per_chunk = self._memory.words(numbers_C)
        word_flags = self._memory.vocabulary.flags[words_W]
        line_W = np.repeat(line_C, words_per_chunk)
        decisive = np.flatnonzero((word_flags & PASSING) == 0)
        line = line_W[decisive]
        terminal = (word_flags[decisive] & TERMINAL) != 0
        starts = terminal[:-1] & ~terminal[1:] & (line[:-1] == line[1:])
        has_words = np.bincount(line_W, minlength=num_lines) > 0
        return np.bincount(line[1:][starts], minlength=num_lines) + has_words


def _lengths(groups: Sequence[Sequence[str]]) -> Integers:
    return np.fromiter(map(len, groups), np.int64, len(groups))


def stretches(line: str, chunks: list[str]) -> list[str]:
    """What `count_sentences` needs of a line that has been split at white space into `chunks`.

    A run of white space is a token of its own when something is left of it after one leading U+0020; such a token can
    start a sentence, but one at an end of the line never makes one.
    """
    if " ".join(chunks) == line:
        return chunks
    found = _STRETCH.findall(line.strip())
    return [SPACE_WORD if part.isspace() else part for part in found if part != " "]
