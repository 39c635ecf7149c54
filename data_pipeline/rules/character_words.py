"""Words of languages that write none: every character of a script without spaces counts as one.

A chunk splitter for `WordSplitter`. A character here is a letter with the marks that belong to it (Thai vowels above
and below, Khmer subscripts), and a full-width or CJK mark is a word of its own. Words of other scripts, such as a Latin
name in a Chinese sentence, are split as English ones.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence

from data_pipeline.rules.chunk import SpacyTokenizer

# First and last code points of the blocks whose scripts are written without spaces between words.
SPACELESS_BLOCKS = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x0F00, 0x0FFF),  # Tibetan
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x2E80, 0x2FDF),  # radicals
    (0x3005, 0x3007),
    (0x3021, 0x3029),
    (0x3031, 0x3035),
    (0x3038, 0x303C),
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x3100, 0x312F),  # Bopomofo
    (0x31A0, 0x31FF),
    (0x3400, 0x4DBF),  # Han
    (0x4E00, 0x9FFF),
    (0xAA60, 0xAA7F),
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9F),  # half-width Katakana
    (0x20000, 0x323AF),
)
_CJK_MARKS = (
    (0x3001, 0x3004),
    (0x3008, 0x3020),
    (0xFE30, 0xFE4F),
    (0xFF01, 0xFF0F),
    (0xFF1A, 0xFF20),
    (0xFF3B, 0xFF65),
)
_JOINER = 0x17D2  # Khmer's sign that the next letter is a subscript


def _iter_code_points(blocks: Sequence[tuple[int, int]]) -> Iterator[int]:
    return (point for first, last in blocks for point in range(first, last + 1))


def _build_character_class(blocks: Sequence[tuple[int, int]]) -> str:
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in blocks)


def _is_mark(point: int) -> bool:
    return unicodedata.category(chr(point)).startswith("M")


_MARKS = "".join(map(chr, filter(_is_mark, _iter_code_points(SPACELESS_BLOCKS[:5])))) + "\u3099\u309a\ufe00-\ufe0f"
_SPACELESS, _PUNCTUATION = _build_character_class(SPACELESS_BLOCKS), re.escape(_build_character_class(_CJK_MARKS)).replace(r"\-", "-")
_WORD = re.compile(
    f"[{_SPACELESS}](?:[{_MARKS}]|(?<={chr(_JOINER)})[{chr(0x1780)}-{chr(0x17A2)}])*"
    rf"|[{_PUNCTUATION}]|[^\s{_SPACELESS}{_PUNCTUATION}]+"
)
_ALONE = re.compile(f"[{_SPACELESS}{_PUNCTUATION}]")


def insert_spaces(text: str) -> str:
    """The text with a space between its characters, for what finds words at spaces alone."""
    return " ".join(_WORD.findall(text))


class CharacterTokenizer:
    """Cuts scripts without spaces into characters, and everything else at white space and by English rules."""

    def __init__(self) -> None:
        self._spaced = SpacyTokenizer()

    def split_chunks(self, text: str) -> list[str]:
        """The chunks of a text."""
        return _WORD.findall(text)

    def split_words(self, chunks: Sequence[str]) -> list[list[str]]:
        """The words of each chunk; a chunk must be one of `split_chunks`."""
        words = [[chunk] if _ALONE.match(chunk) else [] for chunk in chunks]
        spaced = [number for number, found in enumerate(words) if not found]
        for number, found in zip(spaced, self._spaced.split_words([chunks[number] for number in spaced]), strict=True):
            words[number] = found
        return words

    @property
    def sentence_marks(self) -> frozenset[str]:
        """Words that end a sentence."""
        return self._spaced.sentence_marks
