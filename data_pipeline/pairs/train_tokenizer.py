"""Train one tokenizer for both sides of the training pairs.

The sample is the pairs with the smallest hashes of their ids, both sides of each, as for documents.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsys.config.tokenizer import TrainedTokenizerConfig
from llmsys.data_pipeline.core.document_schema import count_text_bytes, hash_positions
from llmsys.data_pipeline.executors.base import Report
from llmsys.data_pipeline.tokenize.train_sentencepiece import fit_tokenizer
from llmsys.dataset.token_shards import read_batches
from llmsys.errors import DataError


def train_pair_tokenizer(
    report: Report,
    *,
    sources: Sequence[Path],
    folder: Path,
    config: TrainedTokenizerConfig,
    sides: Sequence[str],
) -> dict[str, Any]:
    """Train a tokenizer on pairs and publish the model. Progress is in pairs.

    Args:
        report: Progress callback.
        sources: Files of training pairs.
        folder: Folder to write the tokenizer files to.
        config: Vocabulary size, algorithm and sample size.
        sides: Sides to train on: `source`, `target` or both.

    Returns:
        Description of the tokenizer: fingerprint, vocabulary size, end-of-sequence id.

    Raises:
        DataError: If there is no training pair.
    """
    limit, sample = _select_sample(sources, config.sample_bytes, sides)
    if not sample["documents"]:
        raise DataError(
            "no training pair is left to train a tokenizer on. Give more input, or correct the "
            "dropped pairs."
        )
    return fit_tokenizer(_iter_sample_texts(report, sources, limit, sides), folder, config, sample)


def _select_sample(
    files: Sequence[Path], limit_bytes: int, sides: Sequence[str]
) -> tuple[int, dict[str, int]]:
    """Return the largest hash position in the sample, and the pairs and bytes of the sample."""
    places = [np.zeros(0, np.uint64)]
    sizes = [np.zeros(0, np.int64)]
    for file in files:
        for batch in read_batches(file):
            places.append(hash_positions(batch.column("id").to_pylist(), "tokenizer", 0))
            sizes.append(
                sum(
                    (count_text_bytes(batch.column(side)) for side in sides),
                    start=np.zeros(1, np.int64),
                )
            )
    # By hash of the id, so that the sample does not depend on the order of files.
    place = np.concatenate(places)
    size = np.concatenate(sizes)
    order = np.argsort(place, kind="stable")
    total = np.cumsum(size[order])
    pairs = min(len(order), int(np.searchsorted(total, limit_bytes)) + 1)
    if not pairs:
        return 0, {"documents": 0, "bytes": 0}
    return int(place[order[pairs - 1]]), {"documents": pairs, "bytes": int(total[pairs - 1])}


def _iter_sample_texts(
    report: Report, files: Sequence[Path], limit: int, sides: Sequence[str]
) -> Iterator[str]:
    for file in files:
        for batch in read_batches(file):
            places = hash_positions(batch.column("id").to_pylist(), "tokenizer", 0)
            for row in np.flatnonzero(places <= np.uint64(limit)).tolist():
                yield from (batch.column(side)[row].as_py() for side in sides)
            report(batch.num_rows, 0)
