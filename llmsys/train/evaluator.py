"""Evaluate loss and accuracy on held-out rows, divided among all ranks.

Invariants:
- Each row's sums are gathered and added in row order, so the number of ranks changes only rounding
  inside the model.
- The loss is plain cross entropy, without label smoothing or z loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from llmsys.config.evaluation import MAX_DEFAULT_SEQUENCES
from llmsys.data.batch import IGNORED, Batch
from llmsys.parallel.process_group import all_reduce_sum, get_rank, get_world_size
from llmsys.train.cross_entropy import compute_sequence_losses
from llmsys.train.python_metric import LoadedMetric, MetricValue

# Computes the logits of a batch without dropout, such as `Engine.compute_logits`; None where
# another rank has them.
LogitsFunction = Callable[[Batch], Tensor | None]


class RowRanks(NamedTuple):
    """The ranks that compute the logits of a row together.

    Attributes:
        neighbours: ranks of one pipeline stage, next to each other.
        stages: ranks of a pipeline, each with such neighbours; the outermost axis. Logits are None
            on all but one.
    """

    neighbours: int = 1
    stages: int = 1


ALONE = RowRanks()


class HeldoutRows(Protocol):
    """Held-out rows that are read in batches, the same on every rank."""

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        ...

    def get_batch(self, first: int, count: int) -> Batch:
        """Return consecutive rows as a batch.

        Args:
            first: Number of the first row.
            count: Rows of the batch.

        Returns:
            The batch; past the end, a batch without valid targets, so that all ranks run every
            forward pass.
        """
        ...


class EvaluationResult(Protocol):
    """The result of an evaluation."""

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers by name, for events and JSON."""
        ...


class Evaluator(Protocol):
    """An evaluator of models on held-out data."""

    def evaluate(self, compute_logits: LogitsFunction, device: torch.device) -> EvaluationResult:
        """Evaluate this rank's rows and return the result over all ranks. Collective.

        Args:
            compute_logits: computes the logits of a batch.
            device: device of the sums that are reduced over ranks.
        """
        ...


@dataclass(frozen=True)
class EvaluationSums:
    """Sums over all rows: loss in nats, targets whose most likely class is correct, targets, and
    means of metrics.
    """

    nats: float
    correct: float
    targets: float
    metrics: dict[str, MetricValue]


@dataclass(frozen=True)
class TargetEvaluation:
    """Mean loss in nats per target, and the share of targets whose most likely class is correct."""

    loss: float
    perplexity: float
    accuracy: float
    evaluated_targets: int
    metrics: dict[str, MetricValue] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers by name, for events and JSON."""
        return remove_empty_metrics(asdict(self))


@dataclass(frozen=True)
class TargetEvaluator:
    """An evaluator of loss and accuracy on translations, masks or labels.

    Attributes:
        heldout: the rows.
        row_ranks: the ranks that compute the logits of a row together.
        sequences: rows in one forward pass of a rank.
        metrics: further numbers of each target.
    """

    heldout: HeldoutRows
    row_ranks: RowRanks = ALONE
    sequences: int = MAX_DEFAULT_SEQUENCES
    metrics: Sequence[LoadedMetric] = ()

    def evaluate(self, compute_logits: LogitsFunction, device: torch.device) -> TargetEvaluation:
        """Evaluate this rank's rows and sum over all ranks. Collective.

        Args:
            compute_logits: Runs the model on a batch.
            device: Device of this rank.

        Returns:
            Loss and accuracy over all targets, the same on every rank.
        """
        sums = sum_over_rows(
            self.heldout, compute_logits, device, self.row_ranks, self.sequences, self.metrics
        )
        loss = sums.nats / max(sums.targets, 1)
        perplexity = float(torch.tensor(loss).exp())
        return TargetEvaluation(
            loss, perplexity, sums.correct / max(sums.targets, 1), int(sums.targets), sums.metrics
        )


def remove_empty_metrics(values: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of an evaluation without `metrics` where there are none.

    Args:
        values: the fields of a result.

    Returns:
        The fields for events and JSON.
    """
    return (
        values
        if values["metrics"]
        else {name: value for name, value in values.items() if name != "metrics"}
    )


def sum_over_rows(
    heldout: HeldoutRows,
    compute_logits: LogitsFunction,
    device: torch.device,
    row_ranks: RowRanks = ALONE,
    sequences: int = MAX_DEFAULT_SEQUENCES,
    metrics: Sequence[LoadedMetric] = (),
) -> EvaluationSums:
    """Compute the sums over all rows. Collective.

    Args:
        heldout: see `compute_row_metrics`, as all others.
        compute_logits: computes the logits of a batch.
        device: device of the sums that are reduced over ranks.
        row_ranks: the ranks that get the same rows.
        sequences: rows in one forward pass of a rank.
        metrics: further numbers of each target.

    Returns:
        The sums, and the means of the metrics.
    """
    rows = compute_row_metrics(heldout, compute_logits, device, row_ranks, sequences, metrics)
    nats, correct, targets, *own = rows.sum(0).tolist()
    means = {
        metric.name: MetricValue(value / max(targets, 1), metric.digest)
        for metric, value in zip(metrics, own, strict=True)
    }
    return EvaluationSums(nats, correct, targets, means)


def compute_row_metrics(
    heldout: HeldoutRows,
    compute_logits: LogitsFunction,
    device: torch.device,
    row_ranks: RowRanks = ALONE,
    sequences: int = MAX_DEFAULT_SEQUENCES,
    metrics: Sequence[LoadedMetric] = (),
) -> Tensor:
    """Return loss, correct targets, targets and metrics of each row, float64 (rows, 3 + metrics).
    Collective.

    Args:
        heldout: the rows; each is read once over all ranks.
        compute_logits: computes the logits of a batch.
        device: device of the sums that are reduced over ranks.
        row_ranks: the ranks that get the same rows; the sums of the first of them count.
        sequences: rows in one forward pass of a rank.
        metrics: further numbers of each target, summed over a row.
    """
    row_metrics = torch.zeros(heldout.num_rows, 3 + len(metrics), dtype=torch.float64)
    # All ranks run the same number of forward passes: sharded weights are gathered in each.
    ranks_per_stage = get_world_size() // row_ranks.stages
    place = get_rank() % ranks_per_stage
    rows_per_round = sequences * (ranks_per_stage // row_ranks.neighbours)
    for start in range(0, heldout.num_rows, rows_per_round):
        first = start + place // row_ranks.neighbours * sequences
        batch = heldout.get_batch(first, sequences)
        logits_BTV = compute_logits(batch)
        # Other ranks of the row add zeros, so that the reduction counts it once.
        if logits_BTV is None or place % row_ranks.neighbours:
            continue
        targets_BT = batch.targets_BT.to(device)
        columns = [compute_batch_row_sums(logits_BTV, targets_BT)]
        columns += [metric.sum_over_rows(logits_BTV, targets_BT)[:, None] for metric in metrics]
        sums_BM = torch.cat([column.double() for column in columns], dim=1).cpu()
        # The last batch may reach past the end.
        count = max(0, min(sequences, heldout.num_rows - first))
        row_metrics[first : first + count] = sums_BM[:count]
    return all_reduce_sum(row_metrics.to(device)).cpu()


def compute_batch_row_sums(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return loss, correct targets and targets of each row, float32 (B, 3)."""
    likeliest_BT = logits_BTV.argmax(-1).view(targets_BT.shape)
    valid_BT = targets_BT != IGNORED
    hits_B = (valid_BT & (likeliest_BT == targets_BT)).sum(1)
    return torch.stack(
        [compute_sequence_losses(logits_BTV, targets_BT), hits_B.float(), valid_BT.sum(1).float()],
        dim=1,
    )
