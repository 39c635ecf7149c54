"""Split chunks into words as spaCy's rule tokenizer does: `(don't` gives `(`, `do`, `n't`.

The published filters chose their thresholds with these words. The words of nearly all chunks are known without spaCy:
of English ones by `spacy_english_rules`, of other languages for plain letters with at most one mark per side.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from importlib import import_module
from types import ModuleType
from typing import Any, cast

import numpy as np

from data_pipeline.text.spacy_english_rules import EnglishRules

# spaCy splits marks off the ends of a chunk one by one, in quadratic time. Longer chunks are cut into pieces: the only
# intended difference from spaCy's words.
LONGEST_CHUNK = 1_000  # characters
LONGEST_PLAIN_CHUNK = 5_000  # characters of a chunk with letters or digits near both ends, such as an address
LONGEST_PIECE = 200
_END = 100
_SEPARATOR = "the"  # between chunks that are split together: no rule reaches across it

# One opening mark, letters, one closing mark; a full stop is kept on a Latin word in Amharic, Arabic and others.
_PLAIN = re.compile(r"""([("\[])?([A-Za-z]+)([,;:!?)\]"])?""")


class SpacyTokenizer:
    """Splits chunks with a blank spaCy pipeline, loaded when the first chunk is split.

    Args:
        rules: Language of the tokenizer rules, or `xx` for any language with spaces.
    """

    split_chunks = staticmethod(str.split)

    def __init__(self, rules: str = "en") -> None:
        self._rules = rules

    def split_words(self, chunks: Sequence[str]) -> list[list[str]]:
        """Return the words of each chunk. A chunk is not empty and has no white space."""
        words = list(map(self._english_rules.split_chunk if self._rules == "en" else self._split_plain_chunk, chunks))
        hard = [number for number, found in enumerate(words) if found is None]
        pieces = [_cut_long_chunk(chunks[number]) for number in hard]
        split = iter(self._split_with_spacy([piece for group in pieces for piece in group]))
        for number, group in zip(hard, pieces, strict=True):
            words[number] = [word for _ in group for word in next(split)]
        return cast(list[list[str]], words)

    @property
    def sentence_marks(self) -> frozenset[str]:
        """Words that end a sentence."""
        return _load_pipeline(self._rules)[1]

    @cached_property
    def exceptions(self) -> frozenset[str]:
        """Chunks with words of their own, such as `cannot`."""
        return frozenset(_load_pipeline(self._rules)[0].tokenizer.rules)

    def _split_plain_chunk(self, chunk: str) -> list[str] | None:
        """Return the words of a chunk of a language with spaces, or None if spaCy must be asked."""
        match = _PLAIN.fullmatch(chunk)
        if match is None:
            return None
        opening, letters, closing = match.groups()
        special = self.exceptions
        if letters in special or chunk in special:
            return None
        if opening and (opening + letters in special or letters + (closing or "") in special):
            return None
        return [part for part in (opening, letters, closing) if part]

    def _split_with_spacy(self, chunks: Sequence[str]) -> Iterable[list[str]]:
        """Return the words of each chunk by spaCy, in one call for all chunks."""
        if not chunks:
            return []
        nlp = _load_pipeline(self._rules)[0]
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
        tokenizer = _load_pipeline(self._rules)[0].tokenizer
        orth = import_module("spacy.symbols").ORTH
        exceptions = {name: [word[orth] for word in words] for name, words in tokenizer.rules.items()}
        return EnglishRules(exceptions, tokenizer.url_match, LONGEST_CHUNK)


@cache
def _load_pipeline(rules: str) -> tuple[Any, frozenset[str]]:
    """Return spaCy's blank pipeline for a language, one per process, and its sentence marks."""
    nlp: Any = _import_spacy().blank(rules)
    for name in import_module("spacy.symbols").IDS:
        # spaCy numbers the names of its own symbols unlike other strings. When a memory zone closes, it keeps a dead
        # entry of a word such as IS_ALPHA that was first met inside, and later texts fail. Met before, it does no harm.
        nlp.vocab[name]
    nlp.vocab.lex_attr_getters = {}  # unused features of words: a quarter of the time
    return nlp, frozenset(nlp.add_pipe("sentencizer").punct_chars)


def _import_spacy() -> Any:
    """Import spaCy without its command line and without torch.

    spaCy takes half a second, and only rules need it. It would load torch for its networks: seconds and 300 MB more in
    every worker.
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
