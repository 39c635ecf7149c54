"""Train a tokenizer on a sample of the documents; a SentencePiece model here, WordPiece in
train_wordpiece.py.

The sample is the documents with the smallest hashes of their ids, over all or per language.

Reads document files; writes tokenizer.model, tokenizer.vocab (for people) and made.json (its origin
and the sample).

Invariants:
- The sample follows from ids, languages and the configuration; it has no held-out document, and a
  larger sample contains the smaller one.
- Equal documents give equal bytes of the model, whatever the workers.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import numpy as np
import pyarrow as pa

from llmsys.config.data import HeldoutSplitConfig
from llmsys.config.tokenizer import SentencePieceConfig, TrainedTokenizerConfig, WordPieceConfig
from llmsys.data_pipeline.core.document_schema import (
    count_text_bytes,
    hash_positions,
    select_heldout,
)
from llmsys.data_pipeline.executors.base import Report
from llmsys.data_pipeline.tokenize.tokenizer_files import publish_sentencepiece
from llmsys.dataset.token_shards import read_batches
from llmsys.errors import DataError

# Key of all languages together, if none has a weight.
EVERY = "*"


@dataclass(frozen=True)
class TrainingSample:
    """The documents to train on.

    Attributes:
        limits: largest position in the sample, by language.
        facts: its numbers of documents and bytes.
        split: the split that holds documents out.
        heldout_files: files whose documents are held out, instead of a share of all.
    """

    limits: dict[str, int]
    facts: dict[str, Any]
    split: HeldoutSplitConfig
    heldout_files: tuple[str, ...] = ()

    def select_rows(self, batch: pa.RecordBatch) -> list[int]:
        """Return the rows of a batch that are in the sample."""
        ids = batch.column("id").to_pylist()
        places = hash_positions(ids, "tokenizer", 0)
        chosen = np.zeros(len(ids), np.bool_)
        groups = _get_language_groups(batch, EVERY not in self.limits)
        for name, limit in self.limits.items():
            chosen |= (groups == name) & (places <= np.uint64(limit))
        chosen &= ~select_heldout(batch, self.split, self.heldout_files)
        rows: list[int] = np.flatnonzero(chosen).tolist()
        return rows


def draw_sample(
    sources: Sequence[Path],
    config: TrainedTokenizerConfig,
    split: HeldoutSplitConfig,
    heldout_files: tuple[str, ...] = (),
) -> TrainingSample:
    """Draw the texts that a tokenizer is trained on: those with the smallest hashes of their ids.

    Args:
        sources: Files of documents.
        config: `sample_bytes` and the weights of languages.
        split: Which documents are held out; they are not drawn.
        heldout_files: Files whose documents are held out, instead of a share of all.

    Returns:
        The sample; it has no limits if there is no document for it.
    """
    weights = config.language_weights or {EVERY: 1.0}
    found: dict[str, list[tuple[Any, Any]]] = {name: [] for name in weights}
    for source in sources:
        for batch in read_batches(source):
            ids = batch.column("id").to_pylist()
            train = ~select_heldout(batch, split, heldout_files)
            groups = _get_language_groups(batch, bool(config.language_weights))
            places = hash_positions(ids, "tokenizer", 0)
            sizes = count_text_bytes(batch.column("text"))
            for name, parts in found.items():
                mine = train & (groups == name)
                parts.append((places[mine], sizes[mine]))
    total = sum(weights.values())
    limits = {}
    counts = {}
    for name, parts in found.items():
        drawn = _select_smallest(parts, int(config.sample_bytes * weights[name] / total))
        if drawn is not None:
            limits[name], counts[name] = drawn
    facts: dict[str, Any] = {
        key: sum(one[key] for one in counts.values()) for key in ("documents", "bytes")
    }
    if config.language_weights:
        facts["languages"] = counts
    return TrainingSample(limits, facts, split, heldout_files)


def _get_language_groups(batch: pa.RecordBatch, by_language: bool) -> Any:
    """Return the language of each document, or one name for all."""
    if not by_language:
        return np.full(batch.num_rows, EVERY)
    return np.array(batch.column("language").fill_null("").to_pylist(), np.str_)


def _select_smallest(
    parts: list[tuple[Any, Any]], limit_bytes: int
) -> tuple[int, dict[str, int]] | None:
    """Return the last of the smallest positions with `limit_bytes` in total, and the documents
    and bytes up to it.
    """
    places = np.concatenate([np.zeros(0, np.uint64), *(place for place, _ in parts)])
    sizes = np.concatenate([np.zeros(0, np.int64), *(size for _, size in parts)])
    order = np.argsort(places, kind="stable")
    total = np.cumsum(sizes[order])
    documents = min(len(order), int(np.searchsorted(total, limit_bytes)) + 1)
    if not documents:
        return None
    return int(places[order[documents - 1]]), {
        "documents": documents,
        "bytes": int(total[documents - 1]),
    }


# The number of threads is written into the model, so it must not follow the machine.
TRAINING_THREADS = 4
WHITESPACE = ("\n", "\n\n", "\t")


def train_document_tokenizer(
    report: Report,
    *,
    sources: Sequence[Path],
    folder: Path,
    config: TrainedTokenizerConfig,
    split: HeldoutSplitConfig,
    heldout_files: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Train a tokenizer on a sample of the documents and publish it.

    Args:
        report: progress callback, in documents.
        sources: document files.
        folder: the tokenizer folder to write.
        config: size of the sample and options of the tokenizer.
        split: the split that holds documents out.
        heldout_files: files whose documents are held out, instead of a share of all.

    Returns:
        `fingerprint`, `vocab_size` and `eos_id`, for later stages.

    Raises:
        DataError: if there is no document to train on, or the options do not fit the text.
    """
    sample = draw_sample(sources, config, split, heldout_files)
    if not sample.limits:
        languages = f" in {', '.join(config.language_weights)}" if config.language_weights else ""
        raise DataError(
            f"no document{languages} outside of the held-out ones is left to train a tokenizer "
            "on. Lower data.split.heldout_fraction, or give more input in data.inputs."
        )
    return fit_tokenizer(_iter_sample_lines(report, sources, sample), folder, config, sample.facts)


def fit_tokenizer(
    lines: Iterator[str], folder: Path, config: TrainedTokenizerConfig, sample: dict[str, Any]
) -> dict[str, Any]:
    """Train the tokenizer of a config on lines of text and publish it.

    Args:
        lines: the text, without newlines.
        folder: the tokenizer folder to write.
        config: options of the tokenizer.
        sample: numbers of documents and bytes, for `made.json` and messages.

    Returns:
        `fingerprint`, `vocab_size` and `eos_id`, for later stages.
    """
    match config:
        case SentencePieceConfig():
            return fit_sentencepiece(lines, folder=folder, config=config, sample=sample)
        case WordPieceConfig():
            # Imported here: the library is not needed otherwise.
            from llmsys.data_pipeline.tokenize.train_wordpiece import fit_wordpiece

            return fit_wordpiece(lines, folder=folder, config=config, sample=sample)
        case unreachable:
            assert_never(unreachable)


def fit_sentencepiece(
    lines: Iterator[str], *, folder: Path, config: SentencePieceConfig, sample: dict[str, Any]
) -> dict[str, Any]:
    """Train a tokenizer on lines of text and publish it.

    Args:
        lines: the text, without newlines.
        folder: the tokenizer folder to write.
        config: options of SentencePiece.
        sample: numbers of documents and bytes, for `made.json` and messages.

    Returns:
        `fingerprint`, `vocab_size` and `eos_id`, for later stages.

    Raises:
        DataError: if SentencePiece rejects the options, mostly because of the size of the
            vocabulary.
    """
    try:
        model = train_sentencepiece(lines, config)
    except RuntimeError as error:
        raise DataError(_describe_training_error(error, config, sample)) from error
    made = {"config": config.model_dump(mode="json"), "sample": sample}
    return publish_sentencepiece(folder, model, made)


def train_sentencepiece(lines: Iterable[str], config: SentencePieceConfig) -> bytes:
    """Train a tokenizer on lines of text.

    Args:
        lines: the text, without newlines.
        config: options of SentencePiece.

    Returns:
        The model file.

    Raises:
        RuntimeError: SentencePiece rejects the options.
    """
    import sentencepiece  # slow to import

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, **_build_trainer_options(config)
    )
    return model.getvalue()


def _build_trainer_options(config: SentencePieceConfig) -> dict[str, Any]:
    """Return SentencePiece's options; by default text is not changed, so that decoding restores
    it.
    """
    own = WHITESPACE if config.whitespace_symbols == "pieces" else ()
    symbols = [
        *config.user_defined_symbols,
        *(piece for piece in own if piece not in config.user_defined_symbols),
    ]
    return {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "byte_fallback": config.byte_fallback,
        "character_coverage": config.character_coverage,
        "split_digits": config.split_digits,
        **({"control_symbols": list(config.control_symbols)} if config.control_symbols else {}),
        # SentencePiece searches for symbols after it has written spaces as U+2581.
        **(
            {"user_defined_symbols": [symbol.replace(" ", "\u2581") for symbol in symbols]}
            if symbols
            else {}
        ),
        "normalization_rule_name": config.normalization,
        "remove_extra_whitespaces": config.remove_extra_whitespaces,
        "add_dummy_prefix": config.add_dummy_prefix,
        "allow_whitespace_only_pieces": config.allow_whitespace_only_pieces,
        "max_sentence_length": 1 << 30,  # SentencePiece skips longer lines silently
        "num_threads": TRAINING_THREADS,
        # Errors only.
        "minloglevel": 2,
    }


def _iter_sample_lines(
    report: Report, sources: Sequence[Path], sample: TrainingSample
) -> Iterator[str]:
    """Yield the lines of the sampled documents; pieces with newlines are configured, not
    learned.
    """
    for source in sources:
        for batch in read_batches(source):
            for row in sample.select_rows(batch):
                yield from filter(None, batch.column("text")[row].as_py().split("\n"))
            report(batch.num_rows, 0)


def _describe_training_error(
    error: RuntimeError, config: SentencePieceConfig, sample: dict[str, Any]
) -> str:
    """Format the error of SentencePiece, which is almost always about the size of the
    vocabulary.
    """
    reason = str(error).rsplit("] ", 1)[-1].strip().rstrip(".")
    return (
        f"tokenizer.vocab_size={config.vocab_size} cannot be trained on {sample['documents']:,} "
        f"documents ({sample['bytes']:,} bytes): {reason}. Choose another tokenizer.vocab_size, "
        "or give more documents."
    )
