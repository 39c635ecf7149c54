"""Write the rules by which spaCy splits words as data that `SplittingRules` reads without spaCy.

    python tools/splitting_rules.py

Reads the installed spaCy, writes `data_pipeline/text/splitting_rules/`: a JSON file for each
language of a profile, and `shared.json` with what languages have in common. A test compares the
files with what this script makes of the installed spaCy, and the words with spaCy's.

Long classes of characters are written once: `<<ALPHA>>` in an expression stands for the entry of
that name.
"""

import json
import re
import sys
import unicodedata
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from llmsys.config.language import SpacedWordsConfig
from llmsys.data_pipeline.language.rules_by_language import list_profile_codes, read_profile
from llmsys.data_pipeline.text.spacy_tokenizer import load_spacy_pipeline
from llmsys.data_pipeline.text.splitting_rules import FOLDER, SHARED

# A class that is shorter than this is written out where it is used.
SHORTEST_SHARED = 60
# Marks that may stand next to a word, one on each side.
OPENING = "([{\"'“‘«„<#*"
CLOSING = ",;:!?)]}\"'”’»>*"


def list_rule_languages() -> list[str]:
    """List the languages whose rules some profile names."""
    words = [read_profile(f"data/languages/{code}").words for code in list_profile_codes()]
    named = {section.rules for section in words if isinstance(section, SpacedWordsConfig)}
    return sorted({*named, "en", SpacedWordsConfig().rules})


def build_shared() -> dict[str, Any]:
    """Build what languages have in common: classes of characters, marks that end a sentence, and
    combining marks.
    """
    classes = vars(import_module("spacy.lang.char_classes"))
    shared = {
        name: text
        for name, text in classes.items()
        if name.isupper() and isinstance(text, str) and len(text) >= SHORTEST_SHARED
    }
    shared = {name: text for name, text in shared.items() if "CONCAT" not in name}
    return {
        "classes": dict(sorted(shared.items(), key=lambda item: (-len(item[1]), item[0]))),
        "sentence_marks": "".join(sorted(load_spacy_pipeline("xx")[1])),
        "combining_marks": format_ranges(list_combining_marks()),
    }


def list_combining_marks() -> list[int]:
    """List the code points of letters' marks: vowel signs, accents and the like."""
    return [
        point for point in range(sys.maxunicode + 1) if unicodedata.category(chr(point))[0] == "M"
    ]


def format_ranges(points: Iterable[int]) -> str:
    """Format code points as pairs of characters, first and last of each range."""
    ranges: list[list[int]] = []
    for point in sorted(points):
        if ranges and ranges[-1][1] == point - 1:
            ranges[-1][1] = point
        else:
            ranges.append([point, point])
    return "".join(chr(first) + chr(last) for first, last in ranges)


def shorten_pattern(pattern: str | None, classes: Mapping[str, str]) -> str | None:
    """Put the names of shared classes where their characters stand."""
    if pattern is None:
        return None
    assert "<<" not in pattern, pattern
    for name, text in classes.items():
        pattern = pattern.replace(text, f"<<{name}>>")
    return pattern


# the class that an alternative ends with, such as `[<<ALPHA_LOWER>>]+$`
_LAST_CLASS = re.compile(r"(?:\[<<\w+>>\])?\[[^\]]*<<\w+>>[^\]]*\][+*]\$$")


def merge_alternatives(pattern: str) -> str:
    """Return an equal expression in which alternatives with the same end share it.

    French has 204 alternatives that end in one long class. Compiled one by one they take 2.6 s.
    """
    head = "(?iu)(?:^"
    if not (pattern.startswith(head) and pattern.endswith("$)")):
        return pattern
    groups: dict[str, list[str]] = {}
    for alternative in pattern[len(head) : -1].split(")|(?:^"):
        end = _LAST_CLASS.search(alternative)
        place = end.start() if end else len(alternative)
        groups.setdefault(alternative[place:], []).append(alternative[:place])
    shared = [f"^(?:{'|'.join(heads)}){end}" for end, heads in groups.items()]
    return "(?iu)" + "|".join(shared)


# --- which characters an expression needs ---


@cache
def list_letters() -> frozenset[int]:
    """List the code points of letters and their marks."""
    letters = {point for point in range(sys.maxunicode + 1) if chr(point).isalpha()}
    return frozenset({*letters, *list_combining_marks()})


class CharacterSet:
    """Letters, combining marks and some marks, of which the analyzed chunks consist."""

    def __init__(self, extra: str = "") -> None:
        self.points = list_letters() | set(map(ord, extra))

    def can_match(self, items: Iterable[Any]) -> bool:
        """Return whether a sequence of parsed items may match inside a text of these characters."""
        return all(self._can_match_item(*item) for item in items)

    def _can_match_item(self, kind: Any, value: Any) -> bool:
        if kind is _constants.LITERAL:
            return value in self.points
        if kind is _constants.IN:
            return any(self._has_any(*item) for item in value)
        if kind is _constants.BRANCH:
            return any(self.can_match(branch) for branch in value[1])
        if kind is _constants.SUBPATTERN:
            return self.can_match(value[3])
        if kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            return value[0] == 0 or self.can_match(value[2])
        if kind is _constants.ASSERT:
            return self.can_match(value[1])
        # anchors, negative assertions, a negated literal, any character, a group's repetition
        return True

    def _has_any(self, kind: Any, value: Any) -> bool:
        if kind is _constants.LITERAL:
            return value in self.points
        if kind is _constants.RANGE:
            return any(point in self.points for point in range(value[0], value[1] + 1))
        return True  # NEGATE, CATEGORY


@cache
def list_alternatives(pattern: str) -> list[list[Any]]:
    """Parse an expression and list its alternatives."""
    parsed = list(_parser.parse(pattern))
    # The parser pulls out what all alternatives begin with: `^` of prefixes.
    anchor = [item for item in parsed if item[0] is _constants.AT]
    rest = [item for item in parsed if item[0] is not _constants.AT]
    if len(rest) == 1 and rest[0][0] is _constants.BRANCH:
        return [[*anchor, *branch] for branch in rest[0][1][1]]
    return [parsed]


def is_one(alternative: list[Any]) -> bool:
    """Return whether an alternative is one character or class, without further conditions."""
    inner = [item for item in alternative if item[0] is not _constants.AT]
    return len(inner) == 1 and inner[0][0] in (_constants.LITERAL, _constants.IN)


@cache
def find_plain_marks(marks: str, affix: str, other: str | None, token: str | None) -> str:
    """Return the marks that are always split off a word of letters, alone.

    Args:
        marks: The candidates.
        affix: The expression of the side on which the mark stands.
        other: The expression of the other side, which must not match because of the mark.
        token: The expression for whole words, which must not match a word with such a mark.

    Returns:
        Those for which no alternative but the mark itself can match.
    """
    matching = re.compile(affix)
    letters = CharacterSet()
    plain = ""
    for mark in marks:
        characters = CharacterSet(mark)
        possible = [each for each in list_alternatives(affix) if characters.can_match(each)]
        others = [
            each
            for each in list_alternatives(other or "")
            if characters.can_match(each) and not letters.can_match(each) and not is_one(each)
        ]
        is_whole = token and any(characters.can_match(each) for each in list_alternatives(token))
        if matching.search(mark) and all(map(is_one, possible)) and not others and not is_whole:
            plain += mark
    return plain


def build_language(code: str, classes: Mapping[str, str]) -> dict[str, Any]:
    """Build the file of a language."""
    tokenizer = load_spacy_pipeline(code)[0].tokenizer
    names = ("prefix_search", "suffix_search", "infix_finditer", "token_match", "url_match")
    found = {name: getattr(tokenizer, name) for name in names}
    prefix, suffix, infix, token, url = (
        None if match is None else match.__self__.pattern for match in found.values()
    )
    # Some alternatives of Indonesian may match after the beginning.
    is_anchored = all(each[0][0] is _constants.AT for each in list_alternatives(prefix))
    letters = CharacterSet()
    # Letters alone are one word, whether an expression for whole words matches them or none.
    is_whole = not any(
        letters.can_match(each)
        for pattern in (prefix, suffix, infix)
        for each in list_alternatives(pattern)
    )
    orth = import_module("spacy.symbols").ORTH
    exceptions = {
        name: [part[orth] for part in parts] for name, parts in sorted(tokenizer.rules.items())
    }
    plain = build_plain_tokenizer(tokenizer)
    # spaCy looks for the regular words of these exceptions in every text.
    rejoined = [
        [word.text for word in plain(name) if not word.is_space]
        for name in exceptions
        if " " in name
        or tokenizer.find_prefix(name)
        or tokenizer.find_infix(name)
        or tokenizer.find_suffix(name)
    ]
    opening = find_plain_marks(OPENING, prefix, suffix, token)
    closing = find_plain_marks(CLOSING, suffix, prefix, token)
    text = shorten_pattern(token, classes)
    return {
        "prefix": shorten_pattern(prefix, classes),
        "suffix": shorten_pattern(suffix, classes),
        "infix": shorten_pattern(infix, classes),
        "token": None if text is None else merge_alternatives(text),
        "url": shorten_pattern(url, classes),
        "opening": opening if is_whole else "",
        "closing": closing if is_whole else "",
        "letters_are_whole": is_whole,
        "prefix_is_anchored": is_anchored,
        "exceptions": [
            parts if any(map(str.isspace, name)) else " ".join(parts)
            for name, parts in exceptions.items()
        ],
        "rejoined": [" ".join(parts) for parts in rejoined if parts],
    }


def build_plain_tokenizer(tokenizer: Any) -> Any:
    """Build a tokenizer of spaCy with the expressions of another one, and without exceptions."""
    return type(tokenizer)(
        tokenizer.vocab,
        prefix_search=tokenizer.prefix_search,
        suffix_search=tokenizer.suffix_search,
        infix_finditer=tokenizer.infix_finditer,
        token_match=tokenizer.token_match,
        url_match=tokenizer.url_match,
    )


def format_json(value: Mapping[str, Any]) -> str:
    """Format a file: one line for each exception, so that a diff shows what changed."""
    return json.dumps(value, ensure_ascii=False, indent=0) + "\n"


def build_files() -> dict[Path, str]:
    """Build all files, by path."""
    shared = build_shared()
    classes = shared["classes"]
    languages = {code: build_language(code, classes) for code in list_rule_languages()}
    named = {SHARED: shared, **languages}
    return {FOLDER / f"{name}.json": format_json(value) for name, value in named.items()}


def main() -> None:
    """Write all files, and remove those of languages that no profile names."""
    files = build_files()
    FOLDER.mkdir(exist_ok=True)
    for path in set(FOLDER.glob("*.json")) - set(files):
        path.unlink()
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    print(f"{len(files)} files, {sum(map(len, files.values())):,} characters in {FOLDER}")


if __name__ == "__main__":
    main()
