"""Training documents in, a SentencePiece model out: the same bytes for the same documents, whatever the workers.

Reads document files, writes tokenizer.model, tokenizer.vocab (for people) and made.json (how it was made). The
sample is the documents with the smallest hashes of their ids, so that it is reproducible and grows at its end.
"""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from data_pipeline.document import is_heldout, positions, text_bytes
from data_pipeline.executors.event import Report
from data_pipeline.tokenize.publish import publish_sentencepiece
from llmsys.config.data import SplitConfig
from llmsys.config.tokenizer import SentencePieceConfig
from llmsys.errors import DataError
from llmsys.shards import read_batches

# The number of threads is written into the model, so it must not follow the machine.
TRAINING_THREADS = 4


def train_sentencepiece(
    report: Report, *, sources: Sequence[Path], folder: Path, config: SentencePieceConfig, split: SplitConfig
) -> dict[str, Any]:
    """Train on the sample and publish the three files; progress is in documents."""
    limit, sample = _sample(sources, config.sample_bytes, split)
    if not sample["documents"]:
        raise DataError(
            "no document outside the held-back ones is left to train a tokenizer on. "
            "Set data.split.heldout_fraction lower, or give more input in data.inputs."
        )
    return fit_sentencepiece(_lines(report, sources, limit, split), folder=folder, config=config, sample=sample)


def fit_sentencepiece(
    lines: Iterator[str], *, folder: Path, config: SentencePieceConfig, sample: dict[str, int]
) -> dict[str, Any]:
    """Train on lines of text and publish the three files; `sample` says how many documents and bytes they are."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **_options(config))
    except RuntimeError as error:
        raise DataError(_training_failure(error, config, sample)) from error
    made = {"config": config.model_dump(mode="json"), "sample": sample}
    return publish_sentencepiece(folder, model.getvalue(), made)


def _options(config: SentencePieceConfig) -> dict[str, Any]:
    """Return SentencePiece's options: text is taken as it is, so that decoding gives it back."""
    return {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "byte_fallback": config.byte_fallback,
        "character_coverage": config.character_coverage,
        "split_digits": config.split_digits,
        **({"control_symbols": list(config.control_symbols)} if config.control_symbols else {}),
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,  # the first word of a line has no space before it, and none is invented
        "allow_whitespace_only_pieces": True,
        "max_sentence_length": 1 << 30,  # a longer line would be left out in silence
        "num_threads": TRAINING_THREADS,
        "minloglevel": 2,
    }


def _sample(sources: Sequence[Path], limit_bytes: int, split: SplitConfig) -> tuple[int, dict[str, int]]:
    """Return the largest position that is in the sample, and the documents and bytes in it."""
    places, sizes = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for source in sources:
        for batch in read_batches(source):
            ids = batch.column("id").to_pylist()
            train = ~is_heldout(ids, split.heldout_fraction, split.seed)
            places.append(positions(ids, "tokenizer", 0)[train])
            sizes.append(text_bytes(batch.column("text"))[train])
    place, size = np.concatenate(places), np.concatenate(sizes)
    order = np.argsort(place, kind="stable")
    total = np.cumsum(size[order])
    documents = min(len(order), int(np.searchsorted(total, limit_bytes)) + 1)
    if not documents:
        return 0, {"documents": 0, "bytes": 0}
    return int(place[order[documents - 1]]), {"documents": documents, "bytes": int(total[documents - 1])}


def _lines(report: Report, sources: Sequence[Path], limit: int, split: SplitConfig) -> Iterator[str]:
    """Yield the lines of the sampled documents: no piece contains a newline, which is encoded as a byte."""
    for source in sources:
        for batch in read_batches(source):
            ids = batch.column("id").to_pylist()
            chosen = (positions(ids, "tokenizer", 0) <= np.uint64(limit)) & ~is_heldout(
                ids, split.heldout_fraction, split.seed
            )
            for row in np.flatnonzero(chosen).tolist():
                yield from filter(None, batch.column("text")[row].as_py().split("\n"))
            report(batch.num_rows, 0)


def _training_failure(error: RuntimeError, config: SentencePieceConfig, sample: dict[str, int]) -> str:
    """Say in our words what SentencePiece refuses, almost always the size of the vocabulary."""
    reason = str(error).rsplit("] ", 1)[-1].strip().rstrip(".")
    return (
        f"tokenizer.vocab_size={config.vocab_size} cannot be trained on {sample['documents']:,} documents "
        f"({sample['bytes']:,} bytes): {reason}. Set tokenizer.vocab_size to a value that fits, or give more documents."
    )
