"""Texts in, the words of their simplified form out as columns: hashes, or spellings.

Whatever simplification does it does between white space, and spaCy splits there too. So the words of a text are the
parts between the spaces of its folded characters, and the pieces of the few parts that are several words. Nothing is
remembered of a text; a text never seen before costs what any other does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from data_pipeline.dedup.fold import SPACE, fold_texts
from data_pipeline.dedup.parts import RunSplitter, find_character_runs
from data_pipeline.dedup.simplify import WHITE_SPACE, Codes, from_code_points
from data_pipeline.dedup.stretch import Hashes, RollingHasher
from data_pipeline.rules.ragged import Integers, compute_offsets

_BLOCK = 1 << 16  # characters worked on at once, about 40 bytes each
_LONGEST = 1 << 20  # characters without white space, behind a block, that are not cut


@dataclass(frozen=True)
class SimplifiedWords:
    """The words of D documents, one after another: W words.

    Attributes:
        offsets: D + 1 values: where each document starts, and where the last one ends.
        hashes_W: 64-bit hash of each word's spelling.
        spelled: the words, UTF-8, each with a space behind it; nothing unless spellings were asked for.
        ends_W: where each word ends in `spellings`, with its space.
    """

    offsets: Integers
    hashes_W: Hashes
    spellings: bytes
    ends_W: Integers


class SimplifiedWordSplitter:
    """Splits texts into simplified words."""

    def __init__(self, spelling: bool) -> None:
        """Give spellings too, which SHA-1 needs and the combined hash does not."""
        self._spelling = spelling
        self._cutter = RunSplitter()

    def split_words(self, texts: Sequence[str] | pa.Array) -> SimplifiedWords:
        """The words of each text; texts hold no lone surrogates."""
        pieces_of = [_split_long_text(text) for text in (texts.to_pylist() if isinstance(texts, pa.Array) else texts)]
        counts, hashes, spelled = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)], [b""]
        for block in _iter_blocks([piece for pieces in pieces_of for piece in pieces]):
            folded = fold_texts(block)
            hasher, parts = RollingHasher(folded.codes), find_character_runs(folded.codes)
            found = hasher.hash_spans(*parts)
            cuts = self._cutter.find_word_starts(folded, parts, found)
            if len(cuts):
                parts = parts.insert_cuts(cuts)
                found = hasher.hash_spans(*parts)
            counts.append(np.diff(np.searchsorted(parts.starts, folded.edges)))
            hashes.append(found)
            if self._spelling:
                spelled.append(_spell_words(folded.codes, cuts))
        joined = b"".join(spelled)
        ends = np.flatnonzero(np.frombuffer(joined, np.uint8) == SPACE) + 1
        first_pieces = compute_offsets([len(pieces) for pieces in pieces_of])
        offsets = compute_offsets(np.concatenate(counts))[first_pieces]
        return SimplifiedWords(offsets, np.concatenate(hashes), joined, ends)


def _split_long_text(text: str) -> list[str]:
    """Cut a long text where it has white space; without any for a million characters, anywhere."""
    pieces, begin = [], 0
    while len(text) - begin > _BLOCK:
        limit = begin + _BLOCK + _LONGEST
        match = WHITE_SPACE.search(text, begin + _BLOCK, limit)
        cut = match.start() if match else min(limit, len(text))
        pieces.append(text[begin:cut])
        begin = cut
    return [*pieces, text[begin:]]


def _iter_blocks(pieces: Sequence[str]) -> Iterator[list[str]]:
    """Yield pieces that follow each other, as many as make a block."""
    block: list[str] = []
    size = 0
    for piece in pieces:
        block.append(piece)
        size += len(piece)
        if size >= _BLOCK:
            yield block
            block, size = [], 0
    if block:
        yield block


def _spell_words(codes: Codes, cuts: Integers) -> bytes:
    """The words of folded characters with one space behind each."""
    codes = np.insert(codes, cuts, SPACE)
    kept = codes != SPACE
    kept[1:] |= kept[:-1].copy()
    return from_code_points(codes[kept]).encode()
