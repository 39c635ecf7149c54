"""Words and lines of a batch of documents by the compiled core: what `WordCache` gives, from tables
in C++ that hold chunks and words as bytes.

The core leaves chunks to Python that are very long, or that have a character of which its version
of Unicode knows nothing, or another thing than the running Python.

Invariants:
- Words, and everything that is known of them, are those of the Python splitter. Their ids differ,
  on which nothing depends.
"""

import ctypes
import unicodedata
from collections.abc import Sequence
from functools import cache
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from llmsys.data_pipeline.core.native import UNICODE_VERSION, NativeCore, load_core
from llmsys.data_pipeline.text.ragged_arrays import GrowableArray, Integers, compute_offsets
from llmsys.data_pipeline.text.spacy_tokenizer import LONGEST_CHUNK, SpacyTokenizer
from llmsys.data_pipeline.text.splitting_rules import load_splitting_rules
from llmsys.data_pipeline.text.vocabulary import PUNCTUATION, Vocabulary
from llmsys.data_pipeline.text.word_cache import WordTokenizer
from llmsys.data_pipeline.text.word_tokenizers import WhitespaceTokenizer

_LETTERS_ARE_WHOLE = 1
_PREFIX_IS_ANCHORED = 2
# Bits of `llmsys_describe_characters`.
_ASSIGNED = 32
_EXPRESSIONS = ("prefix", "suffix", "infix", "token", "url")

Addresses = ctypes.c_void_p
Counts = npt.NDArray[np.int64]


def get_address(array: npt.NDArray[Any]) -> Addresses:
    """Return the address of an array's first item, for a function of the core.

    Args:
        array: A contiguous array, which must stay alive during the call.

    Returns:
        The address.
    """
    assert array.flags.c_contiguous
    return Addresses(array.ctypes.data)


class CompiledVocabulary(Vocabulary):
    """Words of a table of the core, with their columns."""

    def __init__(self, core: NativeCore, table: int, sentence_marks: frozenset[str]) -> None:
        super().__init__(sentence_marks)
        self._core = core
        self._table = table
        self._strings: list[str] = []

    def __del__(self) -> None:
        """Free the table, which columns may need for as long as they live."""
        self._core.functions.llmsys_free_words(self._table)

    def __len__(self) -> int:
        return len(self._lengths)

    def read_columns(self, total: int) -> None:
        """Add the columns of the words up to number `total`."""
        first = len(self)
        columns: list[GrowableArray] = [
            self._lengths,
            self._sizes,
            self._hashes,
            self._powers,
            self._flags,
        ]
        new = [np.empty(total - first, column.view.dtype) for column in columns]
        self._core.functions.llmsys_write_vocabulary(self._table, first, *map(get_address, new))
        for column, values in zip(columns, new, strict=True):
            column.extend(values)

    def find_word(self, word: str) -> int | None:
        """Return the id of a word, None if it has not been met."""
        data = word.encode()
        found = int(self._core.functions.llmsys_find_word(self._table, data, len(data)))
        return found if 0 <= found < len(self) else None

    def get_word(self, word_id: int) -> str:
        """Return the word with an id."""
        if word_id >= len(self._strings):
            self._read_strings()
        return self._strings[word_id]

    def _read_strings(self) -> None:
        functions = self._core.functions
        first = len(self._strings)
        ends = functions.llmsys_vocabulary_ends(self._table)[first : len(self) + 1]
        data = ctypes.string_at(
            functions.llmsys_vocabulary_data(self._table) + ends[0], ends[-1] - ends[0]
        )
        self._strings += [
            data[start - ends[0] : end - ends[0]].decode() for start, end in pairwise(ends)
        ]


class CompiledWords:
    """Words and line counts of batches.

    Args:
        core: The compiled core.
        splitter: Splits the chunks that the core leaves.
        table: A table of words with the rules of the splitter.
        chunks: Maximum number of chunks.
        characters: Maximum number of characters of all chunks.
    """

    def __init__(
        self, core: NativeCore, splitter: WordTokenizer, table: int, chunks: int, characters: int
    ) -> None:
        self._core = core
        self._splitter = splitter
        self._most_chunks = chunks
        self._most_characters = characters
        self._begin_table(table)

    def __len__(self) -> int:
        """Return the number of chunks that are known."""
        return int(self._counts[1])

    def split_words(
        self, texts: Sequence[str]
    ) -> tuple[npt.NDArray[np.int32], Integers, Vocabulary]:
        """Return the word ids of all texts, where each text begins, and the vocabulary."""
        self._look_up(*join_texts(texts))
        ids = np.empty(int(self._counts[0]), np.int32)
        offsets = np.empty(len(texts) + 1, np.int64)
        self._core.functions.llmsys_write_words(self._table, get_address(ids), get_address(offsets))
        return ids, offsets, self.vocabulary

    def count_lines(self, texts: Sequence[str], lines: Counts) -> tuple[Counts, Counts, Counts]:
        """Return chunks, words and sentences of each line.

        Args:
            texts: The texts.
            lines: Lines of each text, as `str.splitlines` finds them.

        Returns:
            Three arrays of a value for each line of all texts.
        """
        data, offsets = join_texts(texts)
        self._look_up(data, offsets)
        chunks, words, sentences = (np.empty(int(lines.sum()), np.int64) for _ in range(3))
        columns = map(get_address, (offsets, lines, chunks, words, sentences))
        fits = self._core.functions.llmsys_count_lines(self._table, data, *columns)
        if not fits:
            raise ValueError(
                f"{len(texts)} texts have more lines than the {len(chunks)} that were given"
            )
        return chunks, words, sentences

    def _look_up(self, data: bytes, offsets: Integers) -> None:
        """Find the chunks of texts, and learn the words of new ones."""
        if len(self) > self._most_chunks or self._counts[2] > self._most_characters:
            self._clear_table()
        functions = self._core.functions
        count = len(offsets) - 1
        left = functions.llmsys_look_up_words(self._table, data, get_address(offsets), count)
        try:
            if left < 0:
                raise MemoryError("the table of words needs more memory than there is")
            if left:
                self._learn_chunks(self._read_left_chunks(left))
        except BaseException:
            self._clear_table()  # it already holds their numbers
            raise
        functions.llmsys_count_words(self._table, get_address(self._counts))
        self.vocabulary.read_columns(int(self._counts[3]))

    def _read_left_chunks(self, count: int) -> list[str]:
        functions = self._core.functions
        ends = functions.llmsys_left_ends(self._table)[: count + 1]
        data = ctypes.string_at(functions.llmsys_left_data(self._table), ends[-1])
        return [data[start:end].decode() for start, end in pairwise(ends)]

    def _learn_chunks(self, chunks: list[str]) -> None:
        """Split chunks that the core left, and give it their words."""
        split = self._splitter.split_words(chunks)
        words = list(chain.from_iterable(split))
        encoded = [word.encode() for word in words]
        ends = compute_offsets(list(map(len, encoded)))[1:]
        flags = np.array(list(map(self.vocabulary.compute_flags, words)), np.uint8)
        counts = np.array(list(map(len, split)), np.int64)
        learned = self._core.functions.llmsys_learn_words(
            self._table,
            b"".join(encoded),
            get_address(ends),
            get_address(flags),
            get_address(counts),
        )
        if learned < 0:
            raise MemoryError("the table of words needs more memory than there is")

    def _clear_table(self) -> None:
        """Begin a new table. Columns returned earlier keep their vocabulary."""
        table = self._core.functions.llmsys_renew_words(self._table)
        if table is None:
            raise MemoryError("the table of words needs more memory than there is")
        self._begin_table(table)

    def _begin_table(self, table: int) -> None:
        self._table = table
        self._counts = np.zeros(4, np.int64)
        self.vocabulary = CompiledVocabulary(self._core, table, self._splitter.sentence_marks)


def build_compiled_words(
    splitter: WordTokenizer, chunks: int, characters: int
) -> CompiledWords | None:
    """Build the words of a tokenizer by the compiled core.

    Args:
        splitter: The tokenizer.
        chunks: Maximum number of chunks.
        characters: Maximum number of characters of all chunks.

    Returns:
        The words; None without the core, or where it does not know the tokenizer or its rules.
    """
    core = load_core()
    if not isinstance(core, NativeCore):
        return None
    return build_words_of_core(core, splitter, chunks, characters)


def build_words_of_core(
    core: NativeCore, splitter: WordTokenizer, chunks: int, characters: int
) -> CompiledWords | None:
    """Build the words of a tokenizer by one core.

    Args:
        core: The core.
        splitter: The tokenizer.
        chunks: Maximum number of chunks.
        characters: Maximum number of characters of all chunks.

    Returns:
        The words; None where the core does not know the tokenizer or its rules.
    """
    is_known = isinstance(splitter, WhitespaceTokenizer) or (
        isinstance(splitter, SpacyTokenizer) and splitter.has_rules
    )
    table = _create_table(core, splitter) if is_known else None
    return None if table is None else CompiledWords(core, splitter, table, chunks, characters)


def _create_table(core: NativeCore, splitter: WordTokenizer) -> int | None:
    """Create a table of words. Return its address; None if the rules have an unknown expression."""
    texts = [""] * 9
    flags = 0
    if isinstance(splitter, SpacyTokenizer):
        rules = load_splitting_rules(splitter.rules)
        expressions = [rules.get_expression(name) for name in _EXPRESSIONS]
        texts = [
            *expressions,
            rules.opening,
            rules.closing,
            _format_entries(rules.exceptions.values()),
            _format_entries(rules.rejoined),
        ]
        flags = _LETTERS_ARE_WHOLE * rules.are_letters_whole
        flags += _PREFIX_IS_ANCHORED * rules.is_prefix_anchored
    texts += ["".join(sorted(PUNCTUATION)), "".join(sorted(splitter.sentence_marks))]
    texts.append(list_changed_characters(core))
    encoded = [text.encode() for text in texts]
    sizes = np.array(list(map(len, encoded)), np.int64)
    table: int | None = core.functions.llmsys_create_words(
        (ctypes.c_char_p * len(encoded))(*encoded), get_address(sizes), flags, LONGEST_CHUNK
    )
    return table


def _format_entries(entries: Any) -> str:
    """Format lists of words for the core: words end with U+0001, lists with U+0000."""
    text = "".join("\1".join(parts) + "\1\0" if parts else "\0" for parts in entries)
    assert text.count("\0") == len(entries)
    return text


def join_texts(texts: Sequence[str]) -> tuple[bytes, Integers]:
    """Join texts for a function of the core.

    Args:
        texts: D texts.

    Returns:
        Their bytes, and where each begins and the last one ends, int64 of shape (D + 1,).
    """
    encoded = [text.encode() for text in texts]
    return b"".join(encoded), compute_offsets(list(map(len, encoded)))


@cache
def list_changed_characters(core: NativeCore) -> str:
    """List the characters that the core knows, and that the running Python knows otherwise.

    Args:
        core: The compiled core.

    Returns:
        The characters; none where both have the same version of Unicode.
    """
    if unicodedata.unidata_version == UNICODE_VERSION:
        return ""
    return find_changed_characters(core)


def find_changed_characters(core: NativeCore) -> str:
    """Compare what the core and the running Python say of the characters that the core knows.

    Args:
        core: The compiled core.

    Returns:
        The characters of which they say different things.
    """
    described = np.zeros(0x110000, np.uint8)
    core.functions.llmsys_describe_characters(get_address(described))
    described[0xD800:0xE000] = 0  # no text has a lone surrogate
    points = np.flatnonzero(described & _ASSIGNED)
    characters = "".join(map(chr, points.tolist()))
    categories = [category[0] for category in map(unicodedata.category, characters)]
    own = [
        list(map(str.isalpha, characters)),
        [character.isalnum() or character == "_" for character in characters],
        list(map(str.isdecimal, characters)),
        [category == "M" for category in categories],
        [category == "P" for category in categories],
        [True] * len(characters),
    ]
    values = sum(np.array(column, np.uint8) << bit for bit, column in enumerate(own))
    return "".join(map(chr, points[values != described[points]].tolist()))
