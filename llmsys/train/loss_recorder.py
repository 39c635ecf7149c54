"""Record the loss of each document's tokens in every step of a run.

Reads the sums that the loss has added up on the device (llmsys/data/target_documents.py). Writes
files of llmsys/dataset/loss_parts.py, of `MAX_ROWS` rows or shorter; the newest is written again
at each checkpoint.

Invariants:
- No weight, no loss and no order of sums depends on it.
- The host does not wait for the device: the sums of a step are copied once, while the next step is
  computed, and read after it.
- Memory is bounded by MAX_ROWS and the documents of two steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmsys.data.batch import Batch
from llmsys.data.target_documents import SpanSums
from llmsys.dataset.loss_parts import (
    LOSS_SCHEMA,
    LossPart,
    extend_loss_part,
    truncate_loss_parts,
)
from llmsys.engine.engine import StepResult

# Rows that wait for a checkpoint, 27 bytes each. More are written at once.
MAX_ROWS = 1 << 18


@dataclass(frozen=True)
class _CopiedStep:
    """The sums of a step on their way to the host.

    Attributes:
        step: The step, counted from 1.
        is_applied: False for a skipped step.
        sums: The spans of its micro-batches, as many as were computed here.
        host: Their sums one after the other, valid when the event has happened.
        event: End of the copy; None: it has ended.
    """

    step: int
    is_applied: bool
    sums: list[SpanSums]
    host: Tensor
    event: torch.cuda.Event | None


class DocumentLossRecorder:
    """The recorder of one rank. Ranks do not communicate: each writes the targets whose loss it
    computes.

    Args:
        run_folder: Folder of the run.
        rank: This rank.
        ranks: Number of ranks.
        fingerprints: Fingerprint of the dataset of each source.
    """

    def __init__(
        self, run_folder: Path, rank: int, ranks: int, fingerprints: Sequence[str]
    ) -> None:
        self._folder = run_folder
        self._rank = rank
        self._ranks = ranks
        self._fingerprints = fingerprints
        self._batches: list[Batch] = []
        self._step = 0
        self._copied: _CopiedStep | None = None
        self._newest: LossPart | None = None
        self._rows: list[pa.RecordBatch] = []
        self._num_rows = 0

    def begin_step(self, step: int, batches: Sequence[Batch]) -> None:
        """Take the micro-batches of a step before they are trained on.

        Args:
            step: The step, counted from 0.
            batches: Micro-batches of this rank.
        """
        self._step = step + 1
        self._batches = list(batches)

    def end_step(self, result: StepResult) -> None:
        """Begin to copy the sums of the step to the host, and take those of the step before.

        Args:
            result: The result of the step.
        """
        self._take_copied()
        named = [
            batch.target_documents.sums
            for batch in self._batches
            if batch.target_documents is not None
        ]
        self._batches = []
        filled = [(one, one.sums_2S) for one in named if one.sums_2S is not None]
        if filled:
            on_device = torch.cat([tensor for _, tensor in filled])
            host = on_device.to("cpu", non_blocking=on_device.is_cuda)
            event = None
            if on_device.is_cuda:
                event = torch.cuda.Event()
                event.record()
            self._copied = _CopiedStep(
                self._step, result.is_applied, [one for one, _ in filled], host, event
            )
        for one, _ in filled:
            one.sums_2S = None
        if self._num_rows >= MAX_ROWS:
            self._write_rows()

    def flush(self) -> None:
        """Write all steps so far. A checkpoint is saved after it, so that no step is lost."""
        self._take_copied()
        self._write_rows()

    def rewind(self, steps: int) -> None:
        """Forget the steps after a checkpoint that the run has returned to.

        Args:
            steps: Steps of the checkpoint.
        """
        self._copied = None
        self._newest = None
        self._rows = []
        self._num_rows = 0
        truncate_loss_parts(self._folder, steps, self._rank, self._ranks)

    def _take_copied(self) -> None:
        """Turn the sums of the last step into rows."""
        if (copied := self._copied) is None:
            return
        self._copied = None
        if copied.event is not None:
            copied.event.synchronize()
        values = copied.host.numpy()
        place = 0
        for sums in copied.sums:
            size = len(sums.documents_S)
            nats_S, tokens_S = values[place : place + 2 * size].reshape(2, size)
            place += 2 * size
            rows = _build_rows(copied, sums, nats_S, tokens_S)
            self._rows.append(rows)
            self._num_rows += rows.num_rows

    def _write_rows(self) -> None:
        rows = [one for one in self._rows if one.num_rows]
        if rows:
            joined = pa.concat_batches(rows)
            place = self._folder, self._rank
            self._newest = extend_loss_part(
                self._newest, *place, joined, self._fingerprints, MAX_ROWS
            )
        self._rows = []
        self._num_rows = 0


def _build_rows(
    copied: _CopiedStep,
    sums: SpanSums,
    nats_S: NDArray[np.float64],
    tokens_S: NDArray[np.float64],
) -> pa.RecordBatch:
    """Return the rows of one micro-batch: spans of which this rank has computed a target."""
    here = tokens_S > 0
    count = int(here.sum())
    columns = (
        np.full(count, copied.step),
        sums.sources_S[here],
        sums.epochs_S[here],
        sums.documents_S[here],
        tokens_S[here],
        nats_S[here],
        np.full(count, copied.is_applied),
    )
    arrays = [
        pa.array(column.astype(field.type.to_pandas_dtype()), field.type)
        for column, field in zip(columns, LOSS_SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=LOSS_SCHEMA)
