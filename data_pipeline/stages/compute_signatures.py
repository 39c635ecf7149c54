"""Compute deduplication keys of documents: URL hashes, text hashes and MinHash buckets.

Reads one filtered file. Writes one file of documents (id, offset, length) and one file of keys per
comparison. Rows that an earlier comparison dropped have no keys.
"""

from __future__ import annotations

import re
from binascii import unhexlify
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import xxhash

from llmsys.config.deduplication import MinHashDedupConfig, UrlDedupConfig
from llmsys.data_pipeline.dedup.duplicate_decisions import mask_remaining_rows, read_dropped_rows
from llmsys.data_pipeline.dedup.keys import (
    BUCKET_SCHEMA,
    ITEM_SCHEMA,
    Columns,
    KeyWriter,
    hash_texts,
    take_rows,
)
from llmsys.data_pipeline.executors.base import Report
from llmsys.dataset.token_shards import ArrowFileWriter, read_batches

if TYPE_CHECKING:
    from llmsys.data_pipeline.dedup.minhash import MinHasher

DOCUMENT_SCHEMA = pa.schema(
    [("id", pa.string()), ("offset", pa.int64()), ("characters", pa.int64())]
)
_HEXADECIMAL = re.compile(r"(?:[0-9a-f]{32})+")
_LARGEST = (1 << 64) - 1  # ranks sort ascending: subtract to keep the longest or latest


@lru_cache(maxsize=1)
def _get_min_hasher(config: MinHashDedupConfig) -> MinHasher:
    """Return one hasher per process: it caches spaCy's answers about unusual words."""
    from llmsys.data_pipeline.dedup.minhash import MinHasher  # not where the stage is only planned

    return MinHasher(config)


def write_signatures(
    report: Report,
    *,
    source: Path,
    number: int,
    dropped: Sequence[Path],
    documents: Path,
    keys: Mapping[str, Path],
    url: UrlDedupConfig | None,
    minhash: MinHashDedupConfig | None,
    unspaced: Sequence[str],
    earlier: Mapping[str, Path] | None = None,
) -> dict[str, Any]:
    """Write documents and keys of one filtered file. Progress is in documents.

    Args:
        report: Progress callback.
        source: The filtered file.
        number: Its index among the filtered files, by which decisions name it.
        dropped: Files of decisions.
        documents: File to write ids and lengths to.
        keys: Files to write keys to, by relation (`url`, `exact`, `minhash`).
        url: Ranking of captures of one URL. None without URL comparison.
        minhash: MinHash parameters. None without near duplicates.
        unspaced: Languages in which each character counts as a word.
        earlier: What an earlier config computed of a filtered file of the same block, by name:
            `source`, `documents` and `keys.…` by relation. The output does not depend on it.

    Returns:
        Number of rows, and number of keys by relation.
    """
    known = None
    if earlier is not None:
        from llmsys.data_pipeline.stages.known_signatures import read_known_signatures

        known = read_known_signatures(source, earlier)
    gone = read_dropped_rows(dropped, number)
    row = 0
    with ExitStack() as stack:
        table = stack.enter_context(ArrowFileWriter(documents, DOCUMENT_SCHEMA))
        schemas = {name: BUCKET_SCHEMA if name == "minhash" else ITEM_SCHEMA for name in keys}
        writers = {
            name: stack.enter_context(KeyWriter(path, schemas[name])) for name, path in keys.items()
        }
        for batch in read_batches(source):
            lengths = _count_characters(batch)
            table.write(
                pa.record_batch(
                    [batch.column("id"), batch.column("offset"), lengths], schema=DOCUMENT_SCHEMA
                )
            )
            rows = np.arange(row, row + batch.num_rows)
            stays = mask_remaining_rows(rows, gone)
            if known is not None:
                stays &= ~known.mask_rows(rows)
            batch = batch.filter(pa.array(stays))
            rows = rows[stays]
            found = dict[str, Columns]()
            if "url" in writers and url is not None:
                found["url"] = _build_url_items(batch, rows, url)
            if "exact" in writers:
                found["exact"] = _build_items(
                    hash_texts(batch.column("text").to_pylist()), rows, *_compute_id_ranks(batch)
                )
            if "minhash" in writers and minhash is not None:
                found["minhash"] = _compute_bucket_keys(
                    _space_unspaced_texts(batch, unspaced), rows, minhash
                )
            for name, columns in found.items():
                writers[name].write(
                    columns
                    if known is None
                    else known.add_keys(name, columns, row, row + len(stays))
                )
            row += len(stays)
            report(len(stays), 0)
    return {"rows": row, "keys": {name: writer.count for name, writer in writers.items()}}


def write_group_documents(
    report: Report, *, sources: Sequence[Path], first: int, output: Path
) -> dict[str, Any]:
    """Gather the documents of a group of filtered files in one file. Progress is in files.

    Args:
        report: Progress callback.
        sources: Files of documents of the group.
        first: Number of the first of them.
        output: File to write, `DOCUMENT_SCHEMA`.

    Returns:
        Number of rows.
    """
    rows = 0
    with ArrowFileWriter(output, DOCUMENT_SCHEMA) as writer:
        for path in sources:
            table = pa.Table.from_batches(
                list(read_batches(path)), DOCUMENT_SCHEMA
            ).combine_chunks()
            for batch in table.to_batches():
                writer.write(batch)
            rows += table.num_rows
            report(1, 0)
    return {"first": first, "rows": rows}


def _build_items(hashes: Any, rows: Any, rank: Any, tie: Any) -> Columns:
    place = np.zeros(len(rows), np.int32)
    return {
        "high": hashes[:, 0],
        "low": hashes[:, 1],
        "rank": rank,
        "tie": tie,
        "row": rows,
        "place": place,
    }


def _count_characters(batch: pa.RecordBatch) -> pa.Array:
    import pyarrow.compute as pc  # slow to import

    return pc.utf8_length(batch.column("text"))


def _build_url_items(batch: pa.RecordBatch, rows: Any, config: UrlDedupConfig) -> Columns:
    """Return keys of URLs, ranked so that the smallest stays. A document without a URL has none."""
    ids = _compute_id_ranks(batch)[0]
    if config.keep == "longest":
        rank = np.uint64(_LARGEST) - _count_characters(batch).to_numpy().astype(np.uint64)
    else:
        dates = [_parse_date_number(date or "") for date in batch.column("date").to_pylist()]
        # Without a date a document has the last rank in either case.
        rank = np.array(
            [date or _LARGEST if config.keep == "earliest" else _LARGEST - date for date in dates],
            np.uint64,
        )
    urls = [url or "" for url in batch.column("url").to_pylist()]
    return take_rows(
        _build_items(hash_texts(urls), rows, rank, ids),
        np.array([bool(url) for url in urls], np.bool_),
    )


def _parse_date_number(date: str) -> int:
    """Parse a date such as 2024-05-01T12:00:00Z to the number of its first fourteen digits; 0
    without digits.
    """
    digits = re.sub(r"\D", "", date)[:14]
    return int(digits.ljust(14, "0")) if digits else 0


def _compute_id_ranks(batch: pa.RecordBatch) -> tuple[Any, Any]:
    halves = split_document_ids(batch.column("id").to_pylist())
    return halves[:, 0], halves[:, 1]


def split_document_ids(ids: Sequence[str]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Split ids into two numbers each.

    Args:
        ids: Document ids. One that is not 32 hex digits is replaced by its xxh3_128.

    Returns:
        uint64 of shape (len(ids), 2). The order of the pairs is that of the ids.
    """
    text = "".join(ids)
    # One conversion for the batch: ids of crawls are all hexadecimal.
    if _HEXADECIMAL.fullmatch(text) and all(len(name) == 32 for name in ids):
        data = unhexlify(text)
    else:
        data = b"".join(map(_encode_id, ids))
    return np.frombuffer(data, ">u8").astype(np.uint64).reshape(-1, 2)


def _encode_id(name: str) -> bytes:
    is_number = len(name) == 32 and _HEXADECIMAL.fullmatch(name)
    return unhexlify(name) if is_number else xxhash.xxh3_128_digest(name.encode())


def _space_unspaced_texts(batch: pa.RecordBatch, unspaced: Sequence[str]) -> pa.Array:
    """Return the texts, with a space after every character in languages without spaces."""
    texts = batch.column("text")
    languages = batch.column("language")
    # Most batches hold no such language.
    if frozenset(unspaced).isdisjoint(languages.unique().to_pylist()):
        return texts
    from llmsys.data_pipeline.text.word_tokenizers import insert_spaces  # only for such languages

    pairs = zip(texts.to_pylist(), languages.to_pylist(), strict=True)
    return pa.array(
        [insert_spaces(text) if code in unspaced else text for text, code in pairs],
        pa.large_string(),
    )


def _compute_bucket_keys(texts: pa.Array, rows: Any, config: MinHashDedupConfig) -> Columns:
    keys, present = _get_min_hasher(config).compute_bucket_keys(texts)
    buckets = config.buckets
    return {
        "high": keys[present].ravel(),
        "low": np.tile(np.arange(buckets, dtype=np.uint16), int(present.sum())),
        "row": np.repeat(rows[present], buckets),
    }
