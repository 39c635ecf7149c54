"""Where the sentences of an English text end, and how many words it has, as datatrove's reference finds them.

spaCy's sentencizer starts a sentence at the first word after an end mark that is neither punctuation nor an end mark.
What a chunk between white space does to that rule is remembered, so that spaCy is asked about each chunk once. A run of
white space other than one U+0020 is a word to the sentencizer, though not to who counts words.

Paragraphs, lines or sentences of texts: where they end, and what runs of them are compared by.

Reads texts, gives `TextSegments`: a text is cut at `ends`, each piece with the white space before it, and `keys[i]` is
what the run of pieces that begins with piece i is compared by, None where it is never a duplicate.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from data_pipeline.text.simplify_text import simplify_texts
from data_pipeline.text.spacy_tokenizer import SpacyTokenizer
from llmsys.config.deduplication import LineDedupConfig, ParagraphDedupConfig, SentenceDedupConfig

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


SpansConfig = ParagraphDedupConfig | LineDedupConfig | SentenceDedupConfig

_BLANK_LINES = re.compile(r"\n\s*\n")
_NEWLINE = re.compile(r"\n")


class TextSegments(NamedTuple):
    """The pieces of one text; there may be fewer keys than pieces."""

    ends: list[int]
    keys: list[str | None]


@lru_cache(maxsize=1)
def get_sentence_splitter() -> SentenceSplitter:
    """One splitter per process: it remembers how chunks are split."""
    return SentenceSplitter()


def split_segments(texts: Sequence[str], config: SpansConfig) -> list[TextSegments]:
    """Cut texts as the config says."""
    if isinstance(config, SentenceDedupConfig):
        return _split_sentences(texts, config)
    separator = _BLANK_LINES if isinstance(config, ParagraphDedupConfig) else _NEWLINE
    return [_split_by_separator(text, separator, config) for text in texts]


def get_run_length(config: SpansConfig) -> int:
    """How many pieces a key stands for."""
    return config.sentences if isinstance(config, SentenceDedupConfig) else 1


def cut_at_ends(text: str, ends: Sequence[int]) -> list[str]:
    """Cut a text; what lies behind the last end is in no piece."""
    return [text[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def remove_segment_runs(text: str, units: TextSegments, first: Sequence[int], length: int) -> str:
    """Return the text without the runs of pieces that begin at `first`."""
    gone = {place for begin in first for place in range(begin, begin + length)}
    kept = [piece for place, piece in enumerate(cut_at_ends(text, units.ends)) if place not in gone]
    return "".join(kept).lstrip()


def _split_by_separator(
    text: str, separator: re.Pattern[str], config: ParagraphDedupConfig | LineDedupConfig
) -> TextSegments:
    ends = [*(match.start() for match in separator.finditer(text)), len(text)]
    pieces = [piece.strip() for piece in cut_at_ends(text, ends)]
    if isinstance(config, LineDedupConfig):
        pieces = [piece.lower() for piece in pieces]
    return TextSegments(ends, [piece if len(piece) >= max(1, config.min_characters) else None for piece in pieces])


def _split_sentences(texts: Sequence[str], config: SentenceDedupConfig) -> list[TextSegments]:
    """Runs of sentences, simplified and joined; white space behind the last sentence is none."""
    ends_of = [found.ends for found in get_sentence_splitter().find_boundaries(texts)]
    sentences_of = [
        [stripped for piece in cut_at_ends(text, ends) if (stripped := piece.strip())]
        for text, ends in zip(texts, ends_of, strict=True)
    ]
    simple = iter(simplify_texts([sentence for sentences in sentences_of for sentence in sentences]))
    found = []
    for ends, sentences in zip(ends_of, sentences_of, strict=True):
        parts = list(islice(simple, len(sentences)))
        runs = [" ".join(run) for run in zip(*(parts[start:] for start in range(config.sentences)), strict=False)]
        found.append(TextSegments(ends, [run if run.strip() else None for run in runs]))
    return found
