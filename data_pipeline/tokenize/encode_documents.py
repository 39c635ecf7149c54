"""Encode documents into token rows, in the order of the documents.

Reads one document file. Writes one Arrow file of token rows with three more columns (position in
the global shuffle, split, and digest of the text), and one with the number of uses of each piece.
Every document ends with the end-of-sequence id.

Measure how well a tokenizer fits the documents: bytes and words per token by language, and unused
pieces.

Counts the tokens of one document file while it is encoded, and merges the counts of all files for
the manifest. A word is a run of bytes other than ASCII white space and controls.

Invariants:
- A sample of every batch, at least one document, is encoded again by the library and must have the
  same ids. The sample is chosen by the hash of document ids, so it is the same on every machine.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from llmsys.config.data import CrawlConfig
from llmsys.config.document_order import RepositoryOrder
from llmsys.data_pipeline.core.document_schema import (
    count_text_bytes,
    hash_positions,
    select_heldout,
)
from llmsys.data_pipeline.executors.base import Report
from llmsys.data_pipeline.text.ragged_arrays import Integers, compute_offsets
from llmsys.data_pipeline.tokenize.repository_order import (
    REPOSITORY_FIELDS,
    compute_places,
    read_repositories,
)
from llmsys.data_pipeline.tokenize.token_cache import RaggedTokens, get_column_buffers
from llmsys.data_pipeline.tokenize.tokenizer_files import load_dataset_tokenizer
from llmsys.dataset.manifest import LanguageUsage, TokenizerUsage
from llmsys.dataset.token_shards import (
    ArrowFileWriter,
    build_token_schema,
    choose_token_dtype,
    read_batches,
)
from llmsys.errors import DataError
from llmsys.log import get_logger
from llmsys.vocabulary.special_tokens import BYTE_PIECES
from llmsys.vocabulary.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llmsys.data_pipeline.tokenize.column_encoder import ColumnEncoder, EncoderKind


PIECE_SCHEMA = pa.schema([("count", pa.int64())])
DIGEST_BYTES = 16
DIGEST_FIELD = pa.field("text_digest", pa.binary(DIGEST_BYTES))
DEAD_EXAMPLES = 50
_UNKNOWN = 1
_BYTE = 2
_COUNTS = ("documents", "bytes", "words", "tokens", "unknown_tokens", "byte_tokens")


class TokenizerUsageCounter:
    """Counter of tokens by language and by piece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._kinds = np.zeros(tokenizer.vocab_size, np.uint8)
        self._kinds[list(tokenizer.unknown_ids)] = _UNKNOWN
        byte_ids = [
            number for name in BYTE_PIECES if (number := tokenizer.find_piece_id(name)) is not None
        ]
        self._kinds[[number for number in byte_ids if number not in tokenizer.unknown_ids]] = _BYTE
        self._pieces = np.zeros(tokenizer.vocab_size, np.int64)
        self._languages: dict[str, Counter[str]] = {}

    def count_batch(self, batch: pa.RecordBatch, tokens: RaggedTokens) -> None:
        """Count a batch of documents; their tokens have no begin and end ids."""
        self._pieces += np.bincount(tokens.values, minlength=len(self._pieces))
        kinds = self._kinds[tokens.values]
        ends = compute_offsets(tokens.lengths)
        table = np.stack(
            [
                np.ones(batch.num_rows, np.int64),
                count_text_bytes(batch.column("text")),
                _count_words(batch.column("text")),
                tokens.lengths,
                *(
                    np.diff(np.searchsorted(np.flatnonzero(kinds == kind), ends))
                    for kind in (_UNKNOWN, _BYTE)
                ),
            ]
        )
        languages = batch.column("language").fill_null("").dictionary_encode()
        codes = languages.indices.to_numpy()
        for code, name in enumerate(languages.dictionary.to_pylist()):
            sums = table[:, codes == code].sum(axis=1).tolist()
            self._languages.setdefault(name, Counter()).update(
                dict(zip(_COUNTS, sums, strict=True))
            )

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Return {language: counts}, JSON-serializable."""
        return {name: dict(counts) for name, counts in sorted(self._languages.items())}

    def write_piece_counts(self, path: Path) -> None:
        """Write the number of uses of each piece, by id."""
        with ArrowFileWriter(path, PIECE_SCHEMA, "zstd") as writer:
            writer.write(pa.record_batch([pa.array(self._pieces)], schema=PIECE_SCHEMA))


def collect_usage(
    tokenizer: Tokenizer, results: Sequence[dict[str, Any]], pieces: Sequence[Path]
) -> TokenizerUsage:
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


# One document in this many is checked, which takes a few percent of the encoding time.
ONE_OF = 256


def check_sample(batch: pa.RecordBatch, tokens: RaggedTokens, tokenizer: Tokenizer) -> int:
    """Compare a sample of a batch with the tokenizer's library.

    Args:
        batch: Documents.
        tokens: Their ids.
        tokenizer: The tokenizer.

    Returns:
        The size of the sample.

    Raises:
        DataError: Names the first document and token that differ.
    """
    ids = batch.column("id").to_pylist()
    if not ids:
        return 0
    places = hash_positions(ids, "check", 0)
    rows = np.union1d(
        np.flatnonzero(places % np.uint64(ONE_OF) == 0), [int(places.argmin())]
    ).tolist()
    expected = tokenizer.encode_batch(batch.column("text").take(pa.array(rows)).to_pylist())
    ends = compute_offsets(tokens.lengths)
    for row, theirs in zip(rows, expected, strict=True):
        ours = tokens.values[ends[row] : ends[row + 1]].tolist()
        if ours != theirs:
            raise DataError(_describe_difference(ids[row], ours, theirs))
    return len(rows)


def _describe_difference(name: str, ours: list[int], theirs: list[int]) -> str:
    index = next(
        (index for index, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None
    )
    if index is None:
        difference = f"has {len(ours):,} tokens, and the library gives it {len(theirs):,}"
    else:
        difference = (
            f"has the id {ours[index]} as token {index:,}, where the library has {theirs[index]}"
        )
    return (
        f"document {name} {difference}: encoding by columns is wrong for this tokenizer, and its "
        "output was discarded. Set data.tokens.encoder=library, which is slower, and please "
        "report this with the tokenizer."
    )


_log = get_logger(__name__)


@lru_cache(maxsize=1)
def _load_encoder(
    model: Path, fingerprint: str, kind: EncoderKind
) -> tuple[Tokenizer, ColumnEncoder]:
    """Load the tokenizer once per process; the fingerprint detects a new model or end token at
    the same path.
    """
    # not where the stage is only planned
    from llmsys.data_pipeline.tokenize.column_encoder import build_column_encoder

    tokenizer = load_dataset_tokenizer(model)
    encoder = build_column_encoder(tokenizer, kind)
    if encoder.reason is not None:
        _log.info("every document is encoded by the tokenizer library: %s", encoder.reason)
    return tokenizer, encoder


def build_encoded_schema(vocab_size: int) -> pa.Schema:
    """Return the schema of encoded files.

    Args:
        vocab_size: number of ids, which decides their dtype.

    Returns:
        Columns of token rows, `place` in the shuffle, and `heldout`, 0 or 1.
    """
    schema = build_token_schema(choose_token_dtype(vocab_size))
    return schema.append(pa.field("place", pa.uint64())).append(pa.field("heldout", pa.uint8()))


def encode_file(
    report: Report,
    *,
    source: Path,
    output: Path,
    pieces: Path,
    model: Path,
    fingerprint: str,
    config: CrawlConfig,
    heldout_files: tuple[str, ...] = (),
    earlier: Path | None = None,
) -> dict[str, Any]:
    """Encode one document file.

    Args:
        report: progress callback, in bytes of text.
        source: the document file.
        output: the file of token rows to write.
        pieces: the file of piece counts to write.
        model: the tokenizer.
        fingerprint: its fingerprint.
        config: seeds, split and kind of encoder.
        heldout_files: files whose documents are held out, instead of a share of all.
        earlier: what an earlier config wrote of documents with the same tokenizer; the output does
            not depend on it.

    Returns:
        `languages` (counts by language), `checked` (size of the sample), `reason` (why the library
        encoded all texts).

    Raises:
        DataError: if the library has other ids for a sampled document, or a text is not UTF-8.
    """
    tokenizer, encoder = _load_encoder(model, fingerprint, config.tokens.encoder)
    usage = TokenizerUsageCounter(tokenizer)
    checked = 0
    schema = build_encoded_schema(tokenizer.vocab_size).append(DIGEST_FIELD)
    if isinstance(config.document_order, RepositoryOrder):
        schema = pa.schema([*schema, *REPOSITORY_FIELDS], schema.metadata)
    known = None
    if earlier is not None:
        # where the tokenizer is a given one and documents changed
        from llmsys.data_pipeline.tokenize.known_tokens import read_known_tokens

        known = read_known_tokens(earlier, DIGEST_FIELD.name)
    with ArrowFileWriter(output, schema) as writer:
        for batch in read_batches(source):
            digests = hash_text_column(batch.column("text"))
            encode_rows = partial(_encode_rows, encoder, batch, source)
            if known is None:
                tokens = encode_rows(np.arange(batch.num_rows))
            else:
                tokens = known.encode_others(digests, encode_rows)
            checked += check_sample(batch, tokens, tokenizer)
            usage.count_batch(batch, tokens)
            heldout = select_heldout(batch, config.split, heldout_files)
            ended = append_end_token(tokens, tokenizer.eos_id)
            columns = _build_token_columns(batch, ended, heldout, schema, config.tokens.seed)
            columns.append(pa.array(digests, DIGEST_FIELD.type))
            if isinstance(config.document_order, RepositoryOrder):
                found = read_repositories(batch, config.document_order, source)
                ids = batch.column("id").to_pylist()
                places = compute_places(ids, found[0], "shuffle", config.tokens.seed)
                columns[schema.get_field_index("place")] = pa.array(places)
                columns += found
            writer.write(pa.record_batch(columns, schema=schema))
            report(int(count_text_bytes(batch.column("text")).sum()), 0)
    usage.write_piece_counts(pieces)
    return {"languages": usage.to_dict(), "checked": checked, "reason": encoder.reason}


def hash_text_column(texts: pa.Array) -> list[bytes]:
    """Return the digest of each text, by which a later config knows it.

    Args:
        texts: Texts; null counts as empty.
    """
    binary = texts.cast(pa.large_binary()).to_pylist()
    return [hashlib.blake2b(text or b"", digest_size=DIGEST_BYTES).digest() for text in binary]


def _encode_rows(
    encoder: ColumnEncoder, batch: pa.RecordBatch, source: Path, rows: Integers
) -> RaggedTokens:
    """Return the ids of the texts of a batch at these indices."""
    texts = batch.column("text")
    if len(rows) < batch.num_rows:
        texts = texts.take(pa.array(rows))
    try:
        return encoder.encode(texts)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source} holds a text that is not UTF-8 ({error.reason} at byte {error.start:,} of "
            "a part of it). Delete the file, and run llmsys prepare CONFIG to make it again."
        ) from None


def append_end_token(tokens: RaggedTokens, end: int) -> RaggedTokens:
    """Return the rows with an end token each."""
    lengths = tokens.lengths + 1
    ends = np.cumsum(lengths) - 1
    values = np.empty(len(tokens.values) + len(lengths), tokens.values.dtype)
    inside = np.ones(len(values), np.bool_)
    inside[ends] = False
    values[inside] = tokens.values
    values[ends] = end
    return RaggedTokens(values, lengths)


def _build_token_columns(
    batch: pa.RecordBatch,
    tokens: RaggedTokens,
    heldout: npt.NDArray[np.bool_],
    schema: pa.Schema,
    seed: int,
) -> list[pa.Array]:
    """Return the columns of `build_encoded_schema`."""
    ids = batch.column("id").to_pylist()
    return [
        build_list_array(tokens.values, tokens.lengths, schema),
        batch.column("id"),
        batch.column("file"),
        batch.column("offset"),
        pa.array(
            [xxhash.xxh64_intdigest(url.encode()) for url in batch.column("url").to_pylist()],
            pa.uint64(),
        ),
        pa.array(count_text_bytes(batch.column("text"))),
        pa.array(hash_positions(ids, "shuffle", seed)),
        pa.array(heldout.astype(np.uint8)),
    ]


def build_list_array(values: Any, lengths: Any, schema: pa.Schema) -> pa.ListArray:
    """Build rows of tokens.

    Args:
        values: the tokens of all rows, concatenated.
        lengths: number of tokens of each row.
        schema: schema with the column `tokens`.

    Returns:
        The column `tokens`.
    """
    offsets = pa.array(compute_offsets(lengths), pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(values), type=schema.field("tokens").type)
