"""Losses by document over a run: the record of its ranks, summed and compared with the rest of each
step.

Reads `document_losses/` of a run folder (loss_parts.py) and the ids in the token files.

A loss falls during a run, so a document that was seen early has a higher one. Its excess does not:
it is the loss in nats per token, less the mean loss of the steps that the document was in.

Invariants:
- Steps that were skipped changed no weight, and are not counted.
- Memory is that of one file, and 60 bytes for each document and epoch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from llmsys.config.data import DataConfig, list_dataset_folders
from llmsys.config.mixture import MixtureConfig
from llmsys.dataset.loss_parts import read_loss_parts
from llmsys.dataset.paged_token_shards import require_paged
from llmsys.dataset.token_shards import open_tokens
from llmsys.dataset.token_split import TokenShards
from llmsys.errors import DataError

Floats = NDArray[np.float64]

_KEYS = ["source", "document", "epoch"]
# Rows of the running sums before they are summed again.
_MAX_ROWS = 1 << 20


@dataclass(frozen=True)
class DocumentLosses:
    """D documents of a run with their losses, ordered by source and document.

    Attributes:
        sources_D: Source of each document.
        documents_D: Its number in the training split of the source.
        tokens_D: Targets over all epochs.
        nats_D: Their loss, summed.
        expected_D: What their loss would be with the mean of the steps that they were in.
        epochs_D: Epochs that had a target of the document.
        first_D: Loss in nats per token in the first of these epochs.
        last_D: Loss in the last of them.
        num_steps: Steps that are counted.
        num_skipped: Steps that were skipped, which are not.
    """

    sources_D: NDArray[np.int64]
    documents_D: NDArray[np.int64]
    tokens_D: NDArray[np.int64]
    nats_D: Floats
    expected_D: Floats
    epochs_D: NDArray[np.int64]
    first_D: Floats
    last_D: Floats
    num_steps: int
    num_skipped: int

    @property
    def mean_losses(self) -> Floats:
        """Loss of each document in nats per token."""
        losses: Floats = self.nats_D / self.tokens_D
        return losses

    @property
    def excesses(self) -> Floats:
        """Loss of each document above the mean of the steps that it was in, in nats per token."""
        excess: Floats = (self.nats_D - self.expected_D) / self.tokens_D
        return excess


def open_loss_sources(data: DataConfig) -> tuple[tuple[str, ...], tuple[TokenShards, ...]]:
    """Open the training data whose losses a run records.

    Args:
        data: The `data:` section of the run.

    Returns:
        Name and training split of each source; a single dataset has the name "".

    Raises:
        DataError: A dataset is missing or damaged.
    """
    names = (
        tuple(source.title for source in data.sources) if isinstance(data, MixtureConfig) else ("",)
    )
    return names, tuple(open_tokens(folder, "train") for folder in list_dataset_folders(data))


def load_document_losses(run_folder: Path, sources: Sequence[TokenShards]) -> DocumentLosses:
    """Sum the record of a run by document.

    Args:
        run_folder: Folder of the run.
        sources: The training split of each source of the run, in the order of the config.

    Returns:
        The documents that were trained on.

    Raises:
        DataError: The run has no record, a file is damaged, a dataset has changed since, or every
            recorded step was skipped.
    """
    fingerprints = [source.fingerprint for source in sources]
    means, num_skipped = _compute_step_losses(read_loss_parts(run_folder, fingerprints))
    if not len(means):
        raise DataError(
            f"all {num_skipped} recorded steps of {run_folder} were skipped, so no document was "
            "trained on. llmsys report shows why."
        )
    rows = _sum_by_epoch(read_loss_parts(run_folder, fingerprints), means).sort_by(
        [(key, "ascending") for key in _KEYS]
    )
    sources_N, documents_N = (rows.column(key).to_numpy().astype(np.int64) for key in _KEYS[:2])
    is_first = np.ones(len(sources_N), np.bool_)
    is_first[1:] = (np.diff(sources_N) != 0) | (np.diff(documents_N) != 0)
    firsts = np.flatnonzero(is_first)
    lasts = np.append(firsts[1:], len(sources_N)) - 1
    tokens_N, nats_N, expected_N = (
        rows.column(f"{name}_sum").to_numpy() for name in ("tokens", "nats", "expected")
    )
    by_epoch = nats_N / tokens_N
    return DocumentLosses(
        sources_D=sources_N[firsts],
        documents_D=documents_N[firsts],
        tokens_D=np.add.reduceat(tokens_N, firsts).astype(np.int64),
        nats_D=np.add.reduceat(nats_N, firsts),
        expected_D=np.add.reduceat(expected_N, firsts),
        epochs_D=lasts - firsts + 1,
        first_D=by_epoch[firsts],
        last_D=by_epoch[lasts],
        num_steps=int((means == means).sum()),
        num_skipped=num_skipped,
    )


def _compute_step_losses(batches: Iterable[pa.RecordBatch]) -> tuple[Floats, int]:
    """Return the mean loss of each step, NaN for one that is not there, and the number of skipped
    steps.
    """
    nats = np.zeros(0)
    tokens = np.zeros(0)
    skipped: set[int] = set()
    for batch in batches:
        steps, weights = (batch.column(name).to_numpy() for name in ("step", "tokens"))
        applied = batch.column("applied").to_numpy(zero_copy_only=False)
        skipped.update(np.unique(steps[~applied]).tolist())
        size = max(len(nats), int(steps.max(initial=0)) + 1)
        nats, tokens = (
            np.pad(sums, (0, size - len(sums)))
            + np.bincount(steps[applied], values[applied].astype(np.float64), size)
            for sums, values in ((nats, batch.column("nats").to_numpy()), (tokens, weights))
        )
    if not tokens.any():
        return np.zeros(0), len(skipped)
    with np.errstate(invalid="ignore"):  # steps that are not there
        return nats / tokens, len(skipped)


def _sum_by_epoch(batches: Iterable[pa.RecordBatch], means: Floats) -> pa.Table:
    """Return the sums of tokens, nats and expected nats by source, document and epoch."""
    names = ("tokens", "nats", "expected")
    waiting: list[pa.Table] = []
    num_rows = 0
    for batch in batches:
        rows = pa.Table.from_batches([batch]).filter(pc.field("applied"))
        tokens = rows.column("tokens").to_numpy()
        columns = [
            *(rows.column(key) for key in _KEYS),
            pa.array(tokens, pa.int64()),
            rows.column("nats").cast(pa.float64()),
            pa.array(means[rows.column("step").to_numpy()] * tokens, pa.float64()),
        ]
        waiting.append(_sum_rows(pa.table(columns, names=[*_KEYS, *names]), names))
        num_rows += waiting[-1].num_rows
        if num_rows > _MAX_ROWS and len(waiting) > 1:
            waiting = [_sum_again(waiting, names)]
            # The sums themselves may be more rows than that: wait for as many again.
            num_rows = 0
    return _sum_again(waiting, names)


def _sum_again(tables: Sequence[pa.Table], names: Sequence[str]) -> pa.Table:
    joined = pa.concat_tables(tables).rename_columns([*_KEYS, *names])
    return _sum_rows(joined, names)


def _sum_rows(rows: pa.Table, names: Sequence[str]) -> pa.Table:
    summed = rows.group_by(_KEYS, use_threads=False).aggregate([(name, "sum") for name in names])
    return summed.select([*_KEYS, *(f"{name}_sum" for name in names)])


def read_side_columns(
    losses: DocumentLosses, sources: Sequence[TokenShards], column: str
) -> list[str]:
    """Read a column of the token files for the documents of a run.

    Args:
        losses: The documents.
        sources: The training split of each source.
        column: `id` or `file`.

    Returns:
        The value of each document, in order.

    Raises:
        DataError: A token file is damaged or gone.
    """
    found: list[str] = []
    for source, shards in enumerate(sources):
        wanted = losses.documents_D[losses.sources_D == source]
        at = 0
        for first, cells in require_paged(shards).iter_side_column(column):
            stop = int(np.searchsorted(wanted, first + len(cells)))
            if stop > at:
                found += cells.take(pa.array(wanted[at:stop] - first)).to_pylist()
                at = stop
    return found


# Targets that a document needs to be listed: the loss of a few tokens says little about its text.
MIN_LISTED_TOKENS = 32


def select_extremes(losses: DocumentLosses, count: int) -> tuple[list[int], list[int]]:
    """Select the documents with the highest and with the lowest excess.

    Args:
        losses: The documents.
        count: Documents of each kind; documents of fewer than `MIN_LISTED_TOKENS` targets are left
            out.

    Returns:
        Places in `losses` of the highest, highest first, and of the lowest, lowest first. No
        document is in both.
    """
    long_enough = np.flatnonzero(losses.tokens_D >= MIN_LISTED_TOKENS)
    ordered = long_enough[np.argsort(losses.excesses[long_enough], kind="stable")]
    half = min(count, (len(ordered) + 1) // 2)
    highest = ordered[len(ordered) - half :][::-1]
    return highest.tolist(), ordered[: min(count, len(ordered) - half)].tolist()
