"""The learning rate, weight decay and balance factor of a step, as functions of the tokens trained
so far.

Everything is counted in tokens, so that a change of batch size does not move the schedule. Only the
Noam schedule counts steps, as its formula does.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, assert_never

from llmsys.config.loading.python_object import load_python_object
from llmsys.config.run import RunConfig
from llmsys.config.schedule import (
    ConstantScheduleConfig,
    CosineScheduleConfig,
    InverseSqrtScheduleConfig,
    LinearScheduleConfig,
    NoamScheduleConfig,
    PythonSchedule,
    PythonScheduleConfig,
    ScheduleConfig,
    WsdScheduleConfig,
    interpolate_multiplier,
)
from llmsys.errors import ConfigError


class LearningRate(float):
    """A learning rate with the share of the config's weight decay that applies with it; a plain
    float means all.
    """

    decay_share: float

    def __new__(cls, value: float, decay_share: float = 1.0) -> "LearningRate":
        """Return the rate `value` with a share of weight decay."""
        rate = super().__new__(cls, value)
        rate.decay_share = decay_share
        return rate


def get_weight_decay_share(rate: float) -> float:
    """Return the share of weight decay that applies with a learning rate.

    Args:
        rate: The rate of a step; a `LearningRate` also holds the share of decay.

    Returns:
        The share; 1 for a plain number.
    """
    return rate.decay_share if isinstance(rate, LearningRate) else 1.0


def set_rates(groups: Iterable[dict[str, Any]], rate: float) -> None:
    """Set a step's learning rate and weight decay in an optimizer's parameter groups, in place.

    Args:
        groups: Parameter groups with `rate_scale`, the group's multiple of the rate, and their full
            `weight_decay`.
        rate: The learning rate of the step, with its share of weight decay if it is a
            `LearningRate`.
    """
    for group in groups:
        group["base_rate"] = rate
        group["lr"] = rate * group["rate_scale"]
        # The first call keeps the configured decay, of which later ones take a share.
        full = group.setdefault("whole_weight_decay", group["weight_decay"])
        group["weight_decay"] = full * get_weight_decay_share(rate)


def compute_learning_rate(config: RunConfig, steps: int) -> LearningRate:
    """Compute the learning rate of a step and the share of weight decay that applies with it.

    The last step of a run reaches its budget of tokens.

    Args:
        config: The run's config.
        steps: The step, counted from 1.

    Returns:
        The rate, a float with `decay_share`.
    """
    schedule = config.schedule
    tokens = config.batch.count_tokens_before(steps)
    if isinstance(schedule, NoamScheduleConfig):
        multiplier = compute_noam_rate(steps, schedule.warmup_steps, config.model.hidden_size)
    else:
        multiplier = compute_lr_multiplier(schedule, tokens, config.train.get_budget(steps))
    decay_share = interpolate_multiplier(config.factors.weight_decay, tokens)
    return LearningRate(config.optimizer.learning_rate * multiplier, decay_share)


def compute_balance_factor(config: RunConfig, steps: int) -> float:
    """Compute the factor on the experts' balance loss and bias rate of a step.

    Args:
        config: The run's config.
        steps: The step, counted from 1.

    Returns:
        The factor; 1 without `factors.balance`.
    """
    return interpolate_multiplier(config.factors.balance, config.batch.count_tokens_before(steps))


def compute_noam_rate(step: int, warmup_steps: int, hidden_size: int) -> float:
    """Compute the learning rate of "Attention Is All You Need" (Vaswani 2017, 5.3).

    Args:
        step: t, counted from 1.
        warmup_steps: t0, at which the rate has its peak.
        hidden_size: d.

    Returns:
        d^-1/2 · min(t^-1/2, t · t0^-3/2).
    """
    return float(hidden_size**-0.5 * min(step**-0.5, step * warmup_steps**-1.5))


def compute_lr_multiplier(config: ScheduleConfig, tokens: float, budget_tokens: float) -> float:
    """Compute the learning rate as a share of the peak.

    inverse_sqrt is Vaswani 2017, 5.3, in tokens, normalized to 1 at its peak t = t0 =
    warmup_tokens. wsd (warm-up, stable, decay) is Hu 2024 (MiniCPM) with a linear decay.

    Args:
        config: The section `schedule`.
        tokens: Place in the run, in tokens.
        budget_tokens: Tokens of the whole run, at which the decay ends.

    Returns:
        The share, in [0, 1]; one of the user's own may be above 1.

    Raises:
        TypeError: The schedule is noam, which has no peak.
    """
    if isinstance(config, NoamScheduleConfig):
        raise TypeError("schedule.kind=noam has no peak rate; see compute_noam_rate")
    warmup = config.warmup_tokens
    if tokens < warmup:
        return tokens / warmup
    match config:
        case ConstantScheduleConfig():
            return 1.0
        case PythonScheduleConfig():
            return _compute_python_multiplier(config, tokens, budget_tokens)
        case InverseSqrtScheduleConfig():
            return math.sqrt(warmup / tokens)
        case WsdScheduleConfig():
            left = _compute_remaining_share(config.decay_tokens, tokens, budget_tokens)
        case CosineScheduleConfig():
            left = _compute_remaining_share(budget_tokens - warmup, tokens, budget_tokens)
            left = 0.5 * (1 + math.cos(math.pi * (1 - left)))
        case LinearScheduleConfig():
            left = _compute_remaining_share(budget_tokens - warmup, tokens, budget_tokens)
        case unreachable:
            assert_never(unreachable)
    return config.min_lr_factor + (1 - config.min_lr_factor) * left


@lru_cache(maxsize=8)
def load_python_schedule(config: PythonScheduleConfig) -> PythonSchedule:
    """Run the user's code and build the schedule, once in a process.

    Args:
        config: The section.

    Returns:
        The user's object.

    Raises:
        ConfigError: The class is missing or wrong, or an option is.
    """
    return load_python_object(config, PythonSchedule, "schedule")  # type: ignore[type-abstract]


def _compute_python_multiplier(
    config: PythonScheduleConfig, tokens: float, budget_tokens: float
) -> float:
    multiplier = load_python_schedule(config).compute_multiplier(tokens, budget_tokens)
    if not isinstance(multiplier, int | float) or not 0 <= multiplier < math.inf:
        raise ConfigError(
            f"{config.path} gives {multiplier!r} after {tokens:,.0f} tokens, but a multiplier of "
            "the learning rate is a finite number, 0 or more. Correct compute_multiplier."
        )
    return float(multiplier)


def _compute_remaining_share(decay_tokens: float, tokens: float, budget_tokens: float) -> float:
    """Return the share of a decay over the last `decay_tokens` that is still ahead, in [0, 1]."""
    return min(1.0, max(0.0, (budget_tokens - tokens) / max(decay_tokens, 1)))
