"""A number that is not known exactly: its P10, P50 and P90."""

from dataclasses import dataclass
from math import exp

Z90 = 1.2815515655446004  # the standard normal's 90th percentile


@dataclass(frozen=True)
class PercentileInterval:
    """Three percentiles: one in ten is below `p10`, half are below `p50`, one in ten is above `p90`."""

    p10: float
    p50: float
    p90: float

    def scale(self, factor: float) -> "PercentileInterval":
        """The same in another unit; `factor` is positive."""
        return PercentileInterval(self.p10 * factor, self.p50 * factor, self.p90 * factor)

    def contains(self, value: float) -> bool:
        """Return whether the value lies between P10 and P90."""
        return self.p10 <= value <= self.p90

    def to_dict(self) -> dict[str, float]:
        """Plain values with stable keys."""
        return {"p10": self.p10, "p50": self.p50, "p90": self.p90}


def build_log_normal_interval(median: float, spread: float) -> PercentileInterval:
    """Of a log-normal with that median and standard deviation of the logarithm."""
    return PercentileInterval(median * exp(-Z90 * spread), median, median * exp(Z90 * spread))
