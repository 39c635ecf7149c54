"""Optimizers as their papers write them: one weight at a time, in float64."""

import math


def step_lion(
    weight: float,
    gradient: float,
    momentum: float,
    *,
    rate: float,
    decay: float,
    betas: tuple[float, float],
) -> tuple[float, float]:
    """Return the next weight and momentum of Lion (Chen 2023, algorithm 2)."""
    beta1, beta2 = betas
    blended = beta1 * momentum + (1 - beta1) * gradient
    sign = (blended > 0) - (blended < 0)
    return weight - rate * (sign + decay * weight), beta2 * momentum + (1 - beta2) * gradient


def compute_slow_beta(step: int, warmup: int, start: float, end: float) -> float:
    """Return the decay rate whose half-life is between those of two others (AdEMAMix, appendix
    A.1).

    The half-life grows linearly with the step.
    """
    share = min(step / warmup, 1.0) if warmup else 1.0
    half_lives = [math.log(0.5) / math.log(beta) - 1 for beta in (start, end)]
    half_life = (1 - share) * half_lives[0] + share * half_lives[1]
    return 0.5 ** (1 / (half_life + 1))


def step_ademamix(
    weight: float,
    gradient: float,
    moments: tuple[float, float, float],
    step: int,
    *,
    rate: float,
    decay: float,
    betas: tuple[float, float, float],
    alpha: float,
    warmup: int,
    eps: float,
) -> tuple[float, tuple[float, float, float]]:
    """Return the next weight and the moments (fast, second, slow) of AdEMAMix (Pagliardini 2024,
    algorithm 1).
    """
    (beta1, beta2, beta3), (fast, second, slow) = betas, moments
    beta3 = compute_slow_beta(step, warmup, beta1, beta3)
    alpha *= min(step / warmup, 1.0) if warmup else 1.0
    fast = beta1 * fast + (1 - beta1) * gradient
    slow = beta3 * slow + (1 - beta3) * gradient
    second = beta2 * second + (1 - beta2) * gradient**2
    direction = fast / (1 - beta1**step) + alpha * slow
    direction /= math.sqrt(second / (1 - beta2**step)) + eps
    return weight - rate * (direction + decay * weight), (fast, second, slow)


def compute_average_share(rates: list[float], power: float) -> float:
    """Return the share of the last step in the average of schedule-free AdamW, from the rates of
    all steps so far.

    The paper's weights are squares of a rate that warms up and then stays; the authors' library
    takes the largest one so far, and a power of the step (adamw_schedulefree_reference.py).
    """
    weights = [step**power * max(rates[:step]) ** 2 for step in range(1, len(rates) + 1)]
    return weights[-1] / math.fsum(weights)


def step_schedule_free(
    average: float,
    fast: float,
    gradient: float,
    second: float,
    rates: list[float],
    *,
    decay: float,
    betas: tuple[float, float],
    power: float,
    eps: float,
) -> tuple[float, float, float]:
    """Return the next average x, fast weight z and second moment (Defazio 2024, algorithm 1).

    Gradients are at y. `rates` are those of all steps so far, of which the last one is taken now.
    """
    step, rate = len(rates), rates[-1]
    beta2, trained = betas[1], (1 - betas[0]) * fast + betas[0] * average
    second = beta2 * second + (1 - beta2) * gradient**2
    direction = gradient / (math.sqrt(second / (1 - beta2**step)) + eps) + decay * trained
    fast -= rate * direction
    share = compute_average_share(rates, power)
    return (1 - share) * average + share * fast, fast, second
