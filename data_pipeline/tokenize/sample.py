"""Which documents a tokenizer is trained on: those with the smallest hashes of their ids, in all or in each language.

Reads document files; gives a `TrainingSample`. Promises: it follows from ids, languages and the configuration alone, no
held-back document is in it, and a larger sample holds the smaller one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline.document import is_heldout, hash_positions, count_text_bytes
from llmsys.config.data import HeldoutSplitConfig
from llmsys.config.tokenizer import SentencePieceConfig
from llmsys.shards import read_batches

EVERY = "*"
"""The name of all languages together, where none has a weight."""


@dataclass(frozen=True)
class TrainingSample:
    """The documents to train on; `limits` holds the largest position that is in it by language, `facts` what it is."""

    limits: dict[str, int]
    facts: dict[str, Any]
    split: HeldoutSplitConfig

    def select_rows(self, batch: pa.RecordBatch) -> list[int]:
        """The rows of a batch of documents that are in the sample."""
        ids = batch.column("id").to_pylist()
        places = hash_positions(ids, "tokenizer", 0)
        chosen = np.zeros(len(ids), np.bool_)
        groups = _get_language_groups(batch, EVERY not in self.limits)
        for name, limit in self.limits.items():
            chosen |= (groups == name) & (places <= np.uint64(limit))
        chosen &= ~is_heldout(ids, self.split.heldout_fraction, self.split.seed)
        rows: list[int] = np.flatnonzero(chosen).tolist()
        return rows


def draw_sample(sources: Sequence[Path], config: SentencePieceConfig, split: HeldoutSplitConfig) -> TrainingSample:
    """Choose about `sample_bytes` of text; the sample has no limits when there is no document for it."""
    weights = config.language_weights or {EVERY: 1.0}
    found: dict[str, list[tuple[Any, Any]]] = {name: [] for name in weights}
    for source in sources:
        for batch in read_batches(source):
            ids = batch.column("id").to_pylist()
            train = ~is_heldout(ids, split.heldout_fraction, split.seed)
            groups = _get_language_groups(batch, bool(config.language_weights))
            places, sizes = hash_positions(ids, "tokenizer", 0), count_text_bytes(batch.column("text"))
            for name, parts in found.items():
                mine = train & (groups == name)
                parts.append((places[mine], sizes[mine]))
    total = sum(weights.values())
    limits, counts = {}, {}
    for name, parts in found.items():
        drawn = _select_smallest(parts, int(config.sample_bytes * weights[name] / total))
        if drawn is not None:
            limits[name], counts[name] = drawn
    facts: dict[str, Any] = {key: sum(one[key] for one in counts.values()) for key in ("documents", "bytes")}
    if config.language_weights:
        facts["languages"] = counts
    return TrainingSample(limits, facts, split)


def _get_language_groups(batch: pa.RecordBatch, by_language: bool) -> Any:
    """The language of each document, or the same name for all."""
    if not by_language:
        return np.full(batch.num_rows, EVERY)
    return np.array(batch.column("language").fill_null("").to_pylist(), np.str_)


def _select_smallest(parts: list[tuple[Any, Any]], limit_bytes: int) -> tuple[int, dict[str, int]] | None:
    """The largest of the smallest positions that have so many bytes, and the documents and bytes up to it."""
    places = np.concatenate([np.zeros(0, np.uint64), *(place for place, _ in parts)])
    sizes = np.concatenate([np.zeros(0, np.int64), *(size for _, size in parts)])
    order = np.argsort(places, kind="stable")
    total = np.cumsum(sizes[order])
    documents = min(len(order), int(np.searchsorted(total, limit_bytes)) + 1)
    if not documents:
        return None
    return int(places[order[documents - 1]]), {"documents": documents, "bytes": int(total[documents - 1])}
