"""Split chunks into words as the rule tokenizer of spaCy does: `(don't` gives `(`, `do`, `n't`.

The published filters chose their thresholds with these words. The words of nearly all chunks are
decided by plain code: of other languages for letters with at most one mark per side, of English
ones by rules written out for ASCII, typographic quotes and dashes. Others are split by the
expressions and exceptions (`don't`) of spaCy, in `splitting_rules.py`.
"""

import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, cached_property
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np

from llmsys.data_pipeline.text.splitting_rules import (
    has_splitting_rules,
    load_sentence_marks,
    load_splitting_rules,
)

_MARKS = frozenset(",:;!?()[]{}<>_#*&'\"`“”‘’…–—")  # each is a separate word at either end
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

# An infix mark and its required neighbours. The mark comes first, so that other characters are
# skipped fast.
_INFIX = re.compile(
    r"""[.…,+*^~\-–—:<>=/](?:(?<=[.])[.]+|(?<=…)|(?<=[0-9][+\-*^])(?=[0-9-])"""
    r"""|(?<=[a-z,'"`“”‘’][.])(?=[A-Z,'"`“”‘’])|(?<=[A-Za-z],)(?=[A-Za-z])"""
    r"""|(?<=[A-Za-z0-9][~\-–—:<>=/])(?=[A-Za-z])|(?<=[A-Za-z0-9]-)-{1,2}(?=[A-Za-z])|(?<=[A-Za-z0-9]—)—(?=[A-Za-z]))"""
)
# its names may hold any letter or mark
_MAY_BE_ADDRESS = re.compile(r"[A-Za-z0-9“”‘’–—…]\.(?:[a-z]{2}|[0-9])")

# Characters outside these rules, and digits next to non-English letters.
_UNKNOWN = re.compile(r"[^\w\x00-\x7f“”‘’–—…]")
_DIGIT = re.compile(r"\d")
_FOREIGN = re.compile(r"[^\x00-\x7f“”‘’–—…]")


class EnglishRules:
    """Splits a chunk into words by rules alone.

    Args:
        exceptions: Words of chunks, or of chunks without their marks, that do not follow the rules.
        is_address: Whether spaCy's URL pattern matches; an address stays one word.
        longest: Longest chunk in characters. Longer ones are left, unless they are letters only.
    """

    def __init__(
        self, exceptions: Mapping[str, Sequence[str]], is_address: Any, longest: int
    ) -> None:
        self._exceptions: Mapping[str, Sequence[str]] = {}
        self._is_address = is_address
        self._longest = longest
        self._joined: set[tuple[str, str]] = set()
        apart = [self._split_off_marks(name) for name in exceptions]
        # spaCy rejoins adjacent words that are the regular split of an exception.
        self._joined = {(words[0], words[1]) for words in apart if words and len(words) > 1}
        self._exceptions = {
            name: words for name, words in exceptions.items() if not _is_foreign(name)
        }

    def split_chunk(self, chunk: str) -> list[str] | None:
        """Return the words of a non-empty chunk without white space, or None if these
        rules do not decide.
        """
        if chunk in self._exceptions:
            return list(self._exceptions[chunk])
        if chunk.isalpha():
            return [chunk]
        if len(chunk) > self._longest:
            return None
        if _is_foreign(chunk) and (_UNKNOWN.search(chunk) or _DIGIT.search(chunk)):
            return None
        body = chunk[:-1]
        last = chunk[-1]
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
        words = []
        start = 0
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
    """Return the length of the mark or unit at the end of a chunk. None if a non-English letter
    decides.
    """
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


# spaCy splits marks off a chunk one by one, in quadratic time. Cutting longer chunks is the only
# intended difference.
LONGEST_CHUNK = 1_000  # characters
# characters of a chunk with letters or digits near both ends, such as an address
LONGEST_PLAIN_CHUNK = 5_000
LONGEST_PIECE = 200
_END = 100
_SEPARATOR = "the"  # between chunks that are split together: no rule reaches across it


class SpacyTokenizer:
    """Splits chunks as the blank spaCy pipeline of a language does (`xx`: any with spaces).

    spaCy itself is loaded for languages that no profile of ours names.
    """

    split_chunks = staticmethod(str.split)

    def __init__(self, rules: str = "en") -> None:
        """Choose the rules; they are loaded when they are needed.

        Args:
            rules: spaCy's code of a language, or `xx` for any language that puts spaces between
                words. Default: "en".
        """
        self.rules = rules

    @property
    def has_rules(self) -> bool:
        """Return whether the rules are known without spaCy."""
        return has_splitting_rules(self.rules)

    def split_words(self, chunks: Sequence[str]) -> list[list[str]]:
        """Split chunks into words. Very long chunks are cut first, see `LONGEST_CHUNK`.

        Args:
            chunks: Not empty and without white space, as `split_chunks` returns them.

        Returns:
            The words of each chunk.
        """
        if self.has_rules:
            return self._split_with_rules(chunks)
        pieces = [_cut_long_chunk(chunk) for chunk in chunks]
        split = iter(self._split_with_spacy([piece for group in pieces for piece in group]))
        return [[word for _ in group for word in next(split)] for group in pieces]

    def _split_with_rules(self, chunks: Sequence[str]) -> list[list[str]]:
        """Return the words of each chunk of a language with rules."""
        split = load_splitting_rules(self.rules).split_chunk
        found: list[list[str] | None] = (
            list(map(self._english_rules.split_chunk, chunks))
            if self.rules == "en"
            else [None] * len(chunks)
        )
        return [
            words
            if words is not None
            else split(chunk)
            if len(chunk) <= LONGEST_CHUNK
            else [word for piece in _cut_long_chunk(chunk) for word in split(piece)]
            for chunk, words in zip(chunks, found, strict=True)
        ]

    @property
    def sentence_marks(self) -> frozenset[str]:
        """Words that end a sentence."""
        return load_sentence_marks()

    @property
    def exceptions(self) -> Collection[str]:
        """Chunks with their own words, such as `cannot`."""
        if self.has_rules:
            return load_splitting_rules(self.rules).exceptions.keys()
        return frozenset(load_spacy_pipeline(self.rules)[0].tokenizer.rules)

    def _split_with_spacy(self, chunks: Sequence[str]) -> Iterable[list[str]]:
        """Return the words of each chunk by spaCy, in one call for all chunks."""
        if not chunks:
            return []
        nlp = load_spacy_pipeline(self.rules)[0]
        joined = f" {_SEPARATOR} ".join(chunks)
        # Without a memory zone spaCy keeps every word it has seen.
        with nlp.memory_zone():
            places = nlp.tokenizer(joined).to_array(["IDX", "LENGTH"]).astype(np.int64)
        starts, lengths = places.T
        sizes = np.fromiter(map(len, chunks), np.int64, len(chunks))
        firsts = np.cumsum(sizes + len(_SEPARATOR) + 2) - sizes - len(_SEPARATOR) - 2
        numbers = np.searchsorted(firsts, starts, side="right") - 1
        inside = starts < (firsts + sizes)[numbers]  # the others are separators
        groups: list[list[str]] = [[] for _ in chunks]
        columns = (column[inside].tolist() for column in (numbers, starts, starts + lengths))
        for number, start, end in zip(*columns, strict=True):
            groups[number].append(joined[start:end])
        return groups

    @cached_property
    def _english_rules(self) -> EnglishRules:
        rules = load_splitting_rules("en")
        return EnglishRules(rules.exceptions, rules.is_address, LONGEST_CHUNK)


@cache
def load_spacy_pipeline(rules: str) -> tuple[Any, frozenset[str]]:
    """Return spaCy's blank pipeline for a language, one per process, and its sentence marks."""
    nlp: Any = _import_spacy().blank(rules)
    for name in import_module("spacy.symbols").IDS:
        # spaCy numbers the names of its own symbols unlike other strings. When a memory zone
        # closes, it keeps a dead entry of a word such as IS_ALPHA that was first met inside, and
        # later texts fail. Met before, it does no harm.
        nlp.vocab[name]
    nlp.vocab.lex_attr_getters = {}  # unused features of words: a quarter of the time
    return nlp, frozenset(nlp.add_pipe("sentencizer").punct_chars)


def _import_spacy() -> Any:
    """Import spaCy without its command line and without torch.

    spaCy takes half a second, and only languages without rules of ours need it. It would load
    torch for its networks: seconds and 300 MB more in every worker.
    """
    absent: dict[str, Any] = {"torch": None}  # an import of it fails as if it were not installed
    absent["spacy.cli.info"] = ModuleType("spacy.cli.info")
    absent["spacy.cli.info"].info = None
    absent = {name: module for name, module in absent.items() if name not in sys.modules}
    sys.modules.update(absent)
    try:
        return import_module("spacy")
    finally:
        for name in absent:
            del sys.modules[name]


def _cut_long_chunk(chunk: str) -> list[str]:
    """Return the chunk, or its pieces if it is too long."""
    plain_ends = any(map(str.isalnum, chunk[:_END])) and any(map(str.isalnum, chunk[-_END:]))
    if len(chunk) <= (LONGEST_PLAIN_CHUNK if plain_ends else LONGEST_CHUNK):
        return [chunk]
    return [chunk[start : start + LONGEST_PIECE] for start in range(0, len(chunk), LONGEST_PIECE)]
