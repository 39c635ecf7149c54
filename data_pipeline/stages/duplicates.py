"""Kept documents in, which of them are duplicates out: signatures per file, then one exchange over all of them.

`sign_file` maps a file of judged documents to hashes and bucket keys; `find_duplicates` sorts one bucket of all files
at a time and writes, per judged file, the rows to drop. Memory holds keys of one bucket, hashes, lengths; never texts.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_pipeline.dedup.cluster import clusters, kept_of
from data_pipeline.dedup.exact import Indices, same_text, text_hashes
from data_pipeline.dedup.minhash import Signer, same_bucket
from data_pipeline.executors.event import Report
from llmsys.config.data import DeduplicateConfig, MinhashDuplicates
from llmsys.shards import ShardWriter, read_batches

EXACT, NEAR = "exact_duplicates", "near_duplicates"

DUPLICATE_SCHEMA = pa.schema([("row", pa.int64()), ("rule", pa.string()), ("kept", pa.string()), ("size", pa.int64())])


def _signature_schema(buckets: int) -> pa.Schema:
    fields = [("id", pa.string()), ("characters", pa.int64()), ("text_high", pa.uint64()), ("text_low", pa.uint64())]
    return pa.schema([*fields, ("signed", pa.uint8()), *((f"bucket_{i:03d}", pa.uint64()) for i in range(buckets))])


@lru_cache(maxsize=1)
def _signer(config: MinhashDuplicates) -> Signer:
    """One signer per process: it remembers how words are split."""
    return Signer(config)


def sign_file(report: Report, *, source: Path, output: Path, config: DeduplicateConfig) -> dict[str, Any]:
    """Write hash and bucket keys of every document of one judged file; progress is in documents."""
    signer = _signer(config.minhash) if isinstance(config.minhash, MinhashDuplicates) else None
    schema = _signature_schema(signer.config.buckets if signer else 0)
    rows = 0
    with ShardWriter(output, schema) as writer:
        for batch in read_batches(source):
            texts = batch.column("text").to_pylist()
            hashes = text_hashes(texts)
            keys = [
                batch.column("id"),
                pc.utf8_length(batch.column("text")),
                pa.array(hashes[:, 0]),
                pa.array(hashes[:, 1]),
            ]
            if signer is None:
                keys.append(pa.array(np.zeros(len(texts), np.uint8)))
            else:
                buckets, signed = signer.bucket_keys(texts)
                keys += [pa.array(signed.astype(np.uint8)), *(pa.array(column) for column in buckets.T)]
            writer.write(pa.record_batch(keys, schema=schema))
            rows += len(texts)
            report(len(texts), 0)
    return {"rows": rows}


class _Signatures:
    """The signature files of all sources, numbered through in their order; columns are read when asked for."""

    def __init__(self, sources: Sequence[Path]) -> None:
        self.batches = [list(read_batches(source)) for source in sources]  # mapped, not loaded
        self.rows = [sum(batch.num_rows for batch in batches) for batches in self.batches]
        self.starts: list[int] = np.cumsum([0, *self.rows]).tolist()
        self._flat = [batch for batches in self.batches for batch in batches]
        self._flat_starts = np.cumsum([0, *(batch.num_rows for batch in self._flat)])

    def column(self, name: str, dtype: Any) -> np.ndarray[Any, Any]:
        return np.concatenate([np.zeros(0, dtype), *(batch.column(name).to_numpy() for batch in self._flat)])

    def identity(self, document: int) -> str:
        place = int(np.searchsorted(self._flat_starts, document, side="right")) - 1
        name: str = self._flat[place].column("id")[document - int(self._flat_starts[place])].as_py()
        return name


def find_duplicates(
    report: Report, *, sources: Sequence[Path], output: Path, config: DeduplicateConfig
) -> dict[str, Any]:
    """Write a record batch per signature file: the rows to drop, why, and the id that stays; progress is in buckets."""
    signatures = _Signatures(sources)
    characters = signatures.column("characters", np.int64)
    dropped: dict[int, tuple[str, str, int]] = {}

    def drop(rule: str, pairs: Indices) -> None:
        for members in clusters(pairs):
            kept = kept_of(members, characters, signatures.identity)
            name = signatures.identity(kept)
            dropped.update({member: (rule, name, len(members)) for member in members if member != kept})

    if config.exact.kind != "none":
        halves = [signatures.column(name, np.uint64) for name in ("text_high", "text_low")]
        drop(EXACT, same_text(np.stack(halves, axis=1)))
    if isinstance(config.minhash, MinhashDuplicates):
        candidates = np.flatnonzero(signatures.column("signed", np.uint8)).astype(np.int64)
        candidates = np.setdiff1d(candidates, np.fromiter(dropped, np.int64, len(dropped)), assume_unique=True)
        drop(NEAR, _linked(signatures, candidates, config.minhash.buckets, report))
    return _write(signatures, dropped, output)


def _linked(signatures: _Signatures, candidates: Indices, buckets: int, report: Report) -> Indices:
    pairs = [np.zeros((0, 2), np.int64)]
    for bucket in range(buckets):
        keys = signatures.column(f"bucket_{bucket:03d}", np.uint64)[candidates]
        pairs.append(same_bucket(keys, candidates))
        report(1, 0)
    return np.unique(np.concatenate(pairs), axis=0)


def _write(signatures: _Signatures, dropped: dict[int, tuple[str, str, int]], output: Path) -> dict[str, Any]:
    documents = np.array(sorted(dropped), np.int64)
    with ShardWriter(output, DUPLICATE_SCHEMA) as writer:
        for start, rows in zip(signatures.starts, signatures.rows, strict=False):
            here = documents[(documents >= start) & (documents < start + rows)].tolist()
            columns = list(zip(*(dropped[document] for document in here), strict=True)) or [(), (), ()]
            values = [[document - start for document in here], *columns]
            arrays = [pa.array(column, field.type) for column, field in zip(values, DUPLICATE_SCHEMA, strict=True)]
            writer.write(pa.record_batch(arrays, schema=DUPLICATE_SCHEMA))
    return {"dropped": len(dropped)}
