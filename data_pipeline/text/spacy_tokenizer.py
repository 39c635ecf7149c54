"""English words of one chunk, a chunk being what stands between white space: `(don't` gives `(`, `do`, `n't`.

The words are those of spaCy's rule tokenizer, because the thresholds of the published filters were met with them. What
spaCy makes of nearly all chunks is known without asking it: of English ones by `english_rules`, in other languages of
plain letters with at most one mark on a side.
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

# spaCy takes marks off the ends of a chunk one by one, in time that grows with the square of their number. Longer
# chunks are therefore cut into pieces, which is the one place where the words differ from spaCy's by intent.
LONGEST_CHUNK = 1_000  # characters
LONGEST_PLAIN_CHUNK = 5_000  # characters of a chunk with letters or digits near both ends, such as an address
LONGEST_PIECE = 200
_END = 100
_SEPARATOR = "the"  # stands between chunks that are split together, so that no rule can reach from one to the next

# One opening mark, letters, one closing mark; a full stop is kept on a Latin word in Amharic, Arabic and others.
_PLAIN = re.compile(r"""([("\[])?([A-Za-z]+)([,;:!?)\]"])?""")


class SpacyTokenizer:
    """Splits chunks with a blank spaCy pipeline, which is loaded when the first chunk is split.

    Args:
        rules: language of the tokenizer rules: English, that of another language with spaces, or `xx` for any.
    """

    split_chunks = staticmethod(str.split)

    def __init__(self, rules: str = "en") -> None:
        self._rules = rules

    def split_words(self, chunks: Sequence[str]) -> list[list[str]]:
        """The words of each chunk; a chunk must not be empty or contain white space."""
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
        """Chunks with a split of their own, such as `cannot`."""
        return frozenset(_load_pipeline(self._rules)[0].tokenizer.rules)

    def _split_plain_chunk(self, chunk: str) -> list[str] | None:
        """The words of a chunk of a language with spaces, None where spaCy has to be asked."""
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
        """The words of each chunk by spaCy, all chunks in one call."""
        if not chunks:
            return []
        nlp = _load_pipeline(self._rules)[0]
        joined = f" {_SEPARATOR} ".join(chunks)
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
    """spaCy's blank pipeline for a language, one per process, and its sentence marks."""
    nlp: Any = _import_spacy().blank(rules)
    for name in import_module("spacy.symbols").IDS:
        # spaCy numbers the names of its own symbols unlike other strings. When a memory zone closes, it keeps a dead
        # entry of a word such as IS_ALPHA that was first met inside, and later texts fail. Met before, it does no harm.
        nlp.vocab[name]
    nlp.vocab.lex_attr_getters = {}  # shape, prefix and the like of each new word: nobody asks, it takes a quarter
    return nlp, frozenset(nlp.add_pipe("sentencizer").punct_chars)


def _import_spacy() -> Any:
    """spaCy, which takes half a second and only the rules need; without its command line, and without torch, which it
    would load for its networks: that is seconds and 300 MB more in every worker.
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
    """The chunk itself, or pieces of a chunk that is too long."""
    plain_ends = any(map(str.isalnum, chunk[:_END])) and any(map(str.isalnum, chunk[-_END:]))
    if len(chunk) <= (LONGEST_PLAIN_CHUNK if plain_ends else LONGEST_CHUNK):
        return [chunk]
    return [chunk[start : start + LONGEST_PIECE] for start in range(0, len(chunk), LONGEST_PIECE)]
