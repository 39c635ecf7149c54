"""Split texts into paragraphs, lines or sentences, and key the runs of these segments by which they
are compared.

Sentences end where datatrove's reference ends them. spaCy's sentencizer starts a sentence at the
first word after an end mark that is neither punctuation nor an end mark. The effect of a whitespace
chunk on that rule is cached, so that spaCy sees each chunk once. A run of white space other than
one U+0020 is a word for the sentencizer, and is not counted as a word.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from llmsys.config.deduplication import LineDedupConfig, ParagraphDedupConfig, SentenceDedupConfig
from llmsys.data_pipeline.text.simplify_text import simplify_texts
from llmsys.data_pipeline.text.spacy_tokenizer import SpacyTokenizer

# Chunks, and the white space that counts: runs that do not begin with U+0020, or continue after it.
_CHUNK_OR_SPACE = re.compile(r"\S+| \s+|[^\S ]\s*")
_MAX_CHUNKS = 300_000


class SentenceBoundaries(NamedTuple):
    """Ends of sentences in characters of the text (the last is the end of the last word), and
    the number of words.
    """

    ends: list[int]
    words: int


class _Chunk(NamedTuple):
    """The effect of a whitespace chunk on sentence boundaries.

    Attributes:
        words: its number of words.
        first: offset of the word that starts a sentence if an end mark is open before the chunk, or
            -1.
        inner: offsets of words that start a sentence in any case.
        leaves_open: whether an end mark is open after it; None if as before it.
    """

    words: int
    first: int
    inner: tuple[int, ...]
    leaves_open: bool | None


class SentenceSplitter:
    """Splitter of texts into sentences, with a bounded cache of chunks."""

    def __init__(self) -> None:
        self._english = SpacyTokenizer()
        self._cache: dict[str, _Chunk] = {}

    def find_boundaries(self, texts: Sequence[str]) -> list[SentenceBoundaries]:
        """Split texts into sentences.

        Args:
            texts: The texts; an empty one has no boundary. Texts of one call share the work for
                equal chunks, and the cache is emptied only between calls.

        Returns:
            The sentence boundaries of each text.
        """
        if len(self._cache) > _MAX_CHUNKS:
            self._cache = {}
        self._cache_chunks(dict.fromkeys(chunk for text in texts for chunk in text.split()))
        return [self._find_text_boundaries(text) for text in texts]

    def _find_text_boundaries(self, text: str) -> SentenceBoundaries:
        cache = self._cache
        ends = []
        words = 0
        is_open = False
        last = 0
        if text.startswith(" "):
            last = 1  # before the first word, every run of white space is a word
        for match in _CHUNK_OR_SPACE.finditer(text):
            chunk = match.group()
            start = match.start()
            known = cache.get(chunk)
            if known is None:  # white space
                if is_open:
                    ends.append(last)
                    is_open = False
            else:
                if is_open and known.first >= 0:
                    # White space belongs to the segment that follows it.
                    ends.append(start + known.first if known.first else last)
                ends.extend([start + offset for offset in known.inner])
                is_open = is_open if known.leaves_open is None else known.leaves_open
                words += known.words
            last = match.end()
        return SentenceBoundaries([*ends, last] if text else [], words)

    def _cache_chunks(self, chunks: Iterable[str]) -> None:
        unseen = [chunk for chunk in chunks if chunk not in self._cache]
        for chunk, words in zip(unseen, self._english.split_words(unseen), strict=True):
            self._cache[chunk] = self._describe_chunk(words)

    def _describe_chunk(self, words: Sequence[str]) -> _Chunk:
        marks = self._english.sentence_marks
        offset = 0
        first = -1
        inner = []
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
    """The segments of one text, and the keys of their runs; there may be fewer keys than segments.

    Attributes:
        ends: positions at which the text is cut; each segment includes the white space before it.
        keys: key of the run that begins with each segment, None where it is never a duplicate.
    """

    ends: list[int]
    keys: list[str | None]


@lru_cache(maxsize=1)
def get_sentence_splitter() -> SentenceSplitter:
    """Return the sentence splitter of this process, whose cache is shared.

    Returns:
        The same object on every call.
    """
    return SentenceSplitter()


def split_segments(texts: Sequence[str], config: SpansConfig) -> list[TextSegments]:
    """Split texts into segments.

    Args:
        texts: the texts.
        config: the kind of segments, their minimum length, and the length of runs.

    Returns:
        The segments and keys of each text.
    """
    if isinstance(config, SentenceDedupConfig):
        return _split_sentences(texts, config)
    separator = _BLANK_LINES if isinstance(config, ParagraphDedupConfig) else _NEWLINE
    return [_split_by_separator(text, separator, config) for text in texts]


def get_run_length(config: SpansConfig) -> int:
    """Return the number of segments that one key represents.

    Args:
        config: the kind of segments.

    Returns:
        1, except for sentences.
    """
    return config.sentences if isinstance(config, SentenceDedupConfig) else 1


def cut_at_ends(text: str, ends: Sequence[int]) -> list[str]:
    """Cut a text into segments.

    Args:
        text: The text.
        ends: End of each segment, in characters.

    Returns:
        The segments; the text after the last end is dropped.
    """
    return [text[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def remove_segment_runs(
    text: str, segments: TextSegments, first: Sequence[int], length: int
) -> str:
    """Remove runs of segments from a text.

    Args:
        text: the text.
        segments: its segments.
        first: indices of the first segments of the runs.
        length: number of segments of a run.

    Returns:
        The remaining text without leading white space.
    """
    removed = {index for begin in first for index in range(begin, begin + length)}
    kept = [
        piece
        for index, piece in enumerate(cut_at_ends(text, segments.ends))
        if index not in removed
    ]
    return "".join(kept).lstrip()


def _split_by_separator(
    text: str, separator: re.Pattern[str], config: ParagraphDedupConfig | LineDedupConfig
) -> TextSegments:
    ends = [*(match.start() for match in separator.finditer(text)), len(text)]
    pieces = [piece.strip() for piece in cut_at_ends(text, ends)]
    if isinstance(config, LineDedupConfig):
        pieces = [piece.lower() for piece in pieces]
    return TextSegments(
        ends, [piece if len(piece) >= max(1, config.min_characters) else None for piece in pieces]
    )


def _split_sentences(texts: Sequence[str], config: SentenceDedupConfig) -> list[TextSegments]:
    """Return runs of sentences, simplified and joined; white space after the last sentence is no
    segment.
    """
    ends_per_text = [found.ends for found in get_sentence_splitter().find_boundaries(texts)]
    sentences_per_text = [
        [stripped for piece in cut_at_ends(text, ends) if (stripped := piece.strip())]
        for text, ends in zip(texts, ends_per_text, strict=True)
    ]
    simple = iter(
        simplify_texts([sentence for sentences in sentences_per_text for sentence in sentences])
    )
    found = []
    for ends, sentences in zip(ends_per_text, sentences_per_text, strict=True):
        parts = list(islice(simple, len(sentences)))
        runs = [
            " ".join(run)
            for run in zip(*(parts[start:] for start in range(config.sentences)), strict=False)
        ]
        found.append(TextSegments(ends, [run if run.strip() else None for run in runs]))
    return found
