"""Gopher's rules as the dialect `paper` reads them, one document at a time, as plainly as the
paper says them.
"""

import re
from collections import Counter

STOP_WORDS = {"the", "be", "to", "of", "and", "that", "have", "with"}
BULLETS = tuple("•‣⁃▪▫●○◦■□▶–*-")


def find_paper_quality_violation(text: str) -> str | None:
    words = text.split()
    if not 50 <= len(words) <= 100_000:
        return "words"
    if not 3 <= sum(map(len, words)) / len(words) <= 10:
        return "mean word length"
    if text.count("#") / len(words) > 0.1:
        return "hash signs per word"
    if (text.count("...") + text.count("…")) / len(words) > 0.1:
        return "ellipses per word"
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if sum(line.startswith(BULLETS) for line in lines) / len(lines) > 0.9:
        return "share of lines that start with a bullet"
    if sum(line.endswith(("...", "…")) for line in lines) / len(lines) > 0.3:
        return "share of lines that end with an ellipsis"
    if sum(any(character.isalpha() for character in word) for word in words) / len(words) < 0.8:
        return "share of words with a letter"
    return "stop words" if len(STOP_WORDS & set(words)) < 2 else None


def find_paper_repetition_violation(text: str) -> str | None:
    if not text.strip():
        return "empty text"
    parts = {
        "lines": [line.strip() for line in text.split("\n") if line.strip()],
        "paragraphs": [part.strip() for part in re.split(r"\n{2,}", text) if part.strip()],
    }
    copies = {
        name: [part for place, part in enumerate(found) if part in found[:place]]
        for name, found in parts.items()
    }
    for name, found in parts.items():
        if len(copies[name]) / len(found) > 0.3:
            return f"share of duplicate {name}"
    for name in parts:
        if sum(map(len, copies[name])) / len(text) > 0.2:
            return f"share of characters in duplicate {name}"
    return _ngrams(text)


def _ngrams(text: str) -> str | None:
    words = text.split()
    for n in range(2, 11):
        grams = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
        limit = {2: 0.2, 3: 0.18, 4: 0.16}.get(n, (20 - n) / 100)
        if n < 5:
            gram, count = Counter(grams).most_common(1)[0] if grams else ((), 0)
            if count > 1 and count * len(" ".join(gram)) / len(text) > limit:
                return f"share of characters in the most frequent {n}-gram"
            continue
        seen: set[tuple[str, ...]] = set()
        covered: set[int] = set()
        for start, gram in enumerate(grams):
            covered.update(range(start, start + n) if gram in seen else ())
            seen.add(gram)
        if sum(len(words[place]) for place in covered) / len(text) > limit:
            return f"share of characters in duplicate {n}-grams"
    return None
