"""Embed the documents of one filtered file.

Reads the filtered file, decisions about it, and embeddings of earlier configs. Writes one key file:
hash of the embedding, hash of the text, row and rank of the document, and the embedding, in runs
sorted by the first.

Invariants:
    - An embedding that an earlier config computed of the same text by the same model is taken over:
      it is recognized by the hash of the text.
    - A document without an embedding is counted, and has no row.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from llmsys.config.deduplication import (
    ColumnEmbeddingsConfig,
    EncoderEmbeddingsConfig,
    SemanticDedupConfig,
)
from llmsys.data_pipeline.core.input_fields import FIELDS, JSON, decode_fields
from llmsys.data_pipeline.dedup.duplicate_decisions import mask_remaining_rows, read_dropped_rows
from llmsys.data_pipeline.dedup.embeddings import (
    Floats,
    Precision,
    build_embedding_schema,
    hash_embeddings,
    normalize_embeddings,
    require_numbers,
)
from llmsys.data_pipeline.dedup.keys import Columns, KeyWriter, hash_texts, read_key_column
from llmsys.data_pipeline.executors.base import Report
from llmsys.data_pipeline.stages.compute_signatures import split_document_ids
from llmsys.errors import DataError
from llmsys.storage.arrow_file import read_batches

if TYPE_CHECKING:
    from llmsys.data_pipeline.rules.encoder_model import EmbeddingModel

# Embeddings of a batch of documents as they are stored, None for those without one.
Embed = Callable[[pa.RecordBatch], list[Floats | None]]
_Hash = tuple[int, int]


def write_embeddings(
    report: Report,
    *,
    source: Path,
    number: int,
    dropped: Sequence[Path],
    output: Path,
    config: SemanticDedupConfig,
    model: str,
    earlier: Sequence[Path] = (),
) -> dict[str, Any]:
    """Write the embeddings of one filtered file. Progress is in documents.

    Args:
        report: Progress callback.
        source: The filtered file.
        number: Its index among the filtered files, by which decisions name it.
        dropped: Files of decisions; the rows that they drop are not embedded.
        output: File to write.
        config: The semantic duplicates.
        model: Digest of the model and its settings; "" for embeddings of the input.
        earlier: What the same model made of a filtered file of the same block under earlier
            configs. The output does not depend on it.

    Returns:
        Numbers of rows, of embeddings and of documents without one; length of an embedding, 0
        without any; `model`.
    """
    gone = read_dropped_rows(dropped, number)
    row = 0
    numbers = 0
    missing = 0
    embed = _build_embed(config, earlier)
    with KeyWriter(output, build_embedding_schema(config.precision)) as writer:
        for batch in read_batches(source):
            rows = np.arange(row, row + batch.num_rows)
            row += batch.num_rows
            stays = mask_remaining_rows(rows, gone)
            batch = batch.filter(pa.array(stays))
            values, present = _stack_embeddings(embed(batch), batch, numbers)
            missing += batch.num_rows - len(present)
            if len(present):
                numbers = values.shape[1]
                ranks = _rank_documents(batch.take(pa.array(present)), rows[stays][present])
                writer.write(ranks | {"high": hash_embeddings(values), "embedding": values})
            report(len(rows), 0)
    return {
        "rows": row,
        "embeddings": writer.count,
        "missing": missing,
        "numbers": numbers,
        "model": model,
    }


def _rank_documents(batch: pa.RecordBatch, rows: npt.NDArray[np.int64]) -> Columns:
    import pyarrow.compute as pc  # slow to import

    texts = hash_texts(batch.column("text").to_pylist())
    ids = split_document_ids(batch.column("id").to_pylist())
    lengths = pc.utf8_length(batch.column("text")).to_numpy(zero_copy_only=False)
    return {
        "text_high": texts[:, 0],
        "text_low": texts[:, 1],
        "row": rows,
        "shortness": -np.asarray(lengths, np.int64),
        "id_high": ids[:, 0],
        "id_low": ids[:, 1],
    }


def _stack_embeddings(
    found: list[Floats | None], batch: pa.RecordBatch, numbers: int
) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Return the embeddings that there are, (N, numbers), and their places in the batch (N,).

    Raises:
        DataError: One is of another length than those before, of `numbers`, 0 without any.
    """
    present = np.array([place for place, one in enumerate(found) if one is not None], np.int64)
    values = [one for one in found if one is not None]
    for place, one in zip(present.tolist(), values, strict=True):
        numbers = numbers or len(one)
        if len(one) != numbers:
            raise DataError(
                f"the embedding of the document {batch.column('id')[place].as_py()} has "
                f"{len(one):,} numbers, and others have {numbers:,}. Embed all documents by one "
                "model."
            )
    require_numbers(numbers, "an embedding")
    return np.stack(values) if values else np.zeros((0, 0), np.float32), present


def _build_embed(config: SemanticDedupConfig, earlier: Sequence[Path]) -> Embed:
    match config.embeddings:
        case ColumnEmbeddingsConfig(column=column):
            return lambda batch: _read_column(batch, column, config.precision)
        case EncoderEmbeddingsConfig() as encoder:
            known = _KnownEmbeddings(earlier)
            return lambda batch: _embed_texts(batch, encoder, config.precision, known)
        case unreachable:
            assert_never(unreachable)


def _read_column(batch: pa.RecordBatch, column: str, precision: Precision) -> list[Floats | None]:
    if FIELDS not in batch.schema.names:
        return [None] * batch.num_rows
    cells = batch.column(FIELDS).to_pylist()
    found = (_read_numbers(decode_fields(cell).get(column)) for cell in cells)
    # One by one: lengths are compared later.
    return [None if one is None else _normalize_rows(one[None], precision)[0] for one in found]


def _normalize_rows(values: Floats, precision: Precision) -> list[Floats | None]:
    """Return embeddings as they are stored; None for those without a direction."""
    found, usable = normalize_embeddings(values, precision)
    rows = iter(found)
    return [next(rows) if is_usable else None for is_usable in usable.tolist()]


def _read_numbers(value: Any) -> Floats | None:
    """Return a list of numbers as an array; None for another value. One of None is NaN."""
    numbers = value.get(JSON) if isinstance(value, dict) else None
    if not isinstance(numbers, list) or not numbers:
        return None
    try:
        found = np.array(numbers, np.float64)
    except (TypeError, ValueError, OverflowError):  # texts, ragged lists, huge integers
        return None
    return found if found.ndim == 1 else None


def _embed_texts(
    batch: pa.RecordBatch,
    config: EncoderEmbeddingsConfig,
    precision: Precision,
    known: "_KnownEmbeddings",
) -> list[Floats | None]:
    """Embed each distinct text that is not known; an empty one has no embedding."""
    texts = batch.column("text").to_pylist()
    names = [(int(high), int(low)) for high, low in hash_texts(texts).tolist()]
    found = known.find_embeddings(set(names))
    asked = {
        name: text
        for name, text in zip(names, texts, strict=True)
        if text.strip() and name not in found
    }
    if asked:
        embedded = _get_model(config).embed_texts(list(asked.values()))
        found |= zip(asked, _normalize_rows(embedded, precision), strict=True)
    return [found.get(name) for name in names]


@lru_cache(maxsize=1)
def _get_model(config: EncoderEmbeddingsConfig) -> "EmbeddingModel":
    """Return one model per process."""
    from llmsys.data_pipeline.rules.encoder_model import EmbeddingModel  # imports torch

    return EmbeddingModel(config)


class _KnownEmbeddings:
    """Embeddings of earlier configs by hash of the text: the hashes are in memory, the embeddings
    in their mapped files.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._places = dict[_Hash, tuple[pa.RecordBatch, int]]()
        for path in files:
            for batch in _iter_readable(path):
                halves = (batch.column(name).to_pylist() for name in ("text_high", "text_low"))
                for row, name in enumerate(zip(*halves, strict=True)):
                    self._places.setdefault(name, (batch, row))

    def find_embeddings(self, names: set[_Hash]) -> dict[_Hash, Floats | None]:
        """Return the known embeddings of some texts."""
        found = dict[_Hash, Floats | None]()
        for name in names & self._places.keys():
            batch, row = self._places[name]
            found[name] = read_key_column(batch.column("embedding").slice(row, 1))[0]
        return found


def _iter_readable(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a file up to the first that is damaged: what it held is computed
    again.
    """
    try:
        yield from read_batches(path)
    except DataError:
        return
