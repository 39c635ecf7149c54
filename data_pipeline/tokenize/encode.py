"""Documents in, their tokens out, still in the order of the documents.

Reads one document file, writes one Arrow file of token rows with two columns more: the place of the document in the
global shuffle, and its split. Every document ends with the end-of-sequence id.
"""

from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from data_pipeline.document import is_heldout, positions, text_bytes
from data_pipeline.executors.event import Report
from llmsys.config.data import CrawlConfig
from llmsys.shards import ShardWriter, read_batches, token_dtype, token_schema
from llmsys.tokenizer import Tokenizer, load_tokenizer


@lru_cache(maxsize=1)
def _tokenizer(model: Path, fingerprint: str) -> Tokenizer:
    """One tokenizer per process and model; the fingerprint tells a new model, or another end, under the old name."""
    return load_tokenizer(model)


def encoded_schema(vocab_size: int) -> pa.Schema:
    """Return the schema of encoded files: token rows, `place` in the shuffle, `heldout` 0 or 1."""
    schema = token_schema(token_dtype(vocab_size))
    return schema.append(pa.field("place", pa.uint64())).append(pa.field("heldout", pa.uint8()))


def encode_file(
    report: Report, *, source: Path, output: Path, model: Path, fingerprint: str, config: CrawlConfig
) -> dict[str, Any]:
    """Encode one document file; progress is in bytes of text."""
    tokenizer = _tokenizer(model, fingerprint)
    schema = encoded_schema(tokenizer.vocab_size)
    with ShardWriter(output, schema) as writer:
        for batch in read_batches(source):
            writer.write(_encode(batch, tokenizer, schema, config))
            report(int(text_bytes(batch.column("text")).sum()), 0)
    return {}


def _encode(batch: pa.RecordBatch, tokenizer: Tokenizer, schema: pa.Schema, config: CrawlConfig) -> pa.RecordBatch:
    ids = batch.column("id").to_pylist()
    encoded = tokenizer.encode_batch(batch.column("text").to_pylist())
    lengths = np.fromiter((len(tokens) + 1 for tokens in encoded), np.int64, len(encoded))
    values = np.fromiter(
        chain.from_iterable(chain(tokens, (tokenizer.eos_id,)) for tokens in encoded),
        schema.field("tokens").type.value_type.to_pandas_dtype(),
        int(lengths.sum()),
    )
    heldout = is_heldout(ids, config.split.heldout_fraction, config.split.seed)
    columns = [
        token_lists(values, lengths, schema),
        batch.column("id"),
        batch.column("file"),
        batch.column("offset"),
        pa.array([xxhash.xxh64_intdigest(url.encode()) for url in batch.column("url").to_pylist()], pa.uint64()),
        pa.array(text_bytes(batch.column("text"))),
        pa.array(positions(ids, "shuffle", config.tokens.seed)),
        pa.array(heldout.astype(np.uint8)),
    ]
    return pa.record_batch(columns, schema=schema)


def token_lists(values: Any, lengths: Any, schema: pa.Schema) -> pa.ListArray:
    """Return rows of tokens from their values one after another and their lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=schema.field("tokens").type)
