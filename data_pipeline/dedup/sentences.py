"""Where the sentences of an English text end, and how many words it has, as datatrove's reference finds them.

spaCy's sentencizer starts a sentence at the first word after an end mark that is neither punctuation nor an end mark.
What a chunk between white space does to that rule is remembered, so that spaCy is asked about each chunk once. A run of
white space other than one U+0020 is a word to the sentencizer, though not to who counts words.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from data_pipeline.rules.chunk import SpacyTokenizer

# Chunks, and the runs of white space that count: those that do not begin with U+0020, or go on behind it.
_STRETCH = re.compile(r"\S+| \s+|[^\S ]\s*")
_MOST_CHUNKS = 300_000


class SentenceBoundaries(NamedTuple):
    """Ends of sentences (characters from the beginning of the text, the last one that of the last word) and words."""

    ends: list[int]
    words: int


class _Chunk(NamedTuple):
    """What a chunk does: its words; the word that starts a sentence if an end mark stands open before it (its offset,
    or -1); offsets of words that start one anyway; and whether an end mark is open behind it (None: as before).
    """

    words: int
    first: int
    inner: tuple[int, ...]
    leaves_open: bool | None


class SentenceSplitter:
    """Finds sentences, remembering every chunk it has seen, up to a bound."""

    def __init__(self) -> None:
        self._english = SpacyTokenizer()
        self._memo: dict[str, _Chunk] = {}

    def find_boundaries(self, texts: Sequence[str]) -> list[SentenceBoundaries]:
        """The sentences of each text; an empty text has none."""
        if len(self._memo) > _MOST_CHUNKS:
            self._memo = {}
        self._cache_chunks(dict.fromkeys(chunk for text in texts for chunk in text.split()))
        return [self._find_text_boundaries(text) for text in texts]

    def _find_text_boundaries(self, text: str) -> SentenceBoundaries:
        memo, ends, words = self._memo, [], 0
        is_open, last = False, 0
        if text.startswith(" "):
            last = 1  # before the first word every run of white space is a word
        for match in _STRETCH.finditer(text):
            stretch, start = match.group(), match.start()
            known = memo.get(stretch)
            if known is None:  # white space
                if is_open:
                    ends.append(last)
                    is_open = False
            else:
                if is_open and known.first >= 0:
                    ends.append(start + known.first if known.first else last)
                ends.extend([start + offset for offset in known.inner])
                is_open = is_open if known.leaves_open is None else known.leaves_open
                words += known.words
            last = match.end()
        return SentenceBoundaries([*ends, last] if text else [], words)

    def _cache_chunks(self, chunks: Iterable[str]) -> None:
        unseen = [chunk for chunk in chunks if chunk not in self._memo]
        for chunk, words in zip(unseen, self._english.split_words(unseen), strict=True):
            self._memo[chunk] = self._describe_chunk(words)

    def _describe_chunk(self, words: Sequence[str]) -> _Chunk:
        marks = self._english.sentence_marks
        offset, first, inner = 0, -1, []
        is_open: bool | None = None
        for word in words:
            if word in marks:
                is_open = True
            elif not all(unicodedata.category(character).startswith("P") for character in word):
                if is_open is None:
                    first = offset
                elif is_open:
                    inner.append(offset)
                is_open = False
            offset += len(word)
        return _Chunk(len(words), first, tuple(inner), is_open)
