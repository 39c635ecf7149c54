"""Documents in, their tokens out, still in the order of the documents.

Reads one document file, writes one Arrow file of token rows with two columns more: the place of the document in the
global shuffle, and its split; and one that says how often each piece was used. Every document ends with the
end-of-sequence id.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from data_pipeline.document import is_heldout, hash_positions, count_text_bytes
from data_pipeline.executors.event import Report
from data_pipeline.rules.ragged import compute_offsets
from data_pipeline.tokenize.check import check_sample
from data_pipeline.tokenize.columns import ColumnEncoder, EncoderKind, build_column_encoder
from data_pipeline.tokenize.memo import RaggedTokens
from data_pipeline.tokenize.usage import TokenizerUsageCounter
from llmsys.config.data import CrawlConfig
from llmsys.errors import DataError
from llmsys.log import get_logger
from llmsys.shards import ArrowFileWriter, read_batches, choose_token_dtype, build_token_schema
from llmsys.tokenizer import Tokenizer, load_tokenizer

_log = get_logger(__name__)


@lru_cache(maxsize=1)
def _load_encoder(model: Path, fingerprint: str, kind: EncoderKind) -> tuple[Tokenizer, ColumnEncoder]:
    """One tokenizer per process and model; the fingerprint tells a new model, or another end, under the old name."""
    tokenizer = load_tokenizer(model)
    encoder = build_column_encoder(tokenizer, kind)
    if encoder.reason is not None:
        _log.info("every document is given to the tokenizer's library: %s", encoder.reason)
    return tokenizer, encoder


def build_encoded_schema(vocab_size: int) -> pa.Schema:
    """Return the schema of encoded files: token rows, `place` in the shuffle, `heldout` 0 or 1."""
    schema = build_token_schema(choose_token_dtype(vocab_size))
    return schema.append(pa.field("place", pa.uint64())).append(pa.field("heldout", pa.uint8()))


def encode_file(
    report: Report, *, source: Path, output: Path, pieces: Path, model: Path, fingerprint: str, config: CrawlConfig
) -> dict[str, Any]:
    """Encode one document file; progress is in bytes of text. DataError when the library has other ids for a sample."""
    tokenizer, encoder = _load_encoder(model, fingerprint, config.tokens.encoder)
    usage, checked = TokenizerUsageCounter(tokenizer), 0
    schema = build_encoded_schema(tokenizer.vocab_size)
    with ArrowFileWriter(output, schema) as writer:
        for batch in read_batches(source):
            tokens = _encode_batch(encoder, batch, source)
            checked += check_sample(batch, tokens, tokenizer)
            usage.count_batch(batch, tokens)
            writer.write(_build_token_rows(batch, append_end_token(tokens, tokenizer.eos_id), schema, config))
            report(int(count_text_bytes(batch.column("text")).sum()), 0)
    usage.write_piece_counts(pieces)
    return {"languages": usage.to_dict(), "checked": checked, "reason": encoder.reason}


def _encode_batch(encoder: ColumnEncoder, batch: pa.RecordBatch, source: Path) -> RaggedTokens:
    try:
        return encoder.encode(batch.column("text"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source} holds a text that is not UTF-8 ({error.reason} at byte {error.start:,} of a part of it). "
            f"Whatever wrote it broke the format: delete the file, and run llmsys prepare CONFIG to make it again."
        ) from None


def append_end_token(tokens: RaggedTokens, end: int) -> RaggedTokens:
    """The same rows, each with this token more."""
    lengths = tokens.lengths + 1
    ends = np.cumsum(lengths) - 1
    values = np.empty(len(tokens.values) + len(lengths), tokens.values.dtype)
    inside = np.ones(len(values), np.bool_)
    inside[ends] = False
    values[inside] = tokens.values
    values[ends] = end
    return RaggedTokens(values, lengths)


def _build_token_rows(batch: pa.RecordBatch, tokens: RaggedTokens, schema: pa.Schema, config: CrawlConfig) -> pa.RecordBatch:
    ids = batch.column("id").to_pylist()
    heldout = is_heldout(ids, config.split.heldout_fraction, config.split.seed)
    columns = [
        build_list_array(tokens.values, tokens.lengths, schema),
        batch.column("id"),
        batch.column("file"),
        batch.column("offset"),
        pa.array([xxhash.xxh64_intdigest(url.encode()) for url in batch.column("url").to_pylist()], pa.uint64()),
        pa.array(count_text_bytes(batch.column("text"))),
        pa.array(hash_positions(ids, "shuffle", config.tokens.seed)),
        pa.array(heldout.astype(np.uint8)),
    ]
    return pa.record_batch(columns, schema=schema)


def build_list_array(values: Any, lengths: Any, schema: pa.Schema) -> pa.ListArray:
    """Return rows of tokens from their values one after another and their lengths."""
    offsets = pa.array(compute_offsets(lengths), pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(values), type=schema.field("tokens").type)
