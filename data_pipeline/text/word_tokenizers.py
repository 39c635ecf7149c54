"""Words as other tools than datatrove see them: stretches between white space, and Unicode's word segments.

Both are chunk splitters for `WordSplitter`, so that every rule works on the same columns of word ids.

Words of languages that write none: every character of a script without spaces counts as one.

A chunk splitter for `WordSplitter`. A character here is a letter with the marks that belong to it (Thai vowels above
and below, Khmer subscripts), and a full-width or CJK mark is a word of its own. Words of other scripts, such as a Latin
name in a Chinese sentence, are split as English ones.

Words of languages that write none, by a dictionary: jieba for Chinese, SudachiPy for Japanese, PyThaiNLP for Thai.

A chunk splitter for `WordSplitter`. These are the libraries and settings that datatrove finds words with; each is an
extra and is loaded when the first chunk is split. White space parts words in these scripts too, so a chunk is split by
itself: jieba's words are those of the whole text, SudachiPy and PyThaiNLP look beyond a space now and then.

How the words of a language are found, from what its profile says.

Reads the `words` of a profile, gives a chunk splitter for `WordSplitter`.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from importlib import import_module
from typing import Any

from data_pipeline.text.spacy_tokenizer import SpacyTokenizer
from data_pipeline.text.word_cache import WordTokenizer
from llmsys.config.language import CharacterWordsConfig, Dictionary, DictionaryWordsConfig, SpacedWordsConfig, Words

# Unicode joins words over this space (it is of the class ExtendNumLet), Python splits at it.
_JOINING_SPACE = "\u202f"
_STRETCH = re.compile(f"(?:\\S|{_JOINING_SPACE})+")


class WhitespaceTokenizer:
    """Every chunk is one word, as in Python's `str.split`."""

    sentence_marks: frozenset[str] = frozenset()
    split_chunks = staticmethod(str.split)

    def split_words(self, chunks: Sequence[str]) -> list[list[str]]:
        """The words of each chunk."""
        return [[chunk] for chunk in chunks]


class UnicodeTokenizer:
    """Segments between the word boundaries of UAX 29 that start with a letter or a digit (uniseg's words in DCLM)."""

    sentence_marks: frozenset[str] = frozenset()

    def split_chunks(self, text: str) -> list[str]:
        """The chunks of a text, in which no boundary depends on a neighbour."""
        return _STRETCH.findall(text) if _JOINING_SPACE in text else text.split()

    def split_words(self, chunks: Sequence[str]) -> list[list[str]]:
        """The words of each chunk, perhaps none."""
        return [[word for word in self._segment_pattern.findall(chunk) if word[0].isalnum()] for chunk in chunks]

    @cached_property
    def _segment_pattern(self) -> Any:
        return import_module("regex").compile(_build_segment_pattern())


def _build_segment_pattern() -> str:
    """A pattern for one segment of UAX 29; the regex library's own \\b does not look past format characters."""
    marks = r"[\p{WB=Extend}\p{WB=Format}\p{WB=ZWJ}]*"  # WB4: they belong to what they follow
    letter, hebrew = r"[\p{WB=ALetter}\p{WB=Hebrew_Letter}]", r"\p{WB=Hebrew_Letter}"
    digit, joiner, katakana = r"\p{WB=Numeric}", rf"\p{{WB=ExtendNumLet}}{marks}", rf"\p{{WB=Katakana}}{marks}"
    within_word = rf"[\p{{WB=MidLetter}}\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}]{marks}(?={letter})"  # WB6, WB7
    within_number = rf"[\p{{WB=MidNum}}\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}]{marks}(?={digit})"  # WB11, WB12
    within_hebrew = rf"\p{{WB=Double_Quote}}{marks}(?={hebrew})|\p{{WB=Single_Quote}}{marks}"  # WB7a, WB7b, WB7c
    letters = rf"{letter}{marks}(?:{within_word}|(?<={hebrew}{marks})(?:{within_hebrew}))?"
    run = rf"(?:(?:{letters}|{digit}{marks}(?:{within_number})?)+|(?:{katakana})+)"
    return rf"(?:{joiner})*{run}(?:(?:{joiner})+{run})*(?:{joiner})*|(?:{joiner})+|(?s:.){marks}"


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
_SPACELESS, _PUNCTUATION = (
    _build_character_class(SPACELESS_BLOCKS),
    re.escape(_build_character_class(_CJK_MARKS)).replace(r"\-", "-"),
)
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


# SudachiPy refuses more than 49,149 bytes, and datatrove gives it 40,000 at once.
LONGEST_PIECE = 10_000  # characters


class DictionaryTokenizer:
    """Splits chunks by one dictionary."""

    split_chunks = staticmethod(str.split)

    def __init__(self, dictionary: Dictionary) -> None:
        self._dictionary = dictionary

    def split_words(self, chunks: Sequence[str]) -> list[list[str]]:
        """The words of each chunk."""
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
    """The function that gives the words of a text without white space, one per process."""
    match dictionary:
        case "jieba":
            import jieba

            jieba.setLogLevel("ERROR")  # it tells standard error how long its dictionary took
            return lambda text: list(jieba.cut(text))
        case "sudachipy":
            import sudachipy

            library = sudachipy.Dictionary(dict="core")
            make = getattr(library, "tokenizer", None) or library.create  # as it was called before 0.7
            tokenizer = make(mode=sudachipy.SplitMode.A)
            return lambda text: [word.surface() for word in tokenizer.tokenize(text)]
        case "pythainlp":
            from pythainlp.tokenize import word_tokenize

            return lambda text: list(word_tokenize(text, keep_whitespace=False, engine="newmm-safe"))


def build_word_tokenizer(words: Words) -> WordTokenizer:
    """The splitter that a profile asks for."""
    match words:
        case SpacedWordsConfig():
            return SpacyTokenizer(words.rules)
        case CharacterWordsConfig():
            return CharacterTokenizer()
        case DictionaryWordsConfig():
            return DictionaryTokenizer(words.dictionary)
