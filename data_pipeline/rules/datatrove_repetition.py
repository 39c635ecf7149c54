"""Measure repetition as datatrove's implementation of Gopher's rule does.

Second and later occurrences count; the denominator is the whole text. N-grams are compared as
concatenated words, so `ab c` equals `a bc`.

Speed: for n >= 5 a repeat requires equal leading bytes without white space, so one hash of those
bytes selects the candidate positions for every n.
"""

import re
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from llmsys.data_pipeline.core.native import NativeCore, load_core
from llmsys.data_pipeline.rules.compiled_lines import count_repeated_lines
from llmsys.data_pipeline.rules.compiled_ngrams import (
    REPEATED,
    TOP,
    count_repeated_ngrams,
    count_top_ngrams,
)
from llmsys.data_pipeline.rules.gopher_quality import split_at_newline_runs
from llmsys.data_pipeline.rules.repeated_ngrams import (
    Hashes,
    Indices,
    compute_salts,
    group_duplicates,
    iter_repeated_ngrams,
    mix_hashes,
    select_candidate_duplicates,
    select_top_ngrams,
)
from llmsys.data_pipeline.rules.rule import DocumentBatch, Floats, compute_share
from llmsys.data_pipeline.text.ragged_arrays import Integers, compute_offsets
from llmsys.data_pipeline.text.word_columns import WordColumns

_PREFIX_BYTES = 16
# n-grams of so many words usually have 16 bytes; shorter ones are always candidates
_FEWEST_WORDS = 5
_ODD = np.uint64(0x9E3779B97F4A7C15)


def count_duplicate_ngram_characters(
    batch: DocumentBatch, shortest: int, longest: int
) -> dict[int, Integers]:
    """Count the characters in repeated n-grams per document, for n from `shortest` (at least 5) to
    `longest`.

    The scan goes from left to right. A repeated n-gram is counted and skipped; after a new one the
    scan advances by a word.
    """
    words = batch.words
    starts = _select_start_positions(batch)
    remaining = words.offsets[1:][words.document_of_word[starts]] - starts
    own_salt = compute_salts(words)[starts]
    characters = compute_offsets(words.word_lengths)
    hashes = np.zeros(len(starts), np.uint64)
    found: dict[int, Integers] = {}
    for n in range(1, longest + 1):
        inside = remaining >= n
        starts = starts[inside]
        remaining = remaining[inside]
        own_salt = own_salt[inside]
        hashes = hashes[inside]
        last = words.ids_W[starts + n - 1]
        # A polynomial hash of the characters, so that it depends on the words joined and not on
        # their number.
        hashes = hashes * words.vocabulary.powers[last] + words.vocabulary.hashes[last]
        if n < shortest:
            continue
        groups = group_duplicates(hashes + own_salt)
        counted = _select_repeated_positions(starts[groups.members], groups.leaders, n)
        sizes = characters[counted + n] - characters[counted]
        documents = words.document_of_word[counted]
        found[n] = np.bincount(documents, weights=sizes, minlength=len(words.counts)).astype(
            np.int64
        )
    return found


def _select_start_positions(batch: DocumentBatch) -> Indices:
    """Return the positions at which an n-gram that occurs more than once in its document may
    start.
    """
    words = batch.words
    starts = compute_offsets(words.vocabulary.sizes[words.ids_W])
    joined = batch.bytes_without_space
    fits = words.offsets[1:][words.document_of_word] - np.arange(len(words.ids_W)) >= _FEWEST_WORDS
    if starts[-1] != len(joined):
        return np.flatnonzero(fits)  # these words are not the text without its white space
    five = np.minimum(np.arange(len(words.ids_W)) + _FEWEST_WORDS, len(words.ids_W))
    short = starts[five] - starts[:-1] < _PREFIX_BYTES
    hashes = _hash_prefixes(joined, starts[:-1]) + compute_salts(words)
    candidates = np.zeros(len(fits), np.bool_)
    candidates[select_candidate_duplicates(hashes)] = True
    return np.flatnonzero(fits & (candidates | short))


def _hash_prefixes(joined: bytes, starts: Integers) -> Hashes:
    """Hash the 16 bytes from each start."""
    # Padding, so that 16 bytes can be read from every start.
    padded = np.frombuffer(joined + bytes(2 * _PREFIX_BYTES), np.uint8)
    eight: npt.NDArray[np.uint64] = np.lib.stride_tricks.as_strided(
        padded[: len(padded) // 8 * 8].view(np.uint64),
        (len(joined) + _PREFIX_BYTES,),
        (1,),
        writeable=False,
    )
    return mix_hashes(eight[starts]) + eight[starts + 8] * _ODD


def _select_repeated_positions(positions: Integers, names: Integers, n: int) -> Integers:
    """Return the positions at which the scan meets a seen n-gram; no n-gram crosses a document
    boundary.
    """
    seen = bytearray(int(names.max()) + 1 if len(names) else 0)
    counted: list[int] = []
    following = 0
    for position, name in zip(positions.tolist(), names.tolist(), strict=True):
        if position < following:
            continue
        if seen[name]:
            counted.append(position)
            following = position + n
        else:
            seen[name] = 1
    return np.array(counted, np.int64)


_PARAGRAPH_BREAK = re.compile(r"\n{2,}")


def measure_repeated_lines(batch: DocumentBatch) -> dict[str, Floats]:
    """Return the shares of repeated paragraphs and lines, and of their characters."""
    core = load_core()
    if isinstance(core, NativeCore):
        counts = count_repeated_lines(core, batch.texts)
        paragraphs = counts[0], counts[1], counts[2]
        lines = counts[3], counts[4], counts[5]
    else:
        paragraphs = _count_repeats([_split_paragraphs(text) for text in batch.texts])
        lines = _count_repeats([split_at_newline_runs(text) for text in batch.texts])
    return {
        "duplicate_paragraph_share": compute_share(paragraphs[1], paragraphs[0]),
        "duplicate_paragraph_character_share": compute_share(paragraphs[2], batch.character_counts),
        "duplicate_line_share": compute_share(lines[1], lines[0]),
        "duplicate_line_character_share": compute_share(lines[2], batch.character_counts),
    }


def measure_top_ngrams(batch: DocumentBatch) -> dict[str, Floats]:
    """Return the character shares of the most frequent n-grams."""
    return {
        # With the n - 1 spaces between its words.
        f"top_{n}gram_share": compute_share((characters + n - 1) * counts, batch.character_counts)
        for n, counts, characters in _iter_top_ngrams(batch.words)
    }


def _iter_top_ngrams(words: WordColumns) -> Iterator[tuple[int, Integers, Integers]]:
    """Yield n, and the occurrences and characters of the most frequent n-gram per document."""
    core = load_core()
    if isinstance(core, NativeCore):
        yield from zip(TOP, *count_top_ngrams(core, words), strict=True)
        return
    for n, groups in iter_repeated_ngrams(words, TOP[-1]):
        top = select_top_ngrams(words, groups, once=True)
        yield n, top.counts, top.characters


def measure_repeated_ngrams(batch: DocumentBatch) -> dict[str, Floats]:
    """Return the character shares of repeated n-grams."""
    core = load_core()
    if isinstance(core, NativeCore):
        found = dict(zip(REPEATED, count_repeated_ngrams(core, batch.words), strict=True))
    else:
        found = count_duplicate_ngram_characters(batch, REPEATED[0], REPEATED[-1])
    return {
        f"duplicate_{n}gram_share": compute_share(characters, batch.character_counts)
        for n, characters in found.items()
    }


def _split_paragraphs(text: str) -> list[str]:
    """Split the stripped text at runs of at least two newlines."""
    stripped = text.strip()
    return _PARAGRAPH_BREAK.split(stripped) if "\n\n\n" in stripped else stripped.split("\n\n")


def _count_repeats(documents: Sequence[list[str]]) -> tuple[Integers, Integers, Integers]:
    """Return per document the elements, the repeated elements, and the characters of these."""
    elements = np.fromiter(map(len, documents), np.int64, len(documents))
    counts = np.zeros_like(elements)
    characters = np.zeros_like(elements)
    for number, parts in enumerate(documents):
        distinct = set(parts)
        if len(distinct) < len(parts):
            counts[number] = len(parts) - len(distinct)
            characters[number] = sum(map(len, parts)) - sum(map(len, distinct))
    return elements, counts, characters
