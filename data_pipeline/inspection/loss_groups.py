"""Group the losses of a run by host, domain, or any column of its documents, and export them by
document.

Reads document_losses/ of a run folder, and tokens/ and documents/ of its datasets. Writes one
parquet file with the losses of each document next to its id.

Invariants:
- Every token that was trained on is in one group.
- Columns of documents/ are read file by file; texts are never read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from llmsys.data_pipeline.core.document_schema import read_cells
from llmsys.data_pipeline.rules.derived_columns import DERIVED, NO_VALUE
from llmsys.dataset.document_losses import DocumentLosses, read_side_columns
from llmsys.dataset.token_split import TokenShards
from llmsys.errors import ConfigError, DataError
from llmsys.storage.arrow_file import read_columns, read_schema
from llmsys.storage.atomic_write import write_bytes_atomically

# Groups of a column of numbers, each with as many documents.
NUM_BUCKETS = 10
# Columns of the token files.
_STORED = ("source", "file")


@dataclass(frozen=True)
class LossGroup:
    """The documents of a run that have one value of a column.

    Attributes:
        value: The value, or the range of a bucket.
        documents: Number of documents.
        tokens: Targets over all epochs.
        share: Share of all targets.
        loss: Nats per token.
        excess: Loss above the mean of the steps that the documents were in, in nats per token.
        first_loss: Loss in the first epoch of each document, weighted by tokens.
        last_loss: Loss in the last epoch of each document, weighted by tokens.
    """

    value: str
    documents: int
    tokens: int
    share: float
    loss: float
    excess: float
    first_loss: float
    last_loss: float


def group_losses(
    losses: DocumentLosses, names: Sequence[str], sources: Sequence[TokenShards], column: str
) -> list[LossGroup]:
    """Group the documents of a run by a column.

    Args:
        losses: The documents.
        names: Name of each source.
        sources: The training split of each source.
        column: `host`, `domain`, `year`, `month`, `source`, `file`, or a column of documents/.
            Numbers are divided into `NUM_BUCKETS` buckets of about as many documents.

    Returns:
        Groups, those with the most tokens first.

    Raises:
        ConfigError: No source has the column.
        DataError: documents/ is gone or damaged.
    """
    labels, codes_D = _label_documents(losses, names, sources, column)
    size = len(labels)
    documents = np.bincount(codes_D, minlength=size)

    def add_up(values_D: NDArray[Any]) -> NDArray[np.float64]:
        sums: NDArray[np.float64] = np.bincount(codes_D, values_D.astype(np.float64), size).astype(
            np.float64, copy=False
        )
        return sums

    tokens = add_up(losses.tokens_D)
    nats = add_up(losses.nats_D)
    expected = add_up(losses.expected_D)
    firsts = add_up(losses.first_D * losses.tokens_D)
    lasts = add_up(losses.last_D * losses.tokens_D)
    order = [code for code in np.argsort(-tokens, kind="stable").tolist() if documents[code]]
    return [
        LossGroup(
            value=labels[code],
            documents=int(documents[code]),
            tokens=int(tokens[code]),
            share=float(tokens[code] / tokens.sum()),
            loss=float(nats[code] / tokens[code]),
            excess=float((nats[code] - expected[code]) / tokens[code]),
            first_loss=float(firsts[code] / tokens[code]),
            last_loss=float(lasts[code] / tokens[code]),
        )
        for code in order
    ]


def _label_documents(
    losses: DocumentLosses, names: Sequence[str], sources: Sequence[TokenShards], column: str
) -> tuple[list[str], NDArray[np.int64]]:
    """Return the labels of all groups, and the group of each document, (D,)."""
    if column == "source":
        return [name or NO_VALUE for name in names], losses.sources_D
    values: list[Any]
    if column == "file":
        values = [*read_side_columns(losses, sources, "file")]
    else:
        values = read_document_column(losses, sources, column)
    numbers = [value for value in values if isinstance(value, float | int)]
    if numbers and not any(isinstance(value, bool | str) for value in values):
        return _label_buckets(values)
    codes: dict[str, int] = {}
    found = [
        codes.setdefault(NO_VALUE if value in (None, "") else str(value), len(codes))
        for value in values
    ]
    return list(codes), np.array(found, np.int64)


def _label_buckets(values: Sequence[float | None]) -> tuple[list[str], NDArray[np.int64]]:
    """Return the ranges of buckets with about as many values, and the bucket of each value."""
    numbers = np.array([np.nan if value is None else value for value in values], np.float64)
    real = numbers[~np.isnan(numbers)]
    edges = np.unique(np.quantile(real, np.arange(1, NUM_BUCKETS) / NUM_BUCKETS))
    edges = edges[edges > real.min()]
    codes = np.searchsorted(edges, numbers, side="right").astype(np.int64)
    bounds = [real.min(), *edges, real.max()]
    labels = [f"{low:.4g} to {high:.4g}" for low, high in pairwise(bounds)]
    codes[np.isnan(numbers)] = len(labels)
    return [*labels, NO_VALUE], codes


def read_document_column(
    losses: DocumentLosses, sources: Sequence[TokenShards], column: str
) -> list[Any]:
    """Read a column of documents/ for the documents of a run.

    Args:
        losses: The documents.
        sources: The training split of each source.
        column: A column of documents/, or one that follows from it: `host`, `domain`, `year`,
            `month`.

    Returns:
        The value of each document in order, None where there is none.

    Raises:
        ConfigError: No source has the column.
        DataError: A source has no documents/, or a file is damaged.
    """
    stored, derive = DERIVED.get(column, (column, None))
    files = {source: _list_document_files(shards) for source, shards in enumerate(sources)}
    _require_column(files, column, stored)
    ids = np.array(read_side_columns(losses, sources, "id"), np.bytes_)
    values: list[Any] = [None] * len(ids)
    for source, paths in files.items():
        own = np.flatnonzero(losses.sources_D == source)
        own = own[np.argsort(ids[own], kind="stable")]
        sorted_ids = ids[own]
        for path in paths:
            if stored not in read_schema(path).names:
                continue
            for batch in read_columns(path, lambda name: name in ("id", stored)):
                theirs = np.array(batch.column("id").to_pylist(), np.bytes_)
                places = np.searchsorted(sorted_ids, theirs)
                places[places == len(sorted_ids)] = 0
                rows = np.flatnonzero(sorted_ids[places] == theirs)
                cells = read_cells(batch.column(stored).take(pa.array(rows)))
                for place, cell in zip(own[places[rows]].tolist(), cells, strict=True):
                    values[place] = cell if derive is None or cell is None else derive(cell)
    return values


def _list_document_files(shards: TokenShards) -> list[Path]:
    paths = sorted((shards.folder / "documents").glob("*.arrow"))
    if not paths:
        raise DataError(
            f"{shards.folder} has no documents/, which have the columns of its documents. Group by "
            "file or source, or prepare the dataset again: llmsys prepare CONFIG"
        )
    return paths


def _require_column(files: dict[int, list[Path]], column: str, stored: str) -> None:
    names = dict.fromkeys(
        name for paths in files.values() for name in read_schema(paths[0]).names if name != "text"
    )
    if stored not in names:
        known = [name for name, (needed, _) in DERIVED.items() if needed in names]
        raise ConfigError(
            f"--by-loss {column} is no column of documents/. Use "
            f"{', '.join([*known, *_STORED, *names])}."
        )


def find_document_texts(
    sources: Sequence[TokenShards], places: Sequence[tuple[int, str]]
) -> dict[tuple[int, str], dict[str, str]]:
    """Read URL and text of a few documents, where documents/ still has them.

    Args:
        sources: The training split of each source.
        places: Source and id of each document.

    Returns:
        `url` and `text` by source and id.

    Raises:
        DataError: A file is damaged.
    """
    found: dict[tuple[int, str], dict[str, str]] = {}
    for source, shards in enumerate(sources):
        wanted = pa.array([name for one, name in places if one == source], pa.string())
        for path in sorted((shards.folder / "documents").glob("*.arrow")) if len(wanted) else ():
            for index, rows in _iter_matches(path, wanted):
                columns = read_columns(path, lambda name: name in ("id", "url", "text"), [index])
                for row in next(columns).take(rows).to_pylist():
                    shown = {key: row.get(key) or "" for key in ("url", "text")}
                    found[source, row["id"]] = shown
    return found


def _iter_matches(path: Path, wanted: pa.Array) -> Iterator[tuple[int, pa.Array]]:
    """Yield the record batches that have a wanted id, and the rows of these."""
    for index, batch in enumerate(read_columns(path, lambda name: name == "id")):
        rows = pc.indices_nonzero(pc.is_in(batch.column("id"), wanted))
        if len(rows):
            yield index, rows


def export_losses(
    losses: DocumentLosses, names: Sequence[str], sources: Sequence[TokenShards], output: Path
) -> int:
    """Write the losses of each document with its id, to join them with documents/.

    Args:
        losses: The documents.
        names: Name of each source.
        sources: The training split of each source.
        output: A new parquet file.

    Returns:
        Number of documents.

    Raises:
        ConfigError: The file is no parquet file, or exists.
        DataError: A token file is damaged, or the file cannot be written.
    """
    if output.suffix != ".parquet":
        raise ConfigError(f"--output {output} has no known ending with --by-loss. Use .parquet.")
    if output.exists():
        raise ConfigError(
            f"--output {output} exists already. Name another file, or remove it first."
        )
    table = pa.table(
        {
            "id": pa.array(read_side_columns(losses, sources, "id"), pa.string()),
            "source": pa.array([names[source] for source in losses.sources_D], pa.string()),
            "tokens": losses.tokens_D,
            "epochs": losses.epochs_D.astype(np.int32),
            "loss": losses.mean_losses.astype(np.float32),
            "excess": losses.excesses.astype(np.float32),
            "first_loss": losses.first_D.astype(np.float32),
            "last_loss": losses.last_D.astype(np.float32),
        }
    )
    data = pa.BufferOutputStream()
    pq.write_table(table, data, compression="zstd")
    write_bytes_atomically(output, data.getvalue().to_pybytes())
    return len(losses.tokens_D)


def format_loss_groups(
    losses: DocumentLosses, column: str, groups: Sequence[LossGroup], limit: int
) -> str:
    """Format groups as a table.

    Args:
        losses: All documents.
        column: The column they are grouped by.
        groups: Groups, those with the most tokens first.
        limit: Maximum number of rows, sorted by excess.

    Returns:
        Lines of text.
    """
    shown = sorted(groups[:limit], key=lambda group: -group.excess)
    width = max(len(column), *(len(group.value) for group in shown))
    rows = [
        f"{column:<{width}} {'documents':>10} {'tokens':>14} {'share':>7} {'loss':>7} "
        f"{'excess':>8} {'first':>7} {'last':>7}",
        *(
            f"{group.value:<{width}} {group.documents:>10,} {group.tokens:>14,} "
            f"{group.share:>7.2%} {group.loss:>7.3f} {group.excess:>+8.3f} "
            f"{group.first_loss:>7.3f} {group.last_loss:>7.3f}"
            for group in shown
        ),
        "",
        f"{len(losses.tokens_D):,} documents and {int(losses.tokens_D.sum()):,} tokens in "
        f"{losses.num_steps:,} steps; nats per token. excess: above the mean of the same steps; "
        "first, last: in the first and the last epoch of a document",
    ]
    if len(groups) > limit:
        rows.append(
            f"the {limit} of {len(groups):,} with the most tokens; --limit N shows more, --json all"
        )
    if losses.num_skipped:
        rows.append(f"{losses.num_skipped:,} skipped steps, which changed no weight, are left out")
    return "\n".join(rows)
