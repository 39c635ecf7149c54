"""Update rules that treat each element by itself, and an optimizer for those that torch lacks.

Every operation rounds once (IEEE 754), so an element's bits never depend on its neighbours: any
sharding, flat or by rows, gives the same numbers. torch's fused AdamW on the CPU takes most
elements by vector instructions and the rest one by one, with other roundings; the torch engine uses
it in fast mode all the same, because it is faster.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, assert_never

import torch
from torch import Tensor

from llmsys.config.optimizer import (
    MAX_UPDATED_ELEMENTS,
    AdafactorConfig,
    AdamConfig,
    AdamWConfig,
    AdEMAMixConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    PythonOptimizerConfig,
    ScheduleFreeConfig,
    SoapConfig,
)
from llmsys.errors import ConfigError
from llmsys.model.local_tensor import get_local_tensor

# Elements updated at a time on CPUs, so that they stay in cache: 256 KiB of each of five tensors.
CACHED_ELEMENTS = 1 << 16

ElementwiseConfig = (
    AdamWConfig | LionConfig | AdEMAMixConfig | ScheduleFreeConfig | PythonOptimizerConfig
)

# Name of each moment in a checkpoint → in the state of an optimizer.
STATE_KEYS = {
    "first_moment": "exp_avg",
    "second_moment": "exp_avg_sq",
    "slow_moment": "exp_avg_slow",
    "lookahead_moment": "lookahead",
}


# Name of `AverageWeights.tensor` in the training state.
AVERAGE_WEIGHTS = "average_weights"


class ElementwiseRule(Protocol):
    """The change of each element from its gradient and its moments."""

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the moments in a checkpoint."""
        ...

    @property
    def is_elementwise(self) -> bool:
        """False if the change of an element depends on others; only a class of the user's own
        may do so.
        """
        ...

    def compute_update(
        self, gradient: Tensor, moments: Sequence[Tensor], step: int, rate: float
    ) -> Tensor:
        """Update the moments in place and return the change to subtract, without weight decay.

        Args:
            gradient: Not changed.
            moments: In the order of `moments`.
            step: Counted from 1.
            rate: Learning rate.
        """
        ...


@dataclass(frozen=True)
class AdamWRule:
    """Adam with bias correction (Kingma 2014; Loshchilov and Hutter 2017), as torch computes it."""

    config: AdamWConfig
    moments: tuple[str, ...] = ("first_moment", "second_moment")
    is_elementwise: bool = True

    def compute_update(
        self, gradient: Tensor, moments: Sequence[Tensor], step: int, rate: float
    ) -> Tensor:
        """Implement `ElementwiseRule.compute_update`."""
        beta1, beta2 = self.config.betas
        first, second = moments
        first.mul_(beta1).add_(gradient * (1 - beta1))
        root = _update_root(second, gradient, beta2, step).add_(self.config.eps)
        return (first * (rate / (1 - beta1**step))).div_(root)


def _update_root(second: Tensor, gradient: Tensor, beta2: float, step: int) -> Tensor:
    """Update a second moment in place and return its root with bias correction."""
    second.mul_(beta2).add_(gradient.square().mul_(1 - beta2))
    return second.sqrt().div_((1 - beta2**step) ** 0.5)


@dataclass(frozen=True)
class LionRule:
    """The sign of an interpolated momentum (Chen 2023, arXiv:2302.06675, algorithm 2)."""

    config: LionConfig
    moments: tuple[str, ...] = ("first_moment",)
    is_elementwise: bool = True

    def compute_update(
        self, gradient: Tensor, moments: Sequence[Tensor], step: int, rate: float
    ) -> Tensor:
        """Implement `ElementwiseRule.compute_update`."""
        beta1, beta2 = self.config.betas
        (first,) = moments
        # Before the moment is updated, and with another coefficient than it is.
        update = (first * beta1).add_(gradient * (1 - beta1)).sign_().mul_(rate)
        first.mul_(beta2).add_(gradient * (1 - beta2))
        return update


@dataclass(frozen=True)
class AdEMAMixRule:
    """AdamW with a second, slow momentum (Pagliardini 2024, arXiv:2409.03137, algorithm 1)."""

    config: AdEMAMixConfig
    moments: tuple[str, ...] = ("first_moment", "second_moment", "slow_moment")
    is_elementwise: bool = True

    def compute_update(
        self, gradient: Tensor, moments: Sequence[Tensor], step: int, rate: float
    ) -> Tensor:
        """Implement `ElementwiseRule.compute_update`."""
        beta1, beta2 = self.config.betas
        first, second, slow = moments
        alpha, beta3 = compute_slow_coefficients(self.config, step)
        first.mul_(beta1).add_(gradient * (1 - beta1))
        slow.mul_(beta3).add_(gradient * (1 - beta3))
        root = _update_root(second, gradient, beta2, step).add_(self.config.eps)
        # The slow momentum has no bias correction.
        return (first * (rate / (1 - beta1**step))).add_(slow * (rate * alpha)).div_(root)


@dataclass(frozen=True)
class ScheduleFreeRule:
    """Schedule-free AdamW (Defazio 2024, arXiv:2405.15682, algorithm 1), in terms of the weights y
    of the gradient.

    The moment is z - y of the paper, which begins at zero; the average is x = y - (1 - β1) / β1 ·
    (z - y). With the step's share c of the average (`AverageWeights`), y moves by c (z - y) - γ (1
    - β1 (1 - c)) g, and z - y becomes (1 - c) (z - y - γ β1 g), where g is the normalized gradient
    with weight decay.
    """

    config: ScheduleFreeConfig
    moments: tuple[str, ...] = ("second_moment", "lookahead_moment")
    is_elementwise: bool = True

    def compute_update(
        self,
        gradient: Tensor,
        moments: Sequence[Tensor],
        step: int,
        rate: float,
        decay: Tensor | None = None,
        share: float | None = None,
    ) -> Tensor:
        """Implement `ElementwiseRule.compute_update`.

        Args:
            gradient: Not changed.
            moments: In the order of `moments`.
            step: Counted from 1.
            rate: Learning rate.
            decay: Weight decay times the weights, averaged in the same way; None is zero.
            share: The step's share of the average, from `AverageWeights`.
        """
        beta1, beta2 = self.config.betas
        second, lookahead = moments
        assert share is not None
        root = _update_root(second, gradient, beta2, step).add_(self.config.eps)
        normalized = gradient / root if decay is None else (gradient / root).add_(decay)
        update = (normalized * (rate * (1 - beta1 * (1 - share)))).sub_(lookahead * share)
        lookahead.sub_(normalized.mul_(rate * beta1)).mul_(1 - share)
        return update


class AverageWeights:
    """The weights of the steps in the average of schedule-free AdamW, state of a run.

    Step t counts t^p times the square of the largest rate so far, as in the authors' library: the
    averaging of algorithm 1 with a rate that warms up, and p for the `averaging_power`. So a rate
    that is the same in all steps cancels.
    """

    def __init__(self, power: float) -> None:
        self.tensor = torch.zeros(2, dtype=torch.float64)
        """Largest rate so far, and the sum of the weights so far. On the host."""

        self._power = power

    def add_step(self, step: int, rate: float) -> float:
        """Add the weight of a step and return its share of the sum.

        Args:
            step: Counted from 1.
            rate: The learning rate of the step, before a parameter's own factor.

        Returns:
            The share, from 0 to 1; 0 while no step has had a rate.
        """
        largest, total = self.tensor.tolist()
        largest = max(largest, rate)
        weight = step**self._power * largest**2
        total += weight
        self.tensor.copy_(torch.tensor([largest, total], dtype=torch.float64))
        return weight / total if total else 0.0


def build_average_weights(config: OptimizerConfig) -> AverageWeights | None:
    """Build the weights of an average, for an optimizer that keeps one.

    Args:
        config: The `optimizer:` section.

    Returns:
        The weights before the first step; None for an optimizer without an average.
    """
    return (
        AverageWeights(config.averaging_power) if isinstance(config, ScheduleFreeConfig) else None
    )


def compute_slow_coefficients(config: AdEMAMixConfig, step: int) -> tuple[float, float]:
    """Compute the coefficients of AdEMAMix's slow momentum at a step (arXiv:2409.03137, section 3).

    The weight grows linearly, and the half-life of the momentum from that of betas[0].

    Args:
        config: The section `optimizer`.
        step: Counted from 1.

    Returns:
        Weight and decay rate of the slow momentum.
    """
    start = config.betas[0]
    end = config.slow_beta
    share = step / max(config.slow_warmup_steps, 1)
    if share >= 1:
        return config.slow_weight, end
    if start == 0:
        return share * config.slow_weight, end
    low, high = math.log(start), math.log(end)
    return share * config.slow_weight, min(
        math.exp(low * high / ((1 - share) * high + share * low)), end
    )


def require_elementwise(config: OptimizerConfig) -> ElementwiseConfig:
    """Return the settings of an elementwise optimizer, for an engine that has no other.

    Args:
        config: The `optimizer:` section of a run.

    Returns:
        `config` itself.

    Raises:
        ConfigError: Another optimizer is chosen.
    """
    match config:
        case AdamConfig() | MuonConfig() | AdafactorConfig() | SoapConfig():
            raise ConfigError(
                f"optimizer.kind={config.kind} is not built by this engine. "
                "Use optimizer.kind=adamw, or engine.kind=torch with train.reproducibility=fast."
            )
        case (
            AdamWConfig()
            | LionConfig()
            | AdEMAMixConfig()
            | ScheduleFreeConfig()
            | PythonOptimizerConfig()
        ):
            return config
        case unreachable:
            assert_never(unreachable)


def build_elementwise_rule(config: ElementwiseConfig) -> ElementwiseRule:
    """Build the rule of an elementwise optimizer.

    Args:
        config: From `require_elementwise`.

    Returns:
        The rule.
    """
    match config:
        case AdamWConfig():
            return AdamWRule(config)
        case LionConfig():
            return LionRule(config)
        case AdEMAMixConfig():
            return AdEMAMixRule(config)
        case ScheduleFreeConfig():
            return ScheduleFreeRule(config)
        case PythonOptimizerConfig():
            from llmsys.optim.python_optimizer import LoadedPythonOptimizer

            return LoadedPythonOptimizer(config)
        case unreachable:
            assert_never(unreachable)


def apply_weight_decay(weight: Tensor, change: Tensor, share: float, *, is_cautious: bool) -> None:
    """Decay a weight in place, before its change is subtracted.

    Args:
        weight: The weight, or this rank's part of it.
        change: What will be subtracted, up to a positive factor.
        share: Learning rate times weight decay.
        is_cautious: Only elements that the change does not move away from zero decay (Chen 2025,
            arXiv:2510.12402, algorithm 1).
    """
    if not is_cautious or share == 0:
        weight.mul_(1 - share)
        return
    # A product of signs is exact, one of the values may underflow to zero.
    moves_away = change.sign().mul_(weight.sign()) < 0
    weight.mul_(torch.where(moves_away, 1.0, 1 - share))


def update_parameter(
    rule: ElementwiseRule,
    parameter: Tensor,
    gradient: Tensor,
    moments: Sequence[Tensor],
    *,
    step: int,
    rate: float,
    weight_decay: float,
    is_cautious: bool,
    gradient_scale: float = 1.0,
    average_share: float | None = None,
) -> None:
    """Change a parameter and its moments in place.

    Args:
        rule: The update rule.
        parameter: A tensor, or this rank's part of a DTensor.
        gradient: Of the same part.
        moments: In the order of the rule.
        step: Counted from 1.
        rate: Learning rate.
        weight_decay: Per unit of learning rate.
        is_cautious: See `apply_weight_decay`.
        gradient_scale: Factor on the gradient.
        average_share: The step's share of the average, for an optimizer that keeps one.
    """
    size = CACHED_ELEMENTS if parameter.device.type == "cpu" else MAX_UPDATED_ELEMENTS
    whole = (gradient, parameter, *moments)
    pieces = (
        zip(*(one.view(-1).split(size) for one in whole), strict=True)
        if rule.is_elementwise
        else [whole]
    )
    for piece, weight, *state in pieces:
        scaled = piece if gradient_scale == 1 else piece * gradient_scale
        if isinstance(rule, ScheduleFreeRule):
            weight.sub_(
                rule.compute_update(scaled, state, step, rate, weight * weight_decay, average_share)
            )
            continue
        update = rule.compute_update(scaled, state, step, rate)
        apply_weight_decay(weight, update, rate * weight_decay, is_cautious=is_cautious)
        # A rounding of its own: add_(update, alpha=...) may fuse it with that of the product.
        weight.sub_(update)


def build_elementwise_state(parameter: Tensor, rule: ElementwiseRule) -> dict[str, Tensor]:
    """Build the state of a parameter before the first step.

    Args:
        parameter: The parameter, or this rank's shard of it.
        rule: The rule that updates it.

    Returns:
        Moments at zero, in the dtype of the parameter, and on the host the step counter.
    """
    moments = {
        STATE_KEYS[name]: torch.zeros_like(parameter, requires_grad=False) for name in rule.moments
    }
    return {"step": torch.zeros(())} | moments


class ElementwiseOptimizer(torch.optim.Optimizer):
    """An optimizer of one elementwise rule. Parameters may be DTensors or flat shards; the state
    exists at once.

    Args:
        groups: Parameter groups, as for every torch optimizer.
        config: The `optimizer:` section.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], config: ElementwiseConfig) -> None:
        defaults = {
            "lr": config.learning_rate,
            "base_rate": config.learning_rate,
            "weight_decay": 0.0,
        }
        super().__init__([dict(group) for group in groups], defaults)
        self.rule = build_elementwise_rule(config)
        self.average = build_average_weights(config)
        self._is_cautious = config.cautious_weight_decay
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = build_elementwise_state(parameter, self.rule)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step from the gradients."""
        share: float | None = None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] += 1
                if self.average is not None and share is None:
                    share = self.average.add_step(int(state["step"]), group["base_rate"])
                update_parameter(
                    self.rule,
                    get_local_tensor(parameter),
                    get_local_tensor(parameter.grad),
                    [get_local_tensor(state[STATE_KEYS[name]]) for name in self.rule.moments],
                    step=int(state["step"]),
                    rate=group["lr"],
                    weight_decay=group["weight_decay"],
                    is_cautious=self._is_cautious,
                    average_share=share,
                )
