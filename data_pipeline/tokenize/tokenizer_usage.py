"""Measure how well a tokenizer fits the documents: bytes and words per token by language, and unused pieces.

Counts the tokens of one document file while it is encoded, and merges the counts of all files for the manifest. A word
is a run of bytes other than ASCII white space and controls.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data_pipeline.core.document_schema import count_text_bytes
from data_pipeline.text.ragged_arrays import compute_offsets
from data_pipeline.tokenize.token_cache import RaggedTokens, get_column_buffers
from llmsys.manifest import LanguageUsage, TokenizerUsage
from llmsys.special_tokens import BYTE_PIECES
from llmsys.token_shards import ArrowFileWriter, read_batches
from llmsys.tokenizer import Tokenizer

PIECE_SCHEMA = pa.schema([("count", pa.int64())])
DEAD_EXAMPLES = 50
_UNKNOWN, _BYTE = 1, 2
_COUNTS = ("documents", "bytes", "words", "tokens", "unknown_tokens", "byte_tokens")


class TokenizerUsageCounter:
    """Counter of tokens by language and by piece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._kinds = np.zeros(tokenizer.vocab_size, np.uint8)
        self._kinds[list(tokenizer.unknown_ids)] = _UNKNOWN
        byte_ids = [number for name in BYTE_PIECES if (number := tokenizer.find_piece_id(name)) is not None]
        self._kinds[[number for number in byte_ids if number not in tokenizer.unknown_ids]] = _BYTE
        self._pieces = np.zeros(tokenizer.vocab_size, np.int64)
        self._languages: dict[str, Counter[str]] = {}

    def count_batch(self, batch: pa.RecordBatch, tokens: RaggedTokens) -> None:
        """Count a batch of documents; their tokens have no begin and end ids."""
        self._pieces += np.bincount(tokens.values, minlength=len(self._pieces))
        kinds, ends = self._kinds[tokens.values], compute_offsets(tokens.lengths)
        table = np.stack(
            [
                np.ones(batch.num_rows, np.int64),
                count_text_bytes(batch.column("text")),
                _count_words(batch.column("text")),
                tokens.lengths,
                *(np.diff(np.searchsorted(np.flatnonzero(kinds == kind), ends)) for kind in (_UNKNOWN, _BYTE)),
            ]
        )
        languages = batch.column("language").fill_null("").dictionary_encode()
        codes = languages.indices.to_numpy()
        for code, name in enumerate(languages.dictionary.to_pylist()):
            sums = table[:, codes == code].sum(axis=1).tolist()
            self._languages.setdefault(name, Counter()).update(dict(zip(_COUNTS, sums, strict=True)))

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Return {language: counts}, JSON-serializable."""
        return {name: dict(counts) for name, counts in sorted(self._languages.items())}

    def write_piece_counts(self, path: Path) -> None:
        """Write the number of uses of each piece, by id."""
        with ArrowFileWriter(path, PIECE_SCHEMA, "zstd") as writer:
            writer.write(pa.record_batch([pa.array(self._pieces)], schema=PIECE_SCHEMA))


def collect_usage(tokenizer: Tokenizer, results: Sequence[dict[str, Any]], pieces: Sequence[Path]) -> TokenizerUsage:
    """Merge the counts of all document files.

    Args:
        tokenizer: the tokenizer.
        results: results of `encode_file`.
        pieces: files of piece counts that `encode_file` wrote.

    Returns:
        The tokenizer section of the manifest.
    """
    languages: dict[str, Counter[str]] = {}
    for result in results:
        for name, counts in result["languages"].items():
            languages.setdefault(name, Counter()).update(counts)
    used: npt.NDArray[np.int64] = np.zeros(tokenizer.vocab_size, np.int64)
    for path in pieces:
        used += next(read_batches(path)).column("count").to_numpy()
    texts = tokenizer.get_text_pieces()
    dead = [number for number in sorted(texts) if not used[number]]
    order = sorted(languages, key=lambda name: (-languages[name]["bytes"], name))
    return TokenizerUsage(
        languages={name: LanguageUsage(**languages[name]) for name in order},
        pieces=len(texts),
        dead_pieces=len(dead),
        dead_examples=tuple(texts[number] for number in dead[:DEAD_EXAMPLES]),
        checked_documents=sum(result["checked"] for result in results),
        by_library=next((result["reason"] for result in results if result["reason"]), ""),
    )


def _count_words(texts: pa.Array) -> npt.NDArray[np.int64]:
    """Count the words of each text."""
    data, ends = get_column_buffers(texts)
    if not len(data):
        return np.zeros(len(texts), np.int64)
    inside = data > 0x20
    begins = inside.copy()
    begins[1:] &= ~inside[:-1]
    first = ends[:-1][np.diff(ends) > 0]
    begins[first] = inside[first]  # the text before it may end inside a word
    counts: npt.NDArray[np.int64] = np.diff(np.searchsorted(np.flatnonzero(begins), ends))
    return counts
