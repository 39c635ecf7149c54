"""Slow twins of what filters documents by lists, patterns and evaluation sets: one document at a
time, no memory.

What they mean is written down as directly as it can be; the fast ones must agree.
"""

import re
from collections.abc import Collection, Sequence

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
