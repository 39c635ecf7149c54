"""Which documents a tokenizer is trained on: those with the smallest hashes of their ids, in all or in each language.

Reads document files; gives a `TrainingSample`. Promises: it follows from ids, languages and the configuration alone, no
held-back document is in it, and a larger sample holds the smaller one.

Training documents in, a SentencePiece model out: the same bytes for the same documents, whatever the workers.

Reads document files, writes tokenizer.model, tokenizer.vocab (for people) and made.json (how it was made), which says
what the sample was.
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import sentencepiece

from data_pipeline.core.document_schema import count_text_bytes, hash_positions, is_heldout
from data_pipeline.executors.base import Report
from data_pipeline.tokenize.publish_tokenizer import publish_sentencepiece
from llmsys.config.data import HeldoutSplitConfig
from llmsys.config.migration import to_recorded_names
from llmsys.config.tokenizer import SentencePieceConfig
from llmsys.errors import DataError
from llmsys.token_shards import read_batches

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


# The number of threads is written into the model, so it must not follow the machine.
TRAINING_THREADS = 4
WHITESPACE = ("\n", "\n\n", "\t")


def train_sentencepiece(
    report: Report, *, sources: Sequence[Path], folder: Path, config: SentencePieceConfig, split: HeldoutSplitConfig
) -> dict[str, Any]:
    """Train on the sample and publish the three files; progress is in documents."""
    sample = draw_sample(sources, config, split)
    if not sample.limits:
        languages = f" in {', '.join(config.language_weights)}" if config.language_weights else ""
        raise DataError(
            f"no document{languages} outside the held-back ones is left to train a tokenizer on. "
            "Set data.split.heldout_fraction lower, or give more input in data.inputs."
        )
    return fit_sentencepiece(
        _iter_sample_lines(report, sources, sample), folder=folder, config=config, sample=sample.facts
    )


def fit_sentencepiece(
    lines: Iterator[str], *, folder: Path, config: SentencePieceConfig, sample: dict[str, Any]
) -> dict[str, Any]:
    """Train on lines of text and publish the three files; `sample` says how many documents and bytes they are."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines, model_writer=model, **_build_trainer_options(config)
        )
    except RuntimeError as error:
        raise DataError(_describe_training_error(error, config, sample)) from error
    made = {"config": to_recorded_names(config.model_dump(mode="json"), "tokenizer"), "sample": sample}
    return publish_sentencepiece(folder, model.getvalue(), made)


def _build_trainer_options(config: SentencePieceConfig) -> dict[str, Any]:
    """Return SentencePiece's options; by default text is taken as it is, so that decoding gives it back."""
    own = WHITESPACE if config.whitespace_symbols == "pieces" else ()
    symbols = [*config.user_defined_symbols, *(one for one in own if one not in config.user_defined_symbols)]
    return {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "byte_fallback": config.byte_fallback,
        "character_coverage": config.character_coverage,
        "split_digits": config.split_digits,
        **({"control_symbols": list(config.control_symbols)} if config.control_symbols else {}),
        # A symbol is looked for in texts whose spaces are U+2581 already.
        **({"user_defined_symbols": [one.replace(" ", "\u2581") for one in symbols]} if symbols else {}),
        "normalization_rule_name": config.normalization,
        "remove_extra_whitespaces": config.remove_extra_whitespaces,
        "add_dummy_prefix": config.add_dummy_prefix,
        "allow_whitespace_only_pieces": config.allow_whitespace_only_pieces,
        "max_sentence_length": 1 << 30,  # a longer line would be left out in silence
        "num_threads": TRAINING_THREADS,
        "minloglevel": 2,
    }


def _iter_sample_lines(report: Report, sources: Sequence[Path], sample: TrainingSample) -> Iterator[str]:
    """Yield the lines of the sampled documents: pieces with a newline are given, not learnt."""
    for source in sources:
        for batch in read_batches(source):
            for row in sample.select_rows(batch):
                yield from filter(None, batch.column("text")[row].as_py().split("\n"))
            report(batch.num_rows, 0)


def _describe_training_error(error: RuntimeError, config: SentencePieceConfig, sample: dict[str, Any]) -> str:
    """Say in our words what SentencePiece refuses, almost always the size of the vocabulary."""
    reason = str(error).rsplit("] ", 1)[-1].strip().rstrip(".")
    return (
        f"tokenizer.vocab_size={config.vocab_size} cannot be trained on {sample['documents']:,} documents "
        f"({sample['bytes']:,} bytes): {reason}. Set tokenizer.vocab_size to a value that fits, or give more documents."
    )
