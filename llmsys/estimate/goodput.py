"""Goodput, money and energy of a long run: failures, checkpoints, restarts.

Machines fail independently, so the time between two failures is exponential with mean M. A run that
saves every τ seconds, each time for δ seconds, and needs R seconds to be back after a failure,
spends per τ of progress

    E(τ) = M · exp(R / M) · (exp((τ + δ) / M) − 1)

seconds (Daly 2006). The best τ is about √(2·δ·M) (Young 1974) or, to higher order, Daly's equation
37.
"""

from dataclasses import dataclass
from math import exp, expm1, sqrt

from llmsys.estimate.cluster_costs import ClusterCosts


@dataclass(frozen=True)
class Goodput:
    """Of one run on `ranks` devices: the share of time in useful steps, and the interval between
    saves it assumes.
    """

    fraction: float
    checkpoint_seconds: float
    failure_seconds: float

    @property
    def failures_per_day(self) -> float:
        """Expected interruptions in 24 hours."""
        return 86_400 / self.failure_seconds


def estimate_goodput(
    cluster: ClusterCosts, ranks: int, checkpoint_seconds: float | None = None
) -> Goodput:
    """The share of time in useful steps; `checkpoint_seconds` between saves, the best one when
    left out.
    """
    failure = cluster.device_failure_hours * 3600 / ranks
    # Saves that cost nothing would come without end.
    every = checkpoint_seconds or max(1.0, compute_daly_interval(cluster.save_seconds, failure))
    spent = compute_expected_seconds(every, cluster.save_seconds, cluster.restart_seconds, failure)
    return Goodput(every / spent * (1 - cluster.other_loss), every, failure)


def compute_expected_seconds(interval: float, save: float, restart: float, failure: float) -> float:
    """Seconds that `interval` seconds of progress take on average (Daly 2006)."""
    # expm1 keeps its digits where failures are rare
    return failure * exp(restart / failure) * expm1((interval + save) / failure)


def compute_daly_interval(save: float, failure: float) -> float:
    """Seconds between saves that cost least (Daly 2006, equation 37); the mean time to failure
    when saving is slow.
    """
    if save >= 2 * failure:
        return failure
    ratio = save / (2 * failure)
    return sqrt(2 * save * failure) * (1 + sqrt(ratio) / 3 + ratio / 9) - save
