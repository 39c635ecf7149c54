"""Drop texts that are not written in their identified language, by letters, decoding damage and
common words.

Drops pages in another script, pages decoded with the wrong charset, keyword lists and Chinese pages
of mixed variants, of all of which a language identifier is sure. Shares of letters follow MNBVC,
which keeps pages with 70 % Chinese characters.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import regex  # type: ignore[import-untyped]

from llmsys.config.quality_rules import NativeTextConfig
from llmsys.data_pipeline.rules.rule import (
    DocumentBatch,
    Floats,
    RuleVerdicts,
    ThresholdTest,
    apply_thresholds,
    compute_share,
)
from llmsys.data_pipeline.text.ragged_arrays import Integers, compute_offsets
from llmsys.data_pipeline.text.vocabulary import NOT_SYMBOL
from llmsys.data_pipeline.text.word_columns import WordColumns

_LETTER = 1
_OWN = 2
_GARBAGE = 4
_SIMPLIFIED = 8
_TRADITIONAL = 16
_ALL_CHARACTERS = 0x110000
_HAN = range(0x4E00, 0xA000)
# U+FFFD in UTF-8 read as GBK, and the fill patterns of uninitialised memory in Windows read as GBK.
_BROKEN_HAN = ("锟斤拷", "烫烫烫", "屯屯屯")


class NativeTextRule:
    """A rule that drops documents that only resemble their language."""

    kind = "native_text"

    def __init__(self, config: NativeTextConfig) -> None:
        self._stop_words = frozenset(config.stop_words)
        self._scripts = config.scripts
        self.limits = [
            ThresholdTest(
                "share of characters from wrong decoding",
                "garbage_share",
                "above",
                config.max_garbage_share,
            ),
            ThresholdTest(
                f"share of letters that are {' or '.join(config.scripts)}",
                "script_share",
                "below",
                config.min_script_share if config.scripts else 0,
            ),
            ThresholdTest(
                "share of stop words", "stop_word_share", "below", config.min_stop_word_share
            ),
            ThresholdTest(
                "share of the rarer of simplified and traditional",
                "mixed_variant_share",
                "above",
                config.max_mixed_variant_share,
            ),
        ]

    def apply(self, batch: DocumentBatch) -> RuleVerdicts:
        """Return the verdicts, tested in the order damage, script, words, variants."""
        flags = _build_flag_table(self._scripts)[_encode_code_points(batch.texts)]
        ends = np.cumsum(batch.character_counts)
        letters, own, garbage, simplified, traditional = (
            _count_per_document(flags & bit != 0, ends)
            for bit in (_LETTER, _OWN, _GARBAGE, _SIMPLIFIED, _TRADITIONAL)
        )
        garbage = garbage + batch.to_counts(
            sum(text.count(broken) * len(broken) for broken in _BROKEN_HAN) for text in batch.texts
        )
        statistics = {
            "garbage_share": compute_share(garbage, batch.character_counts),
            "script_share": compute_share(own, letters),
            "stop_word_share": _compute_stop_word_share(batch.words, self._stop_words),
            "mixed_variant_share": compute_share(
                np.minimum(simplified, traditional), simplified + traditional
            ),
        }
        return apply_thresholds(self.limits, statistics, len(batch))


def _encode_code_points(texts: Iterable[str]) -> npt.NDArray[np.uint32]:
    return np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)


def _count_per_document(chosen: npt.NDArray[np.bool_], ends: Integers) -> Integers:
    """Count the chosen characters per document; `ends` are the ends of the documents."""
    # A difference of prefix sums, as documents may be empty, for which reduceat is wrong.
    return np.diff(compute_offsets(chosen)[ends], prepend=0)


def _compute_stop_word_share(words: WordColumns, stop_words: frozenset[str]) -> Floats:
    """Return stop words / words that are not punctuation alone."""
    documents = len(words.counts)
    chosen = np.zeros(len(words.vocabulary), np.bool_)
    chosen[
        [number for word in stop_words if (number := words.vocabulary.find_word(word)) is not None]
    ] = True
    found = np.bincount(words.document_of_word[chosen[words.ids_W]], minlength=documents)
    counted = np.bincount(
        words.document_of_word[(words.word_flags & NOT_SYMBOL) != 0], minlength=documents
    )
    return compute_share(found, counted)


@lru_cache(maxsize=128)
def _build_flag_table(scripts: tuple[str, ...]) -> npt.NDArray[np.uint8]:
    """Return the flags of each code point for a set of scripts."""
    flags = _build_shared_flag_table().copy()
    for script in scripts:
        flags[_list_code_points(rf"\p{{Script={script}}}")] |= _OWN
    # scripts have marks and digits too; shares are of letters
    flags[flags & _LETTER == 0] &= ~np.uint8(_OWN)
    return flags


@lru_cache(maxsize=1)
def _build_shared_flag_table() -> npt.NDArray[np.uint8]:
    flags = np.zeros(_ALL_CHARACTERS, np.uint8)
    flags[_list_code_points(r"\p{L}")] = _LETTER
    # Private use, surrogates, unassigned, the replacement character, controls other than white
    # space.
    flags[_list_code_points(r"[\p{Co}\p{Cs}\p{Cn}\uFFFD\x00-\x08\x0E-\x1F\x7F-\x84\x86-\x9F]")] = (
        _GARBAGE
    )
    for point in _HAN:
        in_simplified = _can_encode(chr(point), "gb2312")
        in_traditional = _can_encode(chr(point), "big5")
        if in_simplified != in_traditional:
            flags[point] |= _SIMPLIFIED if in_simplified else _TRADITIONAL
    return flags


def _can_encode(character: str, charset: str) -> bool:
    """Return whether a charset has the character; GB 2312 is simplified Chinese, Big5
    traditional, both share most.
    """
    return bool(character.encode(charset, "ignore"))


def _list_code_points(pattern: str) -> Integers:
    """Return the code points that match a character class."""
    found: Callable[[str], list[str]] = regex.compile(pattern).findall
    return np.fromiter(map(ord, found(_join_all_characters())), np.int64)


@lru_cache(maxsize=1)
def _join_all_characters() -> str:
    return "".join(map(chr, range(_ALL_CHARACTERS)))
