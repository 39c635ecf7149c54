"""Shuffle encoded documents over the whole dataset into token files of about equal size, by split.

Reads encoded files, memory-mapped. Writes token files, their page tables, and the index of a split.
A document's place in the shuffle is a hash of its id, and a token file is a range of places. Files
of a repository may share a place; then they are ordered by their imports (`repository_order.py`).

Invariants:
- Every file is written independently; no list of all documents is needed.
- The number of files follows from the tokens and the configuration, not from the workers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from llmsys.data_pipeline.core.document_schema import concat_batches
from llmsys.data_pipeline.executors.base import Report
from llmsys.data_pipeline.tokenize.repository_order import order_documents
from llmsys.dataset.token_shards import (
    ArrowFileWriter,
    TokenFile,
    build_token_schema,
    choose_token_dtype,
    read_batches,
    write_page_table,
    write_token_index,
)

CELLS_BITS = 16  # places are divided into 65,536 cells; a file is a run of cells
SplitName = Literal["train", "heldout"]
SPLITS: tuple[SplitName, ...] = ("train", "heldout")


@dataclass(frozen=True)
class TokenFilePlan:
    """One token file: the documents of a split whose cell is in [first, last), and their number
    of tokens.
    """

    split: SplitName
    number: int
    first: int
    last: int
    tokens: int

    @property
    def name(self) -> str:
        """File name in tokens/."""
        return f"{self.split}-{self.number:05d}.arrow"


def plan_files(sources: Sequence[Path], split: SplitName, shard_tokens: int) -> list[TokenFilePlan]:
    """Divide a split into files of about equal size.

    Args:
        sources: encoded files.
        split: the split.
        shard_tokens: target size of a file in tokens.

    Returns:
        A plan per file; [] if the split has no documents.
    """
    tokens = np.zeros(1 << CELLS_BITS, np.int64)
    for source in sources:
        for batch in read_batches(source):
            chosen = _compute_split_mask(batch, split)
            lengths = np.diff(batch.column("tokens").offsets.to_numpy())[chosen]
            np.add.at(tokens, _compute_cells(batch)[chosen], lengths)
    total = int(tokens.sum())
    files = -(-total // shard_tokens)
    before = np.cumsum(tokens) - tokens
    # A file begins at the first cell with at least its share of the tokens before it, and ends
    # where the next begins.
    edges = [int(np.searchsorted(before, total * number / files)) for number in range(files)] + [
        len(tokens)
    ]
    ranges = [(first, last, int(tokens[first:last].sum())) for first, last in pairwise(edges)]
    filled = [cut for cut in ranges if cut[2]]
    return [TokenFilePlan(split, number, *cut) for number, cut in enumerate(filled)]


def _compute_split_mask(batch: pa.RecordBatch, split: SplitName) -> Any:
    return batch.column("heldout").to_numpy() == (1 if split == "heldout" else 0)


def _compute_cells(batch: pa.RecordBatch) -> Any:
    return (batch.column("place").to_numpy() >> np.uint64(64 - CELLS_BITS)).astype(np.int64)


def write_token_file(
    report: Report,
    *,
    plan: TokenFilePlan,
    sources: Sequence[Path],
    output: Path,
    vocab_size: int,
    batch_tokens: int,
) -> dict[str, Any]:
    """Write one token file in shuffled order.

    Args:
        report: progress callback, in tokens.
        plan: the file.
        sources: encoded files, in the order that `plan_files` got.
        output: the file to write; its page table is written next to it.
        vocab_size: size of the vocabulary, which decides the dtype of tokens.
        batch_tokens: minimum tokens of a record batch.

    Returns:
        The entry of the file in the index.
    """
    schema = build_token_schema(choose_token_dtype(vocab_size))
    batches = [batch for source in sources for batch in read_batches(source)]
    with ArrowFileWriter(output, schema) as writer:
        for rows in _iter_row_tables(batches, plan, batch_tokens):
            batch = _gather_rows(batches, rows, schema)
            writer.write(batch)
            report(len(batch.column("tokens").values), 0)
    return write_page_table(output).model_dump()


def write_index(
    report: Report, *, output: Path, entries: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Write the index of a split.

    Args:
        report: progress callback, in files.
        output: the file to write.
        entries: what `write_token_file` returned for each file of the split.

    Returns:
        The sums of the split: documents, tokens, bytes and files.
    """
    files = [TokenFile.model_validate(entry) for entry in entries]
    write_token_index(output, files)
    report(len(files), 0)
    return {
        "documents": sum(file.rows for file in files),
        "tokens": sum(file.tokens for file in files),
        "bytes": sum(file.text_bytes for file in files),
        "files": len(files),
    }


def _iter_row_tables(
    batches: Sequence[pa.RecordBatch], plan: TokenFilePlan, batch_tokens: int
) -> Iterator[Any]:
    """Yield (R, 2) tables of [batch, row] in shuffled order, each of at least `batch_tokens`
    tokens.
    """
    places = [np.zeros(0, np.uint64)]
    found = [np.zeros((0, 2), np.int64)]
    lengths = [np.zeros(0, np.int64)]
    for number, batch in enumerate(batches):
        cells = _compute_cells(batch)
        rows = np.flatnonzero(
            _compute_split_mask(batch, plan.split) & (cells >= plan.first) & (cells < plan.last)
        )
        places.append(batch.column("place").to_numpy()[rows])
        found.append(np.stack([np.full(len(rows), number), rows], axis=1))
        lengths.append(np.diff(batch.column("tokens").offsets.to_numpy())[rows].astype(np.int64))
    table = np.concatenate(found)
    if batches and "repository" in batches[0].schema.names:
        order = order_documents(batches, table, np.concatenate(places))
    else:
        order = np.argsort(np.concatenate(places), kind="stable")
    table = table[order]
    tokens = np.cumsum(np.concatenate(lengths)[order])
    start = 0
    while start < len(table):
        reached = (tokens[start - 1] if start else 0) + batch_tokens
        stop = min(len(table), int(np.searchsorted(tokens, reached)) + 1)
        yield table[start:stop]
        start = stop


def _gather_rows(batches: Sequence[pa.RecordBatch], rows: Any, schema: pa.Schema) -> pa.RecordBatch:
    """Copy documents into one batch: first the rows of each source, then all in order."""
    grouped = np.argsort(rows[:, 0], kind="stable")
    numbers, starts = np.unique(rows[grouped, 0], return_index=True)
    pieces = [
        batches[number].select(schema.names).take(pa.array(chosen))
        for number, chosen in zip(
            numbers.tolist(), np.split(rows[grouped, 1], starts[1:]), strict=True
        )
    ]
    order = np.empty(len(rows), np.int64)
    order[grouped] = np.arange(len(rows))
    return concat_batches(pieces).take(pa.array(order)).cast(schema)
