"""Whether a text is written in the language it was taken for, measured in letters, marks of damage and common words.

Reads texts, their words, and what the profile of the language says. Pages in another script, pages decoded with the
wrong charset, lists of keywords and Chinese pages of mixed variants are dropped here; a language identifier is sure of
all of them. Shares of letters follow MNBVC, which keeps pages of 70 % Chinese characters.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import regex  # type: ignore[import-untyped]

from data_pipeline.rules.batch import TextBatch, share
from data_pipeline.rules.ragged import offsets_of
from data_pipeline.rules.verdict import Floats, Limit, Verdicts, first_broken
from data_pipeline.rules.vocabulary import NOT_SYMBOL
from data_pipeline.rules.word_columns import Integers, WordColumns
from llmsys.config.native_text import NativeTextConfig

_LETTER, _OWN, _GARBAGE, _SIMPLIFIED, _TRADITIONAL = 1, 2, 4, 8, 16
_ALL_CHARACTERS = 0x110000
_HAN = range(0x4E00, 0xA000)
# What is left of U+FFFD when UTF-8 text was read as GBK, and of uninitialised memory written as text in Windows.
_BROKEN_HAN = ("锟斤拷", "烫烫烫", "屯屯屯")


class NativeText:
    """Drops documents that only look like their language."""

    kind = "native_text"

    def __init__(self, config: NativeTextConfig) -> None:
        self._stop_words = frozenset(config.stop_words)
        self._scripts = config.scripts
        self.limits = [
            Limit("share of characters from wrong decoding", "garbage_share", "above", config.max_garbage_share),
            Limit(
                f"share of letters that are {' or '.join(config.scripts)}",
                "script_share",
                "below",
                config.min_script_share if config.scripts else 0,
            ),
            Limit("share of stop words", "stop_word_share", "below", config.min_stop_word_share),
            Limit(
                "share of the rarer of simplified and traditional",
                "mixed_variant_share",
                "above",
                config.max_mixed_variant_share,
            ),
        ]

    def judge(self, batch: TextBatch) -> Verdicts:
        """Verdicts in the order damage, script, words, variants."""
        flags = _flags(self._scripts)[_code_points(batch.texts)]
        ends = np.cumsum(batch.characters)
        letters, own, garbage, simplified, traditional = (
            _sums(flags & bit != 0, ends) for bit in (_LETTER, _OWN, _GARBAGE, _SIMPLIFIED, _TRADITIONAL)
        )
        garbage = garbage + batch.count(sum(text.count(one) * len(one) for one in _BROKEN_HAN) for text in batch.texts)
        statistics = {
            "garbage_share": share(garbage, batch.characters),
            "script_share": share(own, letters),
            "stop_word_share": _stop_word_share(batch.words, self._stop_words),
            "mixed_variant_share": share(np.minimum(simplified, traditional), simplified + traditional),
        }
        return first_broken(self.limits, statistics, len(batch))


def _code_points(texts: Iterable[str]) -> npt.NDArray[np.uint32]:
    return np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)


def _sums(chosen: npt.NDArray[np.bool_], ends: Integers) -> Integers:
    """How many of the characters before each document's end are chosen, less those before its beginning."""
    return np.diff(offsets_of(chosen)[ends], prepend=0)


def _stop_word_share(words: WordColumns, stop_words: frozenset[str]) -> Floats:
    """Stop words / words that are not punctuation alone."""
    documents = len(words.counts)
    chosen = np.zeros(len(words.vocabulary), np.bool_)
    chosen[[number for word in stop_words if (number := words.vocabulary.index.get(word)) is not None]] = True
    found = np.bincount(words.document_of_word[chosen[words.ids_W]], minlength=documents)
    counted = np.bincount(words.document_of_word[(words.word_flags & NOT_SYMBOL) != 0], minlength=documents)
    return share(found, counted)


@lru_cache(maxsize=128)
def _flags(scripts: tuple[str, ...]) -> npt.NDArray[np.uint8]:
    """What the rule asks of a character, by code point."""
    flags = _shared_flags().copy()
    for script in scripts:
        flags[_points(rf"\p{{Script={script}}}")] |= _OWN
    flags[flags & _LETTER == 0] &= ~np.uint8(_OWN)
    return flags


@lru_cache(maxsize=1)
def _shared_flags() -> npt.NDArray[np.uint8]:
    flags = np.zeros(_ALL_CHARACTERS, np.uint8)
    flags[_points(r"\p{L}")] = _LETTER
    flags[_points(r"[\p{Co}\p{Cs}\p{Cn}\uFFFD\x00-\x08\x0E-\x1F\x7F-\x84\x86-\x9F]")] = _GARBAGE
    for point in _HAN:
        in_simplified, in_traditional = _encodes(chr(point), "gb2312"), _encodes(chr(point), "big5")
        if in_simplified != in_traditional:
            flags[point] |= _SIMPLIFIED if in_simplified else _TRADITIONAL
    return flags


def _encodes(character: str, charset: str) -> bool:
    """Whether a charset has the character. GB 2312 holds simplified Chinese, Big5 traditional; most are in both."""
    return bool(character.encode(charset, "ignore"))


def _points(pattern: str) -> Integers:
    """The code points that a class of characters holds."""
    found: Callable[[str], list[str]] = regex.compile(pattern).findall
    return np.fromiter(map(ord, found(_every_character())), np.int64)


@lru_cache(maxsize=1)
def _every_character() -> str:
    return "".join(map(chr, range(_ALL_CHARACTERS)))
