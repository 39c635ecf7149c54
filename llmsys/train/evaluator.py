"""A model's loss and hits over held-back rows, dealt to all ranks.

Each row's numbers are gathered and summed in order, so the number of ranks changes the result by rounding inside the
model only. The loss is plain cross entropy, whatever training adds to it.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from llmsys.config.evaluation import MAX_DEFAULT_SEQUENCES
from llmsys.data.batch import IGNORED, Batch
from llmsys.parallel.process_group import all_reduce_sum, get_rank, get_world_size
from llmsys.train.cross_entropy import compute_sequence_losses

LogitsFunction = Callable[[Batch], Tensor]
"""What a model gives for a batch, without dropout; `Engine.logits` is one."""


class HeldoutRows(Protocol):
    """Rows that can be asked for in batches, the same whoever asks."""

    @property
    def num_rows(self) -> int:
        """How many there are."""
        ...

    def get_batch(self, first: int, count: int) -> Batch:
        """Rows `first` to `first + count - 1`; where none are left, a batch in which nothing counts."""
        ...


class EvaluationResult(Protocol):
    """What an evaluation found."""

    def to_dict(self) -> dict[str, Any]:
        """As a dictionary, for events and JSON."""
        ...


class Evaluator(Protocol):
    """Evaluates models on held-back data."""

    def evaluate(self, compute_logits: LogitsFunction, device: torch.device) -> EvaluationResult:
        """Collective: every rank evaluates its rows and gets the same result."""
        ...


@dataclass(frozen=True)
class EvaluationSums:
    """Over all rows: nats of loss, targets whose likeliest class was right, and targets."""

    nats: float
    correct: float
    targets: float


@dataclass(frozen=True)
class TargetEvaluation:
    """Mean loss in nats per target, and the share of targets whose likeliest class is right."""

    loss: float
    perplexity: float
    accuracy: float
    evaluated_targets: int

    def to_dict(self) -> dict[str, Any]:
        """The same as a dictionary, for events and JSON."""
        return asdict(self)


@dataclass(frozen=True)
class TargetEvaluator:
    """Loss and accuracy on the targets of held-back rows: of translations, masks or labels. See `sum_over_rows`."""

    heldout: HeldoutRows
    ranks_per_row: int = 1
    sequences: int = MAX_DEFAULT_SEQUENCES

    def evaluate(self, compute_logits: LogitsFunction, device: torch.device) -> TargetEvaluation:
        """See Evaluator."""
        sums = sum_over_rows(self.heldout, compute_logits, device, self.ranks_per_row, self.sequences)
        loss = sums.nats / max(sums.targets, 1)
        perplexity = float(torch.tensor(loss).exp())
        return TargetEvaluation(loss, perplexity, sums.correct / max(sums.targets, 1), int(sums.targets))


def sum_over_rows(
    heldout: HeldoutRows,
    compute_logits: LogitsFunction,
    device: torch.device,
    ranks_per_row: int = 1,
    sequences: int = MAX_DEFAULT_SEQUENCES,
) -> EvaluationSums:
    """The sums over all rows, see `compute_row_metrics`. Collective."""
    nats, correct, targets = (
        compute_row_metrics(heldout, compute_logits, device, ranks_per_row, sequences).sum(0).tolist()
    )
    return EvaluationSums(nats, correct, targets)


def compute_row_metrics(
    heldout: HeldoutRows,
    compute_logits: LogitsFunction,
    device: torch.device,
    ranks_per_row: int = 1,
    sequences: int = MAX_DEFAULT_SEQUENCES,
) -> Tensor:
    """Loss, hits and targets of each row, float64 (rows, 3). Every row is asked for once, over all ranks. Collective.

    A forward pass of a rank has `sequences` rows.
    `ranks_per_row` neighbouring ranks compute the logits of a batch together: they get the same rows, and the first
    counts.
    """
    row_metrics = torch.zeros(heldout.num_rows, 3, dtype=torch.float64)
    rows_per_round = sequences * (get_world_size() // ranks_per_row)
    for start in range(0, heldout.num_rows, rows_per_round):
        first = start + get_rank() // ranks_per_row * sequences
        batch = heldout.get_batch(first, sequences)
        sums_B3 = compute_batch_row_sums(compute_logits(batch), batch.targets_BT.to(device)).double().cpu()
        count = max(0, min(sequences, heldout.num_rows - first)) if get_rank() % ranks_per_row == 0 else 0
        row_metrics[first : first + count] = sums_B3[:count]
    return all_reduce_sum(row_metrics.to(device)).cpu()


def compute_batch_row_sums(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Loss, hits and targets of each row, float32 (B, 3)."""
    likeliest_BT = logits_BTV.argmax(-1).view(targets_BT.shape)
    valid_BT = targets_BT != IGNORED
    hits_B = (valid_BT & (likeliest_BT == targets_BT)).sum(1)
    return torch.stack(
        [compute_sequence_losses(logits_BTV, targets_BT), hits_B.float(), valid_BT.sum(1).float()], dim=1
    )
