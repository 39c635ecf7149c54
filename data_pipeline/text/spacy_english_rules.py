"""spaCy's English tokenizer rules, written out for the characters of English text.

spaCy searches every chunk several times with patterns of thousands of characters. Nearly always the first and the last
character already tell that these find nothing, or one mark. Written out are the rules for ASCII and for typographic
quotes and dashes. Exceptions (`don't`) and the URL pattern are taken from spaCy, so that only marks and units are
repeated here.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

_MARKS = frozenset(",:;!?()[]{}<>_#*&'\"`“”‘’…–—")  # each is a word of its own at either end
_FIRST_MARKS = _MARKS | frozenset("%=$")
_FOREIGN_MONEY = ("US$", "C$", "A$")
# A full stop is split off after these, and after two capitals.
_BEFORE_STOP = frozenset("0123456789abcdefghijklmnopqrstuvwxyz%+-.|") | _MARKS - frozenset("–—")
_TWO_CAPITALS = re.compile("[A-Z][A-Z]")
_DIGITS = frozenset("0123456789")
_POSSESSIVES = ("'s", "'S", "’s", "’S")
# Units after a digit at the end of a chunk.
_UNIT = re.compile(
    "(?<=[0-9])(?:km|m|dm|cm|mm|ha|nm|yd|in|ft|kg|g|mg|t|lb|oz|m/s|km/h|kmh|mph|h?Pa|mbar|[mkgt]b|[MKGT]B|[TGMK]"
    r"|%|\+|(?:US|C|A)?\$)$"
)
_UNIT_ENDS = frozenset("mandtgbzrshBTGMK%+$")
_LONGEST_UNIT = 5  # with the digit

# An infix mark and its required neighbours. The mark comes first, so that other characters are skipped fast.
_INFIX = re.compile(
    r"""[.…,+*^~\-–—:<>=/](?:(?<=[.])[.]+|(?<=…)|(?<=[0-9][+\-*^])(?=[0-9-])"""
    r"""|(?<=[a-z,'"`“”‘’][.])(?=[A-Z,'"`“”‘’])|(?<=[A-Za-z],)(?=[A-Za-z])"""
    r"""|(?<=[A-Za-z0-9][~\-–—:<>=/])(?=[A-Za-z])|(?<=[A-Za-z0-9]-)-{1,2}(?=[A-Za-z])|(?<=[A-Za-z0-9]—)—(?=[A-Za-z]))"""
)
_MAY_BE_ADDRESS = re.compile(r"[A-Za-z0-9“”‘’–—…]\.(?:[a-z]{2}|[0-9])")  # its names may hold any letter or mark

# Characters outside these rules, and digits next to non-English letters.
_UNKNOWN, _DIGIT = re.compile(r"[^\w\x00-\x7f“”‘’–—…]"), re.compile(r"\d")
_FOREIGN = re.compile(r"[^\x00-\x7f“”‘’–—…]")


class EnglishRules:
    """Splits a chunk into words by rules alone.

    Args:
        exceptions: Words of chunks, or of chunks without their marks, that do not follow the rules.
        is_address: spaCy's URL pattern; an address stays one word.
        longest: Longest chunk in characters. For longer ones, unless they are letters only, ask spaCy.
    """

    def __init__(self, exceptions: Mapping[str, Sequence[str]], is_address: Any, longest: int) -> None:
        self._exceptions: Mapping[str, Sequence[str]] = {}
        self._is_address, self._longest = is_address, longest
        self._joined: set[tuple[str, str]] = set()
        apart = [self._split_off_marks(name) for name in exceptions]
        # spaCy rejoins adjacent words that are the regular split of an exception.
        self._joined = {(words[0], words[1]) for words in apart if words and len(words) > 1}
        self._exceptions = {name: words for name, words in exceptions.items() if not _is_foreign(name)}

    def split_chunk(self, chunk: str) -> list[str] | None:
        """Return the words of a non-empty chunk without white space, or None if spaCy must be asked."""
        if chunk in self._exceptions:
            return list(self._exceptions[chunk])
        if chunk.isalpha():
            return [chunk]
        if len(chunk) > self._longest:
            return None
        if _is_foreign(chunk) and (_UNKNOWN.search(chunk) or _DIGIT.search(chunk)):
            return None
        body, last = chunk[:-1], chunk[-1]
        if body.isalpha() and (last in _MARKS or (last == "." and body[-1] in _BEFORE_STOP)):
            words: list[str] | None = [*self._exceptions.get(body, (body,)), last]
        else:
            words = self._split_off_marks(chunk)
        return words if words and self._joined.isdisjoint(pairwise(words)) else None

    def _split_off_marks(self, chunk: str) -> list[str] | None:
        """Split marks off both ends until an exception or the middle remains, then split that."""
        exceptions = self._exceptions
        first_words: list[str] = []
        last_words: list[str] = []
        middle = chunk
        while middle and middle not in exceptions:
            before = _count_opening_characters(middle)
            if before and middle[before:] in exceptions:
                first_words.append(middle[:before])
                middle = middle[before:]
                break
            after = _count_closing_characters(middle[before:])
            if after is None:
                return None
            if after and middle[:-after] in exceptions:
                last_words.append(middle[-after:])
                middle = middle[:-after]
                break
            if not before and not after:
                break
            if before:
                first_words.append(middle[:before])
            if after:
                last_words.append(middle[-after:])
            middle = middle[before : len(middle) - after]
        words = self._split_middle(middle)
        return None if words is None else [*first_words, *words, *reversed(last_words)]

    def _split_middle(self, middle: str) -> Sequence[str] | None:
        """Return the words between the marks."""
        if not middle:
            return ()
        if middle in self._exceptions:
            return self._exceptions[middle]
        if middle.isalpha():
            return (middle,)
        if _FOREIGN.search(middle):
            return None
        if _MAY_BE_ADDRESS.search(middle) and self._is_address(middle):
            return (middle,)
        words, start = [], 0
        for match in _INFIX.finditer(middle):
            first, last = match.span()
            if not first:
                continue  # a mark at the beginning splits nothing
            if first > start:
                words.append(middle[start:first])
            words.append(middle[first:last])
            start = last
        if start < len(middle):
            words.append(middle[start:])
        return words


def _is_foreign(chunk: str) -> bool:
    """Return whether the chunk has characters that English text does not use."""
    return not chunk.isascii() and _FOREIGN.search(chunk) is not None


def _count_opening_characters(middle: str) -> int:
    """Return the length of the mark at the start of a chunk."""
    first = middle[0]
    if first in _FIRST_MARKS:
        return 1
    if first == ".":
        dots = len(middle) - len(middle.lstrip("."))
        return dots if dots > 1 else 0
    if first == "+":
        return 0 if middle[1:2] in _DIGITS else 1
    if first in "UCA" and middle.startswith(_FOREIGN_MONEY):
        return middle.index("$") + 1
    return 0


def _count_closing_characters(rest: str) -> int | None:
    """Return the length of the mark or unit at the end of a chunk. None if a non-English letter decides."""
    if not rest:
        return 0
    last = rest[-1]
    if last in _MARKS:
        return 2 if rest.endswith("……") else 1
    if last == ".":
        return _count_closing_stops(rest)
    if rest.endswith(_POSSESSIVES):
        return 2
    if last in _UNIT_ENDS and (unit := _UNIT.search(rest, max(0, len(rest) - _LONGEST_UNIT))):
        return len(rest) - unit.start()
    return 0


def _count_closing_stops(rest: str) -> int | None:
    before = rest[-2:-1]
    if before == ".":
        return len(rest) - len(rest.rstrip("."))
    if before in _BEFORE_STOP:
        return 1
    if before and not before.isascii():
        return None
    return 1 if _TWO_CAPITALS.fullmatch(rest[-3:-1]) else 0
