"""A number that is not known exactly: its P10, P50 and P90."""

from math import exp

from pydantic import Field

from llmsys.config.section import Section

Z90 = 1.2815515655446004  # the standard normal's 90th percentile


class PercentileInterval(Section):
    """A number that is not known exactly."""

    p10: float = Field(description="One in ten is below.")
    p50: float = Field(description="Half are below.")
    p90: float = Field(description="One in ten is above.")

    def scale(self, factor: float) -> "PercentileInterval":
        """Return the interval in another unit.

        Args:
            factor: a positive number, by which each percentile is multiplied.
        """
        return PercentileInterval(
            p10=self.p10 * factor, p50=self.p50 * factor, p90=self.p90 * factor
        )

    def contains(self, value: float) -> bool:
        """Return whether a value lies between P10 and P90.

        Args:
            value: number in the unit of the interval.
        """
        return self.p10 <= value <= self.p90


def build_log_normal_interval(median: float, spread: float) -> PercentileInterval:
    """Return the percentiles of a log-normal number.

    Args:
        median: its median, in any unit.
        spread: standard deviation of its natural logarithm.

    Returns:
        The interval.
    """
    return PercentileInterval(
        p10=median * exp(-Z90 * spread), p50=median, p90=median * exp(Z90 * spread)
    )
