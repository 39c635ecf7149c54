"""Metrics of the user's own code on held-out targets: the class to extend, and a test kit.

    class TopK(PythonMetric):
        k: int = 5

        def compute(self, logits_NV, targets_N):
            return (logits_NV.topk(self.k).indices == targets_N[:, None]).any(1).float()

A metric is the mean of a number of each target. The same forward passes serve it and the loss.

Invariants:
- A target's number depends on its own logits alone, so that it is the same on every number of
  ranks; the kit tests it.
"""

import inspect
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llmsys.config.evaluation import PythonMetricConfig
from llmsys.config.loading.python_object import describe_error, load_python_object
from llmsys.config.python_code import compute_code_digest
from llmsys.config.section import Section
from llmsys.data.batch import IGNORED
from llmsys.errors import ConfigError

# B rows, T positions, N targets that count, V size of the vocabulary


class PythonMetric(Section):
    """Base class of a metric: fields are options."""

    @abstractmethod
    def compute(self, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        """Return a number of each target, (N,); its mean over all held-out targets is the metric.

        Args:
            logits_NV: logits of the targets' positions, not to be changed.
            targets_N: ids of the targets.
        """


@dataclass(frozen=True)
class MetricValue:
    """The value of a metric, and the digest of the source of its class."""

    value: float
    code: str


@dataclass(frozen=True)
class LoadedMetric:
    """A metric of a config, with its name and the digest of its source."""

    name: str
    digest: str
    metric: PythonMetric

    def sum_over_rows(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the sum of each row's targets.

        Args:
            logits_BTV: logits, in which the first dims may be joined.
            targets_BT: ids, IGNORED where there is no target.

        Returns:
            float32 (B,).

        Raises:
            ConfigError: the user's code failed or returned anything but a finite number of each
                target.
        """
        valid_BT = targets_BT != IGNORED
        rows_N = valid_BT.nonzero()[:, 0]
        sums_B = torch.zeros(len(targets_BT), device=targets_BT.device)
        if not len(rows_N):
            return sums_B
        logits_NV = logits_BTV.reshape(-1, logits_BTV.shape[-1])[valid_BT.reshape(-1)]
        return sums_B.index_add_(
            0, rows_N, _compute_values(self.metric, logits_NV, targets_BT[valid_BT])
        )


def load_python_metrics(
    configs: Sequence[PythonMetricConfig], vocab_size: int
) -> tuple[LoadedMetric, ...]:
    """Run the user's code and build the metrics.

    Args:
        configs: `evaluation.metrics`.
        vocab_size: number of the model's classes.

    Returns:
        One metric for each, tested.

    Raises:
        ConfigError: a class is missing or wrong, or an option is, or it fails
            `check_python_metric`.
    """
    found = []
    for number, config in enumerate(configs):
        metric = load_python_object(config, PythonMetric, f"evaluation.metrics.{number}")  # type: ignore[type-abstract]
        check_python_metric(metric, vocab_size)
        found.append(LoadedMetric(config.title, compute_code_digest(config), metric))
    return tuple(found)


def check_python_metric(metric: PythonMetric, vocab_size: int = 64) -> None:
    """Test a metric on a few targets.

    Args:
        metric: the user's object.
        vocab_size: number of classes of the test.

    Raises:
        ConfigError: it fails, changes the logits, returns anything but a finite number of each
            target, or a target's number depends on other targets.
    """
    draws = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(6, vocab_size, generator=draws)
    targets_N = torch.randint(vocab_size, (6,), generator=draws)
    given = logits_NV.clone()
    values_N = _compute_values(metric, given, targets_N)
    if not torch.equal(given, logits_NV):
        raise ConfigError(
            f"{type(metric).__name__} changed the logits, which others read. Change a copy of them."
        )
    alone_N = torch.cat(
        [_compute_values(metric, logits_NV[i : i + 1], targets_N[i : i + 1]) for i in range(6)]
    )
    if not torch.allclose(values_N, alone_N, rtol=1e-4, atol=1e-5):
        raise ConfigError(
            f"{type(metric).__name__} gives {values_N.tolist()} for six targets together and "
            f"{alone_N.tolist()} one by one: the metric would depend on the batch and on the "
            "number of ranks. Compute each target by itself."
        )


def _compute_values(metric: PythonMetric, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Return the number of each target, float32. Raises ConfigError for anything else."""
    name = type(metric).__name__
    try:
        values = metric.compute(logits_NV, targets_N)
    except Exception as error:
        reason = describe_error(error, Path(inspect.getfile(type(metric))))
        raise ConfigError(
            f"{name} failed on logits of {tuple(logits_NV.shape)}: {reason}. Correct compute."
        ) from error
    about = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
    if about != tuple(targets_N.shape):
        raise ConfigError(
            f"{name} returned {about} for {len(targets_N)} targets. Return a tensor with a number "
            "of each target."
        )
    if not bool(values.isfinite().all()):
        bad = int((~values.isfinite()).nonzero()[0])
        raise ConfigError(
            f"{name} returned {values[bad].item()} for target {targets_N[bad].item()}, which is "
            "not finite. Correct compute; a logarithm or a division may need an epsilon."
        )
    return values.float()
