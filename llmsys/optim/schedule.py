"""Learning rate as a function of the tokens trained so far.

Everything is counted in tokens, so that a change of batch size does not move the schedule. Each function returns the
share of the peak rate, in [0, 1].
"""

import math

from llmsys.config.schedule import ScheduleConfig


def learning_rate(config: ScheduleConfig, peak: float, tokens: float, budget_tokens: float) -> float:
    """The rate for the step that brings the run to `tokens` of its `budget_tokens`."""
    return peak * rate_share(config, tokens, budget_tokens)


def rate_share(config: ScheduleConfig, tokens: float, budget_tokens: float) -> float:
    """Share of the peak learning rate at `tokens`.

    inverse_sqrt is Vaswani 2017, 5.3, min(t^-1/2, t·t0^-3/2), normalised to 1 at its peak t = t0 = warmup_tokens.
    wsd (warm-up, stable, decay) is Hu 2024 (MiniCPM) with a linear decay.
    """
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
    return config.final_fraction + (1 - config.final_fraction) * left
