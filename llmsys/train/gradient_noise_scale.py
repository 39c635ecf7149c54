"""The gradient noise scale: how many tokens a step should have before more of them stop helping.

McCandlish 2018 (arXiv:1812.06162), 2.2 and A.1: B = tr(Σ) / |G|², Σ being the covariance of a token's gradient and G
its mean. The squared norm of a mean over b tokens is |G|² + tr(Σ) / b on average, so two of them, of the first
micro-batch of all ranks and of the whole step, give unbiased estimates of both. Each is noisy, and so they are averaged
over steps before they are divided. Tokens of one window are not independent; B is in tokens of such windows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from llmsys.config.noise_scale_constraints import require_micro_batches
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.data.batch import Batch
from llmsys.data.shuffle import build_permutation, derive_order_key
from llmsys.data.step_batches import StepBatches
from llmsys.engine.engine import StepResult
from llmsys.model.transformer import Transformer
from llmsys.parallel.gradient_clipping import clip_gradients
from llmsys.parallel.process_group import all_reduce_sum, run_on_rank_zero

DECAY = 0.95
"""Of the averages, from one measurement to the next: about the last 20 count."""


@dataclass
class GradientNoiseScale:
    """Running averages of |G|² and tr(Σ)."""

    gradient_squared: float = 0.0
    covariance_trace: float = 0.0
    weight: float = 0.0

    def update(self, small_squared: float, small_tokens: float, large_squared: float, large_tokens: float) -> None:
        """Take in the squared norms of two mean gradients, of fewer and of more tokens (A.1, equations A.2 and A.3)."""
        both = large_tokens - small_tokens
        gradient = (large_tokens * large_squared - small_tokens * small_squared) / both
        trace = (small_squared - large_squared) / (1 / small_tokens - 1 / large_tokens)
        self.gradient_squared += (1 - DECAY) * (gradient - self.gradient_squared)
        self.covariance_trace += (1 - DECAY) * (trace - self.covariance_trace)
        self.weight += (1 - DECAY) * (1 - self.weight)

    @property
    def tokens(self) -> float | None:
        """The noise scale; None while the averages are too noisy to be of one."""
        if self.gradient_squared <= 0 or self.covariance_trace <= 0:
            return None
        return self.covariance_trace / self.gradient_squared

    def to_dict(self) -> dict[str, float | None]:
        """For the log; the averages as if they had begun with the first measurement."""
        if not self.weight:
            return {}
        return {
            "noise_scale_tokens": self.tokens,
            "noise_gradient_squared": self.gradient_squared / self.weight,
            "noise_covariance_trace": self.covariance_trace / self.weight,
        }


class GradientHookEngine(Protocol):
    """An engine that lets its gradients be looked at between micro-batches."""

    module: Transformer
    after_micro_batch: Callable[[int], None] | None


class NoiseScaleMeter:
    """Measures the noise scale in every `every_steps`-th step: the `engine` calls it after each micro-batch then.

    It costs such a step one more norm of the gradients and a sum over ranks. Which micro-batch comes first is drawn by
    (seed, step), so that what a dealing puts first is not measured again and again; the sum of the step is the same but
    for its rounding.
    """

    def __init__(self, every_steps: int, sequence_ranks: int, seed: int) -> None:
        """`sequence_parallel_size` ranks get the same micro-batches."""
        self.scale = GradientNoiseScale()
        self._every_steps, self._seed = every_steps, seed
        self._sequence_ranks = sequence_ranks
        self.engine: GradientHookEngine | None = None
        self._targets: int | None = None
        self._small: tuple[float, float] | None = None

    def begin_step(self, step: int, batches: Sequence[Batch]) -> list[Batch]:
        """The micro-batches of step `step`, counted from 0, in the order to take them."""
        assert self.engine is not None
        self._targets = self._small = self.engine.after_micro_batch = None
        if (step + 1) % self._every_steps or len(batches) < 2:
            return list(batches)
        self.engine.after_micro_batch = self._record_gradient
        order = build_permutation(len(batches), derive_order_key("noise", self._seed, step))
        batches = [batches[place] for place in order.tolist()]
        self._targets = batches[0].num_valid_targets
        return batches

    @torch.no_grad()
    def _record_gradient(self, number: int) -> None:
        """Note the gradient after the first micro-batch. Collective."""
        if number or self._targets is None or self.engine is None:
            return
        norm = clip_gradients(self.engine.module.parameters(), 0.0)
        targets = all_reduce_sum(norm.new_tensor(float(self._targets))) / self._sequence_ranks
        self._small = float(norm), float(targets)

    def format_noise_scale(self, batch_tokens: int) -> dict[str, str]:
        """The noise scale beside the batch size, for people."""
        tokens = self.scale.tokens
        return {} if tokens is None else {"batch": f"{batch_tokens:,}", "noise_scale": f"{tokens:,.0f}"}

    def end_step(self, result: StepResult) -> None:
        """Take in a step that has been measured; one that was refused says nothing."""
        if self._small is None or not result.is_applied:
            return
        norm, targets = self._small
        # The engine divides by the targets of the whole step; here the mean is over those of the micro-batch.
        small = (norm * result.targets / targets) ** 2
        self.scale.update(small, targets, result.gradient_norm**2, result.targets)


def build_noise_scale_meter(config: RunConfig, steps: StepBatches, layout: ParallelLayout) -> NoiseScaleMeter | None:
    """The meter that the config asks for, if it does; ConfigError when steps have one micro-batch. Collective."""
    every_steps = config.train.noise_scale_every_steps
    if not every_steps:
        return None
    run_on_rank_zero(lambda: require_micro_batches(steps.count_micro_batches(config.num_steps - 1), config.batch))
    return NoiseScaleMeter(every_steps, layout.sequence_parallel_size, config.run.seed)
