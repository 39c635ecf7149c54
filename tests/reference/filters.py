"""Slow twins of what filters documents by lists, patterns and evaluation sets: one document at a
time, no memory.

What they mean is written down as directly as it can be; the fast ones must agree.
"""

import re
from collections.abc import Collection, Iterable, Sequence

from llmsys.data_pipeline.text.simplify_text import simplify_text

LETTER = r"[^\W\x00-\x7f]"  # beyond ASCII; of scripts that write spaces
ATOM = rf"(?:[A-Za-z0-9!#$%&'*+/=?^_`{{|}}~-]|{LETTER})+"
LABEL = rf"(?:[A-Za-z0-9]|{LETTER})(?:(?:[A-Za-z0-9-]|{LETTER})*(?:[A-Za-z0-9]|{LETTER}))?"
# Takes time that grows with the square of the text, which the fast one must not.
EMAIL = re.compile(rf"\b{ATOM}(?:\.{ATOM})*@(?:{LABEL}\.)+{LABEL}")


def scan_emails(text: str) -> list[tuple[int, int]]:
    """Spans of e-mail addresses, by one expression."""
    return [match.span() for match in EMAIL.finditer(text)]


def find_bad_words(text: str, words: Collection[str], anywhere: bool) -> list[str]:
    """Listed words in a text, each position asked for each word, the longest first; found words
    do not overlap.
    """
    lower, found, position = text.lower(), [], 0
    while position < len(lower):
        hits = [
            word
            for word in words
            if lower.startswith(word, position) and (anywhere or _apart(lower, position, word))
        ]
        best = max(hits, key=len, default="")
        found += [best] if best else []
        position += len(best) or 1
    return found


def _apart(text: str, position: int, word: str) -> bool:
    around = (
        text[max(0, position - 1) : position]
        + text[position + len(word) : position + len(word) + 1]
    )
    return not any(character.isalnum() or character == "_" for character in around)


def find_url_match(
    url: str,
    hard: Collection[str],
    soft: Collection[str],
    max_soft: int,
    substrings: Collection[str],
) -> str | None:
    """The first test on words that a URL fails."""
    words = set(re.split(r"[^a-zA-Z0-9]+", url))
    if words & set(hard):
        return "hard word"
    if len(words & set(soft)) > max_soft:
        return "soft words"
    plain = re.sub(r"[^a-zA-Z0-9]", "", url).lower()
    return "substring" if any(one in plain for one in substrings) else None


def find_ngram_matches(
    text: str, items: Sequence[str], ngram_words: int, min_item_words: int
) -> set[tuple[int, str]]:
    """(item, n-gram) for every n-gram of an item that stands in a text, words joined by spaces."""
    words = simplify_text(text).split()
    found = set()
    for number, item in enumerate(items):
        own = simplify_text(item).split()
        n = min(ngram_words, len(own))
        if n < min_item_words:
            continue
        grams = {" ".join(own[start : start + n]) for start in range(len(own) - n + 1)}
        here = {" ".join(words[start : start + n]) for start in range(len(words) - n + 1)}
        found |= {(number, gram) for gram in grams & here}
    return found


def measure_item_shares(
    text: str, items: Sequence[str], ngram_words: int, min_item_words: int
) -> dict[int, float]:
    """The largest share of the words of each item that its n-grams cover in one passage of a text,
    by trying every passage; n-grams with more than ten places in all items do not count.
    """
    words = simplify_text(text).split()
    split = [simplify_text(item).split() for item in items]
    places: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for number, own in enumerate(split):
        if own in split[:number]:
            continue
        for start in range(len(own) - ngram_words + 1):
            gram = tuple(own[start : start + ngram_words])
            places.setdefault(gram, []).append((number, start))
    counted = {gram: found for gram, found in places.items() if len(found) <= 10}
    shares = {}
    for number, own in enumerate(split):
        number = split.index(own)
        all_words = _cover(counted.values(), number, ngram_words)
        if len(all_words) < min_item_words:
            continue
        longest = int(len(own) * 1.5)
        shares[number] = max(
            len(_cover(_list_places(words[start : start + longest], counted, ngram_words), number,
                       ngram_words)) / len(all_words)
            for start in range(max(len(words) - longest, 0) + 1)
        )  # fmt: skip
    return shares


def _list_places(
    words: Sequence[str], counted: dict[tuple[str, ...], list[tuple[int, int]]], n: int
) -> list[list[tuple[int, int]]]:
    starts = range(len(words) - n + 1)
    return [counted.get(tuple(words[start : start + n]), []) for start in starts]


def _cover(places: Iterable[list[tuple[int, int]]], number: int, n: int) -> set[int]:
    return {
        word
        for found in places
        for item, start in found
        if item == number
        for word in range(start, start + n)
    }
