"""Drop pages, or remove lines, with words from the user's lists, matched as in C4's code (Raffel et
al. 2020).

A listed word matches in any letter case where no letter, digit or underscore touches it. In
Japanese, Thai and Chinese, which put no spaces between words, it matches anywhere. An entry may be
several words.

Invariants:
- Time is linear in the text, however many words are listed.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llmsys.config.custom_rules import ANY_LANGUAGE, BadWordsConfig
from llmsys.data_pipeline.rules.entry_lists import build_alternation, read_entries
from llmsys.data_pipeline.rules.rule import DocumentBatch, RuleVerdicts, ThresholdTest

_WITHOUT_SPACES = ("ja", "th", "zh")
_TEST = "share of listed words"
_NAMED = 5  # maximum number of words in a reason


class BadWordsRule:
    """A rule that drops pages or removes lines by lists of words.

    Args:
        config: lists and limits.
        language: ISO code of the documents' language; lists of other languages are ignored.
    """

    kind = "bad_words"

    def __init__(self, config: BadWordsConfig, language: str = ANY_LANGUAGE) -> None:
        self._config = config
        shares = config.action == "drop_page" and not config.keep_fraction
        self.limits = [ThresholdTest(_TEST, "share", "above", config.max_share)] if shares else []
        words = [
            (entry.lower(), listed.language if listed.language != ANY_LANGUAGE else language)
            for listed in config.word_lists
            if listed.language in (ANY_LANGUAGE, language)
            for entry in read_entries(listed)
        ]
        spaced = [word for word, code in words if code not in _WITHOUT_SPACES]
        anywhere = [word for word, code in words if code in _WITHOUT_SPACES]
        sources = [rf"(?<!\w)(?:{build_alternation(sorted(spaced))})(?!\w)"] if spaced else []
        sources += [build_alternation(sorted(anywhere))] if anywhere else []
        # `(?!)` matches nowhere.
        self._pattern = re.compile("|".join(sources) if sources else r"(?!)")

    def apply(self, batch: DocumentBatch) -> RuleVerdicts:
        """Return the verdicts and, if lines are removed, the remaining texts."""
        return (
            self._drop_lines(batch)
            if self._config.action == "drop_line"
            else self._drop_pages(batch)
        )

    def _drop_pages(self, batch: DocumentBatch) -> RuleVerdicts:
        found = [self._pattern.findall(text.lower()) for text in batch.texts]
        hits = batch.to_counts(map(len, found)).astype(np.float64)
        # Counting words is slow, and a page without a match needs no count.
        words = batch.to_counts(
            len(text.split()) if some else 1 for text, some in zip(batch.texts, found, strict=True)
        )
        shares = hits / np.maximum(words, 1)
        fails = shares > self._config.max_share
        for row in np.flatnonzero(fails).tolist() if self._config.keep_fraction else []:
            fails[row] = not self._is_kept_by_hash(batch.texts[row])
        return RuleVerdicts(
            (_TEST,),
            np.where(fails, 0, -1).astype(np.int8),
            np.where(fails, shares, np.nan),
            np.where(fails, self._config.max_share, np.nan),
            {"share": shares, "count": hits},
            matches={
                row: _format_found_words(found[row]) for row in np.flatnonzero(fails).tolist()
            },
        )

    def _is_kept_by_hash(self, text: str) -> bool:
        """Return whether a page with listed words is in the kept fraction, by the hash of its
        text.
        """
        key = str(self._config.seed).encode()
        digest = hashlib.blake2b(
            text.encode("utf-8", "surrogatepass"), digest_size=8, key=key
        ).digest()
        return int.from_bytes(digest, "big") / 2.0**64 < self._config.keep_fraction

    def _drop_lines(self, batch: DocumentBatch) -> RuleVerdicts:
        kept = [self._remove_listed_lines(text) for text in batch.texts]
        taken = batch.to_counts(
            text.count("\n") + 1 - len(lines) for text, lines in zip(batch.texts, kept, strict=True)
        )
        texts = ["\n".join(lines) for lines in kept]
        empty: npt.NDArray[np.bool_] = (taken > 0) & (
            batch.to_counts(bool(text.strip()) for text in texts) == 0
        )
        return RuleVerdicts(
            ("no line left",),
            np.where(empty, 0, -1).astype(np.int8),
            np.full(len(batch), np.nan),
            np.full(len(batch), np.nan),
            {"lines": taken.astype(np.float64)},
            texts,
            {"line taken out: listed word": taken},
            {
                row: _format_found_words(self._pattern.findall(batch.texts[row].lower()))
                for row in np.flatnonzero(empty).tolist()
            },
        )

    def _remove_listed_lines(self, text: str) -> Sequence[str]:
        lines = text.split("\n")
        if not self._pattern.search(text.lower()):
            return lines
        return [line for line in lines if not self._pattern.search(line.lower())]


def _format_found_words(found: Sequence[str]) -> str:
    """Format the matches, each word once with its count, in text order."""
    counts = Counter(found)
    named = [
        word if count == 1 else f"{word} × {count}" for word, count in list(counts.items())[:_NAMED]
    ]
    more = len(counts) - len(named)
    return ", ".join([*named, *([f"{more} more"] if more else [])])
