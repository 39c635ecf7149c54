"""The learning rate of a step, with what goes along with it, and how an optimizer takes it.

Learning rate, weight decay and balance as functions of the tokens trained so far.

Everything is counted in tokens, so that a change of batch size does not move the schedule. The original's formula alone
counts steps and knows the width of the model.
"""

import math
from collections.abc import Iterable
from typing import Any

from llmsys.config.run import RunConfig
from llmsys.config.schedule import NoamScheduleConfig, ScheduleConfig, interpolate_multiplier


class LearningRate(float):
    """A learning rate that says which share of the config's weight decay is in force with it; a plain float means all.

    It is a float, so that whoever cares for the rate alone need not know.
    """

    decay_share: float

    def __new__(cls, value: float, decay_share: float = 1.0) -> "LearningRate":
        """The rate `value`, with a share of weight decay."""
        rate = super().__new__(cls, value)
        rate.decay_share = decay_share
        return rate


def get_weight_decay_share(rate: float) -> float:
    """The share of weight decay that goes with a rate."""
    return rate.decay_share if isinstance(rate, LearningRate) else 1.0


def set_rates(groups: Iterable[dict[str, Any]], rate: float) -> None:
    """Put a step's rate into an optimizer's groups, which say their `lr_multiplier` and their whole `weight_decay`."""
    for group in groups:
        group["lr"] = rate * group["rate_scale"]
        whole = group.setdefault("whole_weight_decay", group["weight_decay"])
        group["weight_decay"] = whole * get_weight_decay_share(rate)


def compute_learning_rate(config: RunConfig, steps: int) -> LearningRate:
    """The rate of step `steps`, counted from 1, and the share of weight decay that goes with it.

    The last step of a run brings it to its budget of tokens.
    """
    peak, tokens = config.optimizer.learning_rate, config.batch.count_tokens_before(steps)
    if isinstance(config.schedule, NoamScheduleConfig):
        share = compute_noam_rate(steps, config.schedule.warmup_steps, config.model.hidden_size)
    else:
        share = compute_lr_multiplier(config.schedule, tokens, config.train.tokens)
    return LearningRate(peak * share, interpolate_multiplier(config.factors.weight_decay, tokens))


def compute_balance_factor(config: RunConfig, steps: int) -> float:
    """The factor on the experts' balance in step `steps`, counted from 1."""
    return interpolate_multiplier(config.factors.balance, config.batch.count_tokens_before(steps))


def compute_noam_rate(step: int, warmup_steps: int, hidden_size: int) -> float:
    """Vaswani 2017, 5.3: d^-1/2 · min(t^-1/2, t·t0^-3/2); its peak is at t = t0, and t counts from 1."""
    return float(hidden_size**-0.5 * min(step**-0.5, step * warmup_steps**-1.5))


def compute_lr_multiplier(config: ScheduleConfig, tokens: float, budget_tokens: float) -> float:
    """Share of the peak learning rate at `tokens`, in [0, 1].

    inverse_sqrt is Vaswani 2017, 5.3, in tokens, normalised to 1 at its peak t = t0 = warmup_tokens.
    wsd (warm-up, stable, decay) is Hu 2024 (MiniCPM) with a linear decay.
    """
    if isinstance(config, NoamScheduleConfig):
        raise TypeError("the original schedule has no peak of its own; see original_rate")
    warmup = config.warmup_tokens
    if tokens < warmup:
        return tokens / warmup
    if config.kind == "constant":
        return 1.0
    if config.kind == "inverse_sqrt":
        return math.sqrt(warmup / tokens)
    decay = config.decay_tokens if config.kind == "wsd" else budget_tokens - warmup
    left = min(1.0, max(0.0, (budget_tokens - tokens) / max(decay, 1)))
    if config.kind == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * (1 - left)))
    return config.min_lr_factor + (1 - config.min_lr_factor) * left
