"""Split chunks into words by the rules of spaCy's tokenizer, without spaCy.

spaCy takes half a second to import and 0.1 to 0.5 s for each language. Its rules are four regular
expressions and a list of exceptions per language, which `tools/splitting_rules.py` writes into
`splitting_rules/`.

Reads `splitting_rules/CODE.json` and `splitting_rules/shared.json`.

Invariants:
- Words are those of spaCy's blank pipeline (`tokenizer.pyx`: `_split_affixes`, `_attach_tokens`,
  `_apply_special_cases`).
- An expression is compiled when the first chunk needs it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from llmsys.data_pipeline.text.pattern_cache import load_pattern

FOLDER = Path(__file__).parent / "splitting_rules"
SHARED = "shared"

_NAME = re.compile("<<([A-Z_]+)>>")


def has_splitting_rules(code: str) -> bool:
    """Return whether a language's rules are known without spaCy.

    Args:
        code: The language, as spaCy names it.

    Returns:
        Whether there is a file of it.
    """
    return (FOLDER / f"{code}.json").is_file()


@cache
def load_sentence_marks() -> frozenset[str]:
    """Load the words that end a sentence; spaCy has the same ones for all languages.

    Returns:
        The marks.
    """
    return frozenset(_load_shared()["sentence_marks"])


@cache
def load_splitting_rules(code: str) -> "SplittingRules":
    """Load the rules of a language, once per process.

    Args:
        code: A language with rules, see `has_splitting_rules`.

    Returns:
        The rules.
    """
    return SplittingRules(_read_file(code))


def _read_file(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_bytes())
    return values


@cache
def _load_shared() -> dict[str, Any]:
    return _read_file(SHARED)


@cache
def _load_combining_marks() -> re.Pattern[str]:
    """Return the expression for marks of letters, such as vowel signs of Indic scripts."""
    ranges = _load_shared()["combining_marks"]
    pairs = zip(ranges[::2], ranges[1::2], strict=True)
    return load_pattern("[" + "".join(f"{first}-{last}" for first, last in pairs) + "]+")


class SplittingRules:
    """The rules of one language.

    Args:
        values: Content of its file. `opening` and `closing` are marks that are always split off a
            word of letters; `rejoined` are the regular words of exceptions, which become the
            exception again wherever they stand next to each other.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.opening: str = values["opening"]
        self.closing: str = values["closing"]
        self.are_letters_whole: bool = values["letters_are_whole"]
        self.is_prefix_anchored: bool = values["prefix_is_anchored"]
        self._opening = frozenset(self.opening)
        self._closing = frozenset(self.closing)
        split = [
            parts if isinstance(parts, list) else parts.split(" ") for parts in values["exceptions"]
        ]
        self.exceptions: dict[str, list[str]] = {"".join(parts): parts for parts in split}
        self.rejoined: list[list[str]] = [text.split(" ") for text in values["rejoined"]]
        self._rejoined: dict[str, list[list[str]]] = {}
        for parts in self.rejoined:
            self._rejoined.setdefault(parts[0], []).append(parts)
        self._begin_none = self._rejoined.keys().isdisjoint

    def split_chunk(self, chunk: str) -> list[str]:
        """Return the words of a chunk.

        Args:
            chunk: A text without white space, not empty.

        Returns:
            The words, whose concatenation is the chunk.
        """
        if chunk in self.exceptions:
            words = list(self.exceptions[chunk])
        elif self.are_letters_whole and chunk.isalpha():
            return [chunk]
        else:
            words = self._split_plain_chunk(chunk) or self._split_affixes(chunk)
        # Few words can begin an exception: one look-up of all of them.
        return words if self._begin_none(words) else self._restore_exceptions(words)

    def _split_plain_chunk(self, chunk: str) -> list[str] | None:
        """Return the words of letters with at most one mark on each side; None if it is another
        chunk.
        """
        exceptions = self.exceptions
        opening = chunk[0] in self._opening
        closing = chunk[-1] in self._closing
        letters = chunk[opening : len(chunk) - closing]
        if not letters or not self.are_letters_whole:
            return None
        if not letters.isalpha() and not _load_combining_marks().sub("", letters).isalpha():
            return None
        if letters in exceptions or chunk[opening:] in exceptions:
            return None
        if chunk[: len(chunk) - closing] in exceptions:
            return None
        words = [letters]
        if opening:
            words.insert(0, chunk[0])
        if closing:
            words.append(chunk[-1])
        return words

    def _split_affixes(self, chunk: str) -> list[str]:
        """Split affixes off both ends until an exception or the middle remains."""
        exceptions = self.exceptions
        first_words: list[str] = []
        last_words: list[str] = []
        middle = chunk
        last_size = 0
        while middle and len(middle) != last_size:
            if middle in exceptions or self._is_whole(middle):
                break
            last_size = len(middle)
            before = self._count_opening_characters(middle)
            if before and middle[before:] in exceptions:
                first_words.append(middle[:before])
                middle = middle[before:]
                break
            after = self._count_closing_characters(middle[before:])
            if after and middle[:-after] in exceptions:
                last_words.append(middle[-after:])
                middle = middle[:-after]
                break
            if before:
                first_words.append(middle[:before])
            if after:
                last_words.append(middle[-after:])
            middle = middle[before : len(middle) - after]
        return [*first_words, *self._split_middle(middle), *reversed(last_words)]

    def _is_whole(self, text: str) -> bool:
        """Return whether the language has an expression for whole words, and it matches."""
        return self._token is not None and self._token.match(text) is not None

    def _count_opening_characters(self, text: str) -> int:
        # An anchored expression is tried at one place instead of at each.
        is_anchored = self.is_prefix_anchored
        found = self._prefix.match(text) if is_anchored else self._prefix.search(text)
        return found.end() - found.start() if found else 0

    def _count_closing_characters(self, text: str) -> int:
        found = self._suffix.search(text)
        return found.end() - found.start() if found else 0

    def _split_middle(self, middle: str) -> Sequence[str]:
        """Return the words between the affixes."""
        if not middle:
            return ()
        if middle in self.exceptions:
            return self.exceptions[middle]
        if middle.isalpha() and self.are_letters_whole:
            return (middle,)
        if self._is_whole(middle) or self.is_address(middle):
            return (middle,)
        words: list[str] = []
        start = 0
        for found in self._infix.finditer(middle):
            first, last = found.span()
            if not first:
                continue  # at the beginning it splits nothing
            if first > start:
                words.append(middle[start:first])
            if last > first:
                words.append(middle[first:last])
            start = last
        if start < len(middle):
            words.append(middle[start:])
        return words

    def is_address(self, text: str) -> bool:
        """Return whether a text is an address, which stays one word.

        Args:
            text: A part of a chunk.

        Returns:
            Whether spaCy's expression for addresses matches.
        """
        # every address has a full stop; the expression takes much longer to say so
        return "." in text and self._url.match(text) is not None

    def _restore_exceptions(self, words: list[str]) -> list[str]:
        """Replace neighbouring words that are the regular words of an exception: spaCy looks for
        them in the whole text, the longest and then the first ones first.
        """
        rejoined = self._rejoined
        spans = [
            (-len(parts), start)
            for start, word in enumerate(words)
            if word in rejoined
            for parts in rejoined[word]
            if words[start : start + len(parts)] == parts
        ]
        if not spans:
            return words
        taken: set[int] = set()
        chosen: list[tuple[int, int]] = []
        for size, start in sorted(set(spans)):
            end = start - size
            if start not in taken and end - 1 not in taken:
                chosen.append((start, end))
            taken.update(range(start, end))
        made: list[str] = []
        done = 0
        for start, end in sorted(chosen):
            made += words[done:start]
            made += self.exceptions.get("".join(words[start:end]), words[start:end])
            done = end
        return made + words[done:]

    @cached_property
    def _prefix(self) -> re.Pattern[str]:
        return self._load_expression("prefix")

    @cached_property
    def _suffix(self) -> re.Pattern[str]:
        return self._load_expression("suffix")

    @cached_property
    def _infix(self) -> re.Pattern[str]:
        return self._load_expression("infix")

    @cached_property
    def _url(self) -> re.Pattern[str]:
        return self._load_expression("url")

    @cached_property
    def _token(self) -> re.Pattern[str] | None:
        return self._load_expression("token") if self._values["token"] else None

    def get_expression(self, name: str) -> str:
        """Return the source of an expression.

        Args:
            name: `prefix`, `suffix`, `infix`, `token` or `url`.

        Returns:
            The expression with its classes written out; empty if the language has none.
        """
        classes = _load_shared()["classes"]
        return _NAME.sub(lambda found: classes[found[1]], self._values[name] or "")

    def _load_expression(self, name: str) -> re.Pattern[str]:
        return load_pattern(self.get_expression(name))
