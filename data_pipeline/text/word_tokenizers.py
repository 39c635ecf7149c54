"""Tokenizers other than spaCy's, for `WordSplitter`: white space, Unicode segments, characters and
dictionaries.

Scripts without spaces have two kinds. `CharacterTokenizer` takes every letter with its marks as a
word (Thai vowels, Khmer subscripts). `DictionaryTokenizer` asks jieba (Chinese), SudachiPy
(Japanese) or PyThaiNLP (Thai), with the settings of datatrove; each is an extra, loaded when the
first chunk is split. White space separates words in these scripts too, so that chunks are split
independently. SudachiPy and PyThaiNLP rarely look beyond a space; jieba never does.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from importlib import import_module
from typing import Any, assert_never

from llmsys.config.language import (
    CharacterWordsConfig,
    Dictionary,
    DictionaryWordsConfig,
    SpacedWordsConfig,
    Words,
)
from llmsys.data_pipeline.text.spacy_tokenizer import SpacyTokenizer
from llmsys.data_pipeline.text.word_cache import WordTokenizer

# UAX 29 joins words across this space (class ExtendNumLet); Python splits at it.
_JOINING_SPACE = "\u202f"
_CHUNK = re.compile(f"(?:\\S|{_JOINING_SPACE})+")


class WhitespaceTokenizer:
    """Every chunk is one word, as in `str.split`."""

    sentence_marks: frozenset[str] = frozenset()
    split_chunks = staticmethod(str.split)

    def split_words(self, chunks: Sequence[str]) -> list[list[str]]:
        """Return the words of each chunk."""
        return [[chunk] for chunk in chunks]


class UnicodeTokenizer:
    """Segments of UAX 29 that start with a letter or a digit (uniseg's words in DCLM)."""

    sentence_marks: frozenset[str] = frozenset()

    def split_chunks(self, text: str) -> list[str]:
        """Return the chunks of a text. No word boundary depends on a neighbouring chunk."""
        return _CHUNK.findall(text) if _JOINING_SPACE in text else text.split()

    def split_words(self, chunks: Sequence[str]) -> list[list[str]]:
        """Return the words of each chunk; there may be none."""
        return [
            [word for word in self._segment_pattern.findall(chunk) if word[0].isalnum()]
            for chunk in chunks
        ]

    @cached_property
    def _segment_pattern(self) -> Any:
        return import_module("regex").compile(_build_segment_pattern())


def _build_segment_pattern() -> str:
    """Build a pattern for one segment of UAX 29. The \\b of the regex library does not look past
    format characters.
    """
    marks = r"[\p{WB=Extend}\p{WB=Format}\p{WB=ZWJ}]*"  # WB4: they belong to what they follow
    letter = r"[\p{WB=ALetter}\p{WB=Hebrew_Letter}]"
    hebrew = r"\p{WB=Hebrew_Letter}"
    digit = r"\p{WB=Numeric}"
    joiner = rf"\p{{WB=ExtendNumLet}}{marks}"
    katakana = rf"\p{{WB=Katakana}}{marks}"
    # WB6, WB7
    within_word = rf"[\p{{WB=MidLetter}}\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}]{marks}(?={letter})"
    # WB11, WB12
    within_number = rf"[\p{{WB=MidNum}}\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}]{marks}(?={digit})"
    # WB7a, WB7b, WB7c
    within_hebrew = rf"\p{{WB=Double_Quote}}{marks}(?={hebrew})|\p{{WB=Single_Quote}}{marks}"
    letters = rf"{letter}{marks}(?:{within_word}|(?<={hebrew}{marks})(?:{within_hebrew}))?"
    run = rf"(?:(?:{letters}|{digit}{marks}(?:{within_number})?)+|(?:{katakana})+)"
    return rf"(?:{joiner})*{run}(?:(?:{joiner})+{run})*(?:{joiner})*|(?:{joiner})+|(?s:.){marks}"


# Blocks of scripts without spaces between words, first and last code points.
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
# Full-width and CJK punctuation, each a separate word.
_CJK_MARKS = (
    (0x3001, 0x3004),
    (0x3008, 0x3020),
    (0xFE30, 0xFE4F),
    (0xFF01, 0xFF0F),
    (0xFF1A, 0xFF20),
    (0xFF3B, 0xFF65),
)
_JOINER = 0x17D2  # Khmer: the next letter is a subscript


def _iter_code_points(blocks: Sequence[tuple[int, int]]) -> Iterator[int]:
    return (point for first, last in blocks for point in range(first, last + 1))


def _build_character_class(blocks: Sequence[tuple[int, int]]) -> str:
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in blocks)


def _is_mark(point: int) -> bool:
    return unicodedata.category(chr(point)).startswith("M")


_MARKS = (
    "".join(map(chr, filter(_is_mark, _iter_code_points(SPACELESS_BLOCKS[:5]))))
    + "\u3099\u309a\ufe00-\ufe0f"
)
_SPACELESS = _build_character_class(SPACELESS_BLOCKS)
_PUNCTUATION = re.escape(_build_character_class(_CJK_MARKS)).replace(r"\-", "-")
_WORD = re.compile(
    f"[{_SPACELESS}](?:[{_MARKS}]|(?<={chr(_JOINER)})[{chr(0x1780)}-{chr(0x17A2)}])*"
    rf"|[{_PUNCTUATION}]|[^\s{_SPACELESS}{_PUNCTUATION}]+"
)
_ALONE = re.compile(f"[{_SPACELESS}{_PUNCTUATION}]")


def insert_spaces(text: str) -> str:
    """Insert a space between the characters of scripts without spaces.

    Args:
        text: The text.

    Returns:
        The words of `CharacterTokenizer`, separated by spaces.
    """
    return " ".join(_WORD.findall(text))


class CharacterTokenizer:
    """Splits scripts without spaces into characters, everything else at white space and by English
    rules.

    A character is a letter with its marks. A full-width or CJK mark is a separate word.
    """

    def __init__(self) -> None:
        self._spaced = SpacyTokenizer()

    def split_chunks(self, text: str) -> list[str]:
        """Return the chunks of a text."""
        return _WORD.findall(text)

    def split_words(self, chunks: Sequence[str]) -> list[list[str]]:
        """Return the words of each chunk. A chunk must come from `split_chunks`."""
        words = [[chunk] if _ALONE.match(chunk) else [] for chunk in chunks]
        spaced = [number for number, found in enumerate(words) if not found]
        for number, found in zip(
            spaced, self._spaced.split_words([chunks[number] for number in spaced]), strict=True
        ):
            words[number] = found
        return words

    @property
    def sentence_marks(self) -> frozenset[str]:
        """Words that end a sentence."""
        return self._spaced.sentence_marks


# SudachiPy accepts at most 49,149 bytes; datatrove passes 40,000.
LONGEST_PIECE = 10_000  # characters


class DictionaryTokenizer:
    """Splits chunks by a dictionary."""

    split_chunks = staticmethod(str.split)

    def __init__(self, dictionary: Dictionary) -> None:
        self._dictionary = dictionary

    def split_words(self, chunks: Sequence[str]) -> list[list[str]]:
        """Return the words of each chunk."""
        segment = _load_segmenter(self._dictionary)
        return [
            [
                word
                for start in range(0, len(chunk), LONGEST_PIECE)
                for found in segment(chunk[start : start + LONGEST_PIECE])
                if (word := found.strip())
            ]
            for chunk in chunks
        ]

    @property
    def sentence_marks(self) -> frozenset[str]:
        """Words that end a sentence: spaCy's, which are the same for all languages."""
        return SpacyTokenizer("xx").sentence_marks


@cache
def _load_segmenter(dictionary: Dictionary) -> Callable[[str], list[str]]:
    """Return the function that splits a text without white space into words, one per process."""
    match dictionary:
        case "jieba":
            import jieba

            jieba.setLogLevel("ERROR")  # it logs the load time of its dictionary to stderr
            return lambda text: list(jieba.cut(text))
        case "sudachipy":
            import sudachipy

            library = sudachipy.Dictionary(dict="core")
            create = getattr(library, "tokenizer", None) or library.create  # `tokenizer` before 0.7
            tokenizer = create(mode=sudachipy.SplitMode.A)
            return lambda text: [word.surface() for word in tokenizer.tokenize(text)]
        case "pythainlp":
            from pythainlp.tokenize import word_tokenize

            return lambda text: list(
                word_tokenize(text, keep_whitespace=False, engine="newmm-safe")
            )
        case unreachable:
            assert_never(unreachable)


def build_word_tokenizer(words: Words) -> WordTokenizer:
    """Build the tokenizer of a language.

    Args:
        words: The section `words` of a language profile.

    Returns:
        A tokenizer. Its library is loaded with the first chunk.
    """
    match words:
        case SpacedWordsConfig():
            return SpacyTokenizer(words.rules)
        case CharacterWordsConfig():
            return CharacterTokenizer()
        case DictionaryWordsConfig():
            return DictionaryTokenizer(words.dictionary)
        case unreachable:
            assert_never(unreachable)
