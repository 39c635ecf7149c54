"""The gradient noise scale as its paper writes it, and a batch that doubles by it: every
measurement is kept.

McCandlish 2018 (arXiv:1812.06162), A.1, with weights that fall by `decay` from one measurement to
the one before.
"""

from dataclasses import dataclass, field


@dataclass
class PlainNoiseScale:
    """Estimates of |G|² and tr(Σ) of all measurements, oldest first."""

    decay: float
    gradients: list[float] = field(default_factory=list)
    traces: list[float] = field(default_factory=list)

    def add(self, small_norm: float, small: int, large_norm: float, large: int) -> None:
        """Add the norms of the mean gradients over `small` and `large` tokens."""
        # E|g_b|² = |G|² + tr(Σ) / b: two equations, two unknowns.
        trace = (small_norm**2 - large_norm**2) / (1 / small - 1 / large)
        self.traces.append(trace)
        self.gradients.append(large_norm**2 - trace / large)

    def compute_tokens(self) -> float | None:
        """The noise scale in tokens; None where a mean is not positive."""
        weights = [self.decay**age for age in range(len(self.traces))][::-1]
        trace, gradient = (
            sum(w * value for w, value in zip(weights, values, strict=True))
            for values in (self.traces, self.gradients)
        )
        return trace / gradient if trace > 0 and gradient > 0 else None


@dataclass
class PlainGrowth:
    """The size of steps in tokens, after each measurement."""

    size: int
    full: int
    max_share: float
    min_measurements: int
    measured: int = 0

    def measure(self, noise: float | None) -> bool:
        """Return whether the batch doubles after this measurement."""
        self.measured += 1
        doubles = (
            self.size < self.full
            and self.measured >= self.min_measurements
            and noise is not None
            and 2 * self.size <= self.max_share * noise
        )
        if doubles:
            self.size, self.measured = 2 * self.size, 0
        return doubles
