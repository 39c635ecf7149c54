"""Measure the gradient noise scale: the tokens per step beyond which larger batches stop helping.

McCandlish 2018 (arXiv:1812.06162), 2.2 and A.1: B = tr(Σ) / |G|² with Σ the covariance of a token's
gradient and G its mean. The expected squared norm of a mean over b tokens is |G|² + tr(Σ) / b. Two
such norms, of the first micro-batch of all ranks and of the whole step, give unbiased estimates of
|G|² and tr(Σ). Both are noisy, so they are averaged over steps before the division. Tokens of one
sequence are not independent: B counts tokens of such sequences.

In bitwise mode the smaller batch is the first half of the step, or the largest power of two of its
micro-batches: one subtree of its sum, with the same bits on any number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from llmsys.config.batch_ramp import NoiseRampConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.pipeline import InterleavedScheduleConfig
from llmsys.config.run import RunConfig
from llmsys.data.batch import Batch
from llmsys.data.shuffle import build_permutation, derive_order_key
from llmsys.data.step_batches import StepBatches
from llmsys.engine.engine import GradientProbe, StepResult
from llmsys.errors import ConfigError
from llmsys.parallel.process_group import all_reduce_sum, run_on_rank_zero

# Weight of the running averages in each update: about the last 20 measurements count.
DECAY = 0.95


@dataclass
class GradientNoiseScale:
    """Running averages of |G|² and tr(Σ)."""

    gradient_squared: float = 0.0
    covariance_trace: float = 0.0
    weight: float = 0.0
    measurements: int = 0

    def update(
        self, small_squared: float, small_tokens: float, large_squared: float, large_tokens: float
    ) -> None:
        """Add one measurement (A.1, equations A.2 and A.3).

        Args:
            small_squared: squared norm of the mean gradient over the smaller batch.
            small_tokens: tokens of the smaller batch.
            large_squared: squared norm of the mean gradient over the larger batch.
            large_tokens: tokens of the larger batch.
        """
        extra_tokens = large_tokens - small_tokens
        gradient = (large_tokens * large_squared - small_tokens * small_squared) / extra_tokens
        trace = (small_squared - large_squared) / (1 / small_tokens - 1 / large_tokens)
        self.gradient_squared += (1 - DECAY) * (gradient - self.gradient_squared)
        self.covariance_trace += (1 - DECAY) * (trace - self.covariance_trace)
        # From 0 to 1, for a correction of the start as in Adam.
        self.weight += (1 - DECAY) * (1 - self.weight)
        self.measurements += 1

    @property
    def tokens(self) -> float | None:
        """The noise scale in tokens; None while an average is not positive."""
        if self.gradient_squared <= 0 or self.covariance_trace <= 0:
            return None
        # The weight of both averages cancels.
        return self.covariance_trace / self.gradient_squared

    def to_dict(self) -> dict[str, float | None]:
        """Return the fields of a `step` event; the averages are corrected for their start at 0."""
        if not self.weight:
            return {}
        return {
            "noise_scale_tokens": self.tokens,
            "noise_gradient_squared": self.gradient_squared / self.weight,
            "noise_covariance_trace": self.covariance_trace / self.weight,
        }


class ProbedEngine(Protocol):
    """An engine that lets a probe look at the gradients of a part of a step."""

    device: torch.device
    gradient_probe: GradientProbe | None

    def compute_partial_norm(self) -> float:
        """Return the norm of the gradients of the step's micro-batches so far, over all ranks.
        Collective.
        """
        ...


class NoiseScaleMeter:
    """A meter of the noise scale in every `every_steps`-th step, called by the engine after the
    first micro-batches of it.

    A measured step costs one more gradient norm and one more reduction, and in a pipeline one more
    bubble. The first micro-batch is drawn by (seed, step): an assignment by length would otherwise
    always measure the same kind. The order changes the step's sum by rounding only. In bitwise mode
    nothing is drawn.

    Args:
        every_steps: Steps from one measurement to the next.
        layout: The resolved layout: several ranks may hold the same micro-batches.
        seed: Seed of the run.
        keeps_order: Bitwise mode; see `count_small_batch`.
    """

    def __init__(
        self, every_steps: int, layout: ParallelLayout, seed: int, *, keeps_order: bool = False
    ) -> None:
        self.scale = GradientNoiseScale()
        self._every_steps = every_steps
        self._seed = seed
        self._keeps_order = keeps_order
        self._layout = layout
        self.engine: ProbedEngine | None = None
        self._targets: int | None = None
        self._small: tuple[float, float] | None = None

    def begin_step(self, step: int, batches: Sequence[Batch]) -> list[Batch]:
        """Return the micro-batches of step `step`, counted from 0, in the order to train on
        them.
        """
        assert self.engine is not None
        self._targets = self._small = self.engine.gradient_probe = None
        # The two norms must be of different numbers of tokens.
        if not self.is_due(step + 1) or len(batches) < 2:
            return list(batches)
        if not self._keeps_order:
            order = build_permutation(len(batches), derive_order_key("noise", self._seed, step))
            batches = [batches[place] for place in order.tolist()]
        count = count_small_batch(len(batches), self._layout, keeps_order=self._keeps_order)
        self._targets = sum(batch.num_valid_targets for batch in batches[:count])
        self.engine.gradient_probe = GradientProbe(count, self._record_gradient)
        return list(batches)

    def is_due(self, number: int) -> bool:
        """Return whether step `number`, counted from 1, is measured."""
        return number % self._every_steps == 0

    @torch.no_grad()
    def _record_gradient(self) -> None:
        """Record the norm of the gradient of the smaller batch. Collective."""
        assert self.engine is not None
        assert self._targets is not None
        norm = self.engine.compute_partial_norm()
        # Counts are exact in float64.
        count = torch.tensor(float(self._targets), dtype=torch.float64, device=self.engine.device)
        holders = self._layout.world_size // self._layout.data_parallel_size
        self._small = norm, float(all_reduce_sum(count)) / holders

    def format_noise_scale(self, batch_tokens: int) -> dict[str, str]:
        """Return the batch size and the noise scale in tokens, for the progress line."""
        tokens = self.scale.tokens
        return (
            {}
            if tokens is None
            else {"batch": f"{batch_tokens:,}", "noise_scale": f"{tokens:,.0f}"}
        )

    def end_step(self, result: StepResult) -> None:
        """Update the averages if the step was measured and applied, and both parts have targets."""
        if self._small is None or not result.is_applied:
            return
        norm, targets = self._small
        # Rows of prompts or of hidden tokens may have none: then the two batches are one, or the
        # smaller has no gradient.
        if not 0 < targets < result.targets:
            return
        # The engine divides by the targets of the whole step; here the mean is over those of the
        # micro-batch.
        small = (norm * result.targets / targets) ** 2
        self.scale.update(small, targets, result.gradient_norm**2, result.targets)


def count_small_batch(count: int, layout: ParallelLayout, *, keeps_order: bool) -> int:
    """Count the micro-batches of the smaller batch, of each rank.

    One, or in an interleaved pipeline one round of its schedule, so that it and what follows are
    whole rounds. In bitwise mode the largest power of two below `count`, a subtree of the sum.

    Args:
        count: Micro-batches of a rank in the step, 2 or more.
        layout: The layout.
        keeps_order: Bitwise mode.
    """
    if keeps_order:
        return 1 << (count - 1).bit_length() - 1
    is_interleaved = isinstance(layout.pipeline_schedule, InterleavedScheduleConfig)
    if layout.pipeline == 1 or not is_interleaved:
        return 1
    rounds = max(1, count // layout.pipeline)
    return 1 if rounds == 1 else count // rounds


def require_micro_batches(micro_batches: int, config: RunConfig, layout: ParallelLayout) -> str:
    """Check that steps that are measured have a part to measure.

    Args:
        micro_batches: Micro-batches per rank in the last step, of a batch that grows by the noise
            in the first.
        config: The run.
        layout: Its resolved layout.

    Returns:
        The number of micro-batches as text for the log.

    Raises:
        ConfigError: There is one micro-batch, or the schedule of a pipeline does not run a part.
    """
    batch = config.batch
    if micro_batches < 2:
        raise ConfigError(
            "train.noise_scale_every_steps compares micro-batches, but "
            f"batch.micro_sequences={batch.micro_sequences} gives each rank only one. Use a "
            "smaller batch.micro_sequences or fewer processes, or set "
            "train.noise_scale_every_steps=0."
        )
    keeps_order = config.train.reproducibility == "bitwise"
    small = count_small_batch(micro_batches, layout, keeps_order=keeps_order)
    schedule = layout.pipeline_schedule
    # Other schedules run any part of a step.
    if layout.pipeline > 1 and isinstance(schedule, InterleavedScheduleConfig):
        parts = small, micro_batches - small
        problems = [schedule.find_micro_batch_problem(layout.pipeline, part) for part in parts]
        if any(problems):
            raise ConfigError(
                f"train.noise_scale_every_steps runs {parts[0]} and then {parts[1]} of "
                f"{micro_batches} micro-batches, but layout.pipeline_schedule=interleaved runs "
                f"{problems[0] or problems[1]}. Use another batch.micro_sequences, "
                "layout.pipeline_schedule=1f1b, or set train.noise_scale_every_steps=0."
            )
    return f"{micro_batches} micro-batches"


def build_noise_scale_meter(
    config: RunConfig, steps: StepBatches, layout: ParallelLayout
) -> NoiseScaleMeter | None:
    """Return the meter of `train.noise_scale_every_steps`, or None where it is 0. Collective.

    Raises:
        ConfigError: steps have a single micro-batch.
    """
    every_steps = config.train.noise_scale_every_steps
    if not every_steps:
        return None
    first = 0 if isinstance(config.batch.ramp, NoiseRampConfig) else config.num_steps - 1
    run_on_rank_zero(
        lambda: require_micro_batches(steps.count_micro_batches(first), config, layout)
    )
    keeps_order = config.train.reproducibility == "bitwise"
    return NoiseScaleMeter(every_steps, layout, config.run.seed, keeps_order=keeps_order)
