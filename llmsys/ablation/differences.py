"""Differences between runs of two variants, paired by seed, with t intervals.

A seed decides initial weights and the order of the data, so that two runs of one seed share much
of their luck, and the difference of a pair varies less than each run.
"""

from collections.abc import Mapping
from statistics import fmean, stdev

from pydantic import BaseModel, ConfigDict

CONFIDENCE = 0.95
NOTE = (
    "A difference is the mean over seeds of variant minus base, of runs with the same seed. The "
    "interval is Student's t interval of 95 % over these differences: it says what other seeds "
    "would give, not what other held-out pages or larger models would. With two seeds it has one "
    "degree of freedom and is 12.7 standard errors wide on each side."
)


class Difference(BaseModel):
    """Difference of a variant to the base.

    Attributes:
        mean: Mean of variant minus base over the seeds.
        half_width: Half the width of the interval of 95 %; None for fewer than two seeds.
        by_seed: The difference of each seed.
    """

    model_config = ConfigDict(extra="forbid")

    mean: float
    half_width: float | None
    by_seed: dict[int, float]

    @property
    def is_clear(self) -> bool:
        """True where the interval does not hold 0."""
        return self.half_width is not None and abs(self.mean) > self.half_width


def compute_difference(
    base: Mapping[int, float], variant: Mapping[int, float]
) -> Difference | None:
    """Compute the difference of a variant to the base, paired by seed.

    Student's interval of the mean of n differences d: mean ± t(0.975, n - 1) · sd(d) / √n.

    Args:
        base: Score of the base by seed.
        variant: Score of the variant by seed.

    Returns:
        The difference over the seeds that both have; None without one.
    """
    seeds = sorted(base.keys() & variant.keys())
    if not seeds:
        return None
    by_seed = {seed: variant[seed] - base[seed] for seed in seeds}
    values = list(by_seed.values())
    half_width = None
    if len(values) > 1:
        from scipy.stats import t as student  # half a second to import

        quantile = float(student.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
        half_width = quantile * stdev(values) / len(values) ** 0.5
    return Difference(mean=fmean(values), half_width=half_width, by_seed=by_seed)
